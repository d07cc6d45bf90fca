"""Reservations of loads of full KV on two rings of coming iterations (VeriCache, section 5.1): link time, and memory held by loads."""

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

# Relative tolerance for sums of floats above a capacity.
ROUNDING = 1e-9


class ReservationError(ValueError):
    """A reservation that cannot be made or released. The message names what is allowed."""


class ReservationRing:
    """Amounts reserved in each of a fixed number of coming iterations, up to a capacity per iteration.

    The current iteration is 0. Totals are exactly rounded sums of the reserved amounts, independent of earlier reservations and releases.

    Attributes:
        horizon: Number of iterations, including the current one (W in the paper).
    """

    def __init__(self, capacity: float, horizon: int):
        """Create an empty ring.

        Args:
            capacity: Capacity of each iteration, in the unit of the amounts.

        Raises:
            ReservationError: The capacity is negative, or the horizon is below 2.
        """
        if horizon < 2:
            raise ReservationError(f"a horizon of {horizon} iterations: pass at least 2, the current one and the next")
        self.horizon = horizon
        self.capacity = capacity
        self._amounts: deque[list[float]] = deque([] for _ in range(horizon))
        self._totals: deque[float] = deque([0.0] * horizon)

    @property
    def capacity(self) -> float:
        """Capacity of each iteration. Lowering it keeps existing reservations, even above the new capacity."""
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: float) -> None:
        self._capacity = _checked("capacity", capacity)

    @property
    def peak(self) -> float:
        """The highest total of an iteration."""
        return max(self._totals)

    @property
    def mean_occupancy(self) -> float:
        """Reserved share of the capacity of all iterations. Infinite if the capacity is 0."""
        total = math.fsum(self._totals)
        return total / self._capacity / self.horizon if self._capacity else math.inf

    def reserved(self, iteration: int) -> float:
        """Amount reserved in an iteration."""
        self._check(iteration, iteration)
        return self._totals[iteration]

    def free(self, iteration: int) -> float:
        """Amount that can still be reserved in an iteration."""
        return max(0.0, self._capacity - self.reserved(iteration))

    def occupancy(self) -> float:
        """Reserved share of the current iteration's capacity, from 0 to 1. 1 if the capacity is 0."""
        return min(1.0, self._totals[0] / self._capacity) if self._capacity else 1.0

    def fits(self, amount: float, first: int, last: int) -> bool:
        """Whether ``amount`` can be reserved in each iteration from ``first`` to ``last``, both included."""
        self._check(first, last)
        room = self._capacity * (1 + ROUNDING)
        return all(self._totals[i] + amount <= room for i in range(first, last + 1))

    def reserve(self, amount: float, first: int, last: int) -> None:
        """Reserve ``amount`` in each iteration from ``first`` to ``last``.

        Raises:
            ReservationError: An iteration has less free. Nothing is reserved then.
        """
        if not self.fits(_checked("amount", amount), first, last):
            least = min(self.free(i) for i in range(first, last + 1))
            raise ReservationError(
                f"{amount:g} in iterations {first} to {last}, where {least:g} of {self._capacity:g} is left; "
                "ask fits() before, or use other iterations"
            )
        self.hold(amount, first, last)

    def hold(self, amount: float, first: int, last: int) -> None:
        """As :meth:`reserve`, for an amount that is in use already: it is never refused."""
        _checked("amount", amount)
        self._check(first, last)
        for i in range(first, last + 1):
            self._amounts[i].append(amount)
        self._sum(range(first, last + 1))

    def release(self, amount: float, first: int, last: int) -> None:
        """Release an amount that was reserved in each iteration from ``first`` to ``last``.

        Raises:
            ReservationError: An iteration has no such reservation. Nothing is released then.
        """
        self._check(first, last)
        for i in range(first, last + 1):
            if amount not in self._amounts[i]:
                raise ReservationError(f"iteration {i} holds no {amount:g}: release what was reserved, once, where it was reserved")
        for i in range(first, last + 1):
            self._amounts[i].remove(amount)
        self._sum(range(first, last + 1))

    def scale(self, factor: float) -> None:
        """Multiply all reserved amounts by ``factor``, for example if the link is slower than expected."""
        _checked("factor", factor)
        self._amounts = deque([amount * factor for amount in amounts] for amounts in self._amounts)
        self._sum(range(self.horizon))

    def advance(self) -> None:
        """End the current iteration: the next one becomes 0, and an empty one is appended."""
        self._amounts.popleft()
        self._totals.popleft()
        self._amounts.append([])
        self._totals.append(0.0)

    def _sum(self, iterations: Iterable[int]) -> None:
        for i in iterations:
            self._totals[i] = math.fsum(self._amounts[i])

    def _check(self, first: int, last: int) -> None:
        if not 0 <= first <= last < self.horizon:
            raise ReservationError(f"iterations {first} to {last}: pass a span within 0 to {self.horizon - 1}")


