"""One room on its way out: which pages it has, which of them are encoded, and when SGLang may have their KV back."""

import threading
from collections.abc import Sequence
from typing import Protocol

import torch

from sglang_ext.managers.disaggregation.link import Link
from sglang_ext.managers.disaggregation.progressive.page_codec import PageCodec, PlacedPage
from sglang_ext.managers.disaggregation.send_queue import Part
from sglang_ext.managers.disaggregation.wire import LayerRange, RoomShape, Stream


class Told(Protocol):
    """Who is told what became of a room. Calls come from threads of links."""

    def succeed(self) -> None:
        """The KV is needed no more. It may be called twice."""

    def fail(self, reason: str) -> None:
        """Not all of it will arrive. It may follow ``succeed``."""


class SentRoom:
    """Encodes pages, and offers their streams to a link. One thread encodes; others may cancel.

    Args:
        number: of the room on its link.
        codec: of the pool.
        layers: that travel in one part of a page.
        starts: where in the prompt each page begins.
        hashes: of each page (page_hashes.py).
        told: of success and failure.
    """

    def __init__(
        self, number: int, codec: PageCodec, layers: LayerRange, starts: Sequence[int], hashes: Sequence[bytes], told: Told
    ) -> None:
        self.number, self._codec, self._layers, self._starts = number, codec, layers, starts
        self._hashes, self._told = hashes, told
        self._lock = threading.Lock()
        self._over = False
        # Of the thread that encodes: pages whose anchor was offered, residuals that were put off, whether the record was offered.
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

    def send_page(self, link: Link, slots: torch.Tensor | memoryview, residual: bool) -> int:
        """Encode the next page and offer its streams; its number.

        Args:
            link: on which the room is open.
            slots: int64 [tokens], of the pool; or the bytes of a page that was encoded before, and has no residual.
            residual: whether to offer that, too; else ``send_residual`` must follow, and the KV stay until then.
        """
        page, self._begun = self._begun, self._begun + 1
        if isinstance(slots, memoryview):
            self._offer(link, Stream.ANCHOR, page, slots)
            return page
        with self._codec.pool.current():
            if residual:
                anchor, rest = self._codec.encode(self._placed(page, slots), self._layers)
            else:
                anchor, rest = self._codec.encode_anchor(self._placed(page, slots), self._layers), None
                self._owed += 1
        self._offer(link, Stream.ANCHOR, page, anchor)
        if rest is not None:
            self._offer(link, Stream.RESIDUAL, page, rest)
        return page

    def send_residual(self, link: Link, page: int, slots: torch.Tensor) -> None:
        """Offer the residual of a page that was sent without."""
        with self._codec.pool.current():
            residual = self._codec.encode_residual(self._placed(page, slots), self._layers)
        self._offer(link, Stream.RESIDUAL, page, residual)
        self._owed -= 1
        self._tell_if_encoded()

    def send_record(self, link: Link, record: bytes) -> None:
        """Offer the auxiliary record, after the last page."""
        link.offer(self.number, Part(Stream.AUX, record))
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

    def _offer(self, link: Link, stream: Stream, page: int, payload: memoryview) -> None:
        link.offer(self.number, Part(stream, payload, page, self._layers, self._hashes[page]))
