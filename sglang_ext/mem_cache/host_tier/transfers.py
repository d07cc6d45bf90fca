"""Copies under way between device and host."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang_ext.device import Mark


class TransferError(RuntimeError):
    """A transfer was asked for what it cannot tell, or did not bring what it should."""


class Outcome(NamedTuple):
    """What a transfer that is done brought.

    Attributes:
        seconds: how long it took, without what it had to wait for.
        failed: of a load, host pages whose KV did not arrive as it was stored.
    """

    seconds: float
    failed: list[int]


@dataclass(frozen=True)
class Launched:
    """A transfer that is on its way.

    Attributes:
        start, end: around its copies.
        wrong: of a load, bool [pages] on the host, valid from ``end`` on: the checksum is not that of the store.
    """

    start: Mark
    end: Mark
    wrong: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Transfer:
    """A copy between device slots and host pages.

    An error that ended it is raised by whatever is asked of it next.

    Attributes:
        size: bytes.
        pages: int64 [pages], of the host.
    """

    size: int
    pages: torch.Tensor
    _launched: "Future[Launched]"

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
    def outcome(self) -> Outcome:
        """What it brought; a store compares no checksums.

        Raises:
            TransferError: it is not done.
        """
        if not self.done:
            raise TransferError(f"a transfer of {self.size} bytes is still under way; ask once it is done")
        launched = self._launched.result()
        failed = [] if launched.wrong is None else self.pages[launched.wrong].tolist()
        return Outcome(launched.start.until(launched.end), failed)
