"""Compressed copies of requests' KV: how they are grown, shared, released and counted. When one is due says policy.py;
compression_method.py writes them.

The token table has a second row for each request (its index plus the number of ordinary rows): the
slots of the compressed copy, then those of the tokens after it. Stock attention backends read it like
any other row, so one forward serves both views.
"""

import logging
from collections import Counter
from collections.abc import Callable, ItemsView, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from sglang.srt.mem_cache.common import evict_from_tree_cache

from sglang_ext.core import CompressedKV
from sglang_ext.mem_cache.compressed.async_selector import AsyncSelector
from sglang_ext.mem_cache.compressed.remote_selector import RemoteSelector, RowSender
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod, CompressedKVWriter
from sglang_ext.mem_cache.compressed.layouts.base import KVLayout, PlainLayout
from sglang_ext.mem_cache.compressed.row_exchange import ReceivedRows
from sglang_ext.mem_cache.compressed.resolve_selection import resolve_selection
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.queries import QueryWindows
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors.contracts.compressor import ScoresError
from sglang_ext.mem_cache.prefix_cache.nodes import SharedPrefix
from sglang_ext.mem_cache.prefix_cache.segments import Segment, free_slots

logger = logging.getLogger(__name__)

# Tokens of a prefix from which on a copy of it that others may read is worth its keeping.
MIN_SHARED = 256


