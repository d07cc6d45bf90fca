"""The rest of a room whose request decodes already, on its anchor."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_ext.managers.disaggregation.link_server import LinkServer
from sglang_ext.managers.disaggregation.progressive.pool_buffers import PoolBuffers
from sglang_ext.managers.disaggregation.progressive.received_room import ReceivedRoom

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass(frozen=True)
class EarlyRoom:
    """Residuals that are written to the slots of a running request. Of the scheduler's thread.

    Attributes:
        number: of the room on its link.
        received: what came of it.
        links: from which it comes.
        pool: to which it is written.
        prefill_again: lets the prefill server compute the request once more, after it gave its slots back.
    """

    number: int
    received: ReceivedRoom
    links: LinkServer
    pool: PoolBuffers
    prefill_again: "Callable[[Req], None]"

    @property
    def complete(self) -> bool:
        """Whether all is written."""
        return self.received.complete

    @property
    def failure(self) -> str | None:
        """Why the rest will not come; None while it may."""
        return self.received.failure

    def cancel(self) -> None:
        """Once this returned, nothing is written to the request's slots any more."""
        complete = self.complete
        self.links.abort(self.number)
        if not complete:
            self.pool.wait_for_links()
