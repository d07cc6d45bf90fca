"""How many tokens a batch drafts before it verifies, from what acceptance and time were measured.

``--kv-draft-length auto``. In lockstep all requests of a batch draft together, so there is one length for all:
the one at which the batch gains most tokens per second (VeriCache, equation (11), with the times measured
instead of modelled). A probability ``p`` per token that a draft is accepted gives, at ``x`` drafts, a mean of
``(1 - p^(x+1)) / (1 - p)`` tokens. Length 0 is plain decoding with full KV: where drafting does not pay, nothing
is drafted, but for a short round now and then that looks whether it would. Times are kept apart by
:class:`Load`, as steps depend on the batch and on the context.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Weight of a new time among those before it, once there are enough for a mean.
NEW_TIME = 0.2
# Another length must be that much better before it is taken: times are noisy.
HYSTERESIS = 1.03
# Plain rounds, then rounds with drafts, that are run first to measure their times.
FIRST_PLAIN_ROUNDS, FIRST_ROUNDS = 2, 1
# Drafts of a round that only looks: enough for the time of one, few to lose.
LOOK_DRAFTS = 2
# Tokens of a request after which the mode that is not in use is looked at again: plain steps cost nothing, a look
# at drafting costs a few steps (and copies), so that each one in vain doubles the time to the next.
LOOK_AT_PLAIN = 1024
SHORTEST_PATIENCE, LONGEST_PATIENCE = 256, 1024
# Where drafting is estimated to come this close to plain decoding, a round of it costs next to nothing.
CLOSE, CLOSE_PATIENCE = 0.9, 16


class Load(NamedTuple):
    """What times are kept apart by: powers of 2 that hold the requests of a batch and their mean context."""

    requests: int
    context: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "Load":
        """Of requests with so many tokens."""
        mean = sum(lengths) // len(lengths)
        return cls((len(lengths) - 1).bit_length(), mean.bit_length())


def expected_tokens(probability: float, drafts: int) -> float:
    """Mean tokens of a round, the verifier's own among them."""
    if probability >= 1:
        return drafts + 1.0
    return (1 - probability ** (drafts + 1)) / (1 - probability)


@dataclass
class Times:
    """What was measured and chosen for one load; seconds, None until seen.

    Attributes:
        step: a step of plain decoding; the time to the next iteration counts.
        draft: a draft in a round.
        rest: a round without its drafts, to the beginning of the next.
        plain_rounds, rounds: how many were seen, without drafts and with.
        chosen: drafts of the last choice; None before the first.
        since: tokens since the mode that is not in use was measured.
        patience: tokens before drafting is looked at again.
    """

    step: float | None = None
    draft: float | None = None
    rest: float | None = None
    plain_rounds: int = 0
    rounds: int = 0
    chosen: int | None = None
    since: int = 0
    patience: int = SHORTEST_PATIENCE

    def observe(self, drafts: int, steps: int, drafting: float, whole: float) -> None:
        """Take an iteration's seconds: its drafts', and all of it; ``steps`` of plain decoding without any."""
        self.since += steps or drafts
        if drafts == 0:
            self.step = _mix(self.step, whole / steps, self.plain_rounds)
            self.plain_rounds += 1
            return
        self.draft = _mix(self.draft, drafting / drafts, self.rounds)
        self.rest = _mix(self.rest, whole - drafting, self.rounds)
        self.rounds += 1


def _mix(old: float | None, new: float, seen: int) -> float:
    weight = max(NEW_TIME, 1 / (seen + 1))
    return new if old is None else (1 - weight) * old + weight * new


@dataclass(frozen=True)
class FixedLength:
    """A draft length that was asked for.

    Attributes:
        drafts: of each iteration.
    """

    drafts: int

    def observe(self, load: Load, drafts: int, steps: int, drafting: float, whole: float) -> None:
        """Nothing is learned."""


@dataclass
class DraftLength:
    """Chooses the draft length of each iteration.

    Attributes:
        longest: drafts at most, which the captured verification has room for.
        times: by load.
    """

    longest: int
    times: dict[Load, Times] = field(default_factory=dict)

    def choose(self, load: Load, probabilities: Sequence[float]) -> int:
        """Drafts of the next iteration for a batch with these probabilities, from 0 to :attr:`longest`."""
        times = self.times.setdefault(load, Times())
        if times.plain_rounds < FIRST_PLAIN_ROUNDS:
            return 0
        look = min(LOOK_DRAFTS, self.longest)
        if times.rounds < FIRST_ROUNDS:
            return look
        rates = [self._rate(times, probabilities, drafts) for drafts in range(self.longest + 1)]
        best = max(range(len(rates)), key=rates.__getitem__)
        if times.chosen is not None and rates[best] < HYSTERESIS * rates[times.chosen]:
            best = times.chosen
        times.chosen = best
        if best:
            times.patience = SHORTEST_PATIENCE
            return self._look(times, LOOK_AT_PLAIN, best, 0)
        close = max(range(1, len(rates)), key=rates.__getitem__)
        if rates[close] >= CLOSE * rates[0]:
            return self._look(times, CLOSE_PATIENCE, 0, close)
        drafts = self._look(times, times.patience, 0, look)
        if drafts:
            times.patience = min(LONGEST_PATIENCE, 2 * times.patience)
        return drafts

    def _look(self, times: Times, patience: int, best: int, other: int) -> int:
        """``best``, or ``other`` when it is time to look at it."""
        if times.since < patience:
            return best
        times.since = 0
        return other

    def observe(self, load: Load, drafts: int, steps: int, drafting: float, whole: float) -> None:
        """Take an iteration's seconds; see :meth:`Times.observe`."""
        self.times.setdefault(load, Times()).observe(drafts, steps, drafting, whole)

    def _rate(self, times: Times, probabilities: Sequence[float], drafts: int) -> float:
        """Tokens per second of the batch."""
        if drafts == 0:
            return len(probabilities) / times.step
        tokens = sum(expected_tokens(p, drafts) for p in probabilities)
        return tokens / (drafts * times.draft + times.rest)
