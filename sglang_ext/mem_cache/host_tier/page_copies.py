"""Copies between device slots and host pages, through the buffers of a double buffer (transfers.py).

- :class:`LayerCopies`: a transfer is split into pieces that fit a buffer, and into runs of consecutive pages, which one copy can move.
- :class:`FrameCopies`: pages have a frame each, and are stored whole or as residuals of packed blocks (residuals.py). A half of the double
  buffer holds as many frames as fit, and the sizes of their residuals. A store copies whole frames to the host, so that nothing waits until
  the device has counted the bits. A load copies the needed part of a frame, if its store has ended.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from sglang_ext.mem_cache.host_tier.host_pool import HostPool, PageRun, runs
from sglang_ext.mem_cache.host_tier.residuals import WHOLE, PageBlocks, ResidualPages

# Pairs of functions that fill and empty a buffer of a double buffer.
Moves = Iterator[tuple[Callable[[torch.Tensor], None], Callable[[torch.Tensor], None]]]


@dataclass(frozen=True)
class TransferPiece:
    """The part of a transfer that is copied through a buffer at once: some tokens of some of the device's buffers.

    The buffers are numbered with the keys of all layers before the values. ``runs`` are those of the tokens' pages, counted in tokens.
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

    Attributes:
        rows: The device's KV, keys of all layers before values: [slots, words] each.
        pool: The host pages.
        buffer_pages: Pages of one layer's keys per ``half`` of a double buffer, [rows, words].
    """

    rows: list[torch.Tensor]
    pool: HostPool
    buffer_pages: int

    @classmethod
    def of(cls, rows: list[torch.Tensor], pool: HostPool, staging: int) -> "LayerCopies":
        """Create with two buffers of ``staging`` bytes together, or of one page each."""
        return cls(rows, pool, max(1, staging // 2 // (pool.page_size * rows[0].shape[1] * rows[0].element_size())))

    def halves(self) -> torch.Tensor:
        """Both buffers, [2, rows, words]."""
        return self.rows[0].new_empty(2, self.buffer_pages * self.pool.page_size, self.rows[0].shape[1])

    def stores(self, pages: torch.Tensor, slots: torch.Tensor, blocks: None) -> Moves:
        """Yield, piece after piece, the functions that fill a buffer from device slots and empty it into host pages."""
        for piece in pieces(len(self.rows), pages, self.pool.page_size, self.buffer_pages):
            yield partial(self.gather, piece, slots), partial(self._to_host, piece)

    def loads(self, pages: torch.Tensor, slots: torch.Tensor, blocks: None, stored: bool) -> Moves:
        """Yield the functions for the other direction."""
        for piece in pieces(len(self.rows), pages, self.pool.page_size, self.buffer_pages):
            yield partial(self._from_host, piece), partial(self.scatter, piece, slots)

    def loaded_bytes(self, pages: torch.Tensor, blocks: None, stored: bool) -> int:
        """Bytes that :meth:`loads` copies with these arguments."""
        return len(pages) * self.pool.page_bytes

    def gather(self, piece: TransferPiece, slots: torch.Tensor, half: torch.Tensor) -> None:
        """Copy from ``slots``, int64 [tokens of the transfer], to a buffer."""
        for part, buffer in zip(piece.part(half), piece.buffers):
            torch.index_select(self.rows[buffer], 0, slots[piece.tokens], out=part)

    def scatter(self, piece: TransferPiece, slots: torch.Tensor, half: torch.Tensor) -> None:
        """Copy from a buffer to ``slots``, int64 [tokens of the transfer]."""
        for part, buffer in zip(piece.part(half), piece.buffers):
            self.rows[buffer].index_copy_(0, slots[piece.tokens], part)

    def _to_host(self, piece: TransferPiece, half: torch.Tensor) -> None:
        for of_host, of_device in self._blocks(piece, half):
            of_host.copy_(of_device, non_blocking=True)

    def _from_host(self, piece: TransferPiece, half: torch.Tensor) -> None:
        for of_host, of_device in self._blocks(piece, half):
            of_device.copy_(of_host, non_blocking=True)

    def _blocks(self, piece: TransferPiece, half: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield corresponding blocks of memory on the host and in a buffer."""
        for part, buffer in zip(piece.part(half), piece.buffers):
            of_host = self.pool.words[buffer]
            for run in piece.runs:
                yield of_host[run.first : run.first + run.count], part[run.place : run.place + run.count]


SIZE_BYTES = 8


