"""How often a scheduler asks how far its rooms are."""

import time
from collections.abc import Callable

# Seconds: who asks again so soon has nothing to run, and pauses so long.
IDLE, PAUSE = 1e-3, 5e-4


class Polls:
    """Slows a scheduler's loop that has nothing to do but to ask: it would keep Python from the threads that bring the KV.

    A loop asks for all its rooms; it pauses at one of them.

    Args:
        now, pause: the clock, and what waits so many seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, pause: Callable[[float], None] = time.sleep) -> None:
        self._now, self._pause = now, pause
        self._room, self._asked = -1, 0.0

    def asked(self, room: int) -> None:
        """The scheduler asked for a room that is not over."""
        since = self._now() - self._asked
        if room == self._room and since < IDLE:
            self._pause(PAUSE)
        if room == self._room or since >= IDLE:
            self._room, self._asked = room, self._now()
