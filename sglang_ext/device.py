"""Host and device: copies without waiting, a second stream, and marks in time."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

# Up to this size, CUDA copies unpinned memory before the call returns, and sends it along with launches. Bytes.
MAX_UNPINNED_BYTES = 64 << 10


def to_device(values: list, device: torch.device | str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Copy values to the device without waiting for it. See :func:`sent`."""
    return sent(torch.tensor(values, dtype=dtype), torch.device(device))


def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device without waiting for it. Return the tensor itself if the device is the host.

    A copy engine copies pinned memory, one copy after another. Behind a load of full KV from the host, a copy would wait for the end of the
    load, and so would its stream (docs/benchmarks.md). So only large tensors are pinned.
    """
    pinned = host.pin_memory() if device.type == "cuda" and host.nbytes > MAX_UNPINNED_BYTES else host
    return pinned.to(device, non_blocking=True)


@contextmanager
def tf32_matmuls(device: torch.device) -> Iterator[None]:
    """On a GPU, compute float32 matrix products in this context on tensor cores: factors have 10 mantissa bits (TF32)."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class Mark:
    """A moment: on a GPU when the device reached the mark, on a CPU when it was set.

    Attributes:
        event: Recorded on the current stream. None on a CPU.
        seconds: On a CPU, time of a clock with an arbitrary zero.
    """

    event: torch.cuda.Event | None = None
    seconds: float = 0.0

    @classmethod
    def now(cls, device: torch.device) -> "Mark":
        """Set a mark after the work launched so far."""
        if device.type != "cuda":
            return cls(seconds=time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return cls(event)

    @property
    def reached(self) -> bool:
        """Whether the device has reached it."""
        return self.event is None or self.event.query()

    def until(self, later: "Mark") -> float:
        """Seconds to a later mark. Both must be reached."""
        if self.event is None:
            return later.seconds - self.seconds
        return self.event.elapsed_time(later.event) / 1000


def current_event(device: torch.device) -> torch.cuda.Event | None:
    """Record an event after the work of the current stream so far. None on a CPU."""
    return torch.cuda.current_stream().record_event() if device.type == "cuda" else None


class SideStream:
    """A second stream of a device, whose work runs in parallel with the current stream's. On a CPU, work is done at once.

    Streams wait for each other on the device only. The host never waits.

    Args:
        device: Its device.
        first: Whether its work has priority over that of other streams.
    """

    def __init__(self, device: torch.device, first: bool = False):
        self._stream = torch.cuda.Stream(device, priority=-first) if device.type == "cuda" else None

    @contextmanager
    def after(self, reached: torch.cuda.Event | None) -> Iterator[None]:
        """Context whose launches begin when ``reached`` is, in parallel with the current stream's later work.

        The caller must keep tensors of other streams that the launches read until then.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self.wait(reached)
            yield

    def join(self) -> None:
        """Make the current stream wait for all work launched so far."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def launch(self, work: Callable[[], None], read: Sequence[torch.Tensor]) -> torch.cuda.Event | None:
        """Start ``work`` after the current stream's work so far. Return an event after it. None on a CPU.

        Args:
            work: Launches kernels on the current stream.
            read: Tensors of other streams that it reads or writes and that may be dropped before it is done. Their memory is not reused
                until then, whether or not the caller waits (:meth:`wait`).
        """
        if self._stream is None:
            work()
            return None
        for tensor in read:
            tensor.record_stream(self._stream)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            return self._stream.record_event()

    @staticmethod
    def wait(done: torch.cuda.Event | None) -> None:
        """Make the current stream's later work wait for ``done``."""
        if done is not None:
            torch.cuda.current_stream().wait_event(done)
