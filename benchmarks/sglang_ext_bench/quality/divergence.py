"""How far a server's answers are from the full KV's: KL divergence of next-token distributions, and first differing tokens."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_ext.tools import CommandError
from sglang_ext_bench.comparing.compare import first_difference
from sglang_ext_bench.client import TopLogprobs

FLOOR = 1e-6
"""Least probability of the unlisted tokens. Below it, float32 log-probabilities do not determine how much is left."""
NOISE_FACTOR = 3.0
"""A verified server's mean KL divergence may be this many times stock's own."""


def kl_bound(full: TopLogprobs, other: TopLogprobs) -> float:
    """A lower bound of KL(full || other), in nats (VeriCache, equation 1).

    Each token that is in both lists is an event of its own. All other tokens together are one more event, because a list does not
    report them. Merging events never raises a KL divergence (data-processing inequality), so the true divergence is at least this
    bound. The bound is exact if all merged tokens have the same ratio of probabilities.

    Args:
        full: The most probable tokens with full KV, and their log-probabilities.
        other: Those of the other server.
    """
    ours, theirs = dict(full), dict(other)
    shared = ours.keys() & theirs.keys()
    kept = math.fsum(math.exp(ours[token]) for token in shared)
    theirs_kept = math.fsum(math.exp(theirs[token]) for token in shared)
    rest, theirs_rest = max(1 - kept, FLOOR), max(1 - theirs_kept, FLOOR)
    events = [math.exp(ours[token]) * (ours[token] - theirs[token]) for token in shared]
    # For equal distributions, rounding can give a negative sum.
    return max(0.0, math.fsum(events) + rest * math.log(rest / theirs_rest))


def kl_by_step(full: Sequence[TopLogprobs], other: Sequence[TopLogprobs]) -> tuple[float, ...]:
    """:func:`kl_bound` at each output token of one answer.

    Raises:
        CommandError: The two lists cover different numbers of tokens.
    """
    if len(full) != len(other):
        raise CommandError(f"log-probabilities of {len(full)} tokens of full KV for an answer of {len(other)} tokens")
    return tuple(kl_bound(*pair) for pair in zip(full, other))


@dataclass(frozen=True)
class KLSummary:
    """KL divergences of a server's answers from the full KV's distributions at the same prefixes, in nats.

    Attributes:
        by_step: Mean over the answers, at each output token.
        per_step: Mean over all output tokens.
        largest: Largest value of all output tokens.
        cumulated: Mean over the answers of the sum over an answer.
    """

    by_step: tuple[float, ...]
    per_step: float
    largest: float
    cumulated: float

    @property
    def growth(self) -> tuple[float, ...]:
        """Cumulative sums of :attr:`by_step`."""
        return tuple(math.fsum(self.by_step[: end + 1]) for end in range(len(self.by_step)))


def summarize(answers: Sequence[Sequence[float]]) -> KLSummary:
    """Summarize the divergences of at least one answer. All answers have the same length."""
    steps = [step for answer in answers for step in answer]
    return KLSummary(
        by_step=tuple(statistics.fmean(column) for column in zip(*answers)),
        per_step=statistics.fmean(steps),
        largest=max(steps),
        cumulated=statistics.fmean(math.fsum(answer) for answer in answers),
    )


def noise_limit(control: KLSummary) -> float:
    """Largest mean divergence per step that counts as noise.

    Args:
        control: Stock's divergence from itself: of its decode from its prefill.
    """
    return NOISE_FACTOR * max(control.per_step, FLOOR)


def above_noise(verified: Mapping[str, KLSummary], control: KLSummary) -> list[str]:
    """Names of the verified servers whose mean divergence per step is above the noise."""
    return [name for name, found in verified.items() if found.per_step > noise_limit(control)]


@dataclass(frozen=True)
class FirstDifferences:
    """First tokens in which a server's answers differ from the full KV's, counted from 0.

    Attributes:
        indices: Index of the first difference of each answer. None if it is identical.
        tokens: Tokens of the longest answer.
    """

    indices: tuple[int | None, ...]
    tokens: int

    @property
    def identical(self) -> int:
        """Number of identical answers."""
        return self.indices.count(None)

    @property
    def median(self) -> float:
        """Median index. An identical answer counts as :attr:`tokens`, so that this is a lower bound."""
        return statistics.median(self.tokens if index is None else index for index in self.indices)

    @property
    def histogram(self) -> dict[str, int]:
        """Number of answers by the index of their first difference, in ranges that double."""
        bounds, found = [0, 1], {}
        while bounds[-1] < self.tokens:
            bounds.append(2 * bounds[-1])
        for low, high in zip(bounds, bounds[1:]):
            found[f"{low}-{high - 1}"] = sum(index is not None and low <= index < high for index in self.indices)
        return found | {"identical": self.identical}


def first_differences(full: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> FirstDifferences:
    """Compare the token ids of two servers' answers, prompt by prompt."""
    pairs = list(zip(full, other, strict=True))
    return FirstDifferences(
        tuple(first_difference(*pair) for pair in pairs), max((len(answer) for answer, _ in pairs), default=0)
    )
