"""Streams that run in parallel with the forwards, and their synchronization."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch

from sglang_ext.device import Mark


@dataclass(frozen=True)
class CopyStream:
    """A stream in addition to the current one. On a CPU, work runs in the calling thread.

    Attributes:
        device: The device of its work.
        stream: None on a CPU.
    """

    device: torch.device
    stream: torch.cuda.Stream | None

    @classmethod
    def beside(cls, device: torch.device, urgent: bool = False) -> "CopyStream":
        """Create a stream. The kernels of an urgent one are scheduled before waiting kernels of forwards."""
        stream = torch.cuda.Stream(device, priority=-1 if urgent else 0) if device.type == "cuda" else None
        return cls(device, stream)

    def running(self) -> AbstractContextManager:
        """Context in which work is launched in this stream, and allocations belong to it."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def mark(self) -> Mark:
        """Return a mark after the work launched in this stream so far."""
        with self.running():
            return Mark.now(self.device)

    def after(self, mark: Mark | None) -> None:
        """Make work launched from now on wait for a mark of another stream."""
        if self.stream is not None and mark is not None:
            self.stream.wait_event(mark.event)

    def uses(self, tensor: torch.Tensor) -> None:
        """Keep the memory of another stream's tensor from being reused before this stream has finished with it."""
        if self.stream is not None:
            tensor.record_stream(self.stream)


class DoubleBuffer:
    """Two buffers that alternate between a stream that fills them and a stream that empties them.

    Args:
        halves: The buffers, [2, rows, words].
        filler, emptier: The streams.
    """

    def __init__(self, halves: torch.Tensor, filler: CopyStream, emptier: CopyStream) -> None:
        self.filler, self.emptier = filler, emptier
        self._halves = halves
        self._emptied: list[Mark | None] = [None, None]
        self._turn = 0
        made = Mark.now(halves.device)
        for lane in (filler, emptier):
            lane.after(made)
            lane.uses(halves)

    @property
    def size(self) -> int:
        """Bytes of both buffers."""
        return self._halves.numel() * self._halves.element_size()

    def after(self, *marks: Mark | None) -> None:
        """Make both streams wait for the marks."""
        for mark in marks:
            self.filler.after(mark)
            self.emptier.after(mark)

    def move(self, fill: Callable[[torch.Tensor], None], empty: Callable[[torch.Tensor], None]) -> None:
        """Launch ``fill`` and then ``empty`` on the next buffer, [rows, words]."""
        half = self._halves[self._turn]
        self.filler.after(self._emptied[self._turn])
        with self.filler.running():
            fill(half)
        self.hand_over()
        with self.emptier.running():
            empty(half)
        self._emptied[self._turn] = self.emptier.mark()
        self._turn = 1 - self._turn

    def hand_over(self) -> None:
        """Make the emptying stream wait for the work of the filling stream so far."""
        self.emptier.after(self.filler.mark())


@dataclass
class LastTransfers:
    """The last transfer of each page in one direction. The transfers of a direction end in the order in which they began.

    Attributes:
        pages: Number of pages.
    """

    pages: int
    _number: np.ndarray = field(init=False)
    _running: dict[int, Mark] = field(default_factory=dict)
    _count: int = 0

    def __post_init__(self) -> None:
        self._number = np.zeros(self.pages, np.int64)

    def note(self, pages: torch.Tensor, end: Mark) -> None:
        """Record a transfer of ``pages``, int64 on the host, that ends at ``end``."""
        # Also here: nothing calls end() for stores while nothing is loaded.
        self._forget_ended()
        self._count += 1
        self._number[pages.numpy()] = self._count
        self._running[self._count] = end

    def end(self, pages: torch.Tensor) -> Mark | None:
        """The mark at the end of the last transfer of any of ``pages``. None if all have ended."""
        self._forget_ended()
        return self._running.get(int(self._number[pages.numpy()].max()))

    @property
    def remembered(self) -> int:
        """Number of transfers that may not have ended."""
        return len(self._running)

    def _forget_ended(self) -> None:
        for number in list(self._running):
            if not self._running[number].reached:
                break
            del self._running[number]
