"""One room on its way in: what has come of it, and where it is written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sglang_ext.managers.kv_transfer.link_server import LinkServer
from sglang_ext.managers.kv_transfer.progressive.page_codec import PageCodec, PlacedPage
from sglang_ext.managers.kv_transfer.progressive.pool_buffers import AuxRecords, PoolBuffers
from sglang_ext.managers.kv_transfer.prompt_queries import PromptQueries
from sglang_ext.managers.kv_transfer.incoming_rooms import ExpectedRoom
from sglang_ext.managers.kv_transfer.wire import LayerRange, PageHeader, RoomShape, Stream

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class RoomWriterListener(Protocol):
    """Who is told how far a room is. Calls come from the thread of links."""

    def anchor_arrived(self) -> None:
        """Anchors and auxiliary record are written: decoding could begin."""

    def succeed(self) -> None:
        """All is written."""

    def fail(self, reason: str) -> None:
        """The rest will not come."""


class RoomWriter:
    """Writes streams into the slots of a request.

    Args:
        codec: of the pool.
        pool: whose writes are waited for.
        aux: where the auxiliary record goes, to row ``aux_index``.
        layers: that travel in one part of a page.
        pages: of the request, from the first that travels.
        hashes: of each page (page_hashes.py).
        told: of how far it is.
        traveling: what queries after the auxiliary record must be; None where none are wanted.

    Attributes:
        queries: what followed the auxiliary record.
        anchor_ready: whether anchors and auxiliary record are written.
        complete: whether all is.
        failure: why the rest will not come; None while it may.
        size, anchor_size: bytes of KV that came so far, and of its anchors.
    """

    def __init__(
        self,
        codec: PageCodec,
        pool: PoolBuffers,
        aux: AuxRecords,
        aux_index: int,
        layers: LayerRange,
        pages: Sequence[PlacedPage],
        hashes: Sequence[bytes],
        told: RoomWriterListener,
        traveling: PromptQueries | None = None,
    ) -> None:
        self._codec, self._pool, self._aux, self._aux_index = codec, pool, aux, aux_index
        self._layers, self._pages, self._hashes, self._told = layers, pages, tuple(hashes), told
        self._traveling, self.queries = traveling, b""
        # Of pages whose residual has not come: it says little without the anchor. Residuals of pages whose anchor comes once more, as its
        # bytes were changed on the way: a sender has sent them by then.
        self._anchors: dict[int, memoryview] = {}
        self._residuals: dict[int, memoryview] = {}
        self._here: set[Stream] = set() if pages else {Stream.ANCHOR}
        self.anchor_ready = self.complete = False
        self.failure: str | None = None
        self.size = self.anchor_size = 0

    @property
    def expected(self) -> ExpectedRoom:
        """What the link server shall let through."""
        shape = RoomShape(len(self._pages), (self._layers,), self._codec.has_residual and bool(self._pages))
        most = {stream: self._codec.most_bytes(stream, self._layers) for stream in (Stream.ANCHOR, Stream.RESIDUAL)}
        record = sum(self._aux.sizes) + (self._traveling.most_bytes if self._traveling is not None else 0)
        return ExpectedRoom(shape, most | {Stream.AUX: record}, self._hashes)

    def write(self, header: PageHeader, payload: memoryview) -> None:
        """Of the link: a part that is what was expected.

        Raises:
            LinkError: it cannot be written.
        """
        if header.stream is Stream.AUX:
            size = sum(self._aux.sizes)
            self._aux.write(self._aux_index, payload[:size])
            self.queries = bytes(payload[size:])
            if self.queries:
                self._traveling.parse(self.queries)
            return
        self.size += len(payload)
        self.anchor_size += len(payload) * (header.stream is Stream.ANCHOR)
        of_page, others = (self._anchors, self._residuals) if header.stream is Stream.ANCHOR else (self._residuals, self._anchors)
        if self._codec.has_residual:
            of_page[header.page] = payload
        page = self._pages[header.page]
        if header.page in others:
            with self._pool.use_stream():
                self._codec.write_residual(page, self._layers, self._anchors.pop(header.page), self._residuals.pop(header.page))
        elif header.stream is Stream.ANCHOR:
            with self._pool.use_stream():
                self._codec.write_anchor(page, self._layers, payload)

    def arrived(self, stream: Stream) -> None:
        """Of the link: all parts of a stream were written; an anchor that comes once more may do so after the auxiliary record."""
        self._here.add(stream)
        if not self.anchor_ready and {Stream.ANCHOR, Stream.AUX} <= self._here:
            self._pool.synchronize_links()
            self.anchor_ready = True
            self._told.anchor_arrived()

    def ended(self, reason: str | None) -> None:
        """Of the link: all is there, or why not."""
        if reason is not None:
            self.failure = reason
            self._told.fail(reason)
            return
        self._pool.synchronize_links()
        self.complete = True
        self._told.succeed()


@dataclass(frozen=True)
class EarlyRoom:
    """A room of a running request, whose residuals are still written to the request's slots. Used by the scheduler's thread.

    Attributes:
        number: the room's ``link_room``.
        received: the room's received pages.
        links: the server that receives them.
        pool: the pool that they are written to.
        prefill_again: lets the prefill server compute the request again, after its slots were freed.
    """

    number: int
    received: RoomWriter
    links: LinkServer
    pool: PoolBuffers
    prefill_again: "Callable[[Req], None]"

    @property
    def complete(self) -> bool:
        """Whether all residuals are written."""
        return self.received.complete

    @property
    def failure(self) -> str | None:
        """Why the rest will not arrive; None while it may."""
        return self.received.failure

    def cancel(self) -> None:
        """Stop the writes to the request's slots. When this returns, none is under way."""
        complete = self.complete
        self.links.abort(self.number)
        if not complete:
            self.pool.synchronize_links()