def _checked(name: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ReservationError(f"{name} {value!r}: pass a finite number, 0 or above")
    return value


@dataclass
class LoadReservation:
    """A reserved load and verification. Iterations count from the first of all.

    Attributes:
        start: The iteration in which the load begins.
        due: The iteration of the verification.
        parts: Link time in each iteration from ``start``, seconds. Empty without a load.
        tokens: Memory held from ``start`` to ``due``, in the unit of the memory ring.
    """

    start: int
    due: int
    parts: list[float]
    tokens: float

    @property
    def has_load(self) -> bool:
        """Whether full KV must be loaded."""
        return bool(self.parts)


class Occupancy(NamedTuple):
    """Reserved shares of the current iteration, from 0 to 1.

    Attributes:
        link: Share of the iteration's link time.
        memory: Share of the memory for loads.
    """

    link: float
    memory: float


class LoadSchedule:
    """Places loads so that link time and memory suffice in each iteration.

    Attributes:
        link: Link time in seconds. The capacity is the duration of an iteration.
        memory: Memory held by loads, and by verifications of the loaded KV.
        now: Iterations since the first of all.
    """

    def __init__(self, iteration_seconds: float, memory: float, horizon: int):
        """Create an empty schedule. See :class:`~sglang_ext.managers.kv_offload.verification_scheduler.VerificationScheduler`."""
        self.link = ReservationRing(iteration_seconds, horizon)
        self.memory = ReservationRing(memory, horizon)
        self.now = 0

    @property
    def occupancy(self) -> Occupancy:
        """Occupancy of the current iteration."""
        return Occupancy(self.link.occupancy(), self.memory.occupancy())

    def advance(self) -> None:
        """Begin the next iteration."""
        self.link.advance()
        self.memory.advance()
        self.now += 1

    def span(self, seconds: float) -> int:
        """Iterations that a load fills (S in the paper)."""
        if not self.link.capacity:
            return self.link.horizon
        return max(1, math.ceil(seconds / self.link.capacity - ROUNDING))

    def place(self, seconds: float, tokens: float, wanted: int, others: Collection[LoadReservation]) -> LoadReservation | None:
        """Reserve a load that is due as near to ``wanted`` iterations as possible. None if nothing fits.

        Args:
            others: All planned loads.
        """
        span = self.span(seconds)
        joined = self.link.mean_occupancy >= self.memory.mean_occupancy
        for due in nearest_first(wanted, span, self.link.horizon - 1):
            for parts in self._forms(seconds, due, span, joined):
                start = due - len(parts)
                if self.memory.fits(tokens, start, due) and _in_order(self.now + start, self.now + due, others):
                    return self._reserve(LoadReservation(self.now + start, self.now + due, parts, tokens))
        return None

    def _reserve(self, planned: LoadReservation) -> LoadReservation:
        start, due = planned.start - self.now, planned.due - self.now
        for iteration, part in enumerate(planned.parts, start):
            if part:
                self.link.reserve(part, iteration, iteration)
        if planned.tokens:
            self.memory.reserve(planned.tokens, start, due)
        return planned

    def release(self, planned: LoadReservation) -> None:
        """Release the remaining reservations of a load."""
        for iteration, part in enumerate(planned.parts, planned.start - self.now):
            if iteration >= 0 and part:
                self.link.release(part, iteration, iteration)
        if planned.tokens:
            self.memory.release(planned.tokens, max(0, planned.start - self.now), planned.due - self.now)

    def _forms(self, seconds: float, due: int, span: int, joined: bool) -> Iterator[list[float]]:
        """Yield link seconds per iteration of loads that end just before ``due``, the best one first.

        Args:
            joined: Try to use the rest of the iteration before the span, which another load uses partly. True if memory is less scarce than
                the link.
        """
        if seconds and self.link.free(due - 1) <= ROUNDING * self.link.capacity:
            return
        first = max(0, due - span - 1)
        if joined and first < due - span and 0 < self.link.free(first) < self.link.capacity:
            yield from self._fill(seconds, list(range(first, due)))
        for parts in self._fill(seconds, list(range(due - 1, first - 1, -1))):
            yield parts[::-1]

    def _fill(self, seconds: float, iterations: list[int]) -> Iterator[list[float]]:
        """Yield the seconds in each of ``iterations``, in their order, each as full as possible. Yield nothing if they do not suffice.

        Backward, unneeded iterations are left out. Forward, all must be needed: otherwise there is an earlier slot.
        """
        parts, left = [], seconds
        for iteration in iterations:
            parts.append(min(left, self.link.free(iteration)))
            left -= parts[-1]
            if left <= ROUNDING * self.link.capacity:
                break
        backward = iterations[0] > iterations[-1]
        if left <= ROUNDING * self.link.capacity and (backward or len(parts) == len(iterations)):
            yield parts


def _in_order(start: int, due: int, others: Collection[LoadReservation]) -> bool:
    """Whether a link that serves loads in the order of their starts also serves them in the order of their due iterations."""
    return all(
        (each.due <= due or each.start >= start) and (each.due >= due or each.start <= start)
        for each in others
        if each.has_load
    )


def nearest_first(wanted: int, least: int, last: int) -> Iterator[int]:
    """Yield ``wanted``, clamped to the range, then one more, one less, two more... Yield nothing if the range is empty."""
    anchor = max(min(wanted, last), least)
    for step in range(last - least + 1):
        for value in dict.fromkeys((anchor + step, anchor - step)):
            if least <= value <= last:
                yield value
