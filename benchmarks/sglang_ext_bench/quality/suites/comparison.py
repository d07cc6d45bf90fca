"""Scores of arms over the same cases, and whether an arm stays within two points of full KV."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from sglang_ext_bench.quality.suites.arms import FULL
from sglang_ext_bench.quality.suites.case import SuiteCase
from sglang_ext_bench.quality.suites.stored_results import StoredResults

MARGIN = 2.0
"""Points below full KV that count as close to it."""
NOISE = 1.96
"""Standard errors of a 95% confidence interval."""


@dataclass(frozen=True)
class Estimate:
    """A mean of points and its standard error.

    Attributes:
        mean: 0 to 100. For a difference, -100 to 100.
        error: Standard error. For scores that are 0 or 1, it is that of a binomial proportion.
        count: Number of values.
    """

    mean: float
    error: float
    count: int

    @classmethod
    def from_points(cls, points: Sequence[float]) -> "Estimate":
        """The mean of at least one independent value."""
        # The biased standard deviation of zeros and ones is sqrt(p (1 - p)).
        spread = stdev(points) * math.sqrt((len(points) - 1) / len(points)) if len(points) > 1 else 0.0
        return cls(fmean(points), spread / math.sqrt(len(points)), len(points))

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.error:.1f}"


@dataclass(frozen=True)
class SuiteScore:
    """The score of an arm in one suite.

    Attributes:
        score: Mean over all answered cases.
        difference: Mean of the paired differences from full KV. None for full KV itself, and if full KV answered none of the same cases.
    """

    score: Estimate
    difference: Estimate | None

    @property
    def verdict(self) -> str:
        """Whether the arm stays within :data:`MARGIN` points of full KV. Empty if unknown.

        ``yes`` and ``no`` hold for the whole confidence interval of the paired difference. With ``within noise`` they hold for its mean only.
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
        name: Name of the arm.
        bytes_share: Bytes of KV that a decode step reads, as a share of the full KV. None if they were not measured.
        suites: Scores by suite.
        cells: Scores by task and length. The length is 0 if the suite does not choose it.
        on_full_kv: Answers of requests that the full KV served at their end, although the arm compresses KV.
        missing: Cases without an answer.
    """

    name: str
    bytes_share: float | None
    suites: Mapping[str, SuiteScore]
    cells: Mapping[tuple[str, int], Estimate]
    on_full_kv: int
    missing: int


def compare(cases: Sequence[SuiteCase], results: Sequence[StoredResults]) -> list[ArmScores]:
    """Compute the scores of all arms, in the order of ``results``."""
    full = next((each for each in results if each.arm == FULL), None)
    return [_arm_scores(cases, each, full) for each in results]


def _arm_scores(cases: Sequence[SuiteCase], arm: StoredResults, full: StoredResults | None) -> ArmScores:
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
