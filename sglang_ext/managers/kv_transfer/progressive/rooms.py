"""The two ends of a room: the prefill side encodes its pages, the decode side writes its parts into slots.

A prompt's newest queries follow a room's auxiliary record. Compression methods select tokens by them, and no cache holds them.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec
import torch
from msgspec import Meta, Struct

from sglang_ext.managers.kv_transfer.incoming_rooms import ExpectedRoom
from sglang_ext.managers.kv_transfer.link import Link
from sglang_ext.managers.kv_transfer.progressive.page_codec import EncodedPage, PageCodec, PlacedPage
from sglang_ext.managers.kv_transfer.progressive.pool_buffers import AuxRecords
from sglang_ext.managers.kv_transfer.wire import LinkError, PageHeader, RoomShape, Stream
from sglang_ext.mem_cache.compressed.queries import QueryWindows

# Bytes of the header that describes the queries.
_MOST_HEADER = 64
# Returns a request's queries as bytes, at most as many as its argument.
QueryReader = Callable[[int], bytes]


class _QueryHeader(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Describes queries [layers, tokens, heads, dim]; ``end``: the position after the newest token."""

    layers: Annotated[int, Meta(ge=1, le=4096)]
    heads: Annotated[int, Meta(ge=1, le=1 << 16)]
    dim: Annotated[int, Meta(ge=1, le=1 << 16)]
    dtype: Annotated[str, Meta(max_length=16)]
    end: Annotated[int, Meta(ge=0, le=1 << 31)]


