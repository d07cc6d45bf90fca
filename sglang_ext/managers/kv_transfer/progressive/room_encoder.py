"""One room on its way out: which pages it has, which of them are encoded, and when SGLang may have their KV back."""

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
    """Who is told what became of a room. Calls come from threads of links."""

    def succeed(self) -> None:
        """The KV is needed no more. It may be called twice."""

    def fail(self, reason: str) -> None:
        """Not all of it will arrive. It may follow ``succeed``."""


class RoomEncoder:
    """Encodes pages, and offers their streams to a link. One thread begins with pages, one waits for them; others may cancel.

    Args:
        number: of the room on its link.
        codec: of the pool.
        layers: that travel in one part of a page.
        starts: where in the prompt each page begins.
        hashes: of each page (page_hashes.py).
        told: of success and failure.
    """

    def __init__(
        self, number: int, codec: PageCodec, layers: LayerRange, starts: Sequence[int], hashes: Sequence[bytes], told: RoomEncoderListener
    ) -> None:
        self.number, self._codec, self._layers, self._starts = number, codec, layers, starts
        self._hashes, self._told = hashes, told
        self._lock = threading.Lock()
        self._over = False
        # Pages that were begun, residuals that were put off and not offered, and whether the record was offered.
        self._begun = self._owed = 0
        self._recorded = False

    @property
    def shape(self) -> RoomShape:
        """Its parts."""
        return RoomShape(len(self._hashes), (self._layers,), self._codec.has_residual and bool(self._hashes))

    @property
    def over(self) -> bool:
        """Whether nothing more of it is sent."""
        return self._over

    def most_bytes(self, stream: Stream) -> int:
        """Of a page's stream; 0 where the room has no such stream."""
        return self._codec.most_bytes(stream, self._layers) if self.shape.parts(stream) else 0

    def start_page(self, slots: torch.Tensor | memoryview, residual: bool) -> "PageEncoding":
        """Begin to encode the next page.

        Args:
            slots: int64 [tokens], of the pool; or the bytes of a page that was encoded before, and has no residual.
            residual: whether with its residual; else ``start_residual`` must follow, and the KV stay until then.
        """
        page, self._begun = self._begun, self._begun + 1
        if isinstance(slots, memoryview):
            return PageEncoding(self, page, {Stream.ANCHOR: len(slots)}, lambda: EncodedPage(slots, None))
        if not residual:
            with self._lock:
                self._owed += 1
        with self._codec.pool.use_stream():
            encoded = self._codec.start(self._placed(page, slots), self._layers, residual=residual)
        return PageEncoding(self, page, self._sizes((Stream.ANCHOR, Stream.RESIDUAL) if residual else (Stream.ANCHOR,)), encoded, slots)

    def start_residual(self, page: int, slots: torch.Tensor) -> "PageEncoding":
        """Begin with the residual of a page that was begun without."""
        with self._codec.pool.use_stream():
            encoded = self._codec.start(self._placed(page, slots), self._layers, anchor=False)
        return PageEncoding(self, page, self._sizes((Stream.RESIDUAL,)), encoded, slots, owed=True)

    def offer(self, link: Link, started: "PageEncoding") -> None:
        """Wait for streams that were begun, and offer them to the link on which the room is open."""
        with self._codec.pool.use_stream():
            encoded = started.encoded()
        for stream, payload in zip((Stream.ANCHOR, Stream.RESIDUAL), encoded, strict=True):
            if payload is not None:
                link.offer(self.number, OutgoingPart(stream, payload, started.page, self._layers, self._hashes[started.page]))
        if started.owed:
            with self._lock:
                self._owed -= 1
            self._tell_if_encoded()

    def send_record(self, link: Link, record: bytes) -> None:
        """Offer the auxiliary record, after the last page."""
        link.offer(self.number, OutgoingPart(Stream.AUX, record))
        self._recorded = True
        self._tell_if_encoded()

    def cancel(self, link: Link, reason: str) -> None:
        """Send no more; nobody is told."""
        with self._lock:
            over, self._over = self._over, True
        if not over:
            link.cancel(self.number, reason)

    def fail(self, reason: str) -> None:
        """Send no more, and tell."""
        with self._lock:
            over, self._over = self._over, True
        if not over:
            self._told.fail(reason)

    def arrived(self, room: int, stream: Stream) -> None:
        """Of the link: nothing waits for a stream."""

    def ended(self, room: int, reason: str | None) -> None:
        """Of the link: all is there, or why not."""
        if reason is not None:
            self.fail(reason)
            return
        with self._lock:
            self._over = True
        self._told.succeed()

    def _tell_if_encoded(self) -> None:
        with self._lock:
            if self._recorded and not self._owed and not self._over:
                self._told.succeed()

    def _placed(self, page: int, slots: torch.Tensor) -> PlacedPage:
        return PlacedPage(self._starts[page], slots)

    def _sizes(self, streams: Sequence[Stream]) -> dict[Stream, int]:
        return {stream: self.most_bytes(stream) for stream in streams}


@dataclass(frozen=True)
class PageEncoding:
    """Streams of a page that are being encoded.

    Attributes:
        sizes: which, and bytes of each at most.
        encoded: waits for them.
        slots: kept until then: a GPU may still read them, on another stream than the one that would give their memory to others.
        owed: whether it is a residual that was put off.
    """

    room: RoomEncoder
    page: int
    sizes: dict[Stream, int]
    encoded: Callable[[], EncodedPage]
    slots: torch.Tensor | None = None
    owed: bool = False
