"""The times of a batch's iterations: of a plain step, of a draft, and of the rest of a round, as they were measured.

They are kept apart by :class:`Load`, as steps depend on the batch and on the context. Draft lengths are chosen by them
(draft_length.py).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

import numpy as np

# Newest times whose median is believed: a stall, as when a kernel is compiled, is in one of them.
RECENT_TIMES = 5
# Rounds that tell a time, of which one may have stalled.
ENOUGH_ROUNDS = 2
# Of a plain step, what a draft takes at least, where its time is extrapolated from a trial with few copies.
LEAST_DRAFT = 0.25


class Load(NamedTuple):
    """What times are kept apart by: powers of 2 that hold the requests of a batch and their mean context."""

    requests: int
    context: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "Load":
        """Of requests with so many tokens."""
        mean = sum(lengths) // len(lengths)
        return cls((len(lengths) - 1).bit_length(), mean.bit_length())


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


@dataclass
class Recent:
    """Times of one kind.

    Attributes:
        newest: the last that were seen, in seconds.
    """

    newest: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_TIMES))

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.newest)

    @property
    def seconds(self) -> float:
        """The median of the newest; of two the shorter; 0 before the first."""
        return median_low(self.newest) if self.newest else 0.0


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
        rests.newest.append(spent.whole - spent.drafting)

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
