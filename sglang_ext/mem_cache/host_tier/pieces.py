"""Splits a transfer into pieces that fit a buffer, and into runs of consecutive pages, which one copy can move."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from sglang_ext.mem_cache.host_tier.host_pages import PageRun, runs

if TYPE_CHECKING:
    from sglang_ext.mem_cache.host_tier.host_pool import HostPool

# Pairs of functions that fill and empty a buffer of a double buffer.
Moves = Iterator[tuple[Callable[[torch.Tensor], None], Callable[[torch.Tensor], None]]]


@dataclass(frozen=True)
class TransferPiece:
    """The part of a transfer that is copied through a buffer at once.

    Attributes:
        buffers: Indices of the device's buffers, keys of all layers before values.
        tokens: The transfer's tokens in this piece.
        runs: Runs of these tokens' pages, counted in tokens.
    """

    buffers: range
    tokens: slice
    runs: tuple[PageRun, ...]

    def part(self, half: torch.Tensor) -> torch.Tensor:
        """The part of a buffer, [rows, words], that the piece uses: [buffers, tokens, words]."""
        tokens = self.tokens.stop - self.tokens.start
        return half[: len(self.buffers) * tokens].view(len(self.buffers), tokens, -1)


def pieces(buffers: int, pages: torch.Tensor, page_size: int, buffer_pages: int) -> Iterator[TransferPiece]:
    """Split a transfer of ``pages`` (int64 [pages]) of ``buffers`` buffers into pieces of at most ``buffer_pages`` pages each."""
    span = min(len(pages), buffer_pages)
    group = buffer_pages // span
    spans = []
    for first in range(0, len(pages), span):
        part = pages[first : first + span]
        of_tokens = tuple(PageRun(r.place * page_size, r.first * page_size, r.count * page_size) for r in runs(part))
        spans.append((slice(first * page_size, (first + len(part)) * page_size), of_tokens))
    for first in range(0, buffers, group):
        for tokens, of_tokens in spans:
            yield TransferPiece(range(first, min(first + group, buffers)), tokens, of_tokens)


@dataclass(frozen=True)
class LayerCopies:
    """Copies between one device's KV and one layer-first pool. Each is launched in the current stream.

    A buffer is a ``half`` of a double buffer (copy_streams.py): [rows, words].

    Attributes:
        rows: The device's KV, keys of all layers before values: [slots, words] each.
        pool: The host pages.
        buffer_pages: Pages of one layer's keys per buffer.
    """

    rows: list[torch.Tensor]
    pool: "HostPool"
    buffer_pages: int

    @classmethod
    def of(cls, rows: list[torch.Tensor], pool: "HostPool", staging: int) -> "LayerCopies":
        """Create with two buffers of ``staging`` bytes together, or of one page each."""
        return cls(rows, pool, max(1, staging // 2 // (pool.page_size * rows[0].shape[1] * rows[0].element_size())))

    def halves(self) -> torch.Tensor:
        """Both buffers, [2, rows, words]."""
        return self.rows[0].new_empty(2, self.buffer_pages * self.pool.page_size, self.rows[0].shape[1])

    def stores(self, pages: torch.Tensor, slots: torch.Tensor, blocks: None) -> Moves:
        """Yield, piece after piece, the functions that fill a buffer from device slots and empty it into host pages."""
        for piece in self._pieces(pages):
            yield partial(self.gather, piece, slots), partial(self.to_host, piece)

    def loads(self, pages: torch.Tensor, slots: torch.Tensor, blocks: None, stored: bool) -> Moves:
        """Yield the functions for the other direction."""
        for piece in self._pieces(pages):
            yield partial(self.from_host, piece), partial(self.scatter, piece, slots)

    def loaded_bytes(self, pages: torch.Tensor, blocks: None, stored: bool) -> int:
        """Bytes that :meth:`loads` copies with these arguments."""
        return len(pages) * self.pool.page_bytes

    def _pieces(self, pages: torch.Tensor) -> Iterator[TransferPiece]:
        return pieces(len(self.rows), pages, self.pool.page_size, self.buffer_pages)

    def gather(self, piece: TransferPiece, slots: torch.Tensor, half: torch.Tensor) -> None:
        """Copy from ``slots``, int64 [tokens of the transfer], to a buffer."""
        for part, buffer in zip(piece.part(half), piece.buffers):
            torch.index_select(self.rows[buffer], 0, slots[piece.tokens], out=part)

    def scatter(self, piece: TransferPiece, slots: torch.Tensor, half: torch.Tensor) -> None:
        """Copy from a buffer to ``slots``, int64 [tokens of the transfer]."""
        for part, buffer in zip(piece.part(half), piece.buffers):
            self.rows[buffer].index_copy_(0, slots[piece.tokens], part)

    def to_host(self, piece: TransferPiece, half: torch.Tensor) -> None:
        """Copy from a buffer to host pages."""
        for of_host, of_device in self._blocks(piece, half):
            of_host.copy_(of_device, non_blocking=True)

    def from_host(self, piece: TransferPiece, half: torch.Tensor) -> None:
        """Copy from host pages to a buffer."""
        for of_host, of_device in self._blocks(piece, half):
            of_device.copy_(of_host, non_blocking=True)

    def _blocks(self, piece: TransferPiece, half: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield corresponding blocks of memory on the host and in a buffer."""
        for part, buffer in zip(piece.part(half), piece.buffers):
            of_host = self.pool.words[buffer]
            for run in piece.runs:
                yield of_host[run.first : run.first + run.count], part[run.place : run.place + run.count]
