"""What is reserved of a resource in coming iterations (VeriCache, section 5.1): link time, or memory in flight."""

import math
from collections import deque
from collections.abc import Iterable

# Sums of floats may pass a capacity by this share.
ROUNDING = 1e-9


class RingError(ValueError):
    """A reservation cannot be made or given back; the message says what would be allowed."""


class Ring:
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
            RingError: the capacity is negative, or the horizon below 2.
        """
        if horizon < 2:
            raise RingError(f"a horizon of {horizon} iterations: pass at least 2, the current one and the next")
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

    def occupancy(self, iteration: int = 0) -> float:
        """Share of the capacity that is reserved in an iteration, from 0 to 1; 1 where there is none."""
        reserved = self.reserved(iteration)
        return min(1.0, reserved / self._capacity) if self._capacity else 1.0

    def fits(self, amount: float, first: int, last: int) -> bool:
        """Whether so much may be reserved in each iteration from ``first`` to ``last``, both included."""
        self._check(first, last)
        room = self._capacity * (1 + ROUNDING)
        return all(self._totals[i] + amount <= room for i in range(first, last + 1))

    def reserve(self, amount: float, first: int, last: int) -> None:
        """Take so much in each iteration from ``first`` to ``last``.

        Raises:
            RingError: an iteration has less left; nothing is reserved then.
        """
        if not self.fits(_checked("amount", amount), first, last):
            least = min(self.free(i) for i in range(first, last + 1))
            raise RingError(
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
            RingError: an iteration holds no such amount; nothing is given back then.
        """
        self._check(first, last)
        for i in range(first, last + 1):
            if amount not in self._amounts[i]:
                raise RingError(f"iteration {i} holds no {amount:g}: release what was reserved, once, where it was reserved")
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
            raise RingError(f"iterations {first} to {last}: pass a span within 0 to {self.horizon - 1}")


def _checked(name: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise RingError(f"{name} {value!r}: pass a finite number, 0 or above")
    return value
