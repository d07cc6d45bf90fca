"""Scores of arms over the same cases, and whether an arm stays within two points of full KV."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from sglang_ext_bench.quality.suites.case import Case
from sglang_ext_bench.quality.suites.served import FULL
from sglang_ext_bench.quality.suites.stored_results import StoredResults

MARGIN = 2.0
"""Points below full KV that count as close to it."""
NOISE = 1.96
"""Standard errors of a 95% confidence interval."""


@dataclass(frozen=True)
class Estimate:
    """A mean in points, 0 to 100 (a difference: -100 to 100), and its standard error.

    Of scores that are 0 or 1 the standard error is that of a binomial proportion.
    """

    mean: float
    error: float
    count: int

    @classmethod
    def from_points(cls, points: Sequence[float]) -> "Estimate":
        """The mean of at least one independent value."""
        # The biased deviation of zeros and ones is sqrt(p (1 - p)).
        spread = stdev(points) * math.sqrt((len(points) - 1) / len(points)) if len(points) > 1 else 0.0
        return cls(fmean(points), spread / math.sqrt(len(points)), len(points))

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.error:.1f}"


@dataclass(frozen=True)
class SuiteScore:
    """An arm in one suite.

    Attributes:
        score: over all cases that were answered.
        difference: mean difference from full KV, case by case. None for full KV itself, and if full KV did not answer the same cases.
    """

    score: Estimate
    difference: Estimate | None

    @property
    def verdict(self) -> str:
        """Whether the arm stays within :data:`MARGIN` points of full KV; empty if unknown.

        ``yes`` and ``no`` hold for the whole confidence interval of the paired difference; with ``within noise`` only for its middle.
        """
        if self.difference is None:
            return ""
        mean, noise = self.difference.mean, NOISE * self.difference.error
        if mean >= -MARGIN:
            return "yes" if mean - noise >= -MARGIN else "yes, within noise"
        return "no" if mean + noise < -MARGIN else "no, within noise"


@dataclass(frozen=True)
class ArmScores:
    """All scores of an arm.

    Attributes:
        name: the arm's.
        bytes_share: bytes of KV that a decode step reads, as a share of the full KV; None if not measured.
        suites: scores by suite.
        cells: scores by task and length; the length is 0 if the suite does not choose it.
        on_full_kv: answers of requests that full KV served at their end, although the arm has compressed KV.
        missing: cases without an answer.
    """

    name: str
    bytes_share: float | None
    suites: Mapping[str, SuiteScore]
    cells: Mapping[tuple[str, int], Estimate]
    on_full_kv: int
    missing: int


def compare(cases: Sequence[Case], results: Sequence[StoredResults]) -> list[ArmScores]:
    """The scores of all arms, in the order of ``results``."""
    full = next((each for each in results if each.arm == FULL), None)
    return [_arm_scores(cases, each, full) for each in results]


def _arm_scores(cases: Sequence[Case], arm: StoredResults, full: StoredResults | None) -> ArmScores:
    answered = [(case, scored) for case in cases if (scored := arm.find(case)) is not None]
    by_suite: dict[str, list[float]] = {}
    by_cell: dict[tuple[str, int], list[float]] = {}
    differences: dict[str, list[float]] = {}
    for case, scored in answered:
        points = 100 * scored.score
        by_suite.setdefault(case.suite, []).append(points)
        by_cell.setdefault((case.task, case.length), []).append(points)
        paired = None if full is None or full is arm else full.find(case)
        if paired is not None:
            differences.setdefault(case.suite, []).append(points - 100 * paired.score)
    suites = {
        suite: SuiteScore(Estimate.from_points(points), Estimate.from_points(differences[suite]) if suite in differences else None)
        for suite, points in by_suite.items()
    }
    cells = {cell: Estimate.from_points(points) for cell, points in by_cell.items()}
    fallbacks = sum(scored.fallback is not None for _, scored in answered)
    return ArmScores(arm.arm, arm.bytes_share, suites, cells, fallbacks, len(cases) - len(answered))
