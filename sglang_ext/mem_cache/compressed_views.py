"""Compressed copies of requests' KV: made, grown, released, counted.

The token table has a second row for each request (its index plus the number of ordinary rows): the
slots of the compressed copy, then those of the tokens after it. Stock attention backends read it like
any other row, so one forward serves both views.
"""

from collections import Counter
from collections.abc import Callable, ItemsView, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from sglang.srt.mem_cache.common import evict_from_tree_cache

from sglang_ext.core import CompressedView
from sglang_ext.mem_cache.compressors import Compressor, ContextKV, Part, kept_count
from sglang_ext.mem_cache.head_cells import HeadCells
from sglang_ext.mem_cache.kv_buffers import KVBuffers
from sglang_ext.mem_cache.packing import PackedRows, Packing, Unpacked
from sglang_ext.mem_cache.query_window import QueryWindows
from sglang_ext.mem_cache.recompute import lost_requests
from sglang_ext.mem_cache.rotary import Rotary
from sglang_ext.mem_cache.segments import Segment, free_slots
from sglang_ext.mem_cache.slot_pointers import PointerRows, Pointers
from sglang_ext.mem_cache.tiered_node import TieredNode

# Tokens of a prefix from which on a copy of it that others may read is worth its keeping.
MIN_SHARED = 256


