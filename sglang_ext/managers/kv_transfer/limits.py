"""Sizes and times of a link."""

from dataclasses import dataclass, replace

from sglang_ext.managers.kv_transfer.link_settings import LinkError
from sglang_ext.managers.kv_transfer.wire import FRAME_OVERHEAD, MAX_FRAME_BYTES

MOST_WINDOW = 1 << 32


@dataclass(frozen=True)
class LinkLimits:
    """What bounds a link; both ends may differ, except that no frame exceeds the receiver's window.

    Attributes:
        frame_bytes: of a part that travel at once; paced links take fewer (pacing.py). What becomes urgent waits for one.
        window_bytes: that a sender may have under way before the receiver grants more.
        residual_bytes, residual_seconds: under way at which no residual is sent, so that anchors wait for little where the network is slow:
            the bytes, or what a receiver takes in that time, if it is more.
        queued_bytes: that a sender holds for all its rooms; more are refused.
        repeats: of a part whose checksum was wrong, before its room fails.
        reconnects: without anything acknowledged in between, before all rooms fail.
        ping_seconds: between signs of life.
        silence_seconds: without one, after which a sender connects anew.
        resume_seconds: without a connection, after which rooms fail on both sides.
        stall_seconds: without an acknowledgement of anything under way, after which rooms fail.
        finished_rooms: that a receiver remembers, for senders that missed the last acknowledgement.
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
        """These, with a window in which four parts of ``size`` bytes are under way: one that is whole and waits to be written shall not
        stop those that follow."""
        return replace(self, window_bytes=min(max(self.window_bytes, 4 * size), MOST_WINDOW))

    def max_residual_bytes(self, rate: float) -> float:
        """Bytes under way at which no residual is sent to a receiver that takes ``rate`` bytes per second."""
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
