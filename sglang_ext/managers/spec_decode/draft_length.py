"""How many tokens a batch drafts before it verifies, from what acceptance and time were measured.

``--kv-draft-length auto``. All requests of a batch draft together, so there is one length for all:
the one at which the batch gains most tokens per second (VeriCache, equation (11), with the times measured
instead of modelled). A probability ``p`` per token that a draft is accepted gives, at ``x`` drafts, a mean of
``(1 - p^(x+1)) / (1 - p)`` tokens. Length 0 is plain decoding with full KV: where drafting does not pay, nothing
is drafted, but for a short round now and then that looks whether it would: of the time that passes, such looks may
lose :data:`LOOK_SHARE`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_ext.managers.spec_decode.pace import Choice, Load, Recent, Spent

# Rounds that tell a time, of which one may have stalled.
ENOUGH_ROUNDS = 2
# Of a plain step, what a draft takes at least, where its time is extrapolated from a trial with few copies.
LEAST_DRAFT = 0.25


@dataclass
class Times:
    """What was measured of one load.

    Attributes:
        step: a step of plain decoding; the time to the next iteration counts.
        draft: a draft in a round.
        widths: tokens of a request in the verifications that are captured, narrow first.
        rests: a round without its drafts, to the beginning of the next, by index of the width.
        copying: what a look at drafting spends on copies before it drafts.
    """

    step: Recent = field(default_factory=Recent)
    draft: Recent = field(default_factory=Recent)
    widths: tuple[int, ...] = (1,)
    rests: dict[int, Recent] = field(default_factory=dict)
    copying: Recent = field(default_factory=Recent)

    def observe(self, spent: Spent, look: bool) -> None:
        """Take an iteration's seconds; ``look``: drafts, where there are any, only looked whether they pay."""
        if spent.drafts == 0:
            self.step.newest.append(spent.whole / spent.steps)
            return
        if look:
            self.copying.newest.append(spent.copying)
        step, draft = self.step.seconds, spent.drafting / spent.drafts
        if 0 < spent.share < 1 and self.step.count:
            # Attention adds up over requests: with copies for all, a draft differs from a plain step by so much more.
            draft = max(LEAST_DRAFT * step, step - (step - draft) / spent.share)
        self.draft.newest.append(draft)
        rests = self.rests.setdefault(int(self._verification(spent.drafts)), Recent())
        # A look verifies few requests; the others' full KV would be read as in a plain step.
        unread = (1 - spent.share) * step if 0 < spent.share < 1 else 0.0
        rests.newest.append(spent.whole - spent.drafting + unread)

    def _verification(self, drafts: np.ndarray | int) -> np.ndarray:
        """Index of the width that so many drafts and the newest token need; the widest for more."""
        return np.minimum(np.searchsorted(self.widths, np.asarray(drafts) + 1), len(self.widths) - 1)

    def seconds(self, drafts: np.ndarray | int) -> np.ndarray | float:
        """Of a round with so many drafts; see :meth:`_rest`."""
        rests = np.array([self._rest(width) for width in range(len(self.widths))])
        return drafts * self.draft.seconds + rests[self._verification(drafts)]

    def _rest(self, width: int) -> float:
        """Of a width seen too seldom: no longer than that of one that was seen, so that it is tried."""
        other = self.rests[min(self.rests)].seconds
        mine = self.rests.get(width)
        if mine is None:
            return other
        return mine.seconds if mine.count >= ENOUGH_ROUNDS else min(mine.seconds, other)


# Another length must be that much better before it is taken: times are noisy.
HYSTERESIS = 1.03
# First come plain rounds, then one with drafts, which is asked for again if after so many iterations nothing of it is
# seen: it may have become a plain one.
ASK_AGAIN = 8
# Plain steps in the time of a first look, from which on it stalled, and tells nothing: there is another.
STALL = 10
# Drafts of a round that only looks, at least: enough for the time of one, few to lose.
LOOK_DRAFTS = 2
# Of the time that passes, what looks at drafting may lose: for copies, and for rounds that gain less than plain steps.
LOOK_SHARE = 0.01
# Tokens of a request after which plain steps are measured again, where drafting pays.
LOOK_AT_PLAIN = 1024


