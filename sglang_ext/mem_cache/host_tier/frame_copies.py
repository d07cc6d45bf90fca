"""Copies of pages that each have a frame on the host, and are stored whole or as residuals of packed blocks (residuals.py).

Each half of a double buffer (copy_streams.py) holds as many frames as fit, and the sizes of their residuals. A store copies whole frames
to the host, so that nothing waits until the device has counted the bits. A load copies the needed part of a frame, if its store has
ended.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from sglang_ext.mem_cache.host_tier.host_pool import HostPool
from sglang_ext.mem_cache.host_tier.host_pages import PageRun, runs
from sglang_ext.mem_cache.host_tier.pieces import Moves
from sglang_ext.mem_cache.host_tier.residuals import WHOLE, PageBlocks, ResidualPages

SIZE_BYTES = 8


@dataclass(frozen=True)
class FrameCopies:
    """Copies between one device's KV and one pool of frames. Each is launched in the current stream.

    Attributes:
        pool: The host pages, in page-first order.
        residuals: Writes and reads frames.
        buffer_pages: Pages per buffer.
    """

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

    def _frames_in(self, half: torch.Tensor) -> torch.Tensor:
        return half[: self.buffer_pages * self.pool.page_bytes].view(self.buffer_pages, -1)

    def _sizes_in(self, half: torch.Tensor) -> torch.Tensor:
        return half[self.buffer_pages * self.pool.page_bytes :].view(torch.int64)

    def _write(self, slots: torch.Tensor, blocks: PageBlocks | None, half: torch.Tensor) -> None:
        count = len(slots) // self.pool.page_size
        self.residuals.write(slots, None if blocks is None else blocks.slots, self._frames_in(half)[:count], self._sizes_in(half)[:count])

    def _read(self, slots: torch.Tensor, blocks: PageBlocks | None, half: torch.Tensor) -> None:
        count = len(slots) // self.pool.page_size
        self.residuals.read(self._frames_in(half)[:count], self._sizes_in(half)[:count], slots, None if blocks is None else blocks.slots)

    def _to_host(self, moved: tuple[PageRun, ...], half: torch.Tensor) -> None:
        frames, sizes = self._frames_in(half), self._sizes_in(half)
        for run in moved:
            there, here = slice(run.first, run.first + run.count), slice(run.place, run.place + run.count)
            self.pool.frames[there].copy_(frames[here], non_blocking=True)
            self.pool.sizes[there].copy_(sizes[here], non_blocking=True)

    def _from_host(self, pages: torch.Tensor, needed: list[int], half: torch.Tensor) -> None:
        frames, sizes = self._frames_in(half), self._sizes_in(half)
        for run in runs(pages):
            sizes[run.place : run.place + run.count].copy_(self.pool.sizes[run.first : run.first + run.count], non_blocking=True)
        for place, (page, size) in enumerate(zip(pages.tolist(), needed, strict=True)):
            frames[place, :size].copy_(self.pool.frames[page, :size], non_blocking=True)
