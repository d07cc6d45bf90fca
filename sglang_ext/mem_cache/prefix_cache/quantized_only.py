"""Mode lossy: frees full KV when compressed KV holds all of its tokens quantized, and restores it if a prompt needs it.

Lossy mode verifies nothing, so packed full KV is needed only by prompts with the same prefix, and by methods that select tokens again. If a
compression method packs all tokens, the prefix tree owns the packed blocks as segments. If segments cover a node without gaps, its device
slots are freed although requests lock it: its KV is *quantized-only*. The first tokens, the newest tokens and a partial block stay exact.
A request's generated tokens stay until its compressed KV packs them, together with the last prompt tokens of the same block.

A prompt that begins with quantized-only nodes gets slots for them, as for full KV on the host (``TieredRadixCache.init_load_back``). The
tokens are dequantized into them before the next forward. Once its compressed KV reads the same segments, the slots are freed again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, lcm
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.prefix_cache.freed_full_kv import FreedFullKV, RemotePrefill, SlotDemand
from sglang_ext.mem_cache.prefix_cache.nodes import TieredNode, path
from sglang_ext.mem_cache.prefix_cache.residency import Holders
from sglang_ext.mem_cache.prefix_cache.segments import CompressedKV, Segment

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod

# Reserve slots for the next refresh when at most 12 tokens remain until it: the tokens of two rounds, and of a round with an unknown
# result.
REFRESH_RESERVE_TOKENS = 12


@dataclass
class QuantizedOnlyKV(FreedFullKV):
    """The quantized-only KV of one scheduler process, without host tier: full KV that was freed because quantized blocks hold its tokens.

    Attributes:
        packing: Layout of blocks in slots.
        method_of: Returns the method that compresses a request. None if it stays on full KV.
        recomputes: Whether this process can recompute all retracted requests. If not, another server recomputes those with a
            :meth:`set_remote_prefill`, and the others keep their full KV.
        holders: Running requests whose compressed KV holds all tokens that it covers.
        restored_tokens: Tokens restored so far.
        computed: Prompts with compressed KV that do not decode yet (quantized_prefill_kv.py), by row: last node, and tokens covered.
    """

    packing: Packing
    method_of: "Callable[[Req], CompressionMethod | None]"
    recomputes: bool = True
    holders: Holders = field(default_factory=Holders)
    restored_tokens: int = 0
    computed: dict[int, tuple[TieredNode, int]] = field(default_factory=dict)
    # Decoding requests at the start of the last round.
    _decoding: dict[int, tuple[TieredNode, int]] = field(default_factory=dict)
    _remote_prefills: dict[int, RemotePrefill] = field(default_factory=dict)
    # Full KV to restore before the next forward: slots of packed blocks, the first of their tokens, and slots to write.
    _pending: list[tuple[torch.Tensor, int, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nodes.segments.blocks = self.packing.block_tokens, self.packing.block_slots, self._on_segment_split

    def _on_segment_split(self, first: Segment, rest: Segment) -> None:
        self.compressed_kv.on_segment_split(first, rest)

    def free_full_kv(self, requests: "Sequence[Req]", compressed: Mapping[int, tuple[TieredNode, int]]) -> None:
        """Free full KV that compressed KV holds."""
        self._decoding = dict(compressed)
        self._update()
        for row in compressed:
            if (holder := self.holders.by_row.get(row)) is not None:
                # A request's generated tokens follow the tokens in the tree.
                self._free_own_slots(row, holder.node.end, holder.covered)

    def _update(self) -> None:
        """Free the tree's full KV of requests with compressed KV."""
        running = self._decoding | self.computed
        whole = {row: where for row, where in running.items() if self.can_lack_full_kv(row)}
        for row, (node, covered) in whole.items():
            before = self.holders.by_row.get(row)
            if before is None or (before.node, before.covered) != (node, covered):
                self._share_blocks(row, node, covered)
        self.holders.update(whole)
        for node, holders in self.holders.by_node.items():
            # The last prompt tokens can share a block with the first generated ones. They are in no segment.
            if node.value is not None and (node.replacing_segments or not node.children) and self.holders.replace(node):
                self.nodes.free_value(node)
                for holder in holders:
                    # To SGLang's padding page.
                    self.compressed_kv.token_table[holder.row, node.start : node.end] = 0

    def begin(self, row: int, tokens: int) -> None:
        """Register a request whose compressed KV another server packs. Its first ``tokens`` tokens have no full KV here."""
        self._own[row] = range(0, tokens)

    def set_remote_prefill(self, row: int, prefill_again: RemotePrefill) -> None:
        """Let another server recompute the request in ``row``. Its full KV may then be freed."""
        self._remote_prefills[row] = prefill_again

    def remote_prefill(self, row: int) -> RemotePrefill | None:
        return self._remote_prefills.get(row) if row in self._own else None

    def _share_blocks(self, row: int, node: TieredNode, covered: int) -> None:
        """Let the tree own the blocks of a request's compressed KV that cover its prompt, and split nodes at the ends of segments."""
        compressed, segments = self.compressed_kv.get(row), self.nodes.segments
        if compressed.own_packed:
            start, own = compressed.shared_len, Segment(compressed.shared_len, covered, compressed.own[compressed.sinks :])
            tokens = segments.boundary(own, min(covered, node.end)) - start
            if tokens > 0:
                method = self.compressed_kv.method(row).name
                self.nodes.attach(node, compressed.detach_blocks(tokens, self.packing.packed_slots(tokens), start + tokens, method))
        for segment in [segment for segment in compressed.segments if segment.node is not None]:
            self._align_nodes(segment, node)

    def _align_nodes(self, segment: Segment, last: TieredNode) -> None:
        """Split nodes on the path to ``last`` at the ends of ``segment``, and split ``segment`` at the ends of nodes that it can tile."""
        nodes, segments = self.nodes, self.nodes.segments
        for node in path(last):
            if node.end <= segment.start or node.value is None:
                continue
            if segment.end <= node.start:
                return
            if node.start < segment.start:
                nodes.split(node, segment.start - node.start)
            if segment.end < node.end:
                nodes.split(node, segment.end - node.start)
            elif (cut := segments.boundary(segment, node.end)) < segment.end and cut > max(segment.start, node.start):
                segments.split(segment, cut, node)
                if cut < node.end:
                    nodes.split(node, cut - node.start)

    def full_kv_start(self, row: int, protected: int) -> int:
        return self.own_start(row, protected) if row in self.holders.by_row else 0

    def forget(self, row: int) -> None:
        super().forget(row)
        self.holders.forget(row)
        for kept in (self.computed, self._decoding, self._remote_prefills):
            kept.pop(row, None)

    def clear(self) -> None:
        super().clear()
        self.holders.clear()
        for kept in (self.computed, self._decoding, self._remote_prefills, self._pending):
            kept.clear()

    @property
    def tokens(self) -> int:
        """Tokens with quantized-only KV, in the tree and in running requests."""
        return sum(len(node.key) for node in self.nodes.quantized_only) + self.own_tokens

    def restore(self, nodes: Sequence[TieredNode], allocate: Callable[[int], torch.Tensor | None]) -> bool:
        """Allocate device slots for quantized-only ``nodes`` of a locked path. :meth:`write_restored` fills them before the next forward.

        ``allocate`` returns this many slots, int64, evicting if necessary, or None. False, and no change, if slots are missing.
        """
        segments, lengths = {segment: None for node in nodes for segment in node.replacing_segments}, [len(node.key) for node in nodes]
        for segment in segments:
            # Protects them from eviction for the slots that they will fill.
            self.nodes.segments.use(segment)
        slots = allocate(sum(lengths))
        for segment in segments:
            self.nodes.segments.release(segment)
        if slots is None:
            return False
        for node, part in zip(nodes, slots.split(lengths)):
            self.nodes.set_value(node, part)
            for segment in node.replacing_segments:
                begin, end = max(node.start, segment.start), min(node.end, segment.end)
                wanted = part[begin - node.start : end - node.start]
                self._pending.append((segment.slots[: segment.packed], begin - segment.start, wanted))
        self.restored_tokens += len(slots)
        return True

    def write_restored(self) -> None:
        """Restore the requested full KV before the next forward, on its stream. Later owners of freed slots write after it."""
        for restored in self._pending:
            self.packing.restore(self.compressed_kv.buffers, *restored)
        self._pending.clear()

    def can_lack_full_kv(self, row: int) -> bool:
        compressed = self.compressed_kv.get(row)
        return compressed is not None and compressed.has_all_tokens and (self.recomputes or row in self._remote_prefills)

    def max_node_end(self, tokens: int) -> int:
        """Tokens, of a context's first ``tokens``, before the last position where segments can be split. ``tokens`` if there is none."""
        begin, step = self.packing.sinks, self._split_tokens
        return begin + (tokens - begin) // step * step if tokens > begin else tokens

    @property
    def _split_tokens(self) -> int:
        """Tokens between the positions where segments can be split."""
        size, page = self.packing.block_tokens, self.nodes.page_size
        return size * lcm(page // gcd(size, page), page // gcd(self.packing.block_slots, page))

    def slot_demands(self, requests: "Iterable[tuple[Req, int]]", share: float) -> list[SlotDemand]:
        return [self._demand(req, more, share) for req, more in requests]

    def _demand(self, req: "Req", more: int, share: float) -> SlotDemand:
        method, tokens = self.method_of(req), len(req.origin_input_ids) + len(req.output_ids)
        compressed = None if req.req_pool_idx is None else self.compressed_kv.get(req.req_pool_idx)
        if method is None or (compressed is None and tokens < method.min_context):
            return SlotDemand(growth=share * more)
        # While its prompt is computed, its compressed KV covers at most the beginning.
        if compressed is None or req.req_pool_idx in self.computed:
            return self._prompt_demand(req, method, compressed, tokens, more, share * more)
        left = compressed.refresh_after - (tokens - method.recent)
        exact = tokens - compressed.covered
        own = tokens - max(compressed.covered, req.cache_protected_len)
        taken, growth = self._growth(method, exact, own, left, more, share * more)
        compressed_slots = taken if left <= REFRESH_RESERVE_TOKENS else 0
        covered = compressed.covered + _covered_later(method, exact, more)
        path_slots_freed = self._freed_nodes(req, method.sinks, covered) if self.can_lack_full_kv(req.req_pool_idx) else {}
        return SlotDemand(compressed_slots, path_slots_freed=path_slots_freed, growth=growth - compressed_slots)

    def _prompt_demand(
        self, req: "Req", method: "CompressionMethod", compressed: CompressedKV | None, tokens: int, more: int, expected: float
    ) -> SlotDemand:
        """As :meth:`_demand`, for a request whose ``tokens`` are compressed once they are computed."""
        sinks, reach = method.sinks, tokens - method.recent
        covered = method.covered(reach)
        segments: list[Segment] = []
        if compressed is None and req.req_pool_idx is None and (matched := len(req.prefix_indices) + req.host_hit_length):
            # Its compressed KV will begin with them.
            segments = self.nodes.segments_to(req.best_match_node, min(matched, covered), method.name, sinks)
        known = segments[-1].end if segments else sinks if compressed is None else compressed.covered
        compressed_slots = sinks * (compressed is None) + method.packing.held_slots(method.num_kept(covered - known))
        new_segments = tuple(segment for segment in segments if not segment.users)
        # Other requests may share all of the prompt.
        _, growth = self._growth(method, tokens - covered, 0, method.next_refresh(reach) - reach, more, expected)
        if not method.packs_all:
            return SlotDemand(compressed_slots, growth=growth, new_segments=new_segments)
        covered = min(tokens, covered + _covered_later(method, tokens - covered, more))
        own_slots_freed = max(0, covered - max(sinks, req.cache_protected_len) - self._kept_where_paths_diverge(req))
        return SlotDemand(compressed_slots, own_slots_freed, self._freed_nodes(req, sinks, covered), growth, new_segments)

    def _growth(self, method: "CompressionMethod", exact: int, own: int, left: int, more: int, expected: float) -> tuple[int, float]:
        """Slots for the next refresh, in ``left`` tokens, and all slots that the remaining output needs, of at most ``more`` tokens."""
        if not method.packs_all:
            return 0, expected
        # While they are packed, their full KV still exists. If the output ends before the refresh, nothing is packed.
        taken = method.packing.held_slots(method.pack_after) if left <= max(more, REFRESH_RESERVE_TOKENS) else 0
        # Of the ``exact`` tokens that the compressed KV does not cover yet, the request owns ``own``.
        packed = max(0, exact - method.recent) + expected
        return taken, max(method.share * packed, taken) + min(more, max(0, method.max_exact_tail - own))

    def _freed_nodes(self, req: "Req", sinks: int, covered: int) -> dict[TieredNode, int]:
        """Nodes on a request's path with full KV that its compressed KV over ``covered`` tokens replaces, with the slots freed of each."""
        found: dict[TieredNode, int] = {}
        for node in path(req.last_node):
            if node.value is None:
                continue
            # A node before others keeps the tokens after its last segment.
            end = node.end if node.replacing_segments or not node.children else self.max_node_end(node.end)
            found[node] = max(0, min(end, covered) - max(node.start, sinks))
        return found

    def _kept_where_paths_diverge(self, req: "Req") -> int:
        """Tokens of a prompt whose full KV stays, because the prompt diverges from another path within their block."""
        node, page = req.best_match_node if req.req_pool_idx is None else req.last_node, self.nodes.page_size
        key = RadixKey(req.origin_input_ids + req.output_ids, req.extra_key)
        rest = key.page_aligned(page)[node.end :]
        child = node.children.get(rest.child_key(page)) if len(rest) else None
        end = node.end + (0 if child is None else child.key.match(rest, page_size=page))
        return end - max(node.end, self.max_node_end(end))


def _covered_later(method: "CompressionMethod", exact: int, more: int) -> int:
    """Tokens that compressed KV covers when the request has most exact tokens: it has ``exact`` now, and generates up to ``more``."""
    return max(0, exact + more - method.max_exact_tail)
