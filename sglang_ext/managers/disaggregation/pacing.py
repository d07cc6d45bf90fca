"""A token bucket: how many bytes a link sends in a time."""

from dataclasses import dataclass, field

from sglang_ext.managers.disaggregation.settings import LinkError

LEAST_GBPS = 0.01
# A frame takes at most this long, unless it has the least size: what becomes urgent waits for the frame under way.
FRAME_SECONDS, LEAST_FRAME = 0.002, 1 << 14
# A thread that wakes up late makes up for so much.
BURST_SECONDS = 0.05


@dataclass
class TokenBucket:
    """Bytes per second, exact over time, with bounded bursts. Times are seconds of one clock that never goes back.

    The bucket may be overdrawn by one message, so that messages larger than the burst pass; the next then waits for longer.
    In any interval of t seconds at most burst + rate * t + one message are sent.

    Attributes:
        rate: bytes per second; None without a limit.
        burst: bytes that may be sent at once after a pause.
    """

    rate: float | None
    burst: float = 0.0
    _tokens: float = field(default=0.0, init=False)
    _last: float | None = field(default=None, init=False)

    @classmethod
    def of_gbps(cls, gbps: float | None) -> "TokenBucket":
        """Of a rate in Gbit/s (10^9 bits); None without a limit.

        Raises:
            LinkError: the rate is below the least.
        """
        if gbps is None:
            return cls(None)
        if not LEAST_GBPS <= gbps < float("inf"):
            raise LinkError(f"a link's rate of {gbps!r} Gbit/s: pass {LEAST_GBPS} or more, or leave it out for no limit")
        return cls(gbps * 1e9 / 8, gbps * 1e9 / 8 * BURST_SECONDS)

    def frame_bytes(self, most: int) -> int:
        """Bytes of a frame that does not hold up others for long, at most ``most``."""
        return most if self.rate is None else min(most, max(LEAST_FRAME, int(self.rate * FRAME_SECONDS)))

    def wait(self, now: float) -> float:
        """Seconds until a message may be sent; 0 when one may now."""
        if self.rate is None:
            return 0.0
        self._fill(now)
        # Less than a byte is owed on: to wait for it would be shorter than what clocks resolve.
        return -self._tokens / self.rate if self._tokens <= -1 else 0.0

    def take(self, size: int, now: float) -> None:
        """A message of ``size`` bytes is sent now."""
        if self.rate is not None:
            self._fill(now)
            self._tokens -= size

    def _fill(self, now: float) -> None:
        if self._last is not None:
            self._tokens = min(self.burst, self._tokens + (now - self._last) * self.rate)
        self._last = now