def expected_tokens(probability: np.ndarray | float, drafts: np.ndarray | int) -> np.ndarray:
    """Mean tokens of rounds, the verifier's own among them."""
    # At 1 the quotient has no value, but a limit.
    p = np.minimum(probability, 1 - 1e-9)
    return (1 - p ** (drafts + 1)) / (1 - p)


@dataclass
class Looks:
    """What was chosen for one load, and what looks at drafting may lose.

    Attributes:
        chosen: drafts of the last choice; None before the first.
        since: tokens since plain steps were measured last.
        allowance: seconds that looks may lose by now; below 0 after the first, which is not waited for.
        awaited: iterations since a first round was asked for, that one included.
        stalled: that first round, so that there is to be another.
    """

    chosen: int | None = None
    since: int = 0
    allowance: float = 0.0
    awaited: int = 0
    stalled: bool = False

    def observe(self, spent: Spent, times: Times) -> None:
        """Take an iteration's seconds; ``times`` are those before it."""
        self.allowance += LOOK_SHARE * spent.whole
        if spent.drafts == 0:
            self.since = 0
            return
        self.since += spent.drafts
        self.stalled = False
        if not times.draft.count:
            step, spending = times.step.seconds, spent.copying + spent.whole
            self.stalled = spending > STALL * step > 0
            self.allowance -= 0 if self.stalled else spending - step
            self.awaited = 0

    def ask_first(self, drafts: int) -> int:
        """``drafts`` of the first round; none while its times are awaited, which come iterations later."""
        self.awaited += 1
        return drafts if self.awaited % ASK_AGAIN == 1 else 0

    def spend(self, loss: float) -> bool:
        """Whether a look that loses so many seconds may be taken now; they are spent then."""
        # What looks have not lost is not saved up for more than one.
        self.allowance = min(self.allowance, loss)
        if self.allowance < loss:
            return False
        self.allowance -= loss
        return True


@dataclass
class DraftLength:
    """Chooses the draft length of each iteration.

    Attributes:
        longest: drafts at most.
        widths: tokens of a request in the verifications that are captured; by default of the longest drafts alone.
        times: measured, by load.
        looks: what was chosen by them, by load.
    """

    longest: int
    widths: tuple[int, ...] = ()
    times: dict[Load, Times] = field(default_factory=dict)
    looks: dict[Load, Looks] = field(default_factory=dict)

    def choose(self, load: Load, probabilities: Sequence[float]) -> Choice:
        """The next iteration of a batch with these probabilities; up to :attr:`longest` drafts."""
        times, looks = self._of(load)
        if times.step.count < ENOUGH_ROUNDS:
            return Choice(0)
        look = min(LOOK_DRAFTS, self.longest)
        if not times.draft.count or looks.stalled:
            return Choice(looks.ask_first(look), trial=True)
        rates = self._rates(times, probabilities)
        best = int(rates.argmax())
        if looks.chosen is not None and rates[best] < HYSTERESIS * rates[looks.chosen]:
            best = looks.chosen
        looks.chosen = best
        if best:
            return Choice(0 if looks.since >= LOOK_AT_PLAIN else best)
        # Of what does not pay, as it seems, the least bad is looked at.
        drafts = look + int(rates[look:].argmax())
        loss = max(0.0, times.copying.seconds + times.seconds(drafts) * (1 - rates[drafts] / rates[0]))
        return Choice(drafts, trial=True) if looks.spend(loss) else Choice(0)

    def observe(self, load: Load, spent: Spent) -> None:
        """Take an iteration's seconds."""
        times, looks = self._of(load)
        looks.observe(spent, times)
        times.observe(spent, look=not looks.chosen)

    def _of(self, load: Load) -> tuple[Times, Looks]:
        if load not in self.times:
            self.times[load] = Times(widths=self.widths or (self.longest + 1,))
        return self.times[load], self.looks.setdefault(load, Looks())

    def _rates(self, times: Times, probabilities: Sequence[float]) -> np.ndarray:
        """Tokens per second of the batch, by draft length."""
        drafts = np.arange(self.longest + 1)
        tokens = expected_tokens(np.asarray(probabilities)[:, None], drafts).sum(0)
        seconds = times.seconds(drafts)
        seconds[0] = times.step.seconds
        return tokens / seconds
