"""Loads of full KV on two rings of coming iterations (VeriCache, section 5.1): link time, and memory that they hold."""

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

# Sums of floats may pass a capacity by this share.
ROUNDING = 1e-9


class ReservationError(ValueError):
    """A reservation cannot be made or given back; the message says what would be allowed."""


class ReservationRing:
    """Amounts reserved in each of a fixed number of coming iterations, none above the capacity.

    Iterations count from the current one, which is 0. Totals are exactly rounded sums of what is reserved, whatever
    was reserved and released before.

    Attributes:
        horizon: iterations, the current one among them (W in the paper).
    """

    def __init__(self, capacity: float, horizon: int):
        """An empty ring.

        Args:
            capacity: of each iteration, in the unit of the amounts.

        Raises:
            ReservationError: the capacity is negative, or the horizon below 2.
        """
        if horizon < 2:
            raise ReservationError(f"a horizon of {horizon} iterations: pass at least 2, the current one and the next")
        self.horizon = horizon
        self.capacity = capacity
        self._amounts: deque[list[float]] = deque([] for _ in range(horizon))
        self._totals: deque[float] = deque([0.0] * horizon)

    @property
    def capacity(self) -> float:
        """Of each iteration. A lower one refuses more; what is reserved stays, even where it is above."""
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: float) -> None:
        self._capacity = _checked("capacity", capacity)

    @property
    def peak(self) -> float:
        """The most that is reserved in an iteration."""
        return max(self._totals)

    @property
    def load(self) -> float:
        """Share of the capacity of all iterations that is reserved; infinite where there is no capacity."""
        total = math.fsum(self._totals)
        return total / self._capacity / self.horizon if self._capacity else math.inf

    def reserved(self, iteration: int) -> float:
        """What is reserved in an iteration."""
        self._check(iteration, iteration)
        return self._totals[iteration]

    def free(self, iteration: int) -> float:
        """What may still be reserved in an iteration."""
        return max(0.0, self._capacity - self.reserved(iteration))

    def occupancy(self) -> float:
        """Share of the capacity that is reserved in the current iteration, from 0 to 1; 1 where there is none."""
        return min(1.0, self._totals[0] / self._capacity) if self._capacity else 1.0

    def fits(self, amount: float, first: int, last: int) -> bool:
        """Whether so much may be reserved in each iteration from ``first`` to ``last``, both included."""
        self._check(first, last)
        room = self._capacity * (1 + ROUNDING)
        return all(self._totals[i] + amount <= room for i in range(first, last + 1))

    def reserve(self, amount: float, first: int, last: int) -> None:
        """Take so much in each iteration from ``first`` to ``last``.

        Raises:
            ReservationError: an iteration has less left; nothing is reserved then.
        """
        if not self.fits(_checked("amount", amount), first, last):
            least = min(self.free(i) for i in range(first, last + 1))
            raise ReservationError(
                f"{amount:g} in iterations {first} to {last}, where {least:g} of {self._capacity:g} is left; "
                "ask fits() before, or take other iterations"
            )
        self.hold(amount, first, last)

    def hold(self, amount: float, first: int, last: int) -> None:
        """As :meth:`reserve` for what is taken already, so that it cannot be refused."""
        _checked("amount", amount)
        self._check(first, last)
        for i in range(first, last + 1):
            self._amounts[i].append(amount)
        self._sum(range(first, last + 1))

    def release(self, amount: float, first: int, last: int) -> None:
        """Give back an amount that was reserved in each iteration from ``first`` to ``last``.

        Raises:
            ReservationError: an iteration holds no such amount; nothing is given back then.
        """
        self._check(first, last)
        for i in range(first, last + 1):
            if amount not in self._amounts[i]:
                raise ReservationError(f"iteration {i} holds no {amount:g}: release what was reserved, once, where it was reserved")
        for i in range(first, last + 1):
            self._amounts[i].remove(amount)
        self._sum(range(first, last + 1))

    def scale(self, factor: float) -> None:
        """Multiply all that is reserved, as when a link turns out slower; reserved amounts are then times ``factor``."""
        _checked("factor", factor)
        self._amounts = deque([amount * factor for amount in amounts] for amounts in self._amounts)
        self._sum(range(self.horizon))

    def advance(self) -> None:
        """The current iteration is over: the next one becomes 0, and an empty one comes at the end."""
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
    """A reservation; iterations count from the first of all.

    Attributes:
        start: in which the load begins.
        due: of the verification.
        parts: seconds of the link in each iteration from ``start``; empty without a load.
        tokens: held from ``start`` to ``due``, in the unit of the memory.
    """

    start: int
    due: int
    parts: list[float]
    tokens: float

    @property
    def loads(self) -> bool:
        """Whether full KV has to come."""
        return bool(self.parts)


