"""Copies under way between device and host: launched now or later, and done on all tensor-parallel ranks.

Each rank moves its heads' part of the same pages, and is done with it at a time of its own. What the tree does then must be
the same everywhere: a transfer counts as done once the ranks have told each other so, and pages that came back changed on
one rank are lost on all.
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
    """A transfer was asked for what it cannot tell, or did not bring what it should."""


class TransferOutcome(NamedTuple):
    """What a transfer that is done brought.

    Attributes:
        seconds: how long it took, without what it had to wait for.
        failed: of a load, host pages whose KV did not arrive as it was stored.
        size: bytes that it moved between device and host.
    """

    seconds: float
    failed: list[int]
    size: int = 0


@dataclass(frozen=True)
class LaunchedTransfer:
    """A transfer that is on its way.

    Attributes:
        start, end: around its copies.
        wrong: of a load, bool [pages] on the host, valid from ``end`` on: the checksum is not that of the store.
        size: bytes that it moves between device and host.
    """

    start: Mark
    end: Mark
    wrong: torch.Tensor | None
    size: int = 0


@dataclass(frozen=True, eq=False)
class Transfer:
    """A copy between device slots and host pages.

    An error that ended it is raised by whatever is asked of it next.

    Attributes:
        size: bytes of full KV in its pages, which a load may bring in fewer (:attr:`TransferOutcome.size`).
        pages: int64 [pages], of the host.
    """

    size: int
    pages: torch.Tensor
    _launched: "Future[LaunchedTransfer]"

    @property
    def done(self) -> bool:
        """Whether all has arrived; does not wait."""
        return self._launched.done() and self._launched.result().end.reached

    def wait(self) -> None:
        """Let the current stream wait for it; on a CPU, wait."""
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
        """What it brought; a store compares no checksums.

        Raises:
            TransferError: it is not done.
        """
        if not self.done:
            raise TransferError(f"a transfer of {self.size} bytes is still under way; ask once it is done")
        launched = self._launched.result()
        failed = [] if launched.wrong is None else self.pages[launched.wrong].tolist()
        return TransferOutcome(launched.start.until(launched.end), failed, launched.size)


class PendingLaunch(Future[LaunchedTransfer]):
    """What a launch will give. Who asks before it ran has it run then, after those that were asked for before it."""

    def __init__(self, launch: Callable[[], LaunchedTransfer], run_all: Callable[[], None]) -> None:
        super().__init__()
        self._launch, self._run_all = launch, run_all

    def run(self) -> None:
        """Launch."""
        self.set_result(self._launch())

    def result(self, timeout: float | None = None) -> LaunchedTransfer:
        """What the launch gave."""
        if not self.done():
            self._run_all()
        return super().result(timeout)


class DeferredLaunches:
    """Runs launches in the order in which they were asked for. All calls come from one thread."""

    def __init__(self) -> None:
        self._waiting: list[PendingLaunch] = []
        self._open = False

    def begin(self, launch: Callable[[], LaunchedTransfer]) -> PendingLaunch:
        """Run ``launch``; inside :meth:`until_end` it runs later."""
        pending = PendingLaunch(launch, self._run_all)
        self._waiting.append(pending)
        if not self._open:
            self._run_all()
        return pending

    @contextmanager
    def until_end(self) -> Iterator[None]:
        """What is asked for inside this context runs at its end, or once someone asks for its result."""
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
    """The transfers of one rank. All ranks ask for the same ones, in the same order.

    Attributes:
        ranks: who must find the same.
    """

    ranks: TPRanks = TPRanks()
    _known: "WeakKeyDictionary[Transfer, TransferOutcome]" = field(default_factory=WeakKeyDictionary)

    def update(self, transfers: Iterable[Transfer]) -> None:
        """Find out which of ``transfers`` are done by now; waits for the other ranks, but for no transfer."""
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
        """Whether :meth:`update` or :meth:`wait` found it done on all ranks; one rank alone looks now."""
        if self.ranks.group is None:
            self.update([transfer])
        return transfer in self._known

    def wait(self, transfer: Transfer) -> None:
        """Wait until it is done on all ranks."""
        transfer.synchronize()
        self.update([transfer])

    def outcome(self, transfer: Transfer) -> TransferOutcome:
        """What it brought: the longest time of all ranks, their most bytes, and the pages that came back changed on any.

        Raises:
            TransferError: it is not known to be done.
        """
        if not self.done(transfer):
            raise TransferError(f"a transfer of {transfer.size} bytes is still under way on some rank; ask once it is done")
        return self._known[transfer]
