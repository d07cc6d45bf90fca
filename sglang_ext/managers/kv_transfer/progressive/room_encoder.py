"""An outgoing room: its pages, which of them are encoded, and when SGLang can free their KV."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_ext.managers.kv_transfer.link import Link
from sglang_ext.managers.kv_transfer.progressive.page_codec import EncodedPage, PageCodec, PlacedPage
from sglang_ext.managers.kv_transfer.outgoing_queue import OutgoingPart
from sglang_ext.managers.kv_transfer.wire import LayerRange, RoomShape, Stream


class RoomEncoderListener(Protocol):
    """Callbacks for the outcome of a room. Called by threads of links."""

    def succeed(self) -> None:
        """The KV is no longer needed. May be called twice."""

    def fail(self, reason: str) -> None:
        """Not all of the KV will arrive. May follow ``succeed``."""


class RoomEncoder:
    """Encodes pages and offers their streams to a link. One thread starts pages, another waits for them; any thread may cancel.

    Args:
        number: Number of the room on its link.
        codec: Codec of the pool.
        layers: Layers of one part of a page.
        starts: Prompt position at which each page begins.
        hashes: Hash of each page (page_hashes.py).
        told: Listener for success and failure.
    """

    def __init__(
        self, number: int, codec: PageCodec, layers: LayerRange, starts: Sequence[int], hashes: Sequence[bytes], listener: RoomEncoderListener
    ) -> None:
        self.number, self._codec, self._layers, self._starts = number, codec, layers, starts
        self._hashes, self._listener = hashes, listener
        self._lock = threading.Lock()
        self._is_closed = False
        # Pages started, deferred residuals not offered yet, and whether the record was offered.
        self._num_started = self._num_deferred = 0
        self._recorded = False

    @property
    def shape(self) -> RoomShape:
        """The parts of the room."""
        return RoomShape(len(self._hashes), (self._layers,), self._codec.has_residual and bool(self._hashes))

    @property
    def is_closed(self) -> bool:
        """Whether the room sends nothing more."""
        return self._is_closed

    def most_bytes(self, stream: Stream) -> int:
        """Return the maximum bytes of a page's stream; 0 if the room has no such stream."""
        return self._codec.most_bytes(stream, self._layers) if self.shape.parts(stream) else 0

    def start_page(self, slots: torch.Tensor | memoryview, residual: bool) -> "PageEncoding":
        """Start to encode the next page.

        Args:
            slots: int64 [tokens], slots in the pool; or the bytes of a page that is encoded already and has no residual.
            residual: Whether to encode the residual too. If False, ``start_residual`` must follow, and the KV must be kept until then.
        """
        page, self._num_started = self._num_started, self._num_started + 1
        if isinstance(slots, memoryview):
            return PageEncoding(self, page, {Stream.ANCHOR: len(slots)}, lambda: EncodedPage(slots, None))
        if not residual:
            with self._lock:
                self._num_deferred += 1
        with self._codec.pool.use_stream():
            encoded = self._codec.start(self._placed(page, slots), self._layers, residual=residual)
        return PageEncoding(self, page, self._sizes((Stream.ANCHOR, Stream.RESIDUAL) if residual else (Stream.ANCHOR,)), encoded, slots)

    def start_residual(self, page: int, slots: torch.Tensor) -> "PageEncoding":
        """Start to encode the residual of a page that was started without it."""
        with self._codec.pool.use_stream():
            encoded = self._codec.start(self._placed(page, slots), self._layers, anchor=False)
        return PageEncoding(self, page, self._sizes((Stream.RESIDUAL,)), encoded, slots, is_deferred=True)

    def offer(self, link: Link, started: "PageEncoding") -> None:
        """Wait for streams that were started, and offer them to the link on which the room is open."""
        with self._codec.pool.use_stream():
            encoded = started.encoded()
        for stream, payload in zip((Stream.ANCHOR, Stream.RESIDUAL), encoded, strict=True):
            if payload is not None:
                link.offer(self.number, OutgoingPart(stream, payload, started.page, self._layers, self._hashes[started.page]))
        if started.is_deferred:
            with self._lock:
                self._num_deferred -= 1
            self._notify_if_encoded()

    def send_record(self, link: Link, record: bytes) -> None:
        """Offer the auxiliary record, after the last page."""
        link.offer(self.number, OutgoingPart(Stream.AUX, record))
        self._recorded = True
        self._notify_if_encoded()

    def cancel(self, link: Link, reason: str) -> None:
        """Send nothing more, without a call of the listener."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            link.cancel(self.number, reason)

    def fail(self, reason: str) -> None:
        """Send nothing more, and notify the listener."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            self._listener.fail(reason)

    def arrived(self, room: int, stream: Stream) -> None:
        """Does nothing: no component waits for a single stream. Called by the link."""

    def ended(self, room: int, reason: str | None) -> None:
        """The room ended: complete (None), or failed for this reason. Called by the link."""
        if reason is not None:
            self.fail(reason)
            return
        with self._lock:
            self._is_closed = True
        self._listener.succeed()

    def _notify_if_encoded(self) -> None:
        with self._lock:
            if self._recorded and not self._num_deferred and not self._is_closed:
                self._listener.succeed()

    def _placed(self, page: int, slots: torch.Tensor) -> PlacedPage:
        return PlacedPage(self._starts[page], slots)

    def _sizes(self, streams: Sequence[Stream]) -> dict[Stream, int]:
        return {stream: self.most_bytes(stream) for stream in streams}


@dataclass(frozen=True)
class PageEncoding:
    """Streams of a page that are being encoded.

    Attributes:
        sizes: The streams, and the maximum bytes of each.
        encoded: Waits for the streams and returns them.
        slots: Kept until then: a GPU may still read them, on another stream than the one that would reuse their memory.
        is_deferred: Whether it is a deferred residual.
    """

    room: RoomEncoder
    page: int
    sizes: dict[Stream, int]
    encoded: Callable[[], EncodedPage]
    slots: torch.Tensor | None = None
    is_deferred: bool = False
