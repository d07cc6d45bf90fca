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
    """Encodes pages in order, and offers their streams to a link.

    Args:
        number: of the room.
        layers: that travel in one part of a page.
        start: tokens of the prompt before the first page.
        hashes: of each page (page_hashes.py).
        told: of success and failure.
    """

    def __init__(self, number: int, codec: PageCodec, layers: LayerRange, start: int, hashes: Sequence[bytes], told: Told) -> None:
        self.number, self._codec, self._layers, self._start = number, codec, layers, start
        self._hashes, self._told = hashes, told
        self._lock = threading.Lock()
        self._over = False
        self._encoded = 0

    @property
    def shape(self) -> RoomShape:
        """Its parts."""
        return RoomShape(len(self._hashes), (self._layers,), self._codec.has_residual and bool(self._hashes))

    @property
    def over(self) -> bool:
        """Whether nothing more of it is sent."""
        return self._over

    @property
    def page_bytes(self) -> int:
        """That a page's streams take at most."""
        return sum(self._codec.most_bytes(stream, self._layers) for stream in (Stream.ANCHOR, Stream.RESIDUAL))

    def send_page(self, link: Link, slots: torch.Tensor) -> None:
        """Encode the next page and offer its streams.

        Args:
            link: on which the room is open.
            slots: int64 [tokens], of the pool.
        """
        if self._over:
            return
        page, self._encoded = self._encoded, self._encoded + 1
        placed = PlacedPage(self._start + page * self._codec.page_size, slots)
        encoded = self._codec.encode(placed, self._layers)
        for stream, payload in ((Stream.ANCHOR, encoded.anchor), (Stream.RESIDUAL, encoded.residual)):
            if payload is not None:
                link.offer(self.number, Part(stream, payload, page, self._layers, self._hashes[page]))

    def send_aux(self, link: Link, record: bytes) -> None:
        """Offer the auxiliary record: all pages were sent, so that their KV is needed no more."""
        if self._over:
            return
        link.offer(self.number, Part(Stream.AUX, record))
        with self._lock:
            if not self._over:
                self._told.succeed()

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
        """Of the link: nothing waits for it."""

    def ended(self, room: int, reason: str | None) -> None:
        """Of the link: all is there, or why not."""
        if reason is not None:
            self.fail(reason)
            return
        with self._lock:
            self._over = True
        self._told.succeed()
