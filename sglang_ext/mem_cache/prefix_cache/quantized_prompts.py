"""Prompts that attend to quantized KV (``--kv-prefill quantized``), where full KV is freed.

A token of such a prompt attends to the quantized KV of all whole blocks before its own (layers/attention/quantized_prefill.py). So nothing
reads the full KV of a chunk after it was computed. When the next chunk begins, the request gets compressed KV of the previous one, except
a partial block, and quantized_only.py frees the full KV. The prompt reads a quantized-only prefix directly from the pool, and its row
points to SGLang's padding page there. A request that decodes on full KV recomputes such a prefix. From a request's admission until it has
compressed KV, its prefix segments are held for it, because eviction would free them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sglang_ext.mem_cache.prefix_cache.nodes import PrefixTree, SharedPrefix, TieredNode, path
from sglang_ext.mem_cache.prefix_cache.segments import Segment

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
    from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod


@dataclass
class QuantizedPrompts:
    """The prompts of one scheduler process that attend to quantized KV.

    Attributes:
        nodes: The prefix tree.
        method_of: Returns the method that compresses a request. None if it decodes on full KV.
        chunk: Maximum number of prompt tokens per forward. None for no limit.
        computed: Prompts with compressed KV that do not decode yet, by row: the last node of their path, and the tokens covered.
    """

    nodes: PrefixTree
    compressed_kv: "CompressedKVCache"
    method_of: "Callable[[Req], CompressionMethod | None]"
    chunk: int | None = None
    computed: dict[int, tuple[TieredNode, int]] = field(default_factory=dict)
    # Segments held for prefixes: by request id from admission, then by row.
    _admitted: dict[str, list[Segment]] = field(default_factory=dict)
    _held: dict[int, list[Segment]] = field(default_factory=dict)
    # Rows that begin with slots of the padding page.
    _padded: set[int] = field(default_factory=set)

    def reads_quantized(self, req: "Req | None", best: TieredNode) -> bool:
        """Whether a request attends to all quantized-only KV on the path to ``best`` directly. If not, it recomputes that KV."""
        method = None if req is None else self._packing_method(req)
        if method is None:
            return False
        segments = self._segments(best, method)
        end = segments[-1].end if segments else 0
        return all(node.end <= end for node in path(best) if node.is_quantized_only)

    def hold(self, req: "Req") -> None:
        """Hold the segments of an admitted request's prefix, the path to its ``last_node``."""
        self._release(self._admitted.pop(req.rid, ()))
        segments = self._segments(req.last_node, self._packing_method(req) or self.compressed_kv.methods[0])
        for segment in segments:
            self.nodes.segments.use(segment)
        self._admitted[req.rid] = segments

    def begin(self, req: "Req", matched: int, known: int) -> None:
        """Prepare the next tokens of an admitted request's prompt. It has its row, and slots for the tokens.

        ``matched`` prompt tokens were in the tree when the request arrived. ``known`` tokens are before the next ones: the tree owns them,
        except a partial unit.
        """
        row, method = req.req_pool_idx, self._packing_method(req)
        if req.rid in self._admitted:
            self._held[row] = self._admitted.pop(req.rid)
            if any(node.is_quantized_only for node in path(req.last_node)):
                self._padded.add(row)
        if method is None:
            return
        old, held = self.compressed_kv.get(row), self._held.get(row)
        prefix = SharedPrefix(req.last_node, matched) if matched else None
        # The compressed KV must hold all quantized-only tokens.
        least = held[-1].end if held else (0 if old is None else old.covered) + 1
        # If there are too few slots for all of them, full KV stays except for the quantized-only part.
        for end in (known, held[-1].end) if held else (known,):
            if method.covered(self.compressed_kv.max_covered(row, end)) < least:
                break
            if self.compressed_kv.compress(row, end, prefix=prefix, is_prompt_unfinished=True):
                self._release(self._held.pop(row, ()))
                break
        if (compressed := self.compressed_kv.get(row)) is not None:
            self.computed[row] = req.last_node, compressed.covered

    def block_slots(self, row: int) -> torch.Tensor:
        """Slots of the blocks after the sinks that the request in ``row`` has in the pool: int64, whole blocks."""
        compressed = self.compressed_kv.get(row)
        if compressed is not None:
            return compressed.slots[: compressed.num_packed_slots]
        held = [segment.slots[: segment.packed] for segment in self._held.get(row, ())]
        return torch.cat(held) if held else self.compressed_kv.token_table.new_empty(0, dtype=torch.int64)

    def peak_slots(self, req: "Req", rest: int) -> int:
        """Maximum slots for full KV of a prompt's last ``rest`` tokens while they are computed, in addition to the slots that it has."""
        method = self._packing_method(req)
        if method is None or self.chunk is None:
            return rest
        # The full KV of a chunk is freed when the next chunk has its slots. A request with a row already has the slots of a chunk.
        chunks = 2 if req.req_pool_idx is None else 1
        return min(rest, chunks * self.chunk + method.unit)

    def on_decode_start(self, rows: Iterable[int]) -> None:
        """Handle that requests in these rows decode: their prompts are computed."""
        for row in rows:
            self.computed.pop(row, None)

    def on_segment_split(self, first: Segment, rest: Segment) -> None:
        """Hold ``first``, which took the first blocks of ``rest``, for every request that holds ``rest``."""
        for segments in (*self._admitted.values(), *self._held.values()):
            if rest in segments:
                segments.insert(segments.index(rest), first)

    def is_lost(self, row: int) -> bool:
        """Whether a request lacks full KV and has no compressed KV, so that it cannot decode."""
        return row in self._padded and self.compressed_kv.get(row) is None

    def forget(self, row: int) -> None:
        """Remove the request in ``row``, which has ended."""
        self.computed.pop(row, None)
        self._padded.discard(row)
        self._release(self._held.pop(row, ()))

    def clear(self) -> None:
        """Remove all requests. The tree is being cleared."""
        for kept in (self.computed, self._admitted, self._held, self._padded):
            kept.clear()

    def _packing_method(self, req: "Req") -> "CompressionMethod | None":
        """The method that packs all tokens of a request when it decodes. None if it decodes on full KV, or selects tokens of it."""
        method = self.method_of(req)
        tokens = len(req.origin_input_ids) + len(req.output_ids)
        return method if method is not None and method.packs_all and tokens >= method.min_context else None

    def _segments(self, node: TieredNode, method: "CompressionMethod") -> list[Segment]:
        return self.nodes.segments_to(node, node.end, method.name, method.sinks)

    def _release(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            self.nodes.segments.release(segment)
