"""Between host and device: what is sent without waiting, a second stream, and marks in time."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

# Up to so many bytes CUDA takes from memory that is not pinned before the call returns, and sends them along with launches.
MAX_UNPINNED_BYTES = 64 << 10


def to_device(values: list, device: torch.device | str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Values on the device, without waiting for it; see :func:`sent`."""
    return sent(torch.tensor(values, dtype=dtype), torch.device(device))


def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on the device, without waiting for it; itself where that is the host.

    A copy from pinned memory is a copy engine's, which serves one after the other: beside a load of full KV from the host it would wait
    for the end of that, and the stream with it (docs/benchmarks.md). So only what is large is pinned.
    """
    pinned = host.pin_memory() if device.type == "cuda" and host.nbytes > MAX_UNPINNED_BYTES else host
    return pinned.to(device, non_blocking=True)


@contextmanager
def tf32_matmuls(device: torch.device) -> Iterator[None]:
    """On a GPU, products of float32 matrices inside this context take tensor cores: factors have 10 bits after the first (TF32)."""
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


def current_event(device: torch.device) -> torch.cuda.Event | None:
    """When the current stream has done what it was given so far; None on a CPU."""
    return torch.cuda.current_stream().record_event() if device.type == "cuda" else None


class SideStream:
    """A second stream of a device, whose work runs beside that of the current one; on a CPU work is done at once.

    Streams wait for each other on the device alone: the host launches and goes on.

    Args:
        device: that it is of.
        first: whether its work comes before that of others, where there is room for one of them.
    """

    def __init__(self, device: torch.device, first: bool = False):
        self._stream = torch.cuda.Stream(device, priority=-first) if device.type == "cuda" else None

    @contextmanager
    def after(self, reached: torch.cuda.Event | None) -> Iterator[None]:
        """What is launched inside begins once ``reached`` is, beside what the current stream is given from now on; tensors of other streams
        which it reads are the caller's to keep until then."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self.wait(reached)
            yield

    def join(self) -> None:
        """Let the current stream wait for all that was launched so far."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def launch(self, work: Callable[[], None], read: Sequence[torch.Tensor]) -> torch.cuda.Event | None:
        """Begin ``work`` once what the current stream was given so far is done; what is reached when it is, None on a CPU.

        Args:
            work: launches on the current stream.
            read: tensors of other streams that it reads or writes and that may be dropped before it is done: until then nothing
                else gets their memory, whether somebody waits (:meth:`wait`) or not.
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
        """Let what the current stream is given from now on begin when ``done`` is reached."""
        if done is not None:
            torch.cuda.current_stream().wait_event(done)