class Prefix(NamedTuple):
    """The beginning of a context with which others began before.

    Attributes:
        node: of the prefix tree, locked; the beginning lies on its path.
        tokens: of the beginning.
    """

    node: TieredNode
    tokens: int


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
        rotary: the model's rotary embedding, for a compressor that needs it.
        prompt_of: token ids of the prompt of the request in a row.
        made: copies that were made or renewed, by the method that chose what they keep.
        packs: name of the method that packs copies; empty for none.
        packed_rows: how copies are packed, and which rows begin with blocks; None for copies of tokens as they are.
        packing: how copies lie in slots.
        head_cells: what the cells of copies hold whose heads keep different numbers of tokens; None where numbers are equal.
        pointer_rows: how copies lead into full KV, and which rows begin with pointers; None for copies that hold KV.
    """

    compressor: Compressor
    budget: float
    token_table: torch.Tensor
    rows: int
    buffers: KVBuffers
    allocator: object
    tree_cache: object
    queries: QueryWindows
    rotary: Rotary | None = None
    prompt_of: Callable[[int], Sequence[int]] = lambda row: ()
    made: Counter[str] = field(default_factory=Counter)
    packs: str = ""
    packed_rows: PackedRows | None = None
    head_cells: HeadCells | None = None
    pointer_rows: PointerRows | None = None
    packing: Packing | Pointers | Unpacked = field(init=False)
    _views: dict[int, CompressedView] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.packed_rows is not None:
            self.packing = self.packed_rows.packing
        elif self.pointer_rows is not None:
            self.packing = self.pointer_rows.pointers
        else:
            self.packing = Unpacked(self.allocator.page_size)

    def get(self, row: int) -> CompressedView | None:
        """The compressed copy of the request in ``row``."""
        return self._views.get(row)

    def copies(self) -> ItemsView[int, CompressedView]:
        """All copies, by their requests' rows."""
        return self._views.items()

    @property
    def held_tokens(self) -> int:
        """Slots that copies hold alone; those of segments are the prefix tree's."""
        return sum(len(view.own) for view in self._views.values())

    def all_slots(self) -> torch.Tensor:
        """Slots that copies hold alone: int64 [held_tokens]."""
        return torch.cat([self._no_slots(), *(view.own for view in self._views.values())])

    def _no_slots(self) -> torch.Tensor:
        return self.token_table.new_empty(0, dtype=torch.int64)

    def free_slots(self) -> torch.Tensor:
        """Slots that SGLang's allocator could hand out: int64 [free]."""
        return free_slots(self.allocator)

    def held_bytes(self) -> int:
        """Bytes of KV in all copies, over all layers; what several share counts once."""
        return self.buffers.bytes_per_slot * (self.held_tokens + self.tree_cache.segments.held_tokens)

    @property
    def recent(self) -> int:
        """Newest tokens of a context that copies leave as they are."""
        return self.packing.recent

    @property
    def unit(self) -> int:
        """Tokens of which copies cover, share and keep whole multiples: those of a page, and of a packed block."""
        return self.packing.unit

    @property
    def share(self) -> float:
        """Of the slots of full KV, those that a copy takes, about."""
        return self.budget * self.packing.share

    def draft_row(self, row: int) -> int:
        """Index of the draft row of the request in ``row``."""
        return row + self.rows

    def compress(self, row: int, tokens: int, headroom: int = 0, prefix: Prefix | None = None) -> bool:
        """Make or renew the copy of the request in ``row`` over its first ``tokens`` tokens.

        Covers whole units, up to where queries were kept (:meth:`reach`). A new copy reads the segments of ``prefix`` that
        the prefix tree has, and leaves one there for the rest of it. Of an existing copy what it shares stays; its own
        part is overwritten in place and grown. Copies of uneven heads share nothing: how much each head keeps of a beginning
        depends on what follows it. Neither do pointers, which are chosen anew in each round.

        Args:
            row: the request's row in the token table.
            tokens: tokens whose full KV is exact.
            headroom: slots that must stay free or evictable for decoding.
            prefix: what a new copy may share; None for nothing.

        Returns:
            False when the pool lacks the slots; an existing copy then stays as it is, and nothing
            was evicted for it.
        """
        covered = self.reach(row, tokens) // self.unit * self.unit
        if covered == 0:
            return False
        old = self._views.get(row)
        if old is not None:
            grown = CompressedView(old.own, covered, old.segments, own_tokens=old.own_tokens)
            return self._resize(row, grown, headroom, None, tokens)
        prefix = prefix if self.head_cells is None and self.pointer_rows is None else None
        segments = self.tree_cache.path_segments(prefix.node, min(prefix.tokens, covered)) if prefix else []
        for segment in segments:
            # Or they would be evicted for the rest.
            self.tree_cache.use(segment)
        made = self._resize(row, CompressedView(self._no_slots(), covered, segments), headroom, prefix, tokens)
        if not made:
            for segment in segments:
                self.tree_cache.release(segment)
        return made

    def _resize(self, row: int, view: CompressedView, headroom: int, prefix: Prefix | None, tokens: int) -> bool:
        """Give ``view`` the slots that it lacks, fill it, and let the request read it; False when the pool lacks them."""
        end = view.shared
        if prefix is not None:
            shareable = min(prefix.tokens, view.covered) // self.unit * self.unit
            end = shareable if shareable - end >= MIN_SHARED else end
        shared = kept_count(end - view.shared, self.budget, self.unit) if end > view.shared else 0
        own = self._own_count(view, end, shared)
        slots = self._slots_for(view.own, self.packing.held_slots(shared) + self.packing.held_slots(own), headroom)
        if slots is None:
            return False
        # Copied, or Triton would compile its kernels again for a tensor that begins elsewhere than at 16 bytes.
        view.own, made = slots[self.packing.held_slots(shared) :].clone(), None
        # Where all tokens are kept, those that are packed stay: full KV does not change.
        done = min(view.own_tokens, own) if self.compressor.keeps_all else 0
        view.own_tokens, view.own_packed = own, self.packing.packed_slots(own)
        if shared:
            mine = slots[: self.packing.held_slots(shared)].clone()
            made = Segment(view.shared, end, mine, tokens=shared, packed=self.packing.packed_slots(shared))
            self.tree_cache.attach(prefix.node, made)
            self.tree_cache.use(made)
            view.segments.append(made)
        self._views[row] = view
        self._fill(row, view, made, done, tokens)
        return True

    def _own_count(self, view: CompressedView, end: int, shared: int) -> int:
        """Tokens that a copy keeps of those from ``end`` on, where ``shared`` and its segments stand for those before.

        What is left of the budget, and the newest tokens in any case: they see what nobody has seen before.
        """
        unit, rest = self.unit, view.covered - end
        before = shared + sum(segment.tokens for segment in view.segments)
        newest = -(-max(1, self.compressor.window) // unit) * unit if end else 0
        return min(rest, max(kept_count(view.covered, self.budget, unit) - before, newest))

    def reach(self, row: int, tokens: int) -> int:
        """Of a request's first ``tokens`` tokens, those that a copy made now would cover, before it counts in units.

        What came after the newest queries that were kept, nobody attended to: it stays exact instead, as recent tokens do.
        """
        newest, oldest = self.queries.newest(row), max(0, tokens - self.recent)
        return oldest if newest is None else min(oldest, newest)

    def compile_kernels(self, query_heads: int) -> None:
        """Compress what lies in slot 0, which no request owns, so that no request waits for compilers."""
        keys, tokens = self.buffers.keys[0], 4 * self.compressor.window + max(64, self.unit)
        count = max(1, tokens // 2 // self.unit) * self.unit
        slots = torch.zeros(tokens, dtype=torch.int64, device=keys.device)
        window = keys.new_zeros(len(self.buffers.keys), self.compressor.window, query_heads, keys.shape[-1])
        positions = torch.arange(tokens - self.compressor.window, tokens, device=keys.device)
        context = ContextKV(self.buffers, slots, window, positions, self.rotary)
        if self.head_cells is not None:
            cells = self.compressor.select_cells(context, Part(0, tokens, count))
            self.head_cells.copy(cells, slots, slots.new_zeros(count))
            return
        (kept,) = self.compressor.select(context, [Part(0, tokens, count)])
        self.packing.write(self.buffers, kept, slots, slots.new_zeros(self.packing.held_slots(count)))

    def _slots_for(self, slots: torch.Tensor, count: int, headroom: int) -> torch.Tensor | None:
        """``slots``, int64, grown or cut to ``count``; None when the pool lacks them."""
        missing = count - len(slots)
        if missing <= 0:
            self.allocator.free(slots[count:])
            return slots[:count]
        if self.allocator.available_size() + self.tree_cache.evictable_size() < missing + headroom:
            return None
        evict_from_tree_cache(self.tree_cache, missing)
        new = self.allocator.alloc(missing)
        return None if new is None else torch.cat([slots, new])

    def _fill(self, row: int, view: CompressedView, made: Segment | None, done: int, tokens: int) -> None:
        """Gather the chosen KV of each layer into a copy's own slots, after ``done`` tokens there, and into a segment's.

        Writes the draft row.
        """
        source = self.token_table[row, : view.covered].long()
        buffers = self.buffers
        # The newest queries are of tokens that stay as they are, where blocks leave some out.
        found = self.queries.get(row, tokens if view.packed else view.covered)
        if found is None:
            key = buffers.keys[0]
            found = key.new_empty(len(buffers.keys), 0, *key.shape[1:]), source.new_empty(0)
        rest = Part(view.shared + done, view.covered, view.own_tokens - done)
        targets = {rest: view.own[self.packing.packed_slots(done) :]}
        if made is not None:
            targets[Part(made.start, made.end, made.tokens)] = made.slots
        context = ContextKV(buffers, source, *found, self.rotary, self.prompt_of(row))
        compressor = self.compressor.for_context(context)
        view.method = "+".join(name for name in (compressor.name, self.packs) if name)
        self.made[view.method] += 1
        if self.head_cells is not None:
            self.head_cells.write(self.draft_row(row), compressor.select_cells(context, rest), source, view.own)
        else:
            parts = [part for part in targets if part.count]
            for part, kept in zip(parts, compressor.select(context, parts)):
                self.packing.write(buffers, kept, source, targets[part])
        self.token_table[self.draft_row(row), : view.kept] = view.slots.to(self.token_table.dtype)
        if self.packed_rows is not None:
            self.packed_rows.slots[self.draft_row(row)] = view.packed
        if self.pointer_rows is not None:
            self.pointer_rows.counts[self.draft_row(row)] = view.own_tokens

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
        if view is None:
            return
        self.allocator.free(view.own)
        for segment in view.segments:
            self.tree_cache.release(segment)

    def largest(self) -> int | None:
        """Row of the request with the largest copy that it can do without; others have their full KV on the host."""
        residency = self.tree_cache.residency
        rows = [row for row in self._views if residency is None or not residency.is_stale(row)]
        return max(rows, key=lambda row: self._views[row].kept, default=None)

    def forget_all(self) -> None:
        """Drop all records; the pool itself is being cleared."""
        self._views.clear()
        self.queries.clear()


def give_back_when_full(original: Callable, batch, selected_indices: list[int] | None = None) -> bool:
    """Hook around ``ScheduleBatch.check_decode_mem``: copies go before requests are retracted; those that are lost go at once."""
    if selected_indices is None and lost_requests(batch):
        return False
    fits = original(batch, selected_indices)
    views = getattr(batch.tree_cache, "views", None)
    while not fits and views is not None and (row := views.largest()) is not None:
        views.release_copy(row)
        fits = original(batch, selected_indices)
    if getattr(batch.tree_cache, "residency", None) is not None:
        # SGLang looks for room again only when a request is done. Here it also comes as full KV leaves the device.
        batch.batch_is_full = False
    return fits
