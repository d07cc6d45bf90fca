"""How many requests verify in each coming iteration: who needs no load goes where the fewest do."""

from collections import Counter
from dataclasses import dataclass, field

from sglang_ext.managers.offload.loads import outward


@dataclass
class Dues:
    """Verifications by iteration; iterations count from the first of all.

    Attributes:
        tolerance: share of the wanted rounds by which a verification may move to where the fewest are due, so that of B
            requests about B/x verify in each iteration.
    """

    tolerance: float
    _counts: Counter[int] = field(default_factory=Counter)

    def add(self, due: int) -> None:
        """A request verifies in iteration ``due``."""
        self._counts[due] += 1

    def remove(self, due: int) -> None:
        """It does not, after all."""
        self._counts[due] -= 1

    def over(self, due: int) -> None:
        """An iteration is over."""
        self._counts.pop(due, None)

    def quietest(self, now: int, wanted: int, last: int) -> int:
        """The iteration near ``wanted`` ones after ``now``, up to ``last`` after it, in which the fewest are due."""
        anchor = min(wanted, last)
        reach = int(self.tolerance * anchor)
        near = outward(anchor, max(1, anchor - reach), min(last, anchor + reach))
        return now + min(near, key=lambda due: self._counts[now + due])
