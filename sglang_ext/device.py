"""Transfers from host to device without waiting, a second stream, and time marks on the device."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

# CUDA copies up to this number of bytes from unpinned memory before the call returns, and sends them along with launches.
MAX_UNPINNED_BYTES = 64 << 10


def to_device(values: list, device: torch.device | str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor of ``values`` on the device, without waiting for it; see :func:`sent`."""
    return sent(torch.tensor(values, dtype=dtype), torch.device(device))


def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device, without waiting for the copy; the same tensor if the device is the host.

    A copy engine copies pinned memory, one transfer after another. During a load of full KV from the host, such a copy would wait for the
    load to end, and the stream would wait for the copy (docs/benchmarks.md). So only large tensors are pinned.
    """
    pinned = host.pin_memory() if device.type == "cuda" and host.nbytes > MAX_UNPINNED_BYTES else host
    return pinned.to(device, non_blocking=True)


@contextmanager
def tf32_matmuls(device: torch.device) -> Iterator[None]:
    """Let products of float32 matrices use tensor cores inside this context, on a GPU: factors have 10 bits after the first (TF32)."""
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
    """A point in time: when the device reaches the ``event``, or on a CPU the ``seconds`` of a clock with an arbitrary zero."""

    event: torch.cuda.Event | None = None
    seconds: float = 0.0

    @classmethod
    def now(cls, device: torch.device, stream: "torch.cuda.Stream | None" = None) -> "Mark":
        """Set a mark after the work that was launched on ``stream`` so far, by default the current one."""
        if device.type != "cuda":
            return cls(seconds=time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return cls(event)

    @property
    def reached(self) -> bool:
        """Whether the device reached the mark."""
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """Wait on the host until the device reaches the mark."""
        if self.event is not None:
            self.event.synchronize()

    def until(self, later: "Mark") -> float:
        """Seconds to a later mark. Both marks must be reached."""
        if self.event is None:
            return later.seconds - self.seconds
        return self.event.elapsed_time(later.event) / 1000


def current_event(device: torch.device) -> torch.cuda.Event | None:
    """An event that is reached when the current stream has done its work so far; None on a CPU."""
    return torch.cuda.current_stream().record_event() if device.type == "cuda" else None


class SideStream:
    """A second stream of a device, whose work runs concurrently with that of the current stream. On a CPU, work is done at once.

    Streams wait for each other on the device only: the host launches and continues. The work of a ``first`` stream takes precedence if the
    device cannot run both.
    """

    def __init__(self, device: torch.device, first: bool = False):
        self._stream = torch.cuda.Stream(device, priority=-first) if device.type == "cuda" else None

    @contextmanager
    def after(self, reached: torch.cuda.Event | None) -> Iterator[None]:
        """Launches inside this context begin once ``reached`` is reached. The caller must keep tensors of other streams that they read."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self.wait(reached)
            yield

    def join(self) -> None:
        """Let the current stream wait for all work that was launched on this stream so far."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def launch(self, work: Callable[[], None], read: Sequence[torch.Tensor]) -> torch.cuda.Event | None:
        """Run ``work`` after the work that the current stream has so far. Returns an event that is reached when it is done; None on a CPU.

        ``read`` are tensors of other streams that it reads or writes. If they are freed before it is done, their memory is not reused.
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
        """Let later work of the current stream begin when ``done`` is reached."""
        if done is not None:
            torch.cuda.current_stream().wait_event(done)
