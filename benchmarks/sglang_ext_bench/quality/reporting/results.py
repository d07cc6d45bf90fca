"""What a quality run showed of each server, computed from all answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sglang_ext_bench.comparing.acceptance import Acceptance, add_up
from sglang_ext_bench.client import Generation, TopLogprobs
from sglang_ext_bench.quality.arms import FULL, Answers, QualityArm
from sglang_ext_bench.quality.attention import AttentionError
from sglang_ext_bench.quality.config import QualityConfig
from sglang_ext_bench.quality.first_difference import (
    FirstDifferences,
    first_differences,
)
from sglang_ext_bench.quality.kl import KLSummary, above_noise, kl_by_step, summarize
from sglang_ext_bench.quality.tasks import Task


@dataclass(frozen=True)
class ArmQuality:
    """One server's figures, by temperature where they depend on it; empty or None where they were not asked for.

    Attributes:
        bytes_share: of a compressed copy in full KV's bytes, as the server reports them; None where it did not.
        acceptance: of a verified server.
        kl: from full KV; of stock, of its decode from its prefill.
        first_differences: from stock's answers.
        functional: mean score by kind of task.
        speed: tokens per second.
    """

    arm: QualityArm
    bytes_share: float | None = 1.0
    acceptance: Mapping[float, Acceptance] = field(default_factory=dict)
    kl: KLSummary | None = None
    first_differences: Mapping[float, FirstDifferences] = field(default_factory=dict)
    functional: Mapping[float, Mapping[str, float]] = field(default_factory=dict)
    speed: float | None = None

    @property
    def share(self) -> float:
        """Of a copy in full KV's bytes; the budget where the server did not say."""
        return self.arm.budget if self.bytes_share is None else self.bytes_share

    @property
    def functional_mean(self) -> float | None:
        """Mean over kinds and temperatures; None where nothing was scored."""
        scores = [score for kinds in self.functional.values() for score in kinds.values()]
        return sum(scores) / len(scores) if scores else None


@dataclass(frozen=True)
class Results:
    """A whole run. ``failed`` says why some servers could not be measured, by name."""

    arms: tuple[ArmQuality, ...]
    attention: tuple[AttentionError, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def stock(self) -> ArmQuality | None:
        """Stock's figures."""
        return next((each for each in self.arms if each.arm == FULL), None)

    def speedup(self, each: ArmQuality) -> float | None:
        """A server's tokens per second over stock's; None where one of them was not measured."""
        return each.speed / self.stock.speed if each.speed and self.stock and self.stock.speed else None

    def bytes_share(self, compressor: str, budget: float) -> float:
        """Share of a compressor's copies in full KV's bytes; the budget where no server reported it."""
        found = (each.share for each in self.arms if (each.arm.compressor, each.arm.budget) == (compressor, budget))
        return next(found, budget)

    @property
    def above_noise(self) -> list[str]:
        """Verified servers farther from stock than stock's own noise, by their KL divergence."""
        if self.stock is None or self.stock.kl is None:
            return []
        verified = {each.arm.name: each.kl for each in self.arms if each.arm.mode == "verified" and each.kl is not None}
        return above_noise(verified, self.stock.kl)

    @property
    def exit_code(self) -> int:
        """0 when all was measured and verified decoding cost nothing, else 1."""
        return int(bool(self.failed) or bool(self.above_noise))


Scores = Mapping[QualityArm, Sequence[Sequence[TopLogprobs]]]
"""Stock's log-probabilities of each server's greedy answers, prompt by prompt."""


def arm_quality(
    config: QualityConfig, arm: QualityArm, answers: Mapping[QualityArm, Answers], scores: Scores, tasks: Sequence[Task]
) -> ArmQuality:
    """The figures of one server among all that answered."""
    mine, stock = answers[arm], answers.get(FULL)
    compared = config.asks("divergence") and arm != FULL and stock is not None
    return ArmQuality(
        arm=arm,
        bytes_share=mine.bytes_share,
        acceptance=_acceptance(arm, mine) if config.asks("acceptance") and arm.draft_length else {},
        kl=_kl(mine, scores[arm]) if arm in scores else None,
        first_differences=_first_differences(mine, stock) if compared and stock else {},
        functional={temperature: functional(tasks, of_tasks) for temperature, of_tasks in mine.tasks.items()},
        speed=mine.speed,
    )


def functional(tasks: Sequence[Task], answers: Sequence[Generation]) -> dict[str, float]:
    """Mean score of the answers by kind of task."""
    by_kind: dict[str, list[float]] = {}
    for task, answer in zip(tasks, answers, strict=True):
        by_kind.setdefault(task.kind, []).append(task.score(answer.text))
    return {kind: sum(scores) / len(scores) for kind, scores in by_kind.items()}


def _acceptance(arm: QualityArm, answers: Answers) -> dict[float, Acceptance]:
    found = {}
    for temperature, of_prompts in answers.prompts.items():
        stats = [answer.verify for answer in of_prompts if answer.verify is not None]
        found[temperature] = add_up(stats, arm.draft_length or 0)
    return found


def _kl(answers: Answers, scored: Sequence[Sequence[TopLogprobs]]) -> KLSummary:
    pairs = zip(scored, answers.prompts[0.0], strict=True)
    return summarize([kl_by_step(full, answer.top_logprobs or ()) for full, answer in pairs])


def _first_differences(answers: Answers, stock: Answers) -> dict[float, FirstDifferences]:
    return {
        temperature: first_differences(
            [answer.output_ids for answer in stock.prompts[temperature]], [answer.output_ids for answer in of_prompts]
        )
        for temperature, of_prompts in answers.prompts.items()
    }
