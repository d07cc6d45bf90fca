"""An incoming room: its received parts, and the slots that they are written to."""

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
    """Callbacks for the progress of a room. Called by threads of links."""

    def anchor_arrived(self) -> None:
        """All anchors and the auxiliary record are written: the request can start to decode."""

    def succeed(self) -> None:
        """All parts are written."""

    def fail(self, reason: str) -> None:
        """The rest of the room will not arrive."""


class RoomWriter:
    """Writes the parts of a room into the slots of a request.

    Args:
        codec: Codec of the pool.
        pool: Pool that is written to.
        aux: Auxiliary records; the room's record is written to row ``aux_index``.
        layers: Layers of one part of a page.
        pages: Pages of the request, from the first page that is transferred.
        hashes: Hash of each page (page_hashes.py).
        told: Listener for the room's progress.
        traveling: Expected queries after the auxiliary record; None if no queries are expected.

    Attributes:
        queries: Bytes after the auxiliary record.
        anchor_ready: Whether all anchors and the auxiliary record are written.
        complete: Whether all parts are written.
        failure: Why the rest will not arrive; None while it may.
        size, anchor_size: Received bytes of KV, and of its anchors.
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
        listener: RoomWriterListener,
        expected_queries: PromptQueries | None = None,
    ) -> None:
        self._codec, self._pool, self._aux, self._aux_index = codec, pool, aux, aux_index
        self._layers, self._pages, self._hashes, self._listener = layers, pages, tuple(hashes), listener
        self._expected_queries, self.queries = expected_queries, b""
        # Anchors of pages whose residual has not arrived: the residual cannot be decoded without its anchor. Residuals of pages whose
        # anchor is retransmitted, because its bytes were corrupted: the sender may have sent them already.
        self._anchors: dict[int, memoryview] = {}
        self._residuals: dict[int, memoryview] = {}
        self._complete_streams: set[Stream] = set() if pages else {Stream.ANCHOR}
        self.anchor_ready = self.complete = False
        self.failure: str | None = None
        self.size = self.anchor_size = 0

    @property
    def expected(self) -> ExpectedRoom:
        """The parts that the link server accepts for this room."""
        shape = RoomShape(len(self._pages), (self._layers,), self._codec.has_residual and bool(self._pages))
        most = {stream: self._codec.most_bytes(stream, self._layers) for stream in (Stream.ANCHOR, Stream.RESIDUAL)}
        record = sum(self._aux.sizes) + (self._expected_queries.most_bytes if self._expected_queries is not None else 0)
        return ExpectedRoom(shape, most | {Stream.AUX: record}, self._hashes)

    def write(self, header: PageHeader, payload: memoryview) -> None:
        """Write a part. Called by the link with an expected part.

        Raises:
            LinkError: The part cannot be written.
        """
        if header.stream is Stream.AUX:
            size = sum(self._aux.sizes)
            self._aux.write(self._aux_index, payload[:size])
            self.queries = bytes(payload[size:])
            if self.queries:
                self._expected_queries.parse(self.queries)
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
        """All parts of a stream are written. Called by the link. A retransmitted anchor may arrive after the auxiliary record."""
        self._complete_streams.add(stream)
        if not self.anchor_ready and {Stream.ANCHOR, Stream.AUX} <= self._complete_streams:
            self._pool.synchronize_links()
            self.anchor_ready = True
            self._listener.anchor_arrived()

    def ended(self, reason: str | None) -> None:
        """The room ended: complete (None), or failed for this reason. Called by the link."""
        if reason is not None:
            self.failure = reason
            self._listener.fail(reason)
            return
        self._pool.synchronize_links()
        self.complete = True
        self._listener.succeed()


@dataclass(frozen=True)
class EarlyRoom:
    """A room of a running request, whose residuals are still written to the request's slots. Used by the scheduler's thread.

    Attributes:
        number: ``link_room`` of the room.
        received: Writer of the room.
        links: Link server that receives the room.
        pool: Pool that is written to.
        prefill_again: Lets the prefill server compute the request again, after its slots were freed.
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
