"""Streams that work beside the forward passes, and how they wait for each other."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch

from sglang_ext.device import Mark


@dataclass(frozen=True)
class CopyStream:
    """A stream beside the current one; on a CPU, the thread that this runs in.

    Attributes:
        device: where its work runs.
        stream: None on a CPU.
    """

    device: torch.device
    stream: torch.cuda.Stream | None

    @classmethod
    def beside(cls, device: torch.device, urgent: bool = False) -> "CopyStream":
        """A new lane; the kernels of an urgent one come before those of forwards that wait for room."""
        stream = torch.cuda.Stream(device, priority=-1 if urgent else 0) if device.type == "cuda" else None
        return cls(device, stream)

    def running(self) -> AbstractContextManager:
        """What is launched inside this context runs in this lane, and what is allocated belongs to it."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def mark(self) -> Mark:
        """A mark behind what was launched in this lane so far."""
        with self.running():
            return Mark.now(self.device)

    def after(self, mark: Mark | None) -> None:
        """Let what is launched from now on wait for a mark of another lane."""
        if self.stream is not None and mark is not None:
            self.stream.wait_event(mark.event)

    def uses(self, tensor: torch.Tensor) -> None:
        """Keep a tensor of another lane from being given away before this one is through with it."""
        if self.stream is not None:
            tensor.record_stream(self.stream)


class DoubleBuffer:
    """Two buffers in turn between a lane that fills them and one that empties them.

    Args:
        halves: [2, rows, words].
        filler, emptier: the lanes.
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
        """Let both lanes wait."""
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
        """Let the lane that empties wait for what the other one has so far."""
        self.emptier.after(self.filler.mark())


@dataclass
class LastTransfers:
    """The newest transfer of each page in one direction; those of a direction end in the order they began.

    Attributes:
        pages: how many there are.
    """

    pages: int
    _number: np.ndarray = field(init=False)
    _running: dict[int, Mark] = field(default_factory=dict)
    _count: int = 0

    def __post_init__(self) -> None:
        self._number = np.zeros(self.pages, np.int64)

    def note(self, pages: torch.Tensor, end: Mark) -> None:
        """A transfer of ``pages``, int64 on the host, ends at ``end``."""
        # Here, too: nobody asks for the end of stores while nothing is loaded.
        self._forget_ended()
        self._count += 1
        self._number[pages.numpy()] = self._count
        self._running[self._count] = end

    def end(self, pages: torch.Tensor) -> Mark | None:
        """Where the last transfer of any of ``pages`` ends; None when all are done."""
        self._forget_ended()
        return self._running.get(int(self._number[pages.numpy()].max()))

    @property
    def remembered(self) -> int:
        """Transfers whose end may still be waited for."""
        return len(self._running)

    def _forget_ended(self) -> None:
        for number in list(self._running):
            if not self._running[number].reached:
                break
            del self._running[number]
