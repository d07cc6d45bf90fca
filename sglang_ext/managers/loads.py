"""Loads of full KV on two rings: the time of the link that brings them, and the memory that they hold."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sglang_ext.managers.rings import ROUNDING, Ring


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


class Loads:
    """Places loads so that the link and the memory suffice in each iteration.

    Attributes:
        link: seconds, at most an iteration's in each.
        memory: held by loads and by verifications of what they brought.
        now: iterations since the first of all.
    """

    def __init__(self, iteration_seconds: float, memory: float, horizon: int):
        """Nothing reserved; see :class:`~sglang_ext.managers.admission.Admission`."""
        self.link = Ring(iteration_seconds, horizon)
        self.memory = Ring(memory, horizon)
        self.now = 0

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
        for due in outward(wanted, span, self.link.horizon - 1):
            parts = self._parts(seconds, due, span)
            if parts is None:
                continue
            start = due - len(parts)
            if not self.memory.fits(tokens, start, due) or not _in_order(self.now + start, self.now + due, others):
                continue
            for iteration, part in enumerate(parts, start):
                if part:
                    self.link.reserve(part, iteration, iteration)
            if tokens:
                self.memory.reserve(tokens, start, due)
            return Planned(self.now + start, self.now + due, parts, tokens)
        return None

    def release(self, planned: Planned) -> None:
        """Give back what is still to come of a load."""
        for iteration, part in enumerate(planned.parts, planned.start - self.now):
            if iteration >= 0 and part:
                self.link.release(part, iteration, iteration)
        if planned.tokens:
            self.memory.release(planned.tokens, max(0, planned.start - self.now), planned.due - self.now)

    def _parts(self, seconds: float, due: int, span: int) -> list[float] | None:
        """Seconds in each iteration of a load that ends right before ``due``; None where too few are free."""
        parts, left = [], seconds
        if seconds and self.link.free(due - 1) <= ROUNDING * self.link.capacity:
            return None
        for iteration in range(due - 1, max(0, due - span - 1) - 1, -1):
            parts.append(min(left, self.link.free(iteration)))
            left -= parts[-1]
            if left <= ROUNDING * self.link.capacity:
                return parts[::-1]
        return None


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
