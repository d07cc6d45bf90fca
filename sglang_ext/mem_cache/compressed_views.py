"""Compressed copies of requests' KV: made, grown, released, counted.

The token table has a second row for each request (its index plus the number of ordinary rows): the
slots of the compressed copy, then those of the tokens after it. Stock attention backends read it like
any other row, so one forward serves both views.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from sglang.srt.mem_cache.common import evict_from_tree_cache

from sglang_ext.core import CompressedView
from sglang_ext.mem_cache.compressors import Compressor, ContextKV, kept_count
from sglang_ext.mem_cache.kv_buffers import KVBuffers
from sglang_ext.mem_cache.query_window import QueryWindows


@dataclass
class CompressedViews:
    """All compressed copies of one scheduler process.

    Attributes:
        compressor: chooses what a copy keeps.
        budget: share of the covered tokens that a copy keeps.
        token_table: int32 [2 * rows, width], ordinary rows first, draft rows after.
        rows: number of ordinary rows.
        buffers: the layers of SGLang's KV pool.
        allocator: SGLang's slot allocator.
        tree_cache: SGLang's radix cache, asked to evict when slots run out.
        queries: the newest queries of each request.
    """

    compressor: Compressor
    budget: float
    token_table: torch.Tensor
    rows: int
    buffers: KVBuffers
    allocator: object
    tree_cache: object
    queries: QueryWindows
    _views: dict[int, CompressedView] = field(default_factory=dict)

    def get(self, row: int) -> CompressedView | None:
        """The compressed copy of the request in ``row``."""
        return self._views.get(row)

    @property
    def held_tokens(self) -> int:
        """Slots of all copies."""
        return sum(view.kept for view in self._views.values())

    def all_slots(self) -> torch.Tensor:
        """Slots of all copies: int64 [held_tokens]."""
        empty = self.token_table.new_empty(0, dtype=torch.int64)
        return torch.cat([empty, *(view.slots for view in self._views.values())])

    def free_slots(self) -> torch.Tensor:
        """Slots that SGLang's allocator could hand out: int64 [free]."""
        page = self.allocator.page_size
        pages = torch.cat([self.allocator.free_pages, self.allocator.release_pages])
        within = torch.arange(page, device=pages.device)
        return (pages[:, None] * page + within).flatten()

    def held_bytes(self) -> int:
        """Bytes of KV in all copies, over all layers."""
        return self.buffers.bytes_per_slot * self.held_tokens

    def draft_row(self, row: int) -> int:
        """Index of the draft row of the request in ``row``."""
        return row + self.rows

    def compress(self, row: int, tokens: int, headroom: int = 0) -> bool:
        """Make or renew the copy of the request in ``row`` over its first ``tokens`` tokens.

        Covers whole pages, up to where queries were kept (:meth:`reach`). An existing copy is overwritten in
        place and grown.

        Args:
            row: the request's row in the token table.
            tokens: tokens whose full KV is exact.
            headroom: slots that must stay free or evictable for decoding.

        Returns:
            False when the pool lacks the slots; an existing copy then stays as it is, and nothing
            was evicted for it.
        """
        page = self.allocator.page_size
        covered = self.reach(row, tokens) // page * page
        if covered == 0:
            return False
        count = kept_count(covered, self.budget, page)
        slots = self._slots_for(row, count, headroom)
        if slots is None:
            return False
        view = CompressedView(slots=slots, covered=covered)
        self._views[row] = view
        self._fill(row, view)
        return True

    def reach(self, row: int, tokens: int) -> int:
        """Of a request's first ``tokens`` tokens, those that a copy made now would cover, before it counts in pages.

        What came after the newest queries that were kept, nobody attended to: it stays exact instead.
        """
        newest = self.queries.newest(row)
        return tokens if newest is None else min(tokens, newest)

    def compile_kernels(self, query_heads: int) -> None:
        """Compress what lies in slot 0, which no request owns, so that no request waits for compilers."""
        keys, tokens = self.buffers.keys[0], 4 * self.compressor.window + 64
        slots = torch.zeros(tokens, dtype=torch.int64, device=keys.device)
        window = keys.new_zeros(len(self.buffers.keys), self.compressor.window, query_heads, keys.shape[-1])
        positions = torch.arange(tokens - self.compressor.window, tokens, device=keys.device)
        context = ContextKV(self.buffers, slots, window, positions)
        kept = self.compressor.select_all(context, tokens // 2)
        self.buffers.copy_kept(kept[..., :1], slots, slots[:1])

    def _slots_for(self, row: int, count: int, headroom: int) -> torch.Tensor | None:
        """``count`` slots for the request in ``row``: those it has, grown or cut; None when full."""
        old = self._views.get(row)
        slots = old.slots if old else self.token_table.new_empty(0, dtype=torch.int64)
        missing = count - len(slots)
        if missing <= 0:
            self.allocator.free(slots[count:])
            return slots[:count]
        if self.allocator.available_size() + self.tree_cache.evictable_size() < missing + headroom:
            return None
        evict_from_tree_cache(self.tree_cache, missing)
        new = self.allocator.alloc(missing)
        return None if new is None else torch.cat([slots, new])

    def _fill(self, row: int, view: CompressedView) -> None:
        """Gather the chosen KV of each layer into the copy's slots, write the draft row."""
        source = self.token_table[row, : view.covered].long()
        buffers = self.buffers
        found = self.queries.get(row, view.covered)
        if found is None:
            key = buffers.keys[0]
            found = key.new_empty(len(buffers.keys), 0, *key.shape[1:]), source.new_empty(0)
        context = ContextKV(buffers, source, *found)
        buffers.copy_kept(self.compressor.select_all(context, view.kept), source, view.slots)
        self.token_table[self.draft_row(row), : view.kept] = view.slots.to(self.token_table.dtype)

    def write_tail(self, row: int, end: int) -> None:
        """Let the draft row lead, after the copy, to the full row's tokens ``[covered, end)``.

        A position keeps its slot while its request runs, so only what is new is written.
        """
        view = self._views[row]
        start = view.tail_end
        if start >= end:
            return
        shift = view.kept - view.covered
        tail = self.token_table[row, start:end]
        self.token_table[self.draft_row(row), start + shift : end + shift] = tail
        view.tail_end = end

    def tail_written(self, row: int, end: int) -> None:
        """Note that the draft row leads to all positions before ``end``."""
        view = self._views[row]
        view.tail_end = max(view.tail_end, end)

    def release(self, row: int) -> None:
        """Free the copy and the queries of the request in ``row``."""
        self.release_copy(row)
        self.queries.forget(row)

    def release_copy(self, row: int) -> None:
        """Free the copy of the request in ``row``; no-op without one. Its queries stay."""
        view = self._views.pop(row, None)
        if view is not None:
            self.allocator.free(view.slots)

    def largest(self) -> int | None:
        """Row of the request with the largest copy."""
        return max(self._views, key=lambda row: self._views[row].kept, default=None)

    def forget_all(self) -> None:
        """Drop all records; the pool itself is being cleared."""
        self._views.clear()
        self.queries.clear()


def give_back_when_full(original: Callable, batch, selected_indices: list[int] | None = None) -> bool:
    """Hook around ``ScheduleBatch.check_decode_mem``: copies go before requests are retracted."""
    fits = original(batch, selected_indices)
    views = getattr(batch.tree_cache, "views", None)
    while not fits and views is not None and (row := views.largest()) is not None:
        views.release_copy(row)
        fits = original(batch, selected_indices)
    return fits
