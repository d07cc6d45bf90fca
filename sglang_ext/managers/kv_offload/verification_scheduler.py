"""Schedules when each request verifies next, and when its full KV is loaded for that (VeriCache, section 5.1 and Algorithm 1).

An iteration is a round: all requests draft, then the due requests verify. In each iteration the engine calls, in this order:

1. :meth:`VerificationScheduler.advance`.
2. :meth:`~VerificationScheduler.due`, and :meth:`~VerificationScheduler.late` for each due request whose load is not complete.
3. :meth:`~VerificationScheduler.admit` for the requests that verify now (their next verification), for new requests, and for those
   that were refused before.
4. :meth:`~VerificationScheduler.loads_to_start`. The engine starts these loads in the returned order.

The scheduler learns at the start of iteration d that a load due in d is complete. So the load's link time is before d, and its memory is
held until the end of d. Link time and memory are reserved on two rings of coming iterations.
"""

import math
from collections import Counter, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

# Relative tolerance for sums of floats above a capacity.
ROUNDING = 1e-9


class ReservationRing:
    """Amounts reserved in each of ``horizon`` coming iterations (W in the paper), up to a capacity per iteration.

    The current iteration is 0. Totals are exactly rounded sums of the reserved amounts, independent of earlier reservations and releases.

    Attributes:
        capacity: Capacity of each iteration. After it was lowered, more may be reserved than it allows.
    """

    def __init__(self, capacity: float, horizon: int) -> None:
        assert horizon >= 2, "the current iteration and the next"
        self.capacity, self.horizon = capacity, horizon
        self._amounts: deque[list[float]] = deque([] for _ in range(horizon))
        self._totals: deque[float] = deque([0.0] * horizon)

    @property
    def peak(self) -> float:
        """The highest total of an iteration."""
        return max(self._totals)

    @property
    def mean_occupancy(self) -> float:
        """Reserved share of the capacity of all iterations. Infinite if the capacity is 0."""
        total = math.fsum(self._totals)
        return total / self.capacity / self.horizon if self.capacity else math.inf

    def reserved(self, iteration: int) -> float:
        """Amount reserved in an iteration."""
        return self._totals[iteration]

    def free(self, iteration: int) -> float:
        """Amount that can still be reserved in an iteration."""
        return max(0.0, self.capacity - self.reserved(iteration))

    def occupancy(self) -> float:
        """Reserved share of the current iteration's capacity, from 0 to 1. 1 if the capacity is 0."""
        return min(1.0, self._totals[0] / self.capacity) if self.capacity else 1.0

    def fits(self, amount: float, first: int, last: int) -> bool:
        """Whether ``amount`` can be reserved in each iteration from ``first`` to ``last``, both included."""
        room = self.capacity * (1 + ROUNDING)
        return all(self._totals[i] + amount <= room for i in self._span(first, last))

    def reserve(self, amount: float, first: int, last: int) -> None:
        """Reserve ``amount`` in each iteration from ``first`` to ``last``, also if it does not fit: it may be in use already."""
        assert 0 <= amount < math.inf, f"an amount of {amount!r}"
        for i in self._span(first, last):
            self._amounts[i].append(amount)
            self._totals[i] = math.fsum(self._amounts[i])

    def release(self, amount: float, first: int, last: int) -> None:
        """Release an amount that was reserved in each iteration from ``first`` to ``last``."""
        for i in self._span(first, last):
            self._amounts[i].remove(amount)
            self._totals[i] = math.fsum(self._amounts[i])

    def scale(self, factor: float) -> None:
        """Multiply all reserved amounts by ``factor``, for example if the link is slower than expected."""
        self._amounts = deque([amount * factor for amount in amounts] for amounts in self._amounts)
        self._totals = deque(map(math.fsum, self._amounts))

    def advance(self) -> None:
        """End the current iteration: the next one becomes 0, and an empty one is appended."""
        self._amounts.popleft()
        self._totals.popleft()
        self._amounts.append([])
        self._totals.append(0.0)

    def _span(self, first: int, last: int) -> range:
        assert 0 <= first <= last < self.horizon, f"iterations {first} to {last} of {self.horizon}"
        return range(first, last + 1)


class VerificationSlot(NamedTuple):
    """Iterations in which a load begins and in which its request verifies; equal without a load. The current iteration is 0."""

    start: int
    due: int


@dataclass
class _Planned:
    """A planned load from iteration ``start`` on, and a verification in iteration ``due``. Iterations count from the first of all.

    ``parts``: link time in each iteration from ``start``, seconds; empty without a load. ``tokens``: memory held from ``start`` to ``due``.
    """

    start: int
    due: int
    parts: list[float]
    tokens: float


