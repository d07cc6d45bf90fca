"""Which requests of a soak are under way beside which."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False)
class Stay:
    """The time in which one request is under way; ``alone``: no other was at any moment of it."""

    alone: bool = True


class Company:
    """Counts who is under way, and keeps others out while one that must be alone is."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._present: set[Stay] = set()
        self._waiting_for_none = 0
        self._closed = False

    @contextmanager
    def join(self, alone: bool) -> Iterator[Stay]:
        """Be under way inside this context; with ``alone``, begin when nobody is, and let nobody begin."""
        stay = Stay()
        with self._changed:
            if alone:
                self._waiting_for_none += 1
                self._changed.wait_for(lambda: not self._present)
                self._waiting_for_none -= 1
                self._closed = True
            else:
                self._changed.wait_for(lambda: not self._waiting_for_none and not self._closed)
            self._present.add(stay)
            if len(self._present) > 1:
                for each in self._present:
                    each.alone = False
        try:
            yield stay
        finally:
            with self._changed:
                self._present.remove(stay)
                self._closed = self._closed and not alone
                self._changed.notify_all()
