"""Full KV of the prefix tree goes to the host, and leaves the device."""

import heapq
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from sglang_ext.mem_cache.host_tier.residuals import PageBlocks
from sglang_ext.mem_cache.host_tier.tier import HostTier
from sglang_ext.mem_cache.host_tier.transfers import TransferTracker, Transfer
from sglang_ext.mem_cache.prefix_cache.anchors import Anchoring, PageSegments, distinct_segments
from sglang_ext.mem_cache.prefix_cache.nodes import PrefixTree, TieredNode, below
from sglang_ext.tp_ranks import TPRanks


class HostStore:
    """What of a tree's nodes is stored on the host.

    All calls come from the thread that owns the tree; the trees of all ranks do the same.

    Args:
        nodes: of the tree.
        tier: where full KV lies in host memory, in pages as long as the tree's.
        priority: of a node; those with the lowest are forgotten first.
        ranks: who must find the same transfers done.
        anchoring: with which segments pages are stored as residuals; None for whole.

    Attributes:
        stored_bytes: of full KV, so far, to the host.
        arrivals: which transfers are done.

    Raises:
        ValueError: the tier's pages are not as long as the tree's.
    """

    def __init__(
        self,
        nodes: PrefixTree,
        tier: HostTier,
        priority: Callable[[TieredNode], Any],
        ranks: TPRanks = TPRanks(),
        anchoring: Anchoring | None = None,
    ) -> None:
        if tier.pool.page_size != nodes.page_size:
            raise ValueError(
                f"host pages of {tier.pool.page_size} tokens for a prefix tree of {nodes.page_size}: pass --page-size "
                f"{tier.pool.page_size}, so that nodes are whole host pages"
            )
        self.nodes, self.tier, self._priority, self.anchoring = nodes, tier, priority, anchoring
        self.arrivals, self.stored_bytes = TransferTracker(ranks), 0
        # How many segments the tree had had when anchors of a node were last looked for.
        self._looked: WeakKeyDictionary[TieredNode, int] = WeakKeyDictionary()

    @property
    def bytes(self) -> int:
        """Of full KV on the host."""
        pool = self.tier.pool
        return (pool.pages.count - pool.pages.free_pages) * pool.page_bytes

    def back_up(self, node: TieredNode) -> Transfer | None:
        """Store the KV of ``node`` to the host; its device slots stay.

        Returns:
            The transfer; of a node that has a host copy, the one that made it. None when the host is full even after it forgot
            what nobody needs, least recently used first.

        Raises:
            ValueError: the node's KV is not on the device.
        """
        if node.host_value is not None:
            return node.store
        if not node.on_device:
            raise ValueError(f"tokens [{node.start}, {node.end}) of a path are not on the device; back up what is there")
        pages = self.allocate(len(node.key) // self.nodes.page_size)
        if pages is None:
            return None
        self._store(node, pages, self._anchors(node))
        return node.store

    def store_as_residual(self, node: TieredNode) -> None:
        """Store a node again that lies on the host, where segments have come with which loads of it would bring less."""
        if self.anchoring is None or not self.anchoring.missing(node) or self._looked.get(node) == self.nodes.segments.added:
            return
        if self.is_stored(node) and sum(map(bool, anchors := self._anchors(node))) > sum(map(bool, node.anchors)):
            self._store(node, node.host_value, anchors)

    def _store(self, node: TieredNode, pages: torch.Tensor, anchors: PageSegments) -> None:
        self.nodes.set_host(node, pages, self.tier.pool.pages, anchors)
        node.store = self.tier.store(node.value, pages, self.blocks([node]))
        for segment in distinct_segments(anchors):
            segment.stored = node.store
        self.stored_bytes += node.store.size

    def _anchors(self, node: TieredNode) -> PageSegments:
        if self.anchoring is None:
            return ()
        self._looked[node] = self.nodes.segments.added
        return self.anchoring.find(node, below(node))

    def blocks(self, nodes: Sequence[TieredNode]) -> PageBlocks | None:
        """The blocks with which the host's pages of ``nodes`` were stored, as far as they are there."""
        return None if self.anchoring is None else self.anchoring.blocks(nodes)

    def drop_device(self, node: TieredNode) -> int:
        """Free the device slots of ``node`` when its host copy is finished, even while requests lock it.

        The caller knows that no forward reads them any more: rows of running requests that lead there are stale from now on.

        Returns:
            Slots that were freed; 0 when there are none, or the host copy is missing or not finished.
        """
        return self.nodes.free_value(node) if self.is_stored(node) else 0

    def is_stored(self, node: TieredNode) -> bool:
        """Whether the KV of ``node`` lies on the device, and all of it on the host too."""
        return node.on_device and node.host_value is not None and self.arrivals.done(node.store)

    def allocate(self, count: int) -> torch.Tensor | None:
        """So many host pages, for which what nobody needs is forgotten: int64 [count]; None when they are not to be had."""
        pages = self.tier.pool.pages
        if count > pages.count:
            return None
        heap = [(self._priority(node), node.id, node) for node in self.nodes.host_leaves]
        heapq.heapify(heap)
        while pages.free_pages < count and heap:
            *_, node = heapq.heappop(heap)
            self.nodes.drop(node)
            if node.parent in self.nodes.host_leaves:
                heapq.heappush(heap, (self._priority(node.parent), node.parent.id, node.parent))
        return pages.allocate(count)
