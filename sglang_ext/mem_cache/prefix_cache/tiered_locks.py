"""What keeps the nodes of the prefix tree, and what SGLang counts by it: slots that it may have, and slots that stay."""

import torch
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams, DecLockRefResult, IncLockRefResult

from sglang_ext.mem_cache.prefix_cache.tiered_node import TieredNode, below, joined
from sglang_ext.mem_cache.prefix_cache.tiered_tree import TieredTree


class TieredLocks(TieredTree):
    """A tree whose paths are kept by the requests that lead through them.

    A node that no request locks holds its KV on the device or on the host; all nodes below it are unlocked too, so that
    it can be dropped with them. A locked node may lose both (:attr:`TieredNode.is_void`): it stays until it is unlocked, or
    a request brings its KV again.
    """

    def inc_lock_ref(self, node: TieredNode) -> IncLockRefResult:
        """Keep the path to ``node``: nobody may evict it; slots that it owns count as protected."""
        if self.disable:
            return IncLockRefResult(delta=0)
        delta = 0
        while node is not self.root_node:
            if node.lock_ref == 0:
                self.evictable_size_ -= node.device_tokens
                self.protected_size_ += node.device_tokens
                delta -= node.device_tokens
            node.lock_ref += 1
            self._update_leaf_status(node)
            node = node.parent
        return IncLockRefResult(delta=delta)

    def dec_lock_ref(self, node: TieredNode, params: DecLockRefParams | None = None) -> DecLockRefResult:
        """Undo one :meth:`inc_lock_ref`; nodes whose KV is lost go once nobody locks them."""
        if self.disable:
            return DecLockRefResult(delta=0)
        delta, lost = 0, []
        while node is not self.root_node:
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self.evictable_size_ += node.device_tokens
                self.protected_size_ -= node.device_tokens
                delta += node.device_tokens
                lost += [node] if node.is_void else []
            self._update_leaf_status(node)
            node = node.parent
        for node in lost:
            self._drop(node)
        return DecLockRefResult(delta=delta)

    def evictable_size(self) -> int:
        """Slots that :meth:`evict` can free: of nodes that nobody locks, of segments that nobody reads, and of running
        requests' full KV that may leave the device."""
        return self.evictable_size_ + self.segments.unused_tokens + self._offered

    def protected_size(self) -> int:
        """Slots of locked nodes that stay."""
        return self.protected_size_ - self._offered

    @property
    def _offered(self) -> int:
        return self.residency.offered_tokens if self.residency is not None else 0

    def total_size(self) -> int:
        """Slots that nodes own."""
        return sum(node.device_tokens for node in below(self.root_node))

    def all_values_flatten(self) -> torch.Tensor:
        """Slots that nodes own: int64 [total_size]."""
        values = [node.value for node in below(self.root_node) if node.value is not None]
        return joined(values, self._empty_match_result.device_indices)

    def cached_slots(self) -> torch.Tensor:
        """Slots that the tree owns, of nodes and segments: int64 [slots]."""
        return torch.cat([self.all_values_flatten(), *(segment.slots for segment in self.segments)])

    def session_held_tokens(self, active_pool_idxs: set | None = None) -> int:
        """Slots of requests' own copies and of segments in use."""
        return super().session_held_tokens(active_pool_idxs) + self.segments.held_tokens
