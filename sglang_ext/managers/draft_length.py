"""How many tokens a batch drafts before it verifies, from what acceptance and time were measured.

``--kv-draft-length auto``. In lockstep all requests of a batch draft together, so there is one length for all:
the one at which the batch gains most tokens per second (VeriCache, equation (11), with the times measured
instead of modelled). A probability ``p`` per token that a draft is accepted gives, at ``x`` drafts, a mean of
``(1 - p^(x+1)) / (1 - p)`` tokens. Length 0 is plain decoding with full KV: where drafting does not pay, nothing
is drafted, but for a short round now and then that looks whether it would: of the time that passes, such looks may
lose :data:`LOOK_SHARE`. Times are kept apart by :class:`Load`, as steps depend on the batch and on the context.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

# Weight of a new time among those before it, once there are enough for a mean.
NEW_TIME = 0.2
# Another length must be that much better before it is taken: times are noisy.
HYSTERESIS = 1.03
# Plain rounds that are run first to measure their time; then one with drafts, which is asked for again if after so
# many iterations nothing of it is seen: it may have become a plain one.
FIRST_PLAIN_ROUNDS, ASK_AGAIN = 2, 8
# Drafts of a round that only looks, at least: enough for the time of one, few to lose.
LOOK_DRAFTS = 2
# Of the time that passes, what looks at drafting may lose: for copies, and for rounds that gain less than plain steps.
LOOK_SHARE = 0.01
# Of a plain step, what a draft takes at least, where its time is extrapolated from a trial with few copies.
LEAST_DRAFT = 0.25
# Tokens of a request after which plain steps are measured again, where drafting pays.
LOOK_AT_PLAIN = 1024


class Load(NamedTuple):
    """What times are kept apart by: powers of 2 that hold the requests of a batch and their mean context."""

    requests: int
    context: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "Load":
        """Of requests with so many tokens."""
        mean = sum(lengths) // len(lengths)
        return cls((len(lengths) - 1).bit_length(), mean.bit_length())


class Choice(NamedTuple):
    """What a batch shall do in its next iteration.

    Attributes:
        drafts: of each request; 0 for plain decoding.
        trial: the drafts only look whether drafting pays: copies shall be made for a few requests, which are enough.
    """

    drafts: int
    trial: bool = False


class Spent(NamedTuple):
    """An iteration's seconds.

    Attributes:
        drafts: of each request; 0 for plain decoding.
        steps: of plain decoding; 0 where tokens were drafted.
        copying: until drafting or decoding began.
        drafting: of all drafts.
        whole: from where drafting or decoding began to the next iteration.
        share: of the requests that drafted on copies, in a trial; the others drafted on full KV.
    """

    drafts: int
    steps: int
    copying: float
    drafting: float
    whole: float
    share: float = 1.0


def expected_tokens(probability: np.ndarray | float, drafts: np.ndarray | int) -> np.ndarray:
    """Mean tokens of rounds, the verifier's own among them."""
    # At 1 the quotient has no value, but a limit.
    p = np.minimum(probability, 1 - 1e-9)
    return (1 - p ** (drafts + 1)) / (1 - p)


