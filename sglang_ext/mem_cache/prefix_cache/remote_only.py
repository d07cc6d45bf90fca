"""Mode lossy beside cache ranks: full KV is given back as soon as a rank has it and a copy holds the rows that its heads read.

Nothing is verified there, and what else is chosen comes from the rank, so that a request's full KV is needed by nobody in this process. At
the beginning of a round its path in the prefix tree is unlocked: nodes stay as an ordinary prefix for prompts that begin alike, until their
slots are needed. What of it is the request's own is freed: the end of its prompt, and generated tokens once its copy stands for them, which
is in the round after.

Where the rank's process is gone, the request is lost: steps under way keep the rows that their copies hold and the newest tokens, and
before the next round it is retracted, and computed again from its tokens (recompute.py).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_ext.mem_cache.prefix_cache.freed_full_kv import FreedFullKV, SlotDemand
from sglang_ext.mem_cache.prefix_cache.nodes import path

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_ext.mem_cache.compressed.remote_selector import FreeBlocks, RowSender
    from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod


@dataclass
class RemoteOnlyKV(FreedFullKV):
    """What of the full KV of one scheduler process lies at its cache ranks alone.

    Attributes:
        ranks: who has the full KV, and exchanges rows of the copies.
        method_of: what makes the copies of a request that waits; None where it gets none.
        tail: tokens that follow a copy at most, as their slots go back a round after they were computed.
    """

    ranks: "RowSender"
    method_of: "Callable[[Req], CompressionMethod | None]"
    tail: int

    def update(self, requests: "Sequence[Req]") -> None:
        """A round of these begins, before which SGLang let the prefix tree take over the prompts of those that have copies."""
        for req in requests:
            view = self.copies.get(req.req_pool_idx)
            if view is None or not req.cache_protected_len <= view.covered <= self.ranks.holds(req.req_pool_idx):
                continue
            if self.own_start(req.req_pool_idx, 0) >= view.covered:
                continue
            self.ranks.leave_slots(req.req_pool_idx, alone=True)
            if req.req_pool_idx not in self._own:
                self._let_go(req)
            self._give_back_own(req.req_pool_idx, req.cache_protected_len, view.covered)

    def _let_go(self, req: "Req") -> None:
        """Give up a request's hold of its path: others may take its slots, so that no row may lead there."""
        row, protected = req.req_pool_idx, req.cache_protected_len
        if not self.tree.disable and req.last_node is not None:
            self.tree.dec_lock_ref(req.last_node)
            req.last_node = self.tree.root_node
        self.copies.token_table[row, :protected] = 0
        self._own[row] = range(protected, protected)

    def full_kv_start(self, row: int, protected: int) -> int:
        """As :meth:`FreedFullKV.full_kv_start`."""
        return self.own_start(row, 0)

    def can_lack_full_kv(self, row: int) -> bool:
        """As :meth:`FreedFullKV.can_lack_full_kv`."""
        return row in self._own

    def can_insert(self, row: int) -> bool:
        """As :meth:`FreedFullKV.can_insert`."""
        return row not in self._own

    def is_lost(self, row: int) -> bool:
        """As :meth:`FreedFullKV.is_lost`."""
        return row in self._own and self.ranks.is_lost(row)

    @property
    def tokens(self) -> int:
        """As :attr:`FreedFullKV.tokens`; of prompts that lie in the prefix tree, too."""
        return sum(own.stop for own in self._own.values())

    def slot_demand(self, req: "Req", more: int, share: float = 1.0) -> SlotDemand:
        """As :meth:`FreedFullKV.slot_demand`, of a request to which all that is free at the ranks is left."""
        return self._room(req, more, share, self.ranks.free_blocks())

    def slot_demands(self, requests: "Iterable[tuple[Req, int]]", share: float = 1.0) -> list[SlotDemand]:
        """As :meth:`FreedFullKV.slot_demands`: in this order they are handed over, and whoever finds no room there keeps its full KV here."""
        free = self.ranks.free_blocks()
        return [self._room(req, more, share, free) for req, more in requests]

    def _room(self, req: "Req", more: int, share: float, free: "FreeBlocks") -> SlotDemand:
        method, row, tokens = self.method_of(req), req.req_pool_idx, len(req.origin_input_ids) + len(req.output_ids)
        view = None if row is None else self.copies.get(row)
        if method is None or (view is None and (tokens < method.shortest or not self._goes(row, tokens, free))):
            return SlotDemand(growth=share * more)
        expected = int(share * more)
        covered = method.covered(tokens) if view is None else view.covered
        kept = method.kept(covered)
        growth = method.kept(method.covered(tokens + expected)) - kept + min(more, self.tail)
        if self.can_lack_full_kv(row):
            return SlotDemand(growth=growth)
        nodes = [] if req.last_node is None else path(req.last_node)
        # Of its path it keeps none: those that nobody else locks may be evicted.
        leaves, back = {node: node.device_tokens for node in nodes}, max(0, covered - req.cache_protected_len)
        return SlotDemand(method.packing.held_slots(kept) if view is None else 0, back, leaves, growth)

    def _goes(self, row: int | None, tokens: int, free: "FreeBlocks") -> bool:
        """Whether a request without a copy was handed over, or will be: it takes what it needs of ``free`` then."""
        return (row is not None and self.ranks.has_request(row)) or free.take(tokens)
