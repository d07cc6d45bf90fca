"""How many tokens a batch drafts before it verifies, from what acceptance and time were measured.

``--kv-draft-length auto``. In lockstep all requests of a batch draft together, so there is one length for all:
the one at which the batch gains most tokens per second (VeriCache, equation (11), with the times measured
instead of modelled). A probability ``p`` per token that a draft is accepted gives, at ``x`` drafts, a mean of
``(1 - p^(x+1)) / (1 - p)`` tokens. Length 0 is plain decoding with full KV: where drafting does not pay, nothing
is drafted, but for a short round now and then that looks whether it would.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

# Weight of a new time among those before it.
NEW_TIME = 0.2
# Another length must be that much better before it is taken: times are noisy.
HYSTERESIS = 1.03
# Iterations after which the mode that is not in use is measured again.
LOOK_AGAIN = 256
# Plain steps, then rounds, that are run first to measure their times.
FIRST_LOOKS = 3


def expected_tokens(probability: float, drafts: int) -> float:
    """Mean tokens of a round, the verifier's own among them."""
    if probability >= 1:
        return drafts + 1.0
    return (1 - probability ** (drafts + 1)) / (1 - probability)


@dataclass
class Times:
    """What was measured and chosen for one batch size; seconds, None until seen.

    Attributes:
        step: an iteration of plain decoding, from its beginning to the next one's.
        draft: a draft in a round.
        rest: a round without its drafts, to the beginning of the next.
        plain_steps, rounds: how many were seen.
        chosen: drafts of the last choice; None before the first.
        since: choices since the mode that is not in use was measured.
    """

    step: float | None = None
    draft: float | None = None
    rest: float | None = None
    plain_steps: int = 0
    rounds: int = 0
    chosen: int | None = None
    since: int = 0

    def observe(self, drafts: int, drafting: float, whole: float) -> None:
        """Take an iteration's seconds: its drafts', and all of it."""
        if drafts == 0:
            self.step = _mix(self.step, whole)
            self.plain_steps += 1
            return
        self.draft = _mix(self.draft, drafting / drafts)
        self.rest = _mix(self.rest, whole - drafting)
        self.rounds += 1


def _mix(old: float | None, new: float) -> float:
    return new if old is None else (1 - NEW_TIME) * old + NEW_TIME * new


@dataclass(frozen=True)
class FixedLength:
    """A draft length that was asked for.

    Attributes:
        drafts: of each iteration.
    """

    drafts: int

    def choose(self, probabilities: Sequence[float]) -> int:
        """:attr:`drafts`, whatever was measured."""
        return self.drafts

    def observe(self, batch: int, drafts: int, drafting: float, whole: float) -> None:
        """Nothing is learned."""


@dataclass
class DraftLength:
    """Chooses the draft length of each iteration.

    Attributes:
        longest: drafts at most, which the captured verification has room for.
        times: by batch size.
    """

    longest: int
    times: dict[int, Times] = field(default_factory=dict)

    def choose(self, probabilities: Sequence[float]) -> int:
        """Drafts of the next iteration for a batch with these probabilities, from 0 to :attr:`longest`."""
        times = self.times.setdefault(len(probabilities), Times())
        if times.plain_steps < FIRST_LOOKS:
            return 0
        if times.rounds < FIRST_LOOKS:
            return self.longest
        best = self._best(times, probabilities)
        last = best if times.chosen is None else times.chosen
        if self._rate(times, probabilities, best) < HYSTERESIS * self._rate(times, probabilities, last):
            best = last
        times.chosen = best
        times.since += 1
        if times.since >= LOOK_AGAIN:
            times.since = 0
            # A short round shows acceptance and times; a plain step shows its time.
            return 0 if best else min(4, self.longest)
        return best

    def observe(self, batch: int, drafts: int, drafting: float, whole: float) -> None:
        """Take an iteration's seconds; see :class:`Times`."""
        self.times.setdefault(batch, Times()).observe(drafts, drafting, whole)

    def _best(self, times: Times, probabilities: Sequence[float]) -> int:
        return max(range(self.longest + 1), key=lambda drafts: self._rate(times, probabilities, drafts))

    def _rate(self, times: Times, probabilities: Sequence[float], drafts: int) -> float:
        """Tokens per second of the batch."""
        if drafts == 0:
            return len(probabilities) / times.step
        tokens = sum(expected_tokens(p, drafts) for p in probabilities)
        return tokens / (drafts * times.draft + times.rest)