@dataclass(kw_only=True)
class CompressedKVCache:
    """All compressed copies of one scheduler process: their slots, and who reads them.

    Attributes:
        methods: that requests may ask for, the one of those that ask for none first.
        token_table: int32 [2 * rows, width], ordinary rows first, draft rows after.
        rows: number of ordinary rows.
        buffers: the layers of SGLang's KV pool.
        allocator: SGLang's slot allocator.
        tree_cache: SGLang's radix cache, asked to evict when slots run out.
        queries: the newest queries of each request.
        rotary: the model's rotary embedding, for a compressor that needs it.
        method_index_of: place in :attr:`methods` of what the request in a row asked for.
        prompt_of: token ids of the prompt of the request in a row.
        namespace_of: what its KV depends on beside tokens, as the prefix tree has it; None where tokens do not tell.
        layout: in which copies lie in their slots.
        remote_selector: who chooses tokens in another process; None where methods choose here.
        async_selector: who chooses them on a GPU beside steps; None where methods choose between steps.
        on_processes_changed: told where processes that choose have come or gone.
        frees_full_kv: whether full KV goes where a copy holds all of it (quantized_only.py).
        made: copies that were made or renewed, by what they are called.
        refused: names of the compressors whose scores cannot be used, of which no copy is made any more.
    """

    methods: tuple[CompressionMethod, ...]
    token_table: torch.Tensor
    rows: int
    buffers: KVBuffers
    allocator: object
    tree_cache: object
    queries: QueryWindows
    rotary: Rotary | None = None
    method_index_of: Callable[[int], int] = lambda row: 0
    prompt_of: Callable[[int], Sequence[int]] = lambda row: ()
    namespace_of: Callable[[int], str | None] = lambda row: ""
    layout: KVLayout = PlainLayout()
    remote_selector: RemoteSelector | None = None
    async_selector: AsyncSelector | None = None
    on_processes_changed: Callable[[], None] = lambda: None
    frees_full_kv: bool = False
    made: Counter[str] = field(default_factory=Counter)
    refused: set[str] = field(default_factory=set)
    _views: dict[int, CompressedKV] = field(default_factory=dict)

    @cached_property
    def _writer(self) -> CompressedKVWriter:
        return CompressedKVWriter(self.token_table, self.buffers, self.queries, self.rotary, self.prompt_of, self.layout)

    def method(self, row: int) -> CompressionMethod:
        """What makes the copies of the request in ``row``."""
        return self.methods[self.method_index_of(row)]

    def draft_row(self, row: int) -> int:
        """Index of the draft row of the request in ``row``."""
        return row + self.rows

    def reach(self, row: int, tokens: int) -> int:
        """Of a request's first ``tokens`` tokens, those that a copy made now would cover, before it counts in units.

        What came after the newest queries that were kept, nobody attended to: where a method scores by queries it stays
        exact instead, as recent tokens do.
        """
        method = self.method(row)
        newest = self.queries.newest(row) if method.compressor.window else None
        oldest = max(0, tokens - method.recent)
        return oldest if newest is None else min(oldest, newest)

    def has_queries(self, row: int) -> bool:
        """Whether as many queries are kept of the request in ``row`` as its method scores by."""
        return self.queries.has_enough(row, self.method(row).compressor.window)

    def compile_kernels(self, query_heads: int) -> None:
        """Compress with each method what no request owns, so that no request waits for compilers."""
        for method in self.methods:
            try:
                self._writer.compile_kernels(method, query_heads)
            except ScoresError as error:
                self._refuse(method, error)
        if self.async_selector is not None:
            self.async_selector.compile_kernels()

    def _refuse(self, method: CompressionMethod, error: ScoresError) -> None:
        """Make no copies with ``method`` any more, and say why, once."""
        if method.compressor.name not in self.refused:
            self.refused.add(method.compressor.name)
            logger.error("sglang-ext: %s. Until then its requests are served with full KV.", error)

    def is_refused(self, row: int) -> bool:
        """Whether no copy can be made of the request in ``row``, by its method's scores."""
        return self.method(row).compressor.name in self.refused

    def get(self, row: int) -> CompressedKV | None:
        """The compressed copy of the request in ``row``."""
        return self._views.get(row)

    def can_lack_full_kv(self, row: int) -> bool:
        """Whether the request in ``row`` may lack full KV here, so that it cannot do without its copy."""
        codes = self.tree_cache.codes
        return codes is not None and codes.can_lack_full_kv(row)

    def is_usable_without_refresh(self, row: int) -> bool:
        """Whether the copy of the request in ``row`` is of use where it cannot be renewed: it holds rows that others exchange, or they
        are all that there is."""
        return self.row_sender is not None and (self.row_sender.holds(row) > 0 or self.can_lack_full_kv(row))

    @property
    def row_sender(self) -> RowSender | None:
        """Who may have the full KV of requests in the place of this process, and sends rows of it to their copies; None for nobody."""
        return next((each for each in (self.remote_selector, self.async_selector) if each is not None and each.sends_rows), None)

    def poll(self) -> None:
        """Look after the processes that choose, where others do: between forwards, and while nothing runs."""
        for each in filter(None, (self.remote_selector, self.async_selector)):
            before = each.processes
            each.poll()
            if each.processes != before:
                self.on_processes_changed()

    def copies(self) -> ItemsView[int, CompressedKV]:
        """All copies, by their requests' rows."""
        return self._views.items()

    @property
    def held_tokens(self) -> int:
        """Slots that copies hold alone; those of segments are the prefix tree's."""
        return sum(len(view.own) + (0 if view.back_slots is None else len(view.back_slots)) for view in self._views.values())

    def all_slots(self) -> torch.Tensor:
        """Slots that copies hold alone: int64 [held_tokens]."""
        return torch.cat([self._no_slots(), *(view.owned_slots for view in self._views.values())])

    def _no_slots(self) -> torch.Tensor:
        return self.token_table.new_empty(0, dtype=torch.int64)

    def free_slots(self) -> torch.Tensor:
        """Slots that SGLang's allocator could hand out: int64 [free]."""
        return free_slots(self.allocator)

    def held_bytes(self) -> int:
        """Bytes of KV in all copies, over all layers; what several share counts once."""
        return self.buffers.bytes_per_slot * (self.held_tokens + self.tree_cache.segments.held_tokens)

    @property
    def share(self) -> float:
        """Of the slots of full KV, those that copies take, about; without any, those that the first method's would take."""
        covered = sum(view.covered for view in self._views.values())
        if not covered:
            return self.methods[0].share
        return sum(self.method(row).share * view.covered for row, view in self._views.items()) / covered

    def compress(self, row: int, tokens: int, headroom: int = 0, prefix: SharedPrefix | None = None, is_prompt_unfinished: bool = False) -> bool:
        """Make or renew the copy of the request in ``row`` over its first ``tokens`` tokens.

        Covers the sinks and whole units after them, up to where queries were kept (:meth:`reach`). A new copy reads the
        segments of its method that the prefix tree has of ``prefix``, and leaves one there for the rest of it. Of an existing
        copy what it shares stays; its own part is overwritten in place and grown. Copies of some formats share nothing
        (:attr:`KVLayout.shareable`).

        Args:
            row: the request's row in the token table.
            tokens: tokens whose full KV is exact.
            headroom: slots that must stay free or evictable for decoding.
            prefix: what a new copy may share; None for nothing.
            is_prompt_unfinished: whether its prompt does: its first round renews the copy then.

        Returns:
            False when the pool lacks the slots; an existing copy then stays as it is, and nothing
            was evicted for it. Also where the method's scores cannot be used (:meth:`is_refused`); there is no copy then.
        """
        method, reach = self.method(row), self.reach(row, tokens)
        covered = method.covered(reach)
        if covered == 0:
            return False
        due = method.due(reach) if self.frees_full_kv and method.packs_all else 0
        due = covered if is_prompt_unfinished else due
        old = self._views.get(row)
        if old is not None:
            self._settle(row)
            grown = CompressedKV(
                old.own, covered, old.segments, sinks=old.sinks, own_tokens=old.own_tokens, back_slots=old.back_slots, refresh_after=due
            )
            return self._resize(row, grown, headroom, None, tokens)
        prefix = prefix if self.layout.shareable else None
        segments = []
        if prefix is not None:
            length = min(prefix.tokens, covered)
            segments = self.tree_cache.nodes.segments_to(prefix.node, length, method.name, method.sinks)
        for segment in segments:
            # Or they would be evicted for the rest.
            self.tree_cache.segments.use(segment)
        view = CompressedKV(self._no_slots(), covered, segments, sinks=method.sinks, refresh_after=due)
        made = self._resize(row, view, headroom, prefix, tokens)
        if not made:
            for segment in segments:
                self.tree_cache.segments.release(segment)
        return made

    def _resize(self, row: int, view: CompressedKV, headroom: int, prefix: SharedPrefix | None, tokens: int) -> bool:
        """Give ``view`` the slots that it lacks, fill it, and let the request read it; False when the pool lacks them."""
        method, end = self.method(row), view.shared_len
        packing = method.packing
        if prefix is not None:
            shareable = method.covered(min(prefix.tokens, view.covered))
            end = shareable if shareable - end >= MIN_SHARED else end
        shared = method.kept(end - view.shared_len)
        own = method.own(view, end, shared)
        held = packing.held_slots(shared)
        end_of_own = held + view.sinks + packing.held_slots(own)
        spare = packing.held_slots(own) if self.async_selector is not None and not self.async_selector.in_place else 0
        slots = self._slots_for(view.owned_slots, end_of_own + spare, headroom)
        if slots is None:
            return False
        renewed = len(view.own) > 0
        # Copied, or Triton would compile its kernels again for a tensor that begins elsewhere than at 16 bytes.
        view.own, made = slots[held:end_of_own].clone(), None
        in_steps = self.async_selector is not None or self.layout.chooses
        view.back_slots = slots[end_of_own:].clone() if in_steps else None
        # Where all tokens are kept, those that are packed stay: full KV does not change.
        done = min(view.own_tokens, own) if method.compressor.keeps_all else 0
        view.own_tokens, view.own_packed = own, packing.packed_slots(own)
        if shared:
            made = Segment(
                view.shared_len, end, slots[:held].clone(), tokens=shared, packed=packing.packed_slots(shared), method=method.name
            )
            view.segments.append(made)
        try:
            kept = resolve_selection(self, row, view, renewed, lambda: self._writer.chosen(method, row, view))
            self._writer.write(method, row, self.draft_row(row), view, made, done, tokens, renewed, kept)
        except ScoresError as error:
            self._refuse(method, error)
            if made is not None:
                view.segments.remove(made)
            self._drop(slots, view.segments if self._views.pop(row, None) else [])
            return False
        self.made[view.method] += 1
        if made is not None:
            self.tree_cache.nodes.attach(prefix.node, made)
            self.tree_cache.segments.use(made)
        self._views[row] = view
        if not method.compressor.follows_queries:
            # Until the copy is to be renewed its queries are of no use; another request's may be.
            self.queries.forget(row)
        return True

    def insert(self, row: int, view: CompressedKV) -> None:
        """Let the request in ``row`` read a copy that another server packs, whose slots may not be filled yet."""
        view.method = self.method(row).called(self.method(row).compressor)
        self.token_table[self.draft_row(row), : view.kept] = view.slots.to(self.token_table.dtype)
        self.layout.begins(self.draft_row(row), view)
        self._views[row] = view

    def reselect(self, row: int, end: int, every: int) -> None:
        """Between two steps of a round: choose anew what the copy of the request in ``row`` keeps, where its method's turn has come.

        The copy goes on to stand for the same tokens and keeps as many, in the same slots, so that what was planned of the round holds.
        What came since follows it in the draft row.

        Args:
            row: the request's row in the token table; its method has :attr:`~.contracts.compressor.Compressor.every`.
            end: position after that of the newest query.
            every: selection interval, in steps.
        """
        method, view = self.method(row), self._views[row]
        if self.remote_selector is not None or method.compressor.synchronous:
            return
        if (end - view.covered) % every or self.is_refused(row):
            return
        try:
            self._writer.reselect(method, row, self.draft_row(row), view, end)
        except ScoresError as error:
            self._refuse(method, error)
        else:
            self.made[view.method] += 1

    def write_selection(self, row: int, layers: slice, kept: torch.Tensor | ReceivedRows) -> None:
        """Let a copy lead to what was chosen elsewhere for some layers, in the place of what it led to there; arguments as
        :meth:`CompressedKVWriter.write_selection`'s."""
        view = self._views[row]
        self._writer.write_selection(self.method(row), row, view, layers, kept)
        # Once for all packs of layers.
        self.made[view.method] += layers.stop == len(self.buffers.keys)

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

    def write_tail(self, row: int, end: int) -> None:
        """Let the draft row lead, after the copy, to the full row's tokens ``[covered, end)``.

        A position keeps its slot unless :meth:`on_row_moved` says otherwise, so only what is new is written.
        """
        view = self._views[row]
        start = view.tail_end
        if start >= end:
            return
        shift = view.kept - view.covered
        tail = self.token_table[row, start:end]
        self.token_table[self.draft_row(row), start + shift : end + shift] = tail
        view.tail_end = end

    def on_row_moved(self, row: int, start: int) -> None:
        """Note that the row of a request leads to other slots from position ``start`` on: those of before are free.

        Under the overlapped loop a first round is launched before the prefix tree takes the prompt over, and with it exchanges
        slots of which it has others. A draft row would go on to lead to what is free; so would pointers, which are dropped, or chosen again
        where the next copy would come later than that of a prompt that the tree had not.
        """
        if self.layout.points_to_full_kv and not self._choose_again(row):
            self.release_compressed_kv(row)
            if self.remote_selector is not None:
                self.remote_selector.forget(row)
            return
        if self.row_sender is not None:
            self.row_sender.leave_slots(row, alone=False)
        if (view := self._views.get(row)) is not None:
            view.tail_end = max(view.covered, min(view.tail_end, start))

    def _choose_again(self, row: int) -> bool:
        """Let pointers lead to other slots of the same tokens; whether they do. Others who choose do so by what they were told."""
        view, here = self._views.get(row), self.remote_selector is None and self.async_selector is None
        return view is not None and here and self._writer.choose_again(self.method(row), row, self.draft_row(row), view)

    def on_segment_split(self, first: Segment, rest: Segment) -> None:
        """Note that ``first`` took over the first blocks of ``rest``: copies that read that read both, in the same slots."""
        for view in self._views.values():
            if rest in view.segments:
                view.segments.insert(view.segments.index(rest), first)

    def mark_tail_written(self, row: int, end: int) -> None:
        """Note that the draft row leads to all positions before ``end``."""
        view = self._views[row]
        view.tail_end = max(view.tail_end, end)

    def release(self, row: int) -> None:
        """Free the copy and the queries of the request in ``row``."""
        self.release_compressed_kv(row)
        self.queries.forget(row)
        for each in (self.remote_selector, self.async_selector):
            if each is not None:
                each.forget(row)

    def release_compressed_kv(self, row: int) -> None:
        """Free the copy of the request in ``row``; no-op without one. What is kept of its queries stays."""
        view = self._views.pop(row, None)
        if view is None:
            return
        self._settle(row)
        self._drop(view.owned_slots, view.segments)

    def _settle(self, row: int) -> None:
        """Let nothing be written any more to the slots of the request's copy by what was launched before."""
        if self.async_selector is not None:
            self.async_selector.flush(row)

    def _drop(self, own: torch.Tensor, segments: list[Segment]) -> None:
        self.allocator.free(own)
        for segment in segments:
            self.tree_cache.segments.release(segment)

    def largest(self) -> int | None:
        """Row of the request with the largest copy that it can do without; others have their full KV on the host, or none."""
        residency = self.tree_cache.residency
        rows = [row for row in self._views if residency is None or not residency.is_offloaded(row)]
        rows = [row for row in rows if not self.can_lack_full_kv(row)]
        return max(rows, key=lambda row: self._views[row].kept, default=None)

    def forget_all(self) -> None:
        """Drop all records; the pool itself is being cleared."""
        self._views.clear()
        self.queries.clear()
        for each in (self.remote_selector, self.async_selector):
            if each is not None:
                each.forget_all()
