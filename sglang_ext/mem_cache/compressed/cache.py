"""Compressed KV of all requests: allocation, sharing, release and counters.

policy.py decides when compressed KV is created or refreshed. compression_method.py writes it.

The token table has a second row for each request, its draft row: the request's row index plus the number of ordinary rows. A draft row
has the slots of the compressed KV, then those of the tokens after it. Stock attention backends read it like any other row. One forward
therefore serves requests on full KV and on compressed KV.
"""

import logging
from collections import Counter
from collections.abc import Callable, ItemsView
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.common import evict_from_tree_cache

from sglang_ext.core import RequestState
from sglang_ext.mem_cache.compressed.compression_method import CompressedKVWriter, CompressionMethod, initial_selection
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.base import KVLayout, PlainLayout
from sglang_ext.mem_cache.compressed.queries import QueryWindows
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressed.row_exchange import NewestRows
from sglang_ext.mem_cache.compressors.compressor import ScoresError
from sglang_ext.mem_cache.prefix_cache.nodes import SharedPrefix
from sglang_ext.mem_cache.prefix_cache.segments import CompressedKV, Segment

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressed.async_selector import AsyncSelector

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class CompressedKVCache:
    """All compressed KV of one scheduler process: its slots and its readers.

    Attributes:
        methods: Methods that requests may ask for. The first is the default.
        token_table: int32 [2 * rows, width], ordinary rows first, draft rows after.
        tree_cache: SGLang's radix cache, which evicts when slots run out.
        rotary: The model's rotary embedding; None if no method needs it.
        state_of: Returns the state of the request in a row.
        async_selector: Selects tokens while steps run, on a second stream or in other processes; None if methods select between steps.
        on_processes_changed: Called when selecting processes started or ended.
        frees_full_kv: Whether full KV is freed where compressed KV holds all of it (quantized_only.py).
        min_shared: Minimum prefix tokens of a shared segment. A shorter one would save too little memory.
        num_compressions: Number of compressions and refreshes, by the name of the compressed KV.
        refused: Names of compressors whose scores cannot be used. They create no compressed KV any more.
    """

    methods: tuple[CompressionMethod, ...]
    token_table: torch.Tensor
    rows: int
    buffers: KVBuffers
    allocator: object
    tree_cache: object
    queries: QueryWindows
    rotary: Rotary | None = None
    state_of: Callable[[int], RequestState] = lambda row: RequestState("", row, 0)
    layout: KVLayout = PlainLayout()
    async_selector: "AsyncSelector | None" = None
    on_processes_changed: Callable[[], None] = lambda: None
    frees_full_kv: bool = False
    min_shared: int = 256
    num_compressions: Counter[str] = field(default_factory=Counter)
    refused: set[str] = field(default_factory=set)
    _by_row: dict[int, CompressedKV] = field(default_factory=dict)

    @cached_property
    def _writer(self) -> CompressedKVWriter:
        return CompressedKVWriter(self.token_table, self.rows, self.buffers, self.queries, self.rotary, self.state_of, self.layout)

    def method(self, row: int) -> CompressionMethod:
        """The compression method of the request in ``row``."""
        return self.methods[self.state_of(row).method]

    def draft_row(self, row: int) -> int:
        """Index of the draft row of the request in ``row``."""
        return row + self.rows

    def max_covered(self, row: int, tokens: int) -> int:
        """Upper limit of the tokens that new compressed KV can cover, of a request's first ``tokens``. Not rounded to units.

        If the method scores by queries, tokens after the newest recorded ones stay exact, as recent tokens do: no query attends to them.
        """
        method = self.method(row)
        newest = self.queries.newest(row) if method.compressor.window else None
        oldest = max(0, tokens - method.recent)
        return oldest if newest is None else min(oldest, newest)

    def has_queries(self, row: int) -> bool:
        """Whether the request in ``row`` has as many recorded queries as its method needs."""
        return self.queries.has_enough(row, self.method(row).compressor.window)

    def compile_kernels(self, query_heads: int) -> None:
        """Compress unowned slots with each method, so that no request waits for kernel compilation."""
        for method in self.methods:
            try:
                self._writer.compile_kernels(method, query_heads)
            except ScoresError as error:
                self._refuse(method, error)
        if self.async_selector is not None:
            self.async_selector.compile_kernels()

    def _refuse(self, method: CompressionMethod, error: ScoresError) -> None:
        """Stop compressing with ``method``, and log the reason once."""
        if method.compressor.name not in self.refused:
            self.refused.add(method.compressor.name)
            logger.error("sglang-ext: %s. Until then its requests are served with full KV.", error)

    def is_refused(self, row: int) -> bool:
        """Whether the request in ``row`` cannot be compressed, because its method's scores cannot be used."""
        return self.method(row).compressor.name in self.refused

    def get(self, row: int) -> CompressedKV | None:
        """The compressed KV of the request in ``row``; None for none."""
        return self._by_row.get(row)

    def can_lack_full_kv(self, row: int) -> bool:
        """Whether the full KV of the request in ``row`` may be missing here, so that the request needs its compressed KV."""
        freed_full_kv = self.tree_cache.freed_full_kv
        return freed_full_kv is not None and freed_full_kv.can_lack_full_kv(row)

    def is_usable_without_refresh(self, row: int) -> bool:
        """Whether compressed KV that cannot be refreshed stays usable: another process exchanges its rows, or it is the request's only KV."""
        return self.row_sender is not None and (self.row_sender.num_held_tokens(row) > 0 or self.can_lack_full_kv(row))

    @property
    def row_sender(self) -> "AsyncSelector | None":
        """The selector whose processes may hold the full KV of requests and send rows of it; None if there is none."""
        return self.async_selector if self.async_selector is not None and self.async_selector.sends_rows else None

    def poll(self) -> None:
        """Poll the processes that select tokens, if any. Called between forwards, and while the scheduler is idle."""
        if self.async_selector is None:
            return
        before = self.async_selector.processes
        self.async_selector.poll()
        if self.async_selector.processes != before:
            self.on_processes_changed()

    def items(self) -> ItemsView[int, CompressedKV]:
        """All compressed KV, by request row."""
        return self._by_row.items()

    @property
    def owned_slot_count(self) -> int:
        """Slots that compressed KV owns. Slots of shared segments belong to the prefix tree."""
        return sum(len(compressed.own) + (0 if compressed.back_slots is None else len(compressed.back_slots)) for compressed in self._by_row.values())

    def all_slots(self) -> torch.Tensor:
        """Slots that compressed KV owns: int64 [owned_slot_count]."""
        return torch.cat([self.token_table.new_empty(0, dtype=torch.int64), *(compressed.owned_slots for compressed in self._by_row.values())])

    def held_bytes(self) -> int:
        """Bytes of all compressed KV, over all layers. Shared segments count once."""
        return self.buffers.bytes_per_slot * (self.owned_slot_count + self.tree_cache.segments.held_tokens)

    @property
    def share(self) -> float:
        """Approximate slots of compressed KV, as a share of full KV's. Without compressed KV, the first method's share."""
        covered = sum(compressed.covered for compressed in self._by_row.values())
        if not covered:
            return self.methods[0].share
        return sum(self.method(row).share * compressed.covered for row, compressed in self._by_row.items()) / covered

    def compress(
        self, row: int, tokens: int, headroom: int = 0, prefix: SharedPrefix | None = None, is_prompt_unfinished: bool = False
    ) -> bool:
        """Create or refresh the compressed KV of the request in ``row`` over its first ``tokens`` tokens.

        It covers the sinks and whole units after them, up to the newest recorded queries (:meth:`max_covered`). New compressed KV reads the
        prefix tree's segments of its method for ``prefix``, and attaches a new segment for the rest of the prefix. A refresh keeps the
        shared segments, and overwrites and grows the owned slots. Some layouts share nothing (:attr:`KVLayout.shareable`).

        Args:
            tokens: Tokens whose full KV is exact.
            headroom: Slots that must stay free or evictable for decoding.
            prefix: The prefix that new compressed KV may share; None for nothing.
            is_prompt_unfinished: Whether the prompt is still being prefilled. Its first round then refreshes the compressed KV.

        Returns:
            False in two cases. The pool lacks slots: existing compressed KV stays as it is, and nothing is evicted. Or the method's scores cannot be
            used (:meth:`is_refused`): the request then has no compressed KV.
        """
        method, max_covered = self.method(row), self.max_covered(row, tokens)
        covered = method.covered(max_covered)
        if covered == 0:
            return False
        refresh_after = method.next_refresh(max_covered) if self.frees_full_kv and method.packs_all else 0
        refresh_after = covered if is_prompt_unfinished else refresh_after
        old = self._by_row.get(row)
        if old is not None:
            self._flush_selection(row)
            return self._resize(row, replace(old, covered=covered, tail_end=0, refresh_after=refresh_after), headroom, None, tokens)
        prefix = prefix if self.layout.shareable else None
        segments = []
        if prefix is not None:
            length = min(prefix.tokens, covered)
            segments = self.tree_cache.nodes.segments_to(prefix.node, length, method.name, method.sinks)
        for segment in segments:
            # Otherwise the allocation for the rest could evict them.
            self.tree_cache.segments.use(segment)
        no_slots = self.token_table.new_empty(0, dtype=torch.int64)
        compressed = CompressedKV(no_slots, covered, segments, sinks=method.sinks, refresh_after=refresh_after)
        is_created = self._resize(row, compressed, headroom, prefix, tokens)
        if not is_created:
            for segment in segments:
                self.tree_cache.segments.release(segment)
        return is_created

    def _resize(self, row: int, compressed: CompressedKV, headroom: int, prefix: SharedPrefix | None, tokens: int) -> bool:
        """Allocate the missing slots of ``compressed``, fill it, and publish it to the draft row. Returns False if the pool lacks the slots."""
        method, end = self.method(row), compressed.shared_len
        packing = method.packing
        if prefix is not None:
            shareable = method.covered(min(prefix.tokens, compressed.covered))
            end = shareable if shareable - end >= self.min_shared else end
        shared = method.num_kept(end - compressed.shared_len)
        own = method.num_own_tokens(compressed, end, shared)
        segment_slots = packing.held_slots(shared)
        end_of_own = segment_slots + compressed.sinks + packing.held_slots(own)
        spare = packing.held_slots(own) if self.async_selector is not None and not self.async_selector.in_place else 0
        slots = self._resize_slots(compressed.owned_slots, end_of_own + spare, headroom)
        if slots is None:
            return False
        has_sinks = len(compressed.own) > 0
        # Cloned: Triton would compile its kernels again for a tensor that is not aligned to 16 bytes.
        compressed.own, new_segment = slots[segment_slots:end_of_own].clone(), None
        selects_in_steps = self.async_selector is not None or self.layout.selects_in_attention
        compressed.back_slots = slots[end_of_own:].clone() if selects_in_steps else None
        # If all tokens are kept, packed tokens stay as they are: full KV does not change.
        num_filled = min(compressed.own_tokens, own) if method.compressor.keeps_all else 0
        compressed.own_tokens, compressed.own_packed = own, packing.packed_slots(own)
        if shared:
            new_segment = Segment(
                compressed.shared_len, end, slots[:segment_slots].clone(), tokens=shared, packed=packing.packed_slots(shared), method=method.name
            )
            compressed.segments.append(new_segment)
        try:
            kept = self._resolve_selection(row, compressed)
            self._writer.write(method, row, compressed, new_segment, num_filled, tokens, has_sinks, kept)
        except ScoresError as error:
            self._refuse(method, error)
            if new_segment is not None:
                compressed.segments.remove(new_segment)
            self._free(slots, compressed.segments if self._by_row.pop(row, None) else [])
            return False
        self.num_compressions[compressed.method] += 1
        if new_segment is not None:
            self.tree_cache.nodes.attach(prefix.node, new_segment)
            self.tree_cache.segments.use(new_segment)
        self._by_row[row] = compressed
        if not method.compressor.follows_queries:
            # Its queries are useless until the next refresh. Another request may need the ring.
            self.queries.forget(row)
        return True

    def _resolve_selection(self, row: int, compressed: CompressedKV) -> torch.Tensor | NewestRows | None:
        """The ``kept`` of :meth:`CompressedKVWriter.write` for compressed KV with all slots that it reads."""
        method, wanted = self.method(row), (compressed.covered, compressed.own_tokens)
        if self.row_sender is None:
            return initial_selection(method.compressor, self.buffers, *wanted)
        if self.can_lack_full_kv(row):
            return self.async_selector.plan_refresh(row, *wanted)
        kept = self._writer.select(method, row, compressed)
        self.async_selector.on_compressed(row, compressed.covered, kept)
        return kept

    def insert(self, row: int, compressed: CompressedKV) -> None:
        """Give the request in ``row`` compressed KV that another server packs. Its slots may not be filled yet."""
        compressed.method = self.method(row).full_name(self.method(row).compressor)
        self.token_table[self.draft_row(row), : compressed.num_slots] = compressed.slots.to(self.token_table.dtype)
        self.layout.on_filled(self.draft_row(row), compressed)
        self._by_row[row] = compressed

    def reselect(self, row: int, end: int, every: int) -> None:
        """Select tokens again for the request in ``row`` between two steps of a round, if its selection interval, ``every`` steps, has ended.

        The compressed KV covers the same tokens and keeps the same number in the same slots, so that the plan of the round stays valid.
        Newer tokens follow it in the draft row. ``end`` is the position after that of the newest query.
        """
        method, compressed = self.method(row), self._by_row[row]
        if method.compressor.synchronous or (end - compressed.covered) % every or self.is_refused(row):
            return
        try:
            self._writer.reselect(method, row, compressed, end)
        except ScoresError as error:
            self._refuse(method, error)
        else:
            self.num_compressions[compressed.method] += 1

    def write_selection(self, row: int, layers: slice, kept: torch.Tensor) -> None:
        """Replace the selection of some layers by ``kept``, int64 [layers, kv_heads, count]: positions, as many as before."""
        compressed = self._by_row[row]
        source, targets = self.token_table[row, : compressed.covered].long(), compressed.own[compressed.sinks :]
        self.method(row).packing.write(self.buffers.of_layers(layers), kept, source, targets)
        # Count once for all groups of layers.
        self.num_compressions[compressed.method] += layers.stop == len(self.buffers.keys)

    def _resize_slots(self, slots: torch.Tensor, count: int, headroom: int) -> torch.Tensor | None:
        """Grow or shrink ``slots``, int64, to ``count``. Returns None if the pool lacks the slots."""
        missing = count - len(slots)
        if missing <= 0:
            self.allocator.free(slots[count:])
            return slots[:count]
        if self.allocator.available_size() + self.tree_cache.evictable_size() < missing + headroom:
            return None
        evict_from_tree_cache(self.tree_cache, missing)
        new = self.allocator.alloc(missing)
        return None if new is None else torch.cat([slots, new])

    def write_tail(self, row: int, end: int) -> None:
        """Point the draft row, after the compressed KV, to the slots of the full row's tokens ``[covered, end)``."""
        # A position keeps its slot unless on_row_moved is called, so only new positions are written.
        compressed = self._by_row[row]
        start = compressed.tail_end
        if start >= end:
            return
        shift = compressed.num_slots - compressed.covered
        tail = self.token_table[row, start:end]
        self.token_table[self.draft_row(row), start + shift : end + shift] = tail
        compressed.tail_end = end

    def on_row_moved(self, row: int, start: int) -> None:
        """Handle that a request's row points to other slots from position ``start`` on. The old slots are free.

        SGLang may move a prompt's tokens to other slots after the first round began: the prefix tree replaces slots of tokens that it
        already has. Draft rows and pointers then point to freed slots. Compressed KV of pointers is written again with the same queries, or freed if
        that is impossible.
        """
        compressed = self._by_row.get(row)
        if self.layout.points_to_full_kv:
            is_kept = compressed is not None and self.async_selector is None
            if not is_kept or not self._writer.rewrite_selection(self.method(row), row, compressed):
                self.release_compressed_kv(row)
                return
        if self.row_sender is not None:
            self.row_sender.on_slots_freed(row, is_remote_only=False)
        if compressed is not None:
            compressed.tail_end = max(compressed.covered, min(compressed.tail_end, start))

    def on_segment_split(self, first: Segment, rest: Segment) -> None:
        """Handle that ``first`` took over the first blocks of ``rest``. Readers of ``rest`` now read both, in the same slots."""
        for compressed in self._by_row.values():
            if rest in compressed.segments:
                compressed.segments.insert(compressed.segments.index(rest), first)

    def mark_tail_written(self, row: int, end: int) -> None:
        """Record that the draft row points to all positions before ``end``."""
        compressed = self._by_row[row]
        compressed.tail_end = max(compressed.tail_end, end)

    def release(self, row: int) -> None:
        """Free the compressed KV and the recorded queries of the request in ``row``."""
        self.release_compressed_kv(row)
        self.queries.forget(row)
        if self.async_selector is not None:
            self.async_selector.forget(row)

    def release_compressed_kv(self, row: int) -> None:
        """Free the compressed KV of the request in ``row``; no-op without one. Its recorded queries stay."""
        compressed = self._by_row.pop(row, None)
        if compressed is None:
            return
        self._flush_selection(row)
        self._free(compressed.owned_slots, compressed.segments)

    def _flush_selection(self, row: int) -> None:
        """Order later work after all launched writes to the slots of the request's compressed KV."""
        if self.async_selector is not None:
            self.async_selector.flush(row)

    def _free(self, own: torch.Tensor, segments: list[Segment]) -> None:
        self.allocator.free(own)
        for segment in segments:
            self.tree_cache.segments.release(segment)

    def largest_releasable_row(self) -> int | None:
        """Row of the request with the most compressed KV, of those whose full KV is on the device. None if there is none."""
        residency = self.tree_cache.residency
        rows = [row for row in self._by_row if residency is None or not residency.is_offloaded(row)]
        rows = [row for row in rows if not self.can_lack_full_kv(row)]
        return max(rows, key=lambda row: self._by_row[row].num_slots, default=None)

    def forget_all(self) -> None:
        """Drop all records. The pool itself is being cleared."""
        self._by_row.clear()
        self.queries.clear()
        if self.async_selector is not None:
            self.async_selector.forget_all()
