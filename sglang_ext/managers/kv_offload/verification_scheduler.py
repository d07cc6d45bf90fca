"""When each request verifies next, and when its full KV is loaded for that (VeriCache, Algorithm 1).

An iteration is a round: all requests draft, then those that are due verify. Each iteration of the engine asks, in
this order: :meth:`VerificationScheduler.advance`; :meth:`~VerificationScheduler.due`, with :meth:`~VerificationScheduler.late` for each whose load is not
there; :meth:`~VerificationScheduler.admit` for those that verify now (their next time), for new ones and for those that were
refused before; :meth:`~VerificationScheduler.loads_to_start`, whose loads go to the link in that order.

A load that is due in iteration d is known to be complete only at the beginning of d, so its link time lies before d,
and its memory is held until d is over.
"""

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_ext.managers.kv_offload.load_reservations import LoadSchedule, Occupancy, LoadReservation, nearest_first


class VerificationScheduleError(ValueError):
    """A call that the state does not allow; the message says what to do."""


class VerificationSlot(NamedTuple):
    """A place in coming iterations; the current one is 0.

    Attributes:
        start: in which the load begins; ``due`` for requests without a load.
        due: in which the request verifies.
    """

    start: int
    due: int


@dataclass
class VerificationCounts:
    """How many requests verify in each coming iteration, counted from the first of all: who needs no load goes where the fewest do.

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

    def end_iteration(self, due: int) -> None:
        """An iteration is over."""
        self._counts.pop(due, None)

    def least_loaded(self, now: int, wanted: int, last: int) -> int:
        """The iteration near ``wanted`` ones after ``now``, up to ``last`` after it, in which the fewest are due."""
        anchor = min(wanted, last)
        reach = int(self.tolerance * anchor)
        near = nearest_first(anchor, max(1, anchor - reach), min(last, anchor + reach))
        return now + min(near, key=lambda due: self._counts[now + due])


class VerificationScheduler:
    """Places verifications and their loads so that the link and the memory suffice in each iteration.

    A load shares the iterations at both ends of its span with others, so that the link is never idle by rounding: of
    S iterations' link time it may take parts of S + 1. No load is planned inside the span of another one, so a link
    that serves loads in the order of :meth:`loads_to_start` completes all in time.

    Attributes:
        admitted: requests that got a place, each time.
        refused: requests that got none, each time: they wait.
        num_postponed: verifications that were put off since their load was late.
    """

    def __init__(self, iteration_seconds: float, memory: float, horizon: int = 64, tolerance: float = 0.25):
        """Nothing reserved.

        Args:
            iteration_seconds: of an iteration, as measured.
            memory: that loads may hold together, in tokens or bytes.
            horizon: iterations that are planned, the current one among them.
            tolerance: of verifications without a load (:class:`VerificationCounts`).

        Raises:
            ReservationError: a number is out of range.
        """
        self._loads = LoadSchedule(iteration_seconds, memory, horizon)
        self.admitted = self.refused = self.num_postponed = 0
        self._planned: dict[Hashable, LoadReservation] = {}
        self._verifying: dict[Hashable, LoadReservation] = {}
        self._dues = VerificationCounts(tolerance)

    @property
    def iteration_seconds(self) -> float:
        """Seconds of an iteration. Set it as measured: reserved seconds of the link stay."""
        return self._loads.link.capacity

    @iteration_seconds.setter
    def iteration_seconds(self, seconds: float) -> None:
        self._loads.link.capacity = seconds

    @property
    def memory(self) -> float:
        """What loads may hold together. Set it as other uses of the memory grow or shrink: what is held stays."""
        return self._loads.memory.capacity

    @memory.setter
    def memory(self, memory: float) -> None:
        self._loads.memory.capacity = memory

    @property
    def memory_peak(self) -> float:
        """The most that loads will hold in a coming iteration, as planned: other uses must leave it free."""
        return self._loads.memory.peak

    @property
    def occupancy(self) -> Occupancy:
        """Of the current iteration."""
        return self._loads.occupancy

    @property
    def max_load_seconds(self) -> float:
        """Seconds of the link that a load can be given at most, within the horizon."""
        return self.iteration_seconds * (self._loads.link.horizon - 2)

    def rescale_link(self, factor: float) -> None:
        """All loads that are planned take ``factor`` times as long: a link's old bandwidth over its new one."""
        self._loads.link.scale(factor)
        for planned in self._planned.values():
            planned.parts = [part * factor for part in planned.parts]

    def admit(self, key: Hashable, seconds: float, tokens: float, wanted: int) -> VerificationSlot | None:
        """Place a request's next verification; None where nothing fits: ask again in a later iteration.

        Tried are ``wanted``, one more, one less, two more..., from as many iterations as the load needs up to the
        horizon. A request whose full KV is on the device (0 seconds, 0 tokens) verifies in the next iteration at the
        earliest, near what is wanted, where the fewest are due.

        Args:
            seconds: of the link for the load.
            tokens: that the load holds, in the unit of the memory.
            wanted: rounds of drafts until the verification (x in the paper), at least 1.

        Raises:
            VerificationScheduleError: the request has a place that is still to come, or a number is out of range.
        """
        if key in self._planned:
            raise VerificationScheduleError(f"{key!r} is due in {self._planned[key].due - self._loads.now} iterations: cancel it first")
        if wanted < 1 or not (0 <= seconds < math.inf and 0 <= tokens < math.inf):
            raise VerificationScheduleError(
                f"{key!r}: {seconds!r} seconds, {tokens!r} tokens, {wanted!r} rounds: pass finite numbers, 0 or above, "
                "and at least 1 round"
            )
        if seconds or tokens:
            planned = self._loads.place(seconds, tokens, wanted, self._planned.values())
        else:
            due = self._dues.least_loaded(self._loads.now, wanted, self._loads.link.horizon - 1)
            planned = LoadReservation(due, due, [], 0.0)
        if planned is None:
            self.refused += 1
            return None
        self.admitted += 1
        self._dues.add(planned.due)
        self._planned[key] = planned
        return VerificationSlot(planned.start - self._loads.now, planned.due - self._loads.now)

    def advance(self) -> None:
        """The next iteration begins; what verified in the last one gives back its memory."""
        self._dues.end_iteration(self._loads.now)
        self._loads.advance()
        self._verifying = {key: each for key, each in self._planned.items() if each.due == self._loads.now}
        for key in self._verifying:
            del self._planned[key]

    def loads_to_start(self) -> list[Hashable]:
        """Requests whose load begins in this iteration, in the order in which the link shall serve them."""
        found = [(each.due, key) for key, each in self._planned.items() if each.loads and each.start == self._loads.now]
        return [key for _, key in sorted(found, key=lambda pair: pair[0])]

    def due(self) -> list[Hashable]:
        """Requests that verify in this iteration, in the order in which they were admitted."""
        return list(self._verifying)

    def late(self, key: Hashable) -> list[Hashable]:
        """Put off a verification of this iteration whose load is not complete to the next one; its memory stays held.

        Returns:
            requests whose loads had to make room, in the order in which they would have begun: admit them anew, in that order,
            so that none of them is overtaken each time.

        Raises:
            VerificationScheduleError: the request is not due, or has its next place already.
        """
        if key not in self._verifying or key in self._planned:
            raise VerificationScheduleError(f"{key!r} cannot be late: only what due() lists, before it is admitted anew")
        late = self._verifying.pop(key)
        # What began before was held beside the late load until now: without those that are yet to begin it fits.
        displaced = []
        if not self._loads.memory.fits(late.tokens, 1, 1):
            now = self._loads.now
            coming = [(each.start, other) for other, each in self._planned.items() if each.tokens and each.start > now]
            displaced = [other for _, other in sorted(coming, key=lambda pair: pair[0])]
            for other in displaced:
                self.cancel(other)
        if late.tokens:
            self._loads.memory.hold(late.tokens, 1, 1)
        self._dues.remove(late.due)
        late.due += 1
        self._dues.add(late.due)
        self._planned[key] = late
        self.num_postponed += 1
        return displaced

    def cancel(self, key: Hashable) -> None:
        """Give back all that a request has reserved, if anything: it is finished, aborted or retracted.

        Where its load has begun, its slots may be used by others only when the load has ended.
        """
        for each in (self._planned.pop(key, None), self._verifying.pop(key, None)):
            if each is not None:
                self._dues.remove(each.due)
                self._loads.release(each)