@dataclass(frozen=True)
class FrameCopies:
    """Copies between one device's KV and one page-first pool, ``buffer_pages`` at once. Each is launched in the current stream."""

    pool: HostPool
    residuals: ResidualPages
    buffer_pages: int

    @classmethod
    def of(cls, pool: HostPool, residuals: ResidualPages, staging: int) -> "FrameCopies":
        """Create with two buffers of ``staging`` bytes together, or of one page each."""
        return cls(pool, residuals, max(1, staging // 2 // (pool.page_bytes + SIZE_BYTES)))

    def halves(self) -> torch.Tensor:
        """Both buffers, uint8 [2, bytes]."""
        size = self.buffer_pages * (self.pool.page_bytes + SIZE_BYTES)
        return torch.empty(2, size, dtype=torch.uint8, device=self.residuals.buffers.keys[0].device)

    def stores(self, pages: torch.Tensor, slots: torch.Tensor, blocks: PageBlocks | None) -> Moves:
        """Yield the copies that store device slots to host pages, see :meth:`ResidualPages.write`."""
        for part, of_slots, of_blocks in self._spans(pages, slots, blocks):
            yield partial(self._write, of_slots, of_blocks), partial(self._to_host, runs(part))

    def loads(self, pages: torch.Tensor, slots: torch.Tensor, blocks: PageBlocks | None, stored: bool) -> Moves:
        """Yield the copies that load host pages to device slots. ``stored``: their stores have ended, so that sizes are known."""
        for part, of_slots, of_blocks in self._spans(pages, slots, blocks):
            yield partial(self._from_host, part, self._needed(part, of_blocks, stored)), partial(self._read, of_slots, of_blocks)

    def loaded_bytes(self, pages: torch.Tensor, blocks: PageBlocks | None, stored: bool) -> int:
        """Bytes that :meth:`loads` copies with these arguments."""
        return sum(self._needed(pages, blocks, stored))

    def _needed(self, pages: torch.Tensor, blocks: PageBlocks | None, stored: bool) -> list[int]:
        """Bytes to copy for each page, from the beginning of its frame."""
        sizes, anchor = self.pool.sizes[pages], self.residuals.anchor_bytes
        known = (sizes > WHOLE) & (sizes <= self.pool.page_bytes - anchor) & stored
        coming = sizes + anchor if blocks is None else torch.where(blocks.there, sizes, sizes + anchor)
        return torch.where(known, coming, self.pool.page_bytes).tolist()

    def _spans(
        self, pages: torch.Tensor, slots: torch.Tensor, blocks: PageBlocks | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, PageBlocks | None]]:
        tokens = self.pool.page_size
        for first in range(0, len(pages), self.buffer_pages):
            end = min(len(pages), first + self.buffer_pages)
            yield pages[first:end], slots[first * tokens : end * tokens], None if blocks is None else blocks.part(first, end)

    def _frames_and_sizes(self, half: torch.Tensor, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The frames, uint8 [pages, page_bytes], and sizes, int64 [pages], of the first ``pages`` pages in a buffer."""
        end = self.buffer_pages * self.pool.page_bytes
        return half[:end].view(self.buffer_pages, -1)[:pages], half[end:].view(torch.int64)[:pages]

    def _write(self, slots: torch.Tensor, blocks: PageBlocks | None, half: torch.Tensor) -> None:
        frames, sizes = self._frames_and_sizes(half, len(slots) // self.pool.page_size)
        self.residuals.write(slots, None if blocks is None else blocks.slots, frames, sizes)

    def _read(self, slots: torch.Tensor, blocks: PageBlocks | None, half: torch.Tensor) -> None:
        frames, sizes = self._frames_and_sizes(half, len(slots) // self.pool.page_size)
        self.residuals.read(frames, sizes, slots, None if blocks is None else blocks.slots)

    def _to_host(self, moved: tuple[PageRun, ...], half: torch.Tensor) -> None:
        frames, sizes = self._frames_and_sizes(half, self.buffer_pages)
        for run in moved:
            there, here = slice(run.first, run.first + run.count), slice(run.place, run.place + run.count)
            self.pool.frames[there].copy_(frames[here], non_blocking=True)
            self.pool.sizes[there].copy_(sizes[here], non_blocking=True)

    def _from_host(self, pages: torch.Tensor, needed: list[int], half: torch.Tensor) -> None:
        frames, sizes = self._frames_and_sizes(half, self.buffer_pages)
        for run in runs(pages):
            sizes[run.place : run.place + run.count].copy_(self.pool.sizes[run.first : run.first + run.count], non_blocking=True)
        for place, (page, size) in enumerate(zip(pages.tolist(), needed, strict=True)):
            frames[place, :size].copy_(self.pool.frames[page, :size], non_blocking=True)
