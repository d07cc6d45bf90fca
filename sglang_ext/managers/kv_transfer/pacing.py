"""Pacing: how many bytes a link sends per second, and how often a scheduler polls rooms."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

# Maximum seconds to send a frame, unless it has the minimum size in bytes. Urgent parts wait for the current frame.
FRAME_SECONDS, LEAST_FRAME = 0.002, 1 << 14
# Maximum seconds that a late thread may catch up.
BURST_SECONDS = 0.05
# Seconds: a scheduler that polls again within IDLE has nothing to run, and pauses for PAUSE.
IDLE, PAUSE = 1e-3, 2e-3


@dataclass
class TokenBucket:
    """Limits bytes per second, exactly over time, with bounded bursts. Times are seconds of one monotonic clock.

    The bucket may be overdrawn by one message, so that messages larger than the burst can be sent. The next message then waits longer. In
    any interval of t seconds at most burst + rate * t + one message are sent.

    Attributes:
        rate: Bytes per second; None for no limit.
        burst: Bytes that may be sent at once after a pause.
    """

    rate: float | None
    burst: float = 0.0
    _tokens: float = field(default=0.0, init=False)
    _last: float | None = field(default=None, init=False)

    @classmethod
    def from_gbps(cls, gbps: float | None) -> "TokenBucket":
        """Create a bucket for a rate in Gbit/s (10^9 bits), as ``--kv-link-gbps`` allows it; None for no limit."""
        return cls(None) if gbps is None else cls(gbps * 1e9 / 8, gbps * 1e9 / 8 * BURST_SECONDS)

    def frame_bytes(self, most: int) -> int:
        """Return the bytes of a frame that does not delay others for long, at most ``most``."""
        return most if self.rate is None else min(most, max(LEAST_FRAME, int(self.rate * FRAME_SECONDS)))

    def wait(self, now: float) -> float:
        """Return the seconds until a message may be sent; 0 if one may be sent now."""
        if self.rate is None:
            return 0.0
        self._fill(now)
        # A debt below one byte is carried over, because its delay is shorter than clocks resolve.
        return -self._tokens / self.rate if self._tokens <= -1 else 0.0

    def take(self, size: int, now: float) -> None:
        """Record that a message of ``size`` bytes is sent now."""
        if self.rate is not None:
            self._fill(now)
            self._tokens -= size

    def _fill(self, now: float) -> None:
        if self._last is not None:
            self._tokens = min(self.burst, self._tokens + (now - self._last) * self.rate)
        self._last = now


class NetworkInterface:
    """The rate limit and the priority of anchors over residuals that all links of one prefill rank share.

    While a link has an anchor or an auxiliary record that its receiver would take, the other links send no residuals. Methods may be called
    from any thread. The bucket may be overdrawn by one message per link.

    Args:
        gbps: Gbit/s (10^9 bits) that all prefill ranks of this host send at most, 0.01 or more; None for no limit.
        ranks: Prefill ranks of this host. They send equally much, so each has an equal part of the rate.
    """

    def __init__(self, gbps: float | None = None, ranks: int = 1) -> None:
        whole = TokenBucket.from_gbps(gbps)
        self._bucket = whole if whole.rate is None else TokenBucket(whole.rate / ranks, whole.burst / ranks)
        self._lock = threading.Lock()
        self._urgent: set[int] = set()

    def frame_bytes(self, most: int) -> int:
        """Return the bytes of a frame that does not hold up others for long, at most ``most``."""
        return self._bucket.frame_bytes(most)

    def set_urgent(self, link: int, urgent: bool) -> None:
        """Set whether a link has an anchor or an auxiliary record that its receiver would take. ``link`` identifies it."""
        with self._lock:
            (self._urgent.add if urgent else self._urgent.discard)(link)

    def is_another_urgent(self, link: int) -> bool:
        """Return whether another link is urgent."""
        with self._lock:
            return bool(self._urgent - {link})

    def wait(self, now: float) -> float:
        """Return the seconds until a message may be sent; 0 if one may be sent now."""
        with self._lock:
            return self._bucket.wait(now)

    def take(self, size: int, now: float) -> None:
        """Record that a message of ``size`` bytes is sent now."""
        with self._lock:
            self._bucket.take(size, now)


class PollThrottle:
    """Slows down a scheduler that only polls rooms. Otherwise it would hold the GIL that the threads of links need.

    A loop polls all its rooms; it pauses at one of them.

    Args:
        now, pause: Clock in seconds, and a function that sleeps for seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, pause: Callable[[float], None] = time.sleep) -> None:
        self._now, self._pause = now, pause
        self._room, self._asked = -1, 0.0

    def asked(self, room: int) -> None:
        """The scheduler polled a room that has not ended."""
        since = self._now() - self._asked
        if room == self._room and since < IDLE:
            self._pause(PAUSE)
        if room == self._room or since >= IDLE:
            self._room, self._asked = room, self._now()
