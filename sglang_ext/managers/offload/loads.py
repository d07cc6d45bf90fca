"""Loads of full KV on two rings: the time of the link that brings them, and the memory that they hold."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from sglang_ext.managers.offload.rings import ROUNDING, Ring


@dataclass
class Planned:
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


class Loads:
    """Places loads so that the link and the memory suffice in each iteration.

    Attributes:
        link: seconds, at most an iteration's in each.
        memory: held by loads and by verifications of what they brought.
        now: iterations since the first of all.
    """

    def __init__(self, iteration_seconds: float, memory: float, horizon: int):
        """Nothing reserved; see :class:`~sglang_ext.managers.offload.admission.Admission`."""
        self.link = Ring(iteration_seconds, horizon)
        self.memory = Ring(memory, horizon)
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

    def place(self, seconds: float, tokens: float, wanted: int, others: Collection[Planned]) -> Planned | None:
        """Reserve a load that is due as near to ``wanted`` iterations as there is room; None where there is none.

        Args:
            others: all that are planned.
        """
        span = self.span(seconds)
        joined = self.link.load >= self.memory.load
        for due in outward(wanted, span, self.link.horizon - 1):
            for parts in self._forms(seconds, due, span, joined):
                start = due - len(parts)
                if self.memory.fits(tokens, start, due) and _in_order(self.now + start, self.now + due, others):
                    return self._reserve(Planned(self.now + start, self.now + due, parts, tokens))
        return None

    def _reserve(self, planned: Planned) -> Planned:
        start, due = planned.start - self.now, planned.due - self.now
        for iteration, part in enumerate(planned.parts, start):
            if part:
                self.link.reserve(part, iteration, iteration)
        if planned.tokens:
            self.memory.reserve(planned.tokens, start, due)
        return planned

    def release(self, planned: Planned) -> None:
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


def _in_order(start: int, due: int, others: Collection[Planned]) -> bool:
    """Whether a link that serves loads by their start serves them by their due iterations, too."""
    return all(
        (each.due <= due or each.start >= start) and (each.due >= due or each.start <= start)
        for each in others
        if each.loads
    )


def outward(wanted: int, least: int, last: int) -> Iterator[int]:
    """``wanted``, clamped to the range, then one more, one less, two more...; nothing where the range is empty."""
    anchor = max(min(wanted, last), least)
    for step in range(last - least + 1):
        for value in dict.fromkeys((anchor + step, anchor - step)):
            if least <= value <= last:
                yield value
