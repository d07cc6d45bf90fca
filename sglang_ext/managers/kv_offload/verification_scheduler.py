"""Schedules when each request verifies next, and when its full KV is loaded for that (VeriCache, Algorithm 1).

An iteration is a round: all requests draft, then the due requests verify. In each iteration the engine calls, in this order:

1. :meth:`VerificationScheduler.advance`.

2. :meth:`~VerificationScheduler.due`, and :meth:`~VerificationScheduler.late` for each due request whose load is not complete.

3. :meth:`~VerificationScheduler.admit` for the requests that verify now (their next verification), for new requests, and for those
   that were refused before.

4. :meth:`~VerificationScheduler.loads_to_start`. The engine starts these loads in the returned order.

The scheduler learns at the start of iteration d that a load due in d is complete. So the load's link time is before d, and its memory is
held until the end of d.
"""

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_ext.managers.kv_offload.load_reservations import LoadReservation, LoadSchedule, Occupancy, nearest_first


class VerificationScheduleError(ValueError):
    """A call that the state does not allow. The message names the remedy."""


class VerificationSlot(NamedTuple):
    """A scheduled verification. Iterations count from the current one, which is 0.

    Attributes:
        start: The iteration in which the load begins. Equal to ``due`` without a load.
        due: The iteration in which the request verifies.
    """

    start: int
    due: int


@dataclass
class VerificationCounts:
    """Number of requests that verify in each coming iteration, counted from the first of all. It balances requests without a load.

    Attributes:
        tolerance: Share of the wanted rounds by which a verification may move to the iteration with the fewest due requests. With B
            requests that verify every x iterations, about B/x verify in each iteration.
    """

    tolerance: float
    _counts: Counter[int] = field(default_factory=Counter)

    def add(self, due: int) -> None:
        """Count a request that verifies in iteration ``due``."""
        self._counts[due] += 1

    def remove(self, due: int) -> None:
        """Remove a request from iteration ``due``."""
        self._counts[due] -= 1

    def end_iteration(self, due: int) -> None:
        """Remove an iteration that has ended."""
        self._counts.pop(due, None)

    def least_loaded(self, now: int, wanted: int, last: int) -> int:
        """The iteration with the fewest due requests near ``wanted`` iterations after ``now``, at most ``last`` after it."""
        anchor = min(wanted, last)
        reach = int(self.tolerance * anchor)
        near = nearest_first(anchor, max(1, anchor - reach), min(last, anchor + reach))
        return now + min(near, key=lambda due: self._counts[now + due])


class VerificationScheduler:
    """Places verifications and their loads so that link time and memory suffice in each iteration.

    A load shares the iterations at both ends of its span with other loads, so that rounding never leaves the link idle. A load of S
    iterations' link time may use parts of S + 1. No load is planned inside the span of another one. So a link that serves loads in the
    order of :meth:`loads_to_start` completes all of them in time.

    Attributes:
        admitted: Number of successful :meth:`admit` calls.
        refused: Number of refused :meth:`admit` calls. The requests wait.
        num_postponed: Number of verifications postponed because their load was late.
    """

    def __init__(self, iteration_seconds: float, memory: float, horizon: int = 64, tolerance: float = 0.25):
        """Create an empty schedule.

        Args:
            iteration_seconds: Measured duration of an iteration.
            memory: Memory that all loads may hold together, in tokens or bytes.
            horizon: Number of planned iterations, including the current one.
            tolerance: For verifications without a load (:class:`VerificationCounts`).

        Raises:
            ReservationError: A number is out of range.
        """
        self._loads = LoadSchedule(iteration_seconds, memory, horizon)
        self.admitted = self.refused = self.num_postponed = 0
        self._planned: dict[Hashable, LoadReservation] = {}
        self._verifying: dict[Hashable, LoadReservation] = {}
        self._dues = VerificationCounts(tolerance)

    @property
    def iteration_seconds(self) -> float:
        """Duration of an iteration in seconds. Set it to the measured value. Reserved link seconds stay."""
        return self._loads.link.capacity

    @iteration_seconds.setter
    def iteration_seconds(self, seconds: float) -> None:
        self._loads.link.capacity = seconds

    @property
    def memory(self) -> float:
        """Memory that all loads may hold together. Set it when other uses of the memory change. Held memory stays held."""
        return self._loads.memory.capacity

    @memory.setter
    def memory(self, memory: float) -> None:
        self._loads.memory.capacity = memory

    @property
    def memory_peak(self) -> float:
        """The most memory that loads will hold in a coming iteration, as planned. Other uses must leave it free."""
        return self._loads.memory.peak

    @property
    def occupancy(self) -> Occupancy:
        """Occupancy of the current iteration."""
        return self._loads.occupancy

    @property
    def max_load_seconds(self) -> float:
        """Maximum link seconds of a load within the horizon."""
        return self.iteration_seconds * (self._loads.link.horizon - 2)

    def rescale_link(self, factor: float) -> None:
        """Multiply the link time of all planned loads by ``factor``, the old bandwidth divided by the new one."""
        self._loads.link.scale(factor)
        for planned in self._planned.values():
            planned.parts = [part * factor for part in planned.parts]

    def admit(self, key: Hashable, seconds: float, tokens: float, wanted: int) -> VerificationSlot | None:
        """Place a request's next verification. None if nothing fits: call it again in a later iteration.

        With a load, it tries the due iterations ``wanted``, one more, one less, two more..., from the length of the load to the horizon.
        A request whose full KV is on the device (0 seconds, 0 tokens) verifies in the next iteration at the earliest. It gets the
        iteration near ``wanted`` with the fewest due requests.

        Args:
            seconds: Link time of the load.
            tokens: Memory that the load holds, in the unit of ``memory``.
            wanted: Rounds of drafts until the verification (x in the paper), at least 1.

        Raises:
            VerificationScheduleError: The request already has a coming verification, or a number is out of range.
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
        """Begin the next iteration, and release the memory of the verifications of the previous one."""
        self._dues.end_iteration(self._loads.now)
        self._loads.advance()
        self._verifying = {key: each for key, each in self._planned.items() if each.due == self._loads.now}
        for key in self._verifying:
            del self._planned[key]

    def loads_to_start(self) -> list[Hashable]:
        """Requests whose load begins in this iteration, in the order in which the link must serve them."""
        found = [(each.due, key) for key, each in self._planned.items() if each.has_load and each.start == self._loads.now]
        return [key for _, key in sorted(found, key=lambda pair: pair[0])]

    def due(self) -> list[Hashable]:
        """Requests that verify in this iteration, in the order in which they were admitted."""
        return list(self._verifying)

    def late(self, key: Hashable) -> list[Hashable]:
        """Postpone a verification of this iteration to the next one, because its load is not complete. Its memory stays held.

        Returns:
            Requests whose reservations were cancelled to free memory, in the order in which their loads would have begun. Admit them again
            in that order, so that none of them is overtaken repeatedly.

        Raises:
            VerificationScheduleError: The request is not due, or its next verification is already scheduled.
        """
        if key not in self._verifying or key in self._planned:
            raise VerificationScheduleError(f"{key!r} cannot be late: only what due() lists, before it is admitted again")
        late = self._verifying.pop(key)
        # Loads that began earlier were held together with the late load until now. It fits without the loads that have not begun.
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
        """Release all reservations of a request that is finished, aborted or retracted.

        If its load has begun, others may use its slots only after the load has ended.
        """
        for each in (self._planned.pop(key, None), self._verifying.pop(key, None)):
            if each is not None:
                self._dues.remove(each.due)
                self._loads.release(each)
