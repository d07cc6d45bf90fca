"""Mode lossy with cache ranks: frees full KV when a rank holds it and compressed KV holds the rows that the attention heads read.

Lossy mode verifies nothing, and later selections come from the rank. So at the start of a round the request's path in the prefix tree is
unlocked: its nodes remain as an ordinary prefix for other prompts. The request's own slots are freed: the end of its prompt, and
generated tokens in the round after its compressed KV covers them. If the rank's process ends, steps in progress keep their rows. Before
the next round the request is retracted and recomputed from its tokens (freed_full_kv.py).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_ext.mem_cache.prefix_cache.freed_full_kv import FreedFullKV, SlotDemand
from sglang_ext.mem_cache.prefix_cache.nodes import TieredNode, path

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_ext.mem_cache.compressed.async_selector import AsyncSelector, FreeBlocks
    from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod


@dataclass
class RemoteOnlyKV(FreedFullKV):
    """The remote-only KV of one scheduler process: full KV held by its cache ``ranks`` alone, which exchange rows of compressed KV.

    ``method_of`` returns the method that will compress a waiting request, or None if it stays on full KV. ``tail`` is the maximum number of
    tokens after the compressed KV. Their slots are freed a round after they were computed.
    """

    ranks: "AsyncSelector"
    method_of: "Callable[[Req], CompressionMethod | None]"
    tail: int

    def free_full_kv(self, requests: "Sequence[Req]", compressed: Mapping[int, tuple[TieredNode, int]]) -> None:
        """Free full KV that cache ranks hold."""
        for req in requests:
            row, protected = req.req_pool_idx, req.cache_protected_len
            kv = self.compressed_kv.get(row)
            if kv is None or not protected <= kv.covered <= self.ranks.num_held_tokens(row):
                continue
            if self.own_start(row, 0) >= kv.covered:
                continue
            self.ranks.on_slots_freed(row, is_remote_only=True)
            if row not in self._own:
                # Others may take the slots of its path, so its row must no longer point to them.
                if req.last_node is not None:
                    self.nodes.unlock(req.last_node)
                    req.last_node = self.nodes.root
                self.compressed_kv.token_table[row, :protected] = 0
                self._own[row] = range(protected, protected)
            self._free_own_slots(row, protected, kv.covered)

    def full_kv_start(self, row: int, protected: int) -> int:
        return self.own_start(row, 0)

    def can_lack_full_kv(self, row: int) -> bool:
        return row in self._own

    def can_insert(self, row: int) -> bool:
        return row not in self._own

    def is_lost(self, row: int) -> bool:
        return row in self._own and self.ranks.is_lost(row)

    @property
    def tokens(self) -> int:
        """Tokens of running requests without full KV in their rows. Includes prompts that are in the prefix tree."""
        return sum(own.stop for own in self._own.values())

    def slot_demands(self, requests: "Iterable[tuple[Req, int]]", share: float) -> list[SlotDemand]:
        """Requests are handed over in the given order. If the ranks are full, full KV stays here."""
        free = self.ranks.free_blocks()
        return [self._demand(req, more, share, free) for req, more in requests]

    def _demand(self, req: "Req", more: int, share: float, free: "FreeBlocks") -> SlotDemand:
        method, row, tokens = self.method_of(req), req.req_pool_idx, len(req.origin_input_ids) + len(req.output_ids)
        compressed = None if row is None else self.compressed_kv.get(row)
        if method is None or (compressed is None and tokens < method.min_context):
            return SlotDemand(growth=share * more)
        is_handed_over = compressed is not None or (row is not None and self.ranks.has_request(row))
        # If it will be handed over, it takes its blocks from the free ones.
        if not is_handed_over and not free.take(tokens):
            return SlotDemand(growth=share * more)
        covered = method.covered(tokens) if compressed is None else compressed.covered
        kept = method.num_kept(covered)
        growth = method.num_kept(method.covered(tokens + int(share * more))) - kept + min(more, self.tail)
        if self.can_lack_full_kv(row):
            return SlotDemand(growth=growth)
        nodes = [] if req.last_node is None else path(req.last_node)
        # The request will unlock its whole path. Nodes that no other request locks may then be evicted.
        path_slots_freed, own_slots_freed = {node: node.device_tokens for node in nodes}, max(0, covered - req.cache_protected_len)
        return SlotDemand(method.packing.held_slots(kept) if compressed is None else 0, own_slots_freed, path_slots_freed, growth)
