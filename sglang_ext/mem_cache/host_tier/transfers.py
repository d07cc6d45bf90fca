"""Transfers between device and host: launched at once or later, and done on all tensor-parallel ranks.

Each rank copies its heads' part of the same pages, and finishes at its own time. The ranks' trees must stay equal. So a transfer counts as
done when the ranks have told each other so, and pages that came back changed on one rank are dropped on all.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from sglang_ext.device import Mark
from sglang_ext.tp_ranks import TPRanks


class TransferError(RuntimeError):
    """A transfer without a result yet, or whose loaded KV differs from the stored KV."""


class TransferOutcome(NamedTuple):
    """Result of a transfer.

    Attributes:
        seconds: Duration, without waiting for earlier work.
        failed: Host pages whose loaded KV differs from the stored KV. Empty for a store.
        size: Bytes copied between device and host.
    """

    seconds: float
    failed: list[int]
    size: int = 0


@dataclass(frozen=True)
class LaunchedTransfer:
    """A transfer in progress.

    Attributes:
        start, end: Marks before and after its copies.
        wrong: For a load, bool [pages] on the host, valid from ``end`` on: the checksum differs from the store's. None for a store.
        size: Bytes copied between device and host.
    """

    start: Mark
    end: Mark
    wrong: torch.Tensor | None
    size: int = 0


@dataclass(frozen=True, eq=False)
class Transfer:
    """A transfer between device slots and host pages.

    If it failed with an error, the next call raises the error.

    Attributes:
        size: Bytes of full KV in its pages. A load may copy fewer (:attr:`TransferOutcome.size`).
        pages: int64 [pages], host pages.
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
        """Its result. A store compares no checksums.

        Raises:
            TransferError: It is not done.
        """
        if not self.done:
            raise TransferError(f"a transfer of {self.size} bytes is still in progress; ask once it is done")
        launched = self._launched.result()
        failed = [] if launched.wrong is None else self.pages[launched.wrong].tolist()
        return TransferOutcome(launched.start.until(launched.end), failed, launched.size)


class PendingLaunch(Future[LaunchedTransfer]):
    """Future of a launch. Requesting the result before it ran runs it, and all launches before it."""

    def __init__(self, launch: Callable[[], LaunchedTransfer], run_all: Callable[[], None]) -> None:
        super().__init__()
        self._launch, self._run_all = launch, run_all

    def run(self) -> None:
        """Run the launch."""
        self.set_result(self._launch())

    def result(self, timeout: float | None = None) -> LaunchedTransfer:
        """Return the launched transfer."""
        if not self.done():
            self._run_all()
        return super().result(timeout)


class DeferredLaunches:
    """Runs launches in the order in which they were requested. All calls come from one thread."""

    def __init__(self) -> None:
        self._waiting: list[PendingLaunch] = []
        self._open = False

    def begin(self, launch: Callable[[], LaunchedTransfer]) -> PendingLaunch:
        """Run ``launch``. Inside :meth:`until_end` it runs later."""
        pending = PendingLaunch(launch, self._run_all)
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
            self._waiting.pop(0).run()


@dataclass
class TransferTracker:
    """The completed transfers of one rank. All ranks ask for the same transfers, in the same order.

    Attributes:
        ranks: The ranks that must agree.
    """

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
        """Its result: the longest time and the most bytes of all ranks, and the pages that came back changed on any rank.

        Raises:
            TransferError: It is not known to be done.
        """
        if not self.done(transfer):
            raise TransferError(f"a transfer of {transfer.size} bytes is still in progress on some rank; ask once it is done")
        return self._known[transfer]
