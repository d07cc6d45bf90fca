"""Limits of links: sizes and timeouts, bytes per second, and how often a scheduler polls rooms."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from sglang_ext.managers.kv_transfer.wire import FRAME_OVERHEAD, MAX_FRAME_BYTES

MAX_WINDOW_BYTES = 1 << 32


@dataclass(frozen=True)
class LinkLimits:
    """Limits of a link. The two ends may differ, except that no frame exceeds the receiver's window.

    Attributes:
        frame_bytes: Maximum bytes of a part in one frame. Paced links use fewer. An urgent part waits for the current frame.
        window_bytes: Bytes that a sender may have in flight before the receiver grants more.
        residual_bytes, residual_seconds: Bytes in flight from which no residual is sent, so that anchors wait little on a slow network. The
            larger of ``residual_bytes`` and the receiver's bytes in ``residual_seconds`` applies.
        queued_bytes: Maximum bytes that a sender queues for all its rooms; more are refused.
        repeats: Retransmissions of a part with a wrong checksum before its room fails.
        reconnects: Reconnections without any acknowledgement between them before all rooms fail.
        ping_seconds: Seconds between pings.
        silence_seconds: Seconds without a message after which a sender reconnects.
        resume_seconds: Seconds without a connection after which rooms fail on both sides.
        stall_seconds: Seconds without an acknowledgement of bytes in flight after which rooms fail.
        finished_rooms: Finished rooms that a receiver remembers, for senders that missed the last acknowledgement.
    """

    frame_bytes: int = 1 << 22
    window_bytes: int = 1 << 25
    residual_bytes: int = 1 << 22
    residual_seconds: float = 0.005
    queued_bytes: int = 1 << 32
    repeats: int = 2
    reconnects: int = 3
    ping_seconds: float = 1.0
    silence_seconds: float = 5.0
    resume_seconds: float = 15.0
    stall_seconds: float = 30.0
    finished_rooms: int = 4096

    def with_part_bytes(self, size: int) -> "LinkLimits":
        """Return a copy whose window holds four parts of ``size`` bytes: a part that waits to be written does not block the next ones."""
        return replace(self, window_bytes=min(max(self.window_bytes, 4 * size), MAX_WINDOW_BYTES))

    def __post_init__(self) -> None:
        assert 1 <= self.frame_bytes <= MAX_FRAME_BYTES, f"frames of {self.frame_bytes} bytes"
        assert 2 * (self.frame_bytes + FRAME_OVERHEAD) <= self.window_bytes <= MAX_WINDOW_BYTES, f"a window of {self.window_bytes} bytes"
        assert self.silence_seconds > self.ping_seconds, "a receiver answers pings"


# Maximum seconds to send a frame, unless it has the minimum size in bytes. Urgent parts wait for the current frame.
FRAME_SECONDS, LEAST_FRAME = 0.002, 1 << 14
# Maximum seconds that a late thread may catch up.
BURST_SECONDS = 0.05
# Seconds: a scheduler that polls again within IDLE has nothing to run, and pauses for PAUSE.
IDLE, PAUSE = 1e-3, 2e-3


class NetworkInterface:
    """The rate limit and the priority of anchors over residuals that all links of one prefill rank share. Any thread may call its methods.

    While a link has an anchor or an auxiliary record that its receiver would take, the other links send no residuals.

    The rate is a token bucket, exact over time. The bucket may be overdrawn by one message per link, so that messages larger than the burst
    can be sent. The next message then waits longer. In any interval of t seconds at most burst + rate * t bytes + one message per link are
    sent. Times are seconds of one monotonic clock.

    Args:
        gbps: Gbit/s (10^9 bits) that all prefill ranks of this host send at most (``--kv-link-gbps``), 0.01 or more; None for no limit.
        ranks: Prefill ranks of this host. They send equally much, so each has an equal part of the rate.
    """

    def __init__(self, gbps: float | None = None, ranks: int = 1) -> None:
        self.rate = None if gbps is None else gbps * 1e9 / 8 / ranks
        self.burst = 0.0 if self.rate is None else self.rate * BURST_SECONDS
        self._tokens = 0.0
        self._last: float | None = None
        self._lock = threading.Lock()
        self._urgent: set[int] = set()

    def frame_bytes(self, most: int) -> int:
        """Return the bytes of a frame that does not delay others for long, at most ``most``."""
        return most if self.rate is None else min(most, max(LEAST_FRAME, int(self.rate * FRAME_SECONDS)))

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
        if self.rate is None:
            return 0.0
        with self._lock:
            self._fill(now)
            # A debt below one byte is carried over, because its delay is shorter than clocks resolve.
            return -self._tokens / self.rate if self._tokens <= -1 else 0.0

    def take(self, size: int, now: float) -> None:
        """Record that a message of ``size`` bytes is sent now."""
        if self.rate is not None:
            with self._lock:
                self._fill(now)
                self._tokens -= size

    def _fill(self, now: float) -> None:
        if self._last is not None:
            self._tokens = min(self.burst, self._tokens + (now - self._last) * self.rate)
        self._last = now


class PollThrottle:
    """Slows down a scheduler that only polls rooms: it pauses at one of them. Otherwise it would hold the GIL that links need."""

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
