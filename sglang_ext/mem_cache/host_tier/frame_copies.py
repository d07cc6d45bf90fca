"""Copies of pages that each have a room on the host: whole, or as residuals of packed blocks, and these (residuals.py).

A buffer of a pipe (copy_streams.py) holds as many rooms as fit, and the sizes of their residuals. A store brings whole rooms to the host,
since nobody waits until the device has counted bits; a load brings what of a room it needs, once the store of it has ended.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from sglang_ext.mem_cache.host_tier.host_pool import HostPool
from sglang_ext.mem_cache.host_tier.pieces import Moves, PageRun, runs
from sglang_ext.mem_cache.host_tier.residuals import WHOLE, PageBlocks, ResidualPages

SIZE_BYTES = 8


@dataclass(frozen=True)
class FrameCopies:
    """Copies between one device's KV and one pool of rooms; each is launched in the current stream.

    Attributes:
        pool: the host pages, one after another.
        residuals: writes and reads rooms.
        buffer_pages: pages that a buffer holds.
    """

    pool: HostPool
    residuals: ResidualPages
    buffer_pages: int

    @classmethod
    def of(cls, pool: HostPool, residuals: ResidualPages, staging: int) -> "FrameCopies":
        """With two buffers of so many bytes together, or of a page each."""
        return cls(pool, residuals, max(1, staging // 2 // (pool.page_bytes + SIZE_BYTES)))

    def halves(self) -> torch.Tensor:
        """Both buffers, uint8 [2, bytes]."""
        size = self.buffer_pages * (self.pool.page_bytes + SIZE_BYTES)
        return torch.empty(2, size, dtype=torch.uint8, device=self.residuals.buffers.keys[0].device)

    def stores(self, pages: torch.Tensor, slots: torch.Tensor, blocks: PageBlocks | None) -> Moves:
        """Of device slots to pages of the host, as of :meth:`ResidualPages.write`."""
        for part, of_slots, of_blocks in self._spans(pages, slots, blocks):
            yield partial(self._write, of_slots, of_blocks), partial(self._to_host, runs(part))

    def loads(self, pages: torch.Tensor, slots: torch.Tensor, blocks: PageBlocks | None, stored: bool) -> Moves:
        """Of pages of the host to device slots; ``stored``: stores of them have ended, so that sizes are known."""
        for part, of_slots, of_blocks in self._spans(pages, slots, blocks):
            yield partial(self._from_host, part, self._needed(part, of_blocks, stored)), partial(self._read, of_slots, of_blocks)

    def loaded_bytes(self, pages: torch.Tensor, blocks: PageBlocks | None, stored: bool) -> int:
        """Bytes that such loads bring."""
        return sum(self._needed(pages, blocks, stored))

    def _needed(self, pages: torch.Tensor, blocks: PageBlocks | None, stored: bool) -> list[int]:
        """Bytes of each page that have to come, from the beginning of its room."""
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

    def _rooms(self, half: torch.Tensor) -> torch.Tensor:
        return half[: self.buffer_pages * self.pool.page_bytes].view(self.buffer_pages, -1)

    def _sizes_in(self, half: torch.Tensor) -> torch.Tensor:
        return half[self.buffer_pages * self.pool.page_bytes :].view(torch.int64)

    def _write(self, slots: torch.Tensor, blocks: PageBlocks | None, half: torch.Tensor) -> None:
        count = len(slots) // self.pool.page_size
        self.residuals.write(slots, None if blocks is None else blocks.slots, self._rooms(half)[:count], self._sizes_in(half)[:count])

    def _read(self, slots: torch.Tensor, blocks: PageBlocks | None, half: torch.Tensor) -> None:
        count = len(slots) // self.pool.page_size
        self.residuals.read(self._rooms(half)[:count], self._sizes_in(half)[:count], slots, None if blocks is None else blocks.slots)

    def _to_host(self, moved: tuple[PageRun, ...], half: torch.Tensor) -> None:
        frames, sizes = self._rooms(half), self._sizes_in(half)
        for run in moved:
            there, here = slice(run.first, run.first + run.count), slice(run.place, run.place + run.count)
            self.pool.frames[there].copy_(frames[here], non_blocking=True)
            self.pool.sizes[there].copy_(sizes[here], non_blocking=True)

    def _from_host(self, pages: torch.Tensor, needed: list[int], half: torch.Tensor) -> None:
        frames, sizes = self._rooms(half), self._sizes_in(half)
        for run in runs(pages):
            sizes[run.place : run.place + run.count].copy_(self.pool.sizes[run.first : run.first + run.count], non_blocking=True)
        for place, (page, size) in enumerate(zip(pages.tolist(), needed, strict=True)):
            frames[place, :size].copy_(self.pool.frames[page, :size], non_blocking=True)
