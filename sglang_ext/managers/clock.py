"""Times of work on a device, measured without waiting for it."""

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Mark:
    """A moment: when the device got to where it was set, or on a CPU when it was set.

    Attributes:
        event: recorded on the current stream; None on a CPU.
        seconds: on a CPU, of a clock with an arbitrary zero.
    """

    event: torch.cuda.Event | None = None
    seconds: float = 0.0

    @classmethod
    def now(cls, device: torch.device) -> "Mark":
        """Set a mark behind the work that was launched so far."""
        if device.type != "cuda":
            return cls(seconds=time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return cls(event)

    @property
    def reached(self) -> bool:
        """Whether the device got there."""
        return self.event is None or self.event.query()

    def until(self, later: "Mark") -> float:
        """Seconds to a later mark; both must be reached."""
        if self.event is None:
            return later.seconds - self.seconds
        return self.event.elapsed_time(later.event) / 1000