@dataclass(frozen=True)
class PromptQueries:
    """Converts queries of one rank's requests, which ``windows`` stores, to bytes and back. ``shape``: layers, heads and channels."""

    windows: QueryWindows
    shape: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's queries."""
        layers, heads, dim = self.shape
        return layers * heads * dim * self.dtype.itemsize

    @property
    def most_bytes(self) -> int:
        """Maximum bytes of a request's queries; 0 if no method selects by queries."""
        return _MOST_HEADER + self.windows.window * self.token_bytes if self.windows.window else 0

    def read(self, row: int, end: int, most: int) -> bytes:
        """Return the newest queries of a prompt of ``end`` tokens in at most ``most`` bytes; empty if the newest ones are not stored."""
        count = min(self.windows.window, (most - _MOST_HEADER) // self.token_bytes)
        found = self.windows.get(row, end, count) if count > 0 else None
        if found is None:
            return b""
        queries, positions = found
        positions = positions.tolist()
        if positions != list(range(end - len(positions), end)):
            return b""
        header = msgspec.msgpack.encode(_QueryHeader(*self.shape, self._dtype_name, end))
        header = (bytes([len(header)]) + header).ljust(_MOST_HEADER, b"\0")
        return header + queries.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()

    def write(self, row: int, data: bytes) -> None:
        """Store received queries, as :meth:`parse` accepts them, for the request in ``row``. Does nothing without data."""
        if not data or not self.most_bytes:
            return
        shape = self.parse(data)
        layers, heads, dim = self.shape
        queries = torch.frombuffer(bytearray(data[_MOST_HEADER:]), dtype=self.dtype).view(layers, -1, heads, dim)
        self.windows.insert(row, shape.end, queries)

    def parse(self, data: bytes) -> _QueryHeader:
        """Decode the header of queries. Raise ``LinkError`` if they are of another model or dtype."""
        try:
            shape = msgspec.msgpack.decode(data[1 : 1 + data[0]], type=_QueryHeader)
        except msgspec.MsgspecError as error:
            raise LinkError(f"the prompt's queries are not of this version: {error}; install the same version on both sides") from error
        theirs, ours = (shape.layers, shape.heads, shape.dim, shape.dtype), (*self.shape, self._dtype_name)
        if theirs != ours:
            raise LinkError(
                f"the prompt's queries are {theirs} at the sender and {ours} at the receiver; give both servers the same --dtype"
            )
        size = len(data) - _MOST_HEADER
        if size % self.token_bytes or size > self.windows.window * self.token_bytes:
            raise LinkError(
                f"the prompt's queries have {size} bytes; expected are {self.token_bytes} per token, of {self.windows.window} at most"
            )
        return shape

    @property
    def _dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def _room_shape(codec: PageCodec, pages: int) -> RoomShape:
    return RoomShape(pages, (codec.pool.layer_range,), codec.has_residual and pages > 0)


class RoomListener(Protocol):
    """Callbacks for the outcome of a room. Called by threads of links."""

    def succeed(self) -> None:
        """At the prefill side: its KV is no longer needed. May be called twice. At the decode side: all parts are written."""

    def fail(self, reason: str) -> None:
        """The rest of the KV will not arrive. At the prefill side this may follow ``succeed``."""


class RoomWriterListener(RoomListener, Protocol):
    """Callbacks for the progress of a room at the decode side."""

    def anchor_arrived(self) -> None:
        """All anchors and the auxiliary record are written: the request can start to decode."""


class RoomEncoder:
    """Encodes pages and offers their streams to a link. One thread starts pages, another waits for them; any thread may cancel.

    ``starts`` has the prompt position at which each page begins, ``hashes`` the hash of each page (page_codec.py).
    """

    def __init__(
        self, number: int, codec: PageCodec, starts: Sequence[int], hashes: Sequence[bytes], listener: RoomListener
    ) -> None:
        self.number, self._codec, self._starts, self._hashes, self._listener = number, codec, starts, hashes, listener
        self.shape = _room_shape(codec, len(hashes))
        self.is_closed = False
        self._lock = threading.Lock()
        # Pages started, deferred residuals not offered yet, and whether the record was offered.
        self._num_started = self._num_deferred = 0
        self._recorded = False

    def most_bytes(self, stream: Stream) -> int:
        """Return the maximum bytes of a page's stream; 0 if the room has no such stream."""
        return self._codec.most_bytes(stream) if self.shape.parts(stream) else 0

    def start_page(self, slots: torch.Tensor | memoryview, residual: bool) -> "PageEncoding":
        """Start to encode the next page: int64 [tokens] slots, or an encoded page. Without ``residual``, ``start_residual`` must follow."""
        page, self._num_started = self._num_started, self._num_started + 1
        if isinstance(slots, memoryview):
            return PageEncoding(self, page, {Stream.ANCHOR: len(slots)}, lambda: EncodedPage(slots, None))
        if not residual:
            with self._lock:
                self._num_deferred += 1
        return self._start(page, slots, residual=residual)

    def start_residual(self, page: int, slots: torch.Tensor) -> "PageEncoding":
        """Start to encode the residual of a page that was started without it."""
        return self._start(page, slots, anchor=False)

    def _start(self, page: int, slots: torch.Tensor, anchor: bool = True, residual: bool = True) -> "PageEncoding":
        with self._codec.pool.use_stream():
            encoded = self._codec.start(PlacedPage(self._starts[page], slots), anchor=anchor, residual=residual)
        sizes = {stream: self.most_bytes(stream) for stream, wanted in ((Stream.ANCHOR, anchor), (Stream.RESIDUAL, residual)) if wanted}
        return PageEncoding(self, page, sizes, encoded, slots, is_deferred=not anchor)

    def start_record(self, record: bytes) -> "PageEncoding":
        """Return the auxiliary record, to be offered after the last page."""
        return PageEncoding(self, 0, {}, lambda: EncodedPage(None, None), record=record)

    def offer(self, link: Link, started: "PageEncoding") -> None:
        """Wait for streams that were started, and offer them or a record to the link on which the room is open."""
        with self._codec.pool.use_stream():
            encoded = started.encoded()
        for stream, payload in zip((Stream.ANCHOR, Stream.RESIDUAL), encoded, strict=True):
            if payload is not None:
                link.offer(self.number, stream, payload, started.page, self._codec.pool.layer_range, self._hashes[started.page])
        if started.is_deferred:
            with self._lock:
                self._num_deferred -= 1
        if started.record is not None and not self.is_closed:
            link.offer(self.number, Stream.AUX, started.record)
            self._recorded = True
        with self._lock:
            if self._recorded and not self._num_deferred and not self.is_closed:
                self._listener.succeed()

    def cancel(self, link: Link, reason: str) -> None:
        """Send nothing more, without a call of the listener."""
        if self._close():
            link.cancel(self.number, reason)

    def fail(self, reason: str) -> None:
        """Send nothing more, and notify the listener."""
        if self._close():
            self._listener.fail(reason)

    def ended(self, room: int, reason: str | None) -> None:
        """The room ended: complete (None), or failed for this reason. Called by the link."""
        if reason is not None:
            self.fail(reason)
            return
        self._close()
        self._listener.succeed()

    def _close(self) -> bool:
        """Send nothing more. Return whether this is new."""
        with self._lock:
            was_closed, self.is_closed = self.is_closed, True
        return not was_closed


@dataclass(frozen=True)
class PageEncoding:
    """Streams of a page that are being encoded, with the maximum bytes of each, or a room's auxiliary record."""

    room: RoomEncoder
    page: int
    sizes: dict[Stream, int]
    # Waits for the streams and returns them.
    encoded: Callable[[], EncodedPage]
    # Kept until then: a GPU may still read them, on another stream than the one that would reuse their memory.
    slots: torch.Tensor | None = None
    is_deferred: bool = False
    record: bytes | None = None


class RoomWriter:
    """Writes the parts of a room into the slots of a request, and its auxiliary record into row ``aux_index``.

    ``pages`` begin with the first page that is transferred, and have ``hashes`` (page_codec.py). ``expected_queries`` converts the queries
    after the auxiliary record; None if no queries are expected.

    Attributes:
        anchor_ready: Whether all anchors and the auxiliary record are written.
        size, anchor_size: Received bytes of KV, and of its anchors.
    """

    def __init__(
        self,
        codec: PageCodec,
        aux: AuxRecords,
        aux_index: int,
        pages: Sequence[PlacedPage],
        hashes: Sequence[bytes],
        listener: RoomWriterListener,
        expected_queries: PromptQueries | None = None,
    ) -> None:
        self._codec, self._pool, self._aux, self._aux_index = codec, codec.pool, aux, aux_index
        self._pages, self._hashes, self._listener = pages, tuple(hashes), listener
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
        most = {stream: self._codec.most_bytes(stream) for stream in (Stream.ANCHOR, Stream.RESIDUAL)}
        record = sum(self._aux.sizes) + (self._expected_queries.most_bytes if self._expected_queries is not None else 0)
        return ExpectedRoom(_room_shape(self._codec, len(self._pages)), most | {Stream.AUX: record}, self._hashes)

    def write(self, header: PageHeader, payload: memoryview) -> None:
        """Write an expected part. Called by the link. Raise ``LinkError`` if it cannot be written."""
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
                self._codec.write_residual(page, self._anchors.pop(header.page), self._residuals.pop(header.page))
        elif header.stream is Stream.ANCHOR:
            with self._pool.use_stream():
                self._codec.write_anchor(page, payload)

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
