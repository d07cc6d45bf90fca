"""Prompts that attend to quantized KV (``--kv-prefill quantized``), where full KV is freed.

A token of such a prompt attends to the quantized KV of all whole blocks before its own (layers/attention/quantized_prefill.py). So nothing
reads the full KV of a chunk after it was computed. When the next chunk begins, the request gets compressed KV of the previous one, except
a partial block, and quantized_only.py frees the full KV. The prompt reads a quantized-only prefix directly from the pool, and its row
points to SGLang's padding page there. A request that decodes on full KV recomputes such a prefix. From a request's admission until it has
compressed KV, its prefix segments are held for it, because eviction would free them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sglang_ext.mem_cache.prefix_cache.nodes import SharedPrefix, TieredNode, path
from sglang_ext.mem_cache.prefix_cache.quantized_only import QuantizedOnlyKV
from sglang_ext.mem_cache.prefix_cache.segments import Segment

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod


@dataclass
class QuantizedPrefillKV(QuantizedOnlyKV):
    """Quantized-only KV of one scheduler process whose prompts attend to quantized KV, at most ``chunk`` tokens per forward, if set."""

    chunk: int | None = None
    # Segments held for prefixes: by request id from admission, then by row.
    _admitted: dict[str, list[Segment]] = field(default_factory=dict)
    _held: dict[int, list[Segment]] = field(default_factory=dict)
    # Rows that begin with slots of the padding page.
    _padded: set[int] = field(default_factory=set)

    def free_full_kv(self, requests: "Sequence[Req]", compressed: Mapping[int, tuple[TieredNode, int]]) -> None:
        """Free full KV that compressed KV holds. The prompts of decoding requests are computed."""
        for row in compressed:
            self.computed.pop(row, None)
        super().free_full_kv(requests, compressed)

    def reads_quantized(self, req: "Req | None", best: TieredNode) -> bool:
        """Whether a request attends to all quantized-only KV on the path to ``best`` directly. If not, it recomputes that KV."""
        method = None if req is None else self._packing_method(req)
        if method is None:
            return False
        segments = self._segments(best, method)
        end = segments[-1].end if segments else 0
        return all(node.end <= end for node in path(best) if node.is_quantized_only)

    def restore(self, nodes: Sequence[TieredNode], allocate: Callable[[int], torch.Tensor | None]) -> bool:
        """Restore nothing: a request that cannot read quantized KV recomputes the prefix."""
        return False

    def on_admitted(self, req: "Req") -> None:
        """Hold the segments of an admitted request's prefix, the path to its ``last_node``."""
        self._release(self._admitted.pop(req.rid, ()))
        segments = self._segments(req.last_node, self._packing_method(req) or self.compressed_kv.methods[0])
        for segment in segments:
            self.nodes.segments.use(segment)
        self._admitted[req.rid] = segments

    def begin_prompts(self, prompts: "Iterable[tuple[Req, int, int]]") -> None:
        """Compress the previous tokens of ``prompts``, and free their full KV."""
        for req, matched, known in prompts:
            self._begin_prompt(req, matched, known)
        self._update()

    def _begin_prompt(self, req: "Req", matched: int, known: int) -> None:
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
        compressed = self.compressed_kv.get(row)
        if compressed is not None:
            return compressed.slots[: compressed.num_packed_slots]
        held = [segment.slots[: segment.packed] for segment in self._held.get(row, ())]
        return torch.cat(held) if held else self.compressed_kv.token_table.new_empty(0, dtype=torch.int64)

    def peak_slots(self, req: "Req", rest: int) -> int:
        method = self._packing_method(req)
        if method is None or self.chunk is None:
            return rest
        # The full KV of a chunk is freed when the next chunk has its slots. A request with a row already has the slots of a chunk.
        chunks = 2 if req.req_pool_idx is None else 1
        return min(rest, chunks * self.chunk + method.unit)

    @property
    def _split_tokens(self) -> int:
        # Chunks become segments before the next chunk is computed. These segments end at a page boundary.
        return self.packing.unit // self.packing.block_tokens * self.packing.block_tokens

    def _on_segment_split(self, first: Segment, rest: Segment) -> None:
        """Hold ``first``, which took the first blocks of ``rest``, for every request that holds ``rest``."""
        super()._on_segment_split(first, rest)
        for segments in (*self._admitted.values(), *self._held.values()):
            if rest in segments:
                segments.insert(segments.index(rest), first)

    def is_lost(self, row: int) -> bool:
        """Whether a request lacks full KV and has no compressed KV, so that it cannot decode."""
        return row in self._padded and self.compressed_kv.get(row) is None

    def forget(self, row: int) -> None:
        super().forget(row)
        self._padded.discard(row)
        self._release(self._held.pop(row, ()))

    def clear(self) -> None:
        super().clear()
        for kept in (self._admitted, self._held, self._padded):
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
