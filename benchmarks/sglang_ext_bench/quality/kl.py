"""KL divergence of next-token distributions, from the best log-probabilities of two servers."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_ext.tools import CommandError
from sglang_ext_bench.client import TopLogprobs

FLOOR = 1e-6
"""Least probability of the rest: below it, float32 log-probabilities do not say how much is left."""


def kl_bound(full: TopLogprobs, other: TopLogprobs) -> float:
    """A lower bound of KL(full || other), in nats (VeriCache, equation 1).

    The tokens that stand in both lists are events of their own, all others together are one more: what a list does not
    name, its server did not say. Merging events never raises a KL divergence (data-processing inequality), so that the true
    one is at least this; it is equal where what was merged has the same ratio in both.
    """
    ours, theirs = dict(full), dict(other)
    shared = ours.keys() & theirs.keys()
    kept = math.fsum(math.exp(ours[token]) for token in shared)
    theirs_kept = math.fsum(math.exp(theirs[token]) for token in shared)
    rest, theirs_rest = max(1 - kept, FLOOR), max(1 - theirs_kept, FLOOR)
    events = [math.exp(ours[token]) * (ours[token] - theirs[token]) for token in shared]
    # Not negative but for what rounding makes of equal distributions.
    return max(0.0, math.fsum(events) + rest * math.log(rest / theirs_rest))


def kl_by_step(full: Sequence[TopLogprobs], other: Sequence[TopLogprobs]) -> tuple[float, ...]:
    """:func:`kl_bound` at each output token of one answer.

    Raises:
        CommandError: not both lists cover the same tokens.
    """
    if len(full) != len(other):
        raise CommandError(f"log-probabilities of {len(full)} tokens of full KV for an answer of {len(other)} tokens")
    return tuple(kl_bound(*pair) for pair in zip(full, other))


@dataclass(frozen=True)
class KLSummary:
    """KL divergences of a server's answers from full KV's distributions at the same prefixes, in nats.

    Attributes:
        by_step: mean over the answers at each output token.
        per_step: mean over all.
        largest: of any step.
        cumulated: mean sum over an answer.
    """

    by_step: tuple[float, ...]
    per_step: float
    largest: float
    cumulated: float

    @property
    def growth(self) -> tuple[float, ...]:
        """Mean sum up to and with each output token."""
        return tuple(math.fsum(self.by_step[: end + 1]) for end in range(len(self.by_step)))


def summarize(answers: Sequence[Sequence[float]]) -> KLSummary:
    """Pool the steps of several answers of one length, at least one."""
    steps = [step for answer in answers for step in answer]
    return KLSummary(
        by_step=tuple(statistics.fmean(column) for column in zip(*answers)),
        per_step=statistics.fmean(steps),
        largest=max(steps),
        cumulated=statistics.fmean(math.fsum(answer) for answer in answers),
    )


NOISE_FACTOR = 3.0
"""A verified server's mean KL may be this many times stock's own."""


def noise_limit(control: KLSummary) -> float:
    """Mean KL per step up to which a server differs from stock no more than stock's decode from its prefill."""
    return NOISE_FACTOR * max(control.per_step, FLOOR)


def above_noise(verified: Mapping[str, KLSummary], control: KLSummary) -> list[str]:
    """Names of verified servers whose mean KL per step is above the noise."""
    return [name for name, found in verified.items() if found.per_step > noise_limit(control)]
