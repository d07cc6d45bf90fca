"""Full KV of the prefix tree leaves the device: to the host, or for good."""

import heapq
import time

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams

from sglang_ext.mem_cache.host_tier.arrivals import Arrivals
from sglang_ext.mem_cache.host_tier.tier import HostTier
from sglang_ext.mem_cache.host_tier.transfers import Transfer
from sglang_ext.mem_cache.prefix_cache.segments import Segment
from sglang_ext.mem_cache.prefix_cache.tiered_locks import TieredLocks
from sglang_ext.mem_cache.prefix_cache.tiered_node import TieredNode
from sglang_ext.ranks import Ranks


class TieredStores(TieredLocks):
    """A tree whose nodes are backed up to the host, dropped from the device, and evicted from both.

    All calls come from the thread that owns the tree.

    Attributes:
        stored_bytes: of full KV, so far, to the host.
        arrivals: which transfers are done.
    """

    stored_bytes: int = 0

    def __init__(self, params: CacheInitParams) -> None:
        self.arrivals = Arrivals()
        super().__init__(params)

    @property
    def host_bytes(self) -> int:
        """Bytes of full KV on the host."""
        if self.host_tier is None:
            return 0
        pool = self.host_tier.pool
        return (pool.pages.count - pool.pages.free_pages) * pool.page_bytes

    def use_host(self, tier: HostTier, ranks: Ranks = Ranks()) -> None:
        """Keep full KV in ``tier``, too; the trees of all ``ranks`` do the same.

        Raises:
            ValueError: its pages are not as long as the tree's.
        """
        if tier.pool.page_size != self.page_size:
            raise ValueError(
                f"host pages of {tier.pool.page_size} tokens for a prefix tree of {self.page_size}: pass --page-size "
                f"{tier.pool.page_size}, so that nodes are whole host pages"
            )
        self.host_tier = tier
        self.arrivals = Arrivals(ranks)

    def back_up(self, node: TieredNode) -> Transfer | None:
        """Store the KV of ``node`` to the host; its device slots stay.

        Returns:
            The transfer; of a node that has a host copy, the one that made it. None when there is no host tier, or it is
            full even after it forgot what nobody needs, least recently used first.

        Raises:
            ValueError: the node's KV is not on the device.
        """
        if node.host_value is not None:
            return node.store
        if not node.on_device:
            raise ValueError(f"tokens [{node.start}, {node.end}) of a path are not on the device; back up what is there")
        pages = self._allocate_pages(len(node.key) // self.page_size)
        if pages is None:
            return None
        node.host_value, node.store = pages, self.host_tier.store(node.value, pages)
        self.stored_bytes += node.store.size
        return node.store

    def drop_device(self, node: TieredNode) -> int:
        """Free the device slots of ``node`` when its host copy is finished, even while requests lock it.

        The caller knows that no forward reads them any more: rows of running requests that lead there are stale from now on.

        Returns:
            Slots that were freed; 0 when there are none, or the host copy is missing or not finished.
        """
        return self._free_value(node) if self.is_stored(node) else 0

    def is_stored(self, node: TieredNode) -> bool:
        """Whether the KV of ``node`` lies on the device, and all of it on the host too."""
        return node.on_device and node.host_value is not None and self.arrivals.done(node.store)

    def evict(self, params: EvictParams) -> EvictResult:
        """Free device slots: of segments that nobody reads, and of nodes that nobody locks, from the leaves up.

        Segments are as old as the node that they hang on, and go before it. Where there is a host tier with room, nodes stay
        there; else they are dropped. What lacks then is taken from running requests that need it for verifications only.
        """
        if self.disable:
            return EvictResult()
        start_time, evicted = time.perf_counter(), 0
        heap = [self._ranked(node, node.id) for node in self.evictable_leaves]
        heap += [self._ranked(segment.node, -1 - count, segment) for count, segment in enumerate(self.segments.unused)]
        heapq.heapify(heap)
        while evicted < params.num_tokens and heap:
            *_, node, segment = heapq.heappop(heap)
            if segment is not None:
                evicted += self.segments.free(segment)
            elif node in self.evictable_leaves:
                evicted += self._evict_leaf(node)
                if node.parent in self.evictable_leaves:
                    heapq.heappush(heap, self._ranked(node.parent, node.parent.id))
        if evicted < params.num_tokens and self.residency is not None:
            evicted += self.residency.drop(params.num_tokens - evicted)
        self.update_eviction_metrics(evicted, start_time)
        return EvictResult(num_tokens_evicted=evicted)

    def _ranked(self, node: TieredNode, rank: int, segment: Segment | None = None) -> tuple:
        """An entry of the heap of what may be evicted, least needed first, then deepest; ``rank`` differs between all."""
        return self.eviction_strategy.get_priority(node), -node.end, rank, node, segment

    def _evict_leaf(self, node: TieredNode) -> int:
        self.back_up(node)
        return self._drop(node) if node.host_value is None else self._free_value(node)

    def _allocate_pages(self, count: int) -> torch.Tensor | None:
        if self.host_tier is None or count > self.host_tier.pool.pages.count:
            return None
        pages = self.host_tier.pool.pages
        heap = [(self.eviction_strategy.get_priority(node), node.id, node) for node in self.host_leaves]
        heapq.heapify(heap)
        while pages.free_pages < count and heap:
            *_, node = heapq.heappop(heap)
            self._drop(node)
            if node.parent in self.host_leaves:
                heapq.heappush(heap, (self.eviction_strategy.get_priority(node.parent), node.parent.id, node.parent))
        return pages.allocate(count)