class VerificationScheduler:
    """Places verifications and their loads so that link time and memory suffice in each iteration.

    A load of S iterations' link time may use parts of S + 1. It shares those at both ends with other loads, so that the link is never idle.
    No load is planned inside the span of another one. So a link that serves loads in the order of :meth:`loads_to_start` completes
    all of them in time.

    Args:
        iteration_seconds: Measured duration of an iteration.
        memory: Memory that all loads may hold together, in tokens or bytes.
        horizon: Number of planned iterations, including the current one.
        tolerance: Share of the wanted rounds by which a verification without a load may move to an iteration with fewer due requests.

    Attributes:
        link: Link time of loads in seconds. Set its capacity to the measured duration of an iteration; reserved seconds stay.
        memory: Memory held by loads, and by verifications of the loaded KV. Set its capacity when other uses of the memory change.
        admitted, refused: Numbers of successful and of refused :meth:`admit` calls.
        num_postponed: Number of verifications postponed because their load was late.
    """

    def __init__(self, iteration_seconds: float, memory: float, horizon: int = 64, tolerance: float = 0.25) -> None:
        self.link = ReservationRing(iteration_seconds, horizon)
        self.memory = ReservationRing(memory, horizon)
        self.admitted = self.refused = self.num_postponed = 0
        self._tolerance, self._now = tolerance, 0
        self._planned: dict[Hashable, _Planned] = {}
        self._verifying: dict[Hashable, _Planned] = {}

    @property
    def max_load_seconds(self) -> float:
        """Maximum link seconds of a load within the horizon."""
        return self.link.capacity * (self.link.horizon - 2)

    def rescale_link(self, factor: float) -> None:
        """Multiply the link time of all planned loads by ``factor``, the old bandwidth divided by the new one."""
        self.link.scale(factor)
        for planned in self._planned.values():
            planned.parts = [part * factor for part in planned.parts]

    def admit(self, key: Hashable, seconds: float, tokens: float, wanted: int) -> VerificationSlot | None:
        """Place a request's next verification after about ``wanted`` rounds of drafts (x in the paper), at least 1.

        The load takes ``seconds`` of link time, and holds memory for ``tokens``. It tries the due iterations ``wanted``, one more, one less,
        two more..., from the length of the load to the horizon. A request whose full KV is on the device (0 seconds, 0 tokens) gets the
        iteration near ``wanted`` with the fewest due requests, the next one at the earliest. Returns None if nothing fits: call it again in a
        later iteration. The request must have no coming verification.
        """
        assert key not in self._planned, f"{key!r} is due in {self._planned[key].due - self._now} iterations: cancel it first"
        assert wanted >= 1 and 0 <= seconds < math.inf and 0 <= tokens < math.inf, f"{key!r}: {seconds!r} s, {tokens!r} tokens, {wanted!r} rounds"
        planned = self._place_load(seconds, tokens, wanted) if seconds or tokens else self._place_alone(wanted)
        if planned is None:
            self.refused += 1
            return None
        self.admitted += 1
        self._planned[key] = planned
        return VerificationSlot(planned.start - self._now, planned.due - self._now)

    def advance(self) -> None:
        """Begin the next iteration, and release the memory of the verifications of the previous one."""
        self.link.advance()
        self.memory.advance()
        self._now += 1
        self._verifying = {key: each for key, each in self._planned.items() if each.due == self._now}
        for key in self._verifying:
            del self._planned[key]

    def loads_to_start(self) -> list[Hashable]:
        """Requests whose load begins in this iteration, in the order in which the link must serve them."""
        found = [key for key, each in self._planned.items() if each.parts and each.start == self._now]
        return sorted(found, key=lambda key: self._planned[key].due)

    def due(self) -> list[Hashable]:
        """Requests that verify in this iteration, in the order in which they were admitted."""
        return list(self._verifying)

    def late(self, key: Hashable) -> list[Hashable]:
        """Postpone a verification of this iteration to the next one, because its load is not complete. Its memory stays held.

        Called for requests of :meth:`due`, before their next :meth:`admit`. Returns the requests whose reservations were cancelled to free
        memory, in the order in which their loads would have begun. Admit them again in that order, so that none of them is overtaken
        repeatedly.
        """
        assert key not in self._planned, f"{key!r} was admitted again, and cannot be late"
        late = self._verifying.pop(key)
        # Loads that began earlier were held together with the late load until now. It fits without the loads that have not begun.
        displaced = []
        if not self.memory.fits(late.tokens, 1, 1):
            coming = [other for other, each in self._planned.items() if each.tokens and each.start > self._now]
            displaced = sorted(coming, key=lambda other: self._planned[other].start)
            for other in displaced:
                self.cancel(other)
        if late.tokens:
            self.memory.reserve(late.tokens, 1, 1)
        late.due += 1
        self._planned[key] = late
        self.num_postponed += 1
        return displaced

    def cancel(self, key: Hashable) -> None:
        """Release all reservations of a request that is finished, aborted or retracted.

        If its load has begun, others may use its slots only after the load has ended.
        """
        for planned in filter(None, (self._planned.pop(key, None), self._verifying.pop(key, None))):
            for iteration, part in enumerate(planned.parts, planned.start - self._now):
                if iteration >= 0:
                    self.link.release(part, iteration, iteration)
            if planned.tokens:
                self.memory.release(planned.tokens, max(0, planned.start - self._now), planned.due - self._now)

    def _place_alone(self, wanted: int) -> _Planned:
        """Place a verification without a load near ``wanted``, in the iteration with the fewest due requests."""
        last = self.link.horizon - 1
        anchor = min(wanted, last)
        reach = int(self._tolerance * anchor)
        counts = Counter(each.due - self._now for each in self._planned.values())
        due = self._now + min(_nearest_first(anchor, max(1, anchor - reach), min(last, anchor + reach)), key=counts.__getitem__)
        return _Planned(due, due, [], 0.0)

    def _place_load(self, seconds: float, tokens: float, wanted: int) -> _Planned | None:
        """Reserve a load that is due as near to ``wanted`` iterations as possible. None if nothing fits."""
        # Iterations that the load fills (S in the paper).
        span = max(1, math.ceil(seconds / self.link.capacity - ROUNDING)) if self.link.capacity else self.link.horizon
        joined = self.link.mean_occupancy >= self.memory.mean_occupancy
        for due in _nearest_first(wanted, span, self.link.horizon - 1):
            for parts in self._forms(seconds, due, span, joined):
                start = due - len(parts)
                if self.memory.fits(tokens, start, due) and self._is_in_order(self._now + start, self._now + due):
                    for iteration, part in enumerate(parts, start):
                        self.link.reserve(part, iteration, iteration)
                    if tokens:
                        self.memory.reserve(tokens, start, due)
                    return _Planned(self._now + start, self._now + due, parts, tokens)
        return None

    def _forms(self, seconds: float, due: int, span: int, joined: bool) -> Iterator[list[float]]:
        """Yield link seconds per iteration of loads that end just before ``due``, the best one first. With ``joined``, set if memory is less
        scarce than the link, a load may use the rest of the iteration before the span."""
        if seconds and self.link.free(due - 1) <= ROUNDING * self.link.capacity:
            return
        first = max(0, due - span - 1)
        if joined and first < due - span and 0 < self.link.free(first) < self.link.capacity:
            yield from self._fill(seconds, list(range(first, due)))
        for parts in self._fill(seconds, list(range(due - 1, first - 1, -1))):
            yield parts[::-1]

    def _fill(self, seconds: float, iterations: list[int]) -> Iterator[list[float]]:
        """Yield the seconds in each of ``iterations``, each as full as possible. Yield nothing if they do not suffice, or if a forward load
        does not need all of them: there is an earlier slot then. Backward, unneeded iterations are left out."""
        parts, left = [], seconds
        for iteration in iterations:
            parts.append(min(left, self.link.free(iteration)))
            left -= parts[-1]
            if left <= ROUNDING * self.link.capacity:
                break
        backward = iterations[0] > iterations[-1]
        if left <= ROUNDING * self.link.capacity and (backward or len(parts) == len(iterations)):
            yield parts

    def _is_in_order(self, start: int, due: int) -> bool:
        """Whether a link that serves loads in the order of their starts also serves them in the order of their due iterations."""
        return all(
            (each.due <= due or each.start >= start) and (each.due >= due or each.start <= start)
            for each in self._planned.values()
            if each.parts
        )


def _nearest_first(wanted: int, least: int, last: int) -> Iterator[int]:
    """Yield ``wanted``, clamped to the range, then one more, one less, two more... Yield nothing if the range is empty."""
    anchor = max(min(wanted, last), least)
    for step in range(last - least + 1):
        for value in dict.fromkeys((anchor + step, anchor - step)):
            if least <= value <= last:
                yield value
