"""Results of a quality run: the figures of each server, computed from the answers of all servers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sglang_ext_bench.comparing.acceptance import Acceptance, add_up
from sglang_ext_bench.client import Generation, TopLogprobs
from sglang_ext_bench.quality.arms import FULL, ArmAnswers, QualityArm
from sglang_ext_bench.quality.attention import AttentionError
from sglang_ext_bench.quality.divergence import (
    FirstDifferences,
    KLSummary,
    above_noise,
    first_differences,
    kl_by_step,
    summarize,
)
from sglang_ext_bench.quality.options import QualityConfig
from sglang_ext_bench.quality.tasks import Task


@dataclass(frozen=True)
class ArmQuality:
    """The figures of one server. Mappings have the temperature as key. A figure that was not measured is empty or None.

    Attributes:
        arm: The server.
        bytes_share: Bytes of compressed KV, as a share of the full KV. None if the server reported none.
        acceptance: Acceptance of draft tokens, for a verified server.
        kl: KL divergence from the full KV. For stock, of its decode from its prefill.
        first_differences: First differences from stock's answers.
        functional: Mean scores by kind of task.
        speed: Tokens per second.
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
        """Bytes of compressed KV, as a share of the full KV. The budget if the server reported none."""
        return self.arm.budget if self.bytes_share is None else self.bytes_share

    @property
    def functional_mean(self) -> float | None:
        """Mean score over kinds and temperatures. None if there are no scores."""
        scores = [score for kinds in self.functional.values() for score in kinds.values()]
        return sum(scores) / len(scores) if scores else None


@dataclass(frozen=True)
class Results:
    """The results of a whole run.

    Attributes:
        arms: The figures of each server.
        attention: Errors of attention outputs.
        failed: Error messages of servers that could not be measured, by name.
    """

    arms: tuple[ArmQuality, ...]
    attention: tuple[AttentionError, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def stock(self) -> ArmQuality | None:
        """Stock's figures. None if it was not measured."""
        return next((each for each in self.arms if each.arm == FULL), None)

    def speedup(self, each: ArmQuality) -> float | None:
        """A server's tokens per second over stock's. None if one of them was not measured."""
        return each.speed / self.stock.speed if each.speed and self.stock and self.stock.speed else None

    def bytes_share(self, compressor: str, budget: float) -> float:
        """Bytes of a compressor's KV, as a share of the full KV. The budget if no server reported them."""
        found = (each.share for each in self.arms if (each.arm.compressor, each.arm.budget) == (compressor, budget))
        return next(found, budget)

    @property
    def above_noise(self) -> list[str]:
        """Names of the verified servers whose KL divergence from stock is above stock's own noise."""
        if self.stock is None or self.stock.kl is None:
            return []
        verified = {each.arm.name: each.kl for each in self.arms if each.arm.mode == "verified" and each.kl is not None}
        return above_noise(verified, self.stock.kl)

    @property
    def exit_code(self) -> int:
        """0 if all servers were measured and no verified server is above the noise, else 1."""
        return int(bool(self.failed) or bool(self.above_noise))


Scores = Mapping[QualityArm, Sequence[Sequence[TopLogprobs]]]
"""Stock's log-probabilities of each server's greedy answers, prompt by prompt."""


def arm_quality(
    config: QualityConfig, arm: QualityArm, answers: Mapping[QualityArm, ArmAnswers], scores: Scores, tasks: Sequence[Task]
) -> ArmQuality:
    """Compute the figures of one server.

    Args:
        config: The command line.
        arm: The server.
        answers: Answers of all servers.
        scores: Stock's log-probabilities.
        tasks: The functional tasks.
    """
    own, stock = answers[arm], answers.get(FULL)
    return ArmQuality(
        arm=arm,
        bytes_share=own.bytes_share,
        acceptance=_acceptance(arm, own) if config.has_part("acceptance") and arm.draft_length else {},
        kl=_kl(own, scores[arm]) if arm in scores else None,
        first_differences=_first_differences(own, stock) if config.has_part("divergence") and arm != FULL and stock else {},
        functional={temperature: mean_scores(tasks, generations) for temperature, generations in own.tasks.items()},
        speed=own.speed,
    )


def mean_scores(tasks: Sequence[Task], answers: Sequence[Generation]) -> dict[str, float]:
    """Mean score of the answers by kind of task."""
    by_kind: dict[str, list[float]] = {}
    for task, answer in zip(tasks, answers, strict=True):
        by_kind.setdefault(task.kind, []).append(task.score(answer.text))
    return {kind: sum(scores) / len(scores) for kind, scores in by_kind.items()}


def _acceptance(arm: QualityArm, answers: ArmAnswers) -> dict[float, Acceptance]:
    found = {}
    for temperature, generations in answers.prompts.items():
        stats = [answer.verify for answer in generations if answer.verify is not None]
        found[temperature] = add_up(stats, arm.draft_length or 0)
    return found


def _kl(answers: ArmAnswers, scored: Sequence[Sequence[TopLogprobs]]) -> KLSummary:
    pairs = zip(scored, answers.prompts[0.0], strict=True)
    return summarize([kl_by_step(full, answer.top_logprobs or ()) for full, answer in pairs])


def _first_differences(answers: ArmAnswers, stock: ArmAnswers) -> dict[float, FirstDifferences]:
    return {
        temperature: first_differences(
            [answer.output_ids for answer in stock.prompts[temperature]], [answer.output_ids for answer in generations]
        )
        for temperature, generations in answers.prompts.items()
    }