@dataclass
class Times:
    """What was measured and chosen for one load; seconds, None until seen.

    Attributes:
        step: a step of plain decoding; the time to the next iteration counts.
        draft: a draft in a round.
        widths: tokens of a request in the verifications that are captured, narrow first.
        rests: a round without its drafts, to the beginning of the next, by index of the width.
        copying: what a look spends on copies before it drafts.
        plain_rounds, rounds: how many were seen, without drafts and with.
        chosen: drafts of the last choice; None before the first.
        since: tokens since plain steps were measured last.
        allowance: seconds that looks may lose by now; below 0 after the first, which is not waited for.
        awaited: iterations since the first round was asked for, that one included.
    """

    step: float | None = None
    draft: float | None = None
    widths: tuple[int, ...] = (1,)
    rests: dict[int, float] = field(default_factory=dict)
    copying: float = 0.0
    plain_rounds: int = 0
    rounds: int = 0
    chosen: int | None = None
    since: int = 0
    allowance: float = 0.0
    awaited: int = 0

    def observe(self, spent: Spent) -> None:
        """Take an iteration's seconds."""
        self.allowance += LOOK_SHARE * spent.whole
        if spent.drafts == 0:
            self.step = _mix(self.step, spent.whole / spent.steps, self.plain_rounds)
            self.plain_rounds += 1
            self.since = 0
            return
        self.since += spent.drafts
        if self.rounds == 0:
            self.allowance -= spent.copying + spent.whole - (self.step or 0.0)
        if not self.chosen:
            self.copying = _mix(self.copying, spent.copying, self.rounds)
        draft = spent.drafting / spent.drafts
        if 0 < spent.share < 1 and self.step is not None:
            # Attention adds up over requests: with copies for all, a draft differs from a plain step by so much more.
            draft = max(LEAST_DRAFT * self.step, self.step - (self.step - draft) / spent.share)
        self.draft = _mix(self.draft, draft, self.rounds)
        width = int(self._verification(spent.drafts))
        self.rests[width] = _mix(self.rests.get(width), spent.whole - spent.drafting, self.rounds)
        self.rounds += 1

    def _verification(self, drafts: np.ndarray | int) -> np.ndarray:
        """Index of the width that so many drafts and the newest token need; the widest for more."""
        return np.minimum(np.searchsorted(self.widths, np.asarray(drafts) + 1), len(self.widths) - 1)

    def ask_first(self, drafts: int) -> int:
        """``drafts`` of the first round; none while its times are awaited, which come iterations later."""
        self.awaited += 1
        return drafts if self.awaited % ASK_AGAIN == 1 else 0

    def seconds(self, drafts: np.ndarray | int) -> np.ndarray | float:
        """Of a round with so many drafts; a width that was not seen is thought to take as long as one that was."""
        other = self.rests[min(self.rests)]
        rests = np.array([self.rests.get(width, other) for width in range(len(self.widths))])
        return drafts * self.draft + rests[self._verification(drafts)]


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

    def observe(self, load: Load, spent: Spent) -> None:
        """Nothing is learned."""


@dataclass
class DraftLength:
    """Chooses the draft length of each iteration.

    Attributes:
        longest: drafts at most.
        widths: tokens of a request in the verifications that are captured; by default of the longest drafts alone.
        times: by load.
    """

    longest: int
    widths: tuple[int, ...] = ()
    times: dict[Load, Times] = field(default_factory=dict)

    def choose(self, load: Load, probabilities: Sequence[float]) -> Choice:
        """The next iteration of a batch with these probabilities; up to :attr:`longest` drafts."""
        times = self._times(load)
        if times.plain_rounds < FIRST_PLAIN_ROUNDS:
            return Choice(0)
        look = min(LOOK_DRAFTS, self.longest)
        if not times.rounds:
            return Choice(times.ask_first(look), trial=True)
        rates = self._rates(times, probabilities)
        best = int(rates.argmax())
        if times.chosen is not None and rates[best] < HYSTERESIS * rates[times.chosen]:
            best = times.chosen
        times.chosen = best
        if best:
            return Choice(0 if times.since >= LOOK_AT_PLAIN else best)
        # Of what does not pay, as it seems, the least bad is looked at.
        drafts = look + int(rates[look:].argmax())
        loss = max(0.0, times.copying + times.seconds(drafts) * (1 - rates[drafts] / rates[0]))
        # What looks have not lost is not saved up for more than one.
        times.allowance = min(times.allowance, loss)
        if times.allowance < loss:
            return Choice(0)
        times.allowance -= loss
        return Choice(drafts, trial=True)

    def observe(self, load: Load, spent: Spent) -> None:
        """Take an iteration's seconds; see :meth:`Times.observe`."""
        self._times(load).observe(spent)

    def _times(self, load: Load) -> Times:
        if load not in self.times:
            self.times[load] = Times(widths=self.widths or (self.longest + 1,))
        return self.times[load]

    def _rates(self, times: Times, probabilities: Sequence[float]) -> np.ndarray:
        """Tokens per second of the batch, by draft length."""
        drafts = np.arange(self.longest + 1)
        tokens = expected_tokens(np.asarray(probabilities)[:, None], drafts).sum(0)
        seconds = times.seconds(drafts)
        seconds[0] = times.step
        return tokens / seconds
