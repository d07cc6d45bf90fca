"""Transfers between device and host: the streams of their copies, launches at once or later, and completion on all tensor-parallel ranks.

Each rank copies its heads' part of the same pages, at its own speed, and the ranks' trees must stay equal. So a transfer counts as done when
all ranks have reported it. If a loaded page differs on one rank, all ranks drop it.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from sglang_ext.core import TPRanks
from sglang_ext.device import Mark


class CopyStream:
    """A stream in addition to the current one. Kernels of an ``urgent`` one precede waiting kernels of forwards. On a CPU, work runs at once."""

    def __init__(self, device: torch.device, urgent: bool) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-urgent) if device.type == "cuda" else None

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

    def uses(self, *tensors: torch.Tensor | None) -> None:
        """Keep the memory of other streams' tensors from being reused before this stream has finished with it."""
        for tensor in tensors:
            if self.stream is not None and tensor is not None:
                tensor.record_stream(self.stream)


class DoubleBuffer:
    """Two buffers, ``halves`` [2, rows, words], that alternate between a stream that fills them and a stream that empties them."""

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


class LastTransfers:
    """The last transfer of each of ``pages`` pages in one direction. The transfers of a direction end in the order in which they began."""

    def __init__(self, pages: int) -> None:
        # The ends of transfers that may not have ended, by number.
        self.running: dict[int, Mark] = {}
        self._number, self._count = np.zeros(pages, np.int64), 0

    def note(self, pages: torch.Tensor, end: Mark) -> None:
        """Record a transfer of ``pages``, int64 on the host, that ends at ``end``."""
        # Also here: nothing calls end() for stores while nothing is loaded.
        self._forget_ended()
        self._count += 1
        self._number[pages.numpy()] = self._count
        self.running[self._count] = end

    def end(self, pages: torch.Tensor) -> Mark | None:
        """The mark at the end of the last transfer of any of ``pages``. None if all have ended."""
        self._forget_ended()
        return self.running.get(int(self._number[pages.numpy()].max()))

    def _forget_ended(self) -> None:
        for number in list(self.running):
            # Another thread may have asked, too.
            mark = self.running.get(number)
            if mark is not None and not mark.reached:
                break
            self.running.pop(number, None)


class TransferError(RuntimeError):
    """A transfer without a result yet, or whose loaded KV differs from the stored KV."""


class TransferOutcome(NamedTuple):
    """Seconds of a transfer without waiting for earlier work, host pages whose loaded KV differs from the stored KV, and bytes copied."""

    seconds: float
    failed: list[int]
    size: int = 0


@dataclass(frozen=True)
class LaunchedTransfer:
    """A transfer in progress, of ``size`` bytes. ``wrong``, bool [pages] on the host, is valid from ``end`` on. None for a store."""

    start: Mark
    end: Mark
    wrong: torch.Tensor | None
    size: int = 0


@dataclass(frozen=True, eq=False)
class Transfer:
    """A transfer between device slots and host ``pages``, int64 [pages]. If it failed with an error, the next call raises the error.

    ``size`` is the bytes of full KV in its pages. A load may copy fewer (:attr:`TransferOutcome.size`).
    """

    size: int
    pages: torch.Tensor
    _launched: "Future[LaunchedTransfer]"

    @property
    def done(self) -> bool:
        """Whether the transfer is complete. Does not wait."""
        return self._launched.done() and self._launched.result().end.reached

    def wait(self) -> None:
        """Make the current stream wait for the transfer. On a CPU, wait."""
        end = self._launched.result().end
        if end.event is not None:
            torch.cuda.current_stream().wait_event(end.event)

    def synchronize(self) -> None:
        """Wait until it is done."""
        end = self._launched.result().end
        if end.event is not None:
            end.event.synchronize()

    @property
    def outcome(self) -> TransferOutcome:
        """Its result. Raises :class:`TransferError` if it is not done. A store compares no checksums."""
        if not self.done:
            raise TransferError(f"a transfer of {self.size} bytes is still in progress; ask once it is done")
        launched = self._launched.result()
        failed = [] if launched.wrong is None else self.pages[launched.wrong].tolist()
        return TransferOutcome(launched.start.until(launched.end), failed, launched.size)


class PendingLaunch(Future[LaunchedTransfer]):
    """Future of a launch. Requesting the result before it ran runs it, and all launches before it."""

    def __init__(self, launch: Callable[[], LaunchedTransfer], run_all: Callable[[], None]) -> None:
        super().__init__()
        self.launch, self._run_all = launch, run_all

    def result(self, timeout: float | None = None) -> LaunchedTransfer:
        """Return the launched transfer. Runs the launch first if necessary."""
        if not self.done():
            self._run_all()
        return super().result(timeout)


class DeferredLaunches:
    """An executor in the calling thread, which runs launches in the order in which they were submitted. All calls come from one thread."""

    def __init__(self) -> None:
        self._waiting: list[PendingLaunch] = []
        self._open = False

    def submit(self, launch: Callable[..., LaunchedTransfer], *args: Any) -> PendingLaunch:
        """Run ``launch`` with ``args``. Inside :meth:`until_end` it runs later."""
        pending = PendingLaunch(partial(launch, *args), self._run_all)
        self._waiting.append(pending)
        if not self._open:
            self._run_all()
        return pending

    @contextmanager
    def until_end(self) -> Iterator[None]:
        """Postpone launches requested inside this context to its end, or until a result is requested."""
        self._open = True
        try:
            yield
        finally:
            self._open = False
            self._run_all()

    def _run_all(self) -> None:
        while self._waiting:
            pending = self._waiting.pop(0)
            pending.set_result(pending.launch())


@dataclass
class TransferTracker:
    """The completed transfers of one rank. All ranks ask for the same transfers, in the same order."""

    ranks: TPRanks = TPRanks()
    _known: "WeakKeyDictionary[Transfer, TransferOutcome]" = field(default_factory=WeakKeyDictionary)

    def update(self, transfers: Iterable[Transfer]) -> None:
        """Check which of ``transfers`` are done. Waits for the other ranks, but not for transfers."""
        unknown = [transfer for transfer in dict.fromkeys(transfers) if transfer not in self._known]
        if not unknown:
            return
        mine = [transfer.outcome if transfer.done else None for transfer in unknown]
        for transfer, outcomes in zip(unknown, zip(*self.ranks.gather(mine))):
            if None not in outcomes:
                failed = {page for outcome in outcomes for page in outcome.failed}
                seconds, size = (max(each) for each in ([o.seconds for o in outcomes], [o.size for o in outcomes]))
                self._known[transfer] = TransferOutcome(seconds, sorted(failed), size)

    def done(self, transfer: Transfer) -> bool:
        """Whether :meth:`update` or :meth:`wait` found it done on all ranks. A single rank checks now."""
        if self.ranks.group is None:
            self.update([transfer])
        return transfer in self._known

    def wait(self, transfer: Transfer) -> None:
        """Wait until it is done on all ranks."""
        transfer.synchronize()
        self.update([transfer])

    def outcome(self, transfer: Transfer) -> TransferOutcome:
        """The longest time, pages that came back changed on any rank, and the most bytes. Raises :class:`TransferError` if it is not done."""
        if not self.done(transfer):
            raise TransferError(f"a transfer of {transfer.size} bytes is still in progress on some rank; ask once it is done")
        return self._known[transfer]
