"""Sizes and timeouts of a link."""

from dataclasses import dataclass, replace

from sglang_ext.managers.kv_transfer.link_settings import LinkError
from sglang_ext.managers.kv_transfer.wire import FRAME_OVERHEAD, MAX_FRAME_BYTES

MOST_WINDOW = 1 << 32


@dataclass(frozen=True)
class LinkLimits:
    """Limits of a link. The two ends may differ, except that no frame exceeds the receiver's window.

    Attributes:
        frame_bytes: Maximum bytes of a part in one frame. Paced links use fewer (pacing.py). An urgent part waits for the current frame.
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
        """Return a copy whose window holds four parts of ``size`` bytes, so that a part that waits to be written does not block the next
        ones."""
        return replace(self, window_bytes=min(max(self.window_bytes, 4 * size), MOST_WINDOW))

    def max_residual_bytes(self, rate: float) -> float:
        """Return the bytes in flight from which no residual is sent to a receiver that takes ``rate`` bytes per second."""
        return max(self.residual_bytes, rate * self.residual_seconds)

    def __post_init__(self) -> None:
        self._check("frame_bytes", 1 <= self.frame_bytes <= MAX_FRAME_BYTES, f"1 to {MAX_FRAME_BYTES}")
        least = 2 * (self.frame_bytes + FRAME_OVERHEAD)
        self._check("window_bytes", least <= self.window_bytes <= MOST_WINDOW, f"{least} (two frames) to {MOST_WINDOW}")
        self._check("residual_bytes", self.residual_bytes >= 1, "at least 1")
        self._check("residual_seconds", 0 <= self.residual_seconds <= 1, "0 to 1")
        self._check("queued_bytes", self.queued_bytes >= 1, "at least 1")
        for name in ("repeats", "reconnects", "finished_rooms"):
            self._check(name, getattr(self, name) >= 0, "0 or above")
        for name in ("ping_seconds", "silence_seconds", "resume_seconds", "stall_seconds"):
            self._check(name, 0 < getattr(self, name) <= 86400, "above 0, up to a day")
        self._check("silence_seconds", self.silence_seconds > self.ping_seconds, f"above ping_seconds, {self.ping_seconds}")

    def _check(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise LinkError(f"{name} of a link is {getattr(self, name)!r}: pass {allowed}")
