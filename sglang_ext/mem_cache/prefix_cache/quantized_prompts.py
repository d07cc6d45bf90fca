"""Prompts that attend to codes (``--kv-prefill quantized``), where full KV is given back: what they read, and when it goes.

A token of such a prompt attends to the codes of all whole blocks before its own (layers/attention/quantized_prefill.py). So nobody reads
the full KV of a chunk that was computed: as the next one begins, the request gets a copy of it, which grows with each chunk, and
quantized_only.py gives it back. A prefix that is codes alone is read as it lies in the pool; the request's row leads to SGLang's padding page
there. A request that decodes on full KV computes such a prefix anew. Copies pack the newest tokens, too, but for those that fill no
block. From a request's admission until it has a copy, segments of its prefix are held for it: eviction would take them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sglang_ext.mem_cache.prefix_cache.nodes import SharedPrefix, TieredNode, path
from sglang_ext.mem_cache.prefix_cache.segments import Segment

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
    from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
    from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache


@dataclass
class QuantizedPrompts:
    """Those of one scheduler process.

    Attributes:
        tree: the prefix tree.
        copies: of the requests.
        method_of: what makes the copies of a request; None where it decodes on full KV.
        chunk: tokens of prompts in a forward at most; None for no bound.
        computed: prompts that have copies and do not decode yet, by row: the end of their path, and the tokens that the copy covers.
    """

    tree: "TieredRadixCache"
    copies: "CompressedKVCache"
    method_of: "Callable[[Req], CompressionMethod | None]"
    chunk: int | None = None
    computed: dict[int, tuple[TieredNode, int]] = field(default_factory=dict)
    # Segments of prefixes: of admitted requests, by their names, and, once they have one, by their row.
    _admitted: dict[str, list[Segment]] = field(default_factory=dict)
    _held: dict[int, list[Segment]] = field(default_factory=dict)
    # Rows of which a beginning leads to the padding page.
    _padded: set[int] = field(default_factory=set)

    def reads(self, req: "Req | None", best: TieredNode) -> bool:
        """Whether a request reads all that is codes alone on the path to ``best`` as it is; else it computes that anew."""
        method = None if req is None else self._packing_method(req)
        if method is None:
            return False
        segments = self._segments(best, method)
        end = segments[-1].end if segments else 0
        return all(node.end <= end for node in path(best) if node.is_quantized_only)

    def hold(self, req: "Req") -> None:
        """A request was admitted that begins with the path to its ``last_node``: keep the codes of it."""
        self._release(self._admitted.pop(req.rid, ()))
        segments = self._segments(req.last_node, self._packing_method(req) or self.copies.methods[0])
        for segment in segments:
            self.tree.segments.use(segment)
        self._admitted[req.rid] = segments

    def begin(self, req: "Req", matched: int, known: int) -> None:
        """The next tokens of an admitted request's prompt are about to be computed.

        Args:
            req: has its row, and slots of the tokens.
            matched: tokens that the tree had when it came.
            known: tokens before; the tree took them over but for what fills no unit.
        """
        row, method = req.req_pool_idx, self._packing_method(req)
        if req.rid in self._admitted:
            self._held[row] = self._admitted.pop(req.rid)
            if any(node.is_quantized_only for node in path(req.last_node)):
                self._padded.add(row)
        if method is None:
            return
        old, held = self.copies.get(row), self._held.get(row)
        prefix = SharedPrefix(req.last_node, matched) if matched else None
        # Of what is codes alone it must hold all.
        least = held[-1].end if held else (0 if old is None else old.covered) + 1
        # Where slots for all lack, full KV stays but for what is codes alone.
        for end in (known, held[-1].end) if held else (known,):
            if method.covered(self.copies.reach(row, end)) < least:
                break
            if self.copies.compress(row, end, prefix=prefix, is_prompt_unfinished=True):
                self._release(self._held.pop(row, ()))
                break
        if (view := self.copies.get(row)) is not None:
            self.computed[row] = req.last_node, view.covered

    def codes(self, row: int) -> torch.Tensor:
        """Slots of the blocks from the sinks on that the request in ``row`` has in the pool: int64, whole blocks."""
        view = self.copies.get(row)
        if view is not None:
            return view.slots[: view.packed]
        held = [segment.slots[: segment.packed] for segment in self._held.get(row, ())]
        return torch.cat(held) if held else self.copies.token_table.new_empty(0, dtype=torch.int64)

    def peak_slots(self, req: "Req", rest: int) -> int:
        """Slots that full KV of the last ``rest`` tokens of a prompt takes at most beside what it has, while they are computed."""
        method = self._packing_method(req)
        if method is None or self.chunk is None:
            return rest
        # A chunk's goes when the next one has its slots; one that was computed has them already.
        chunks = 2 if req.req_pool_idx is None else 1
        return min(rest, chunks * self.chunk + method.unit)

    def decode(self, rows: Iterable[int]) -> None:
        """Requests in these rows decode: their prompts are computed."""
        for row in rows:
            self.computed.pop(row, None)

    def on_segment_split(self, first: Segment, rest: Segment) -> None:
        """``first`` took over the first blocks of ``rest``: for whom that was held, both are."""
        for segments in (*self._admitted.values(), *self._held.values()):
            if rest in segments:
                segments.insert(segments.index(rest), first)

    def is_lost(self, row: int) -> bool:
        """Whether a request lacks full KV and has no copy, so that it cannot decode."""
        return row in self._padded and self.copies.get(row) is None

    def forget(self, row: int) -> None:
        """The request in ``row`` is gone."""
        self.computed.pop(row, None)
        self._padded.discard(row)
        self._release(self._held.pop(row, ()))

    def clear(self) -> None:
        """All requests are gone, and the tree is being cleared."""
        for kept in (self.computed, self._admitted, self._held, self._padded):
            kept.clear()

    def _packing_method(self, req: "Req") -> "CompressionMethod | None":
        """What makes a request's copy as soon as it decodes, of all tokens; None for one that decodes on full KV, or chooses of it."""
        method = self.method_of(req)
        tokens = len(req.origin_input_ids) + len(req.output_ids)
        return method if method is not None and method.packs_all and tokens >= method.shortest else None

    def _segments(self, node: TieredNode, method: "CompressionMethod") -> list[Segment]:
        return self.tree.nodes.segments_to(node, node.end, method.name, method.sinks)

    def _release(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            self.tree.segments.release(segment)