class Occupancy(NamedTuple):
    """Shares that are reserved in the current iteration, from 0 to 1.

    Attributes:
        link: of its seconds.
        memory: of what loads may hold.
    """

    link: float
    memory: float


class LoadSchedule:
    """Places loads so that the link and the memory suffice in each iteration.

    Attributes:
        link: seconds, at most an iteration's in each.
        memory: held by loads and by verifications of what they brought.
        now: iterations since the first of all.
    """

    def __init__(self, iteration_seconds: float, memory: float, horizon: int):
        """Nothing reserved; see :class:`~sglang_ext.managers.kv_offload.verification_scheduler.VerificationScheduler`."""
        self.link = ReservationRing(iteration_seconds, horizon)
        self.memory = ReservationRing(memory, horizon)
        self.now = 0

    @property
    def occupancy(self) -> Occupancy:
        """Of the current iteration."""
        return Occupancy(self.link.occupancy(), self.memory.occupancy())

    def advance(self) -> None:
        """The next iteration begins."""
        self.link.advance()
        self.memory.advance()
        self.now += 1

    def span(self, seconds: float) -> int:
        """Iterations that a load fills (S in the paper)."""
        if not self.link.capacity:
            return self.link.horizon
        return max(1, math.ceil(seconds / self.link.capacity - ROUNDING))

    def place(self, seconds: float, tokens: float, wanted: int, others: Collection[LoadReservation]) -> LoadReservation | None:
        """Reserve a load that is due as near to ``wanted`` iterations as there is room; None where there is none.

        Args:
            others: all that are planned.
        """
        span = self.span(seconds)
        joined = self.link.load >= self.memory.load
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
        """Give back what is still to come of a load."""
        for iteration, part in enumerate(planned.parts, planned.start - self.now):
            if iteration >= 0 and part:
                self.link.release(part, iteration, iteration)
        if planned.tokens:
            self.memory.release(planned.tokens, max(0, planned.start - self.now), planned.due - self.now)

    def _forms(self, seconds: float, due: int, span: int, joined: bool) -> Iterator[list[float]]:
        """Seconds in each iteration of loads that end right before ``due``, the better one first.

        Args:
            joined: what another load leaves of the iteration before the span is of use: memory is less scarce than the link.
        """
        if seconds and self.link.free(due - 1) <= ROUNDING * self.link.capacity:
            return
        first = max(0, due - span - 1)
        if joined and first < due - span and 0 < self.link.free(first) < self.link.capacity:
            yield from self._fill(seconds, list(range(first, due)))
        for parts in self._fill(seconds, list(range(due - 1, first - 1, -1))):
            yield parts[::-1]

    def _fill(self, seconds: float, iterations: list[int]) -> Iterator[list[float]]:
        """Seconds in these iterations, in their order, each as full as it gets; nothing where they do not suffice.

        Backward, iterations that are not needed are left out; forward, all are needed, or there is a sooner place.
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
    """Whether a link that serves loads by their start serves them by their due iterations, too."""
    return all(
        (each.due <= due or each.start >= start) and (each.due >= due or each.start <= start)
        for each in others
        if each.loads
    )


def nearest_first(wanted: int, least: int, last: int) -> Iterator[int]:
    """``wanted``, clamped to the range, then one more, one less, two more...; nothing where the range is empty."""
    anchor = max(min(wanted, last), least)
    for step in range(last - least + 1):
        for value in dict.fromkeys((anchor + step, anchor - step)):
            if least <= value <= last:
                yield value
