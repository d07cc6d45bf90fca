"""Stores full KV of the prefix tree on the host, and frees its device slots.

A shared segment that packs all tokens in blocks of Lynx is the anchor of these tokens' full KV (:class:`Anchoring`). A page on
the host is stored as its residual and its anchor (host_tier/residuals.py). While the segment with which it was stored is on the device, a
load transfers only the residual, afterwards both. No other segment can be used, even if it covers the same tokens: it may have been packed
from other bits.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch

from sglang_ext.mem_cache.host_tier.residuals import PageBlocks
from sglang_ext.mem_cache.host_tier.tier import HostTier
from sglang_ext.mem_cache.host_tier.transfers import TransferTracker, Transfer
from sglang_ext.mem_cache.prefix_cache.nodes import PageSegments, PrefixTree, TieredNode, below, distinct_segments
from sglang_ext.mem_cache.prefix_cache.segments import Segment
from sglang_ext.core import TPRanks


@dataclass(frozen=True)
class Anchoring:
    """How segments of one method are anchors of host pages.

    Attributes:
        method: Name of the method, whose segments keep all tokens in packed blocks.
        page_size: Tokens per page, a multiple of ``block_tokens``.
        block_tokens: Tokens per packed block.
        block_slots: Slots per packed block.
        sinks: First tokens of a context, whole pages, that no segment covers.
    """

    method: str
    page_size: int
    block_tokens: int
    block_slots: int
    sinks: int

    @property
    def page_slots(self) -> int:
        """Slots of a page's blocks."""
        return self.page_size // self.block_tokens * self.block_slots

    def _first(self, node: TieredNode) -> int:
        """The first page of a node that may have an anchor."""
        return max(0, self.sinks - node.start) // self.page_size

    def missing(self, node: TieredNode) -> bool:
        """Whether a node has pages that could have an anchor on the device and have none."""
        pages = len(node.key) // self.page_size
        return None in node.anchors[self._first(node) :] if node.anchors else pages > self._first(node)

    def find(self, node: TieredNode, below: Iterable[TieredNode]) -> PageSegments:
        """Return the segments that cover pages of ``node``. They are attached to it, or to nodes ``below`` it."""
        first = self._first(node)
        found: list[Segment | None] = [None] * (len(node.key) // self.page_size)
        for each in chain([node], below):
            for segment in each.segments:
                if segment.method == self.method and segment.packed and segment.start < node.end:
                    begin, end = ((at - node.start) // self.page_size for at in (segment.start, segment.end))
                    for page in range(max(first, begin), min(len(found), end)):
                        found[page] = found[page] or segment
            if None not in found[first:]:
                break
        return tuple(found) if any(found) else ()

    def blocks(self, nodes: Sequence[TieredNode]) -> PageBlocks | None:
        """Return the blocks of each page of ``nodes``, one node after another. None if there are no blocks."""
        of_pages = [node.anchors or (None,) * (len(node.key) // self.page_size) for node in nodes]
        there = [segment is not None for anchors in of_pages for segment in anchors]
        if not any(there):
            return None
        like = next(segment for anchors in of_pages for segment in anchors if segment is not None).slots
        parts = []
        for node, anchors in zip(nodes, of_pages):
            position = node.start
            for segment, pages in groupby(anchors):
                count = len(list(pages))
                parts.append(self._of_pages(segment, position, count, like))
                position += count * self.page_size
        return PageBlocks(torch.cat(parts), torch.tensor(there))

    def _of_pages(self, segment: Segment | None, position: int, pages: int, like: torch.Tensor) -> torch.Tensor:
        if segment is None:
            return like.new_full((pages, self.page_slots), -1)
        first = (position - segment.start) // self.page_size * self.page_slots
        return segment.slots[first : first + pages * self.page_slots].view(pages, self.page_slots)


class HostStore:
    """The KV of a tree's nodes that is stored on the host.

    All calls come from the thread that owns the tree. The trees of all ranks make the same calls.

    Args:
        nodes: The tree.
        tier: The host tier. Its page size equals the tree's.
        priority: Priority of a node. Nodes with the lowest priority are dropped first.
        ranks: The ranks that must agree on which transfers are done.
        anchoring: Which segments are anchors of pages stored as residuals. None stores pages whole.

    Attributes:
        stored_bytes: Bytes of full KV stored to the host so far.
        arrivals: Tracks which transfers are done.

    Raises:
        ValueError: The tier's page size differs from the tree's.
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
        # Number of segments that the tree had ever had when anchors of the node were last searched.
        self._looked: WeakKeyDictionary[TieredNode, int] = WeakKeyDictionary()

    @property
    def bytes(self) -> int:
        """Bytes of full KV on the host."""
        pool = self.tier.pool
        return (pool.pages.count - pool.pages.free_pages) * pool.page_bytes

    def back_up(self, node: TieredNode) -> Transfer | None:
        """Store the KV of ``node`` on the host. Its device slots stay.

        Returns:
            The transfer. If the node is on the host already, the transfer that stored it. None if the host is full even after it dropped
            unneeded nodes, least recently used first.

        Raises:
            ValueError: The node's KV is not on the device.
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
        """Store a node again that is on the host, if loads would transfer less with segments that were added since."""
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
        """The blocks with which the host pages of ``nodes`` were stored, where they still exist."""
        return None if self.anchoring is None else self.anchoring.blocks(nodes)

    def drop_device(self, node: TieredNode) -> int:
        """Free the device slots of ``node`` if its store to the host is complete, even while requests lock it.

        The caller guarantees that no forward reads the slots any more. Rows of running requests that point to them are stale afterwards.

        Returns:
            Slots that were freed. 0 if there are none, or if the store is missing or not complete.
        """
        return self.nodes.free_value(node) if self.is_stored(node) else 0

    def is_stored(self, node: TieredNode) -> bool:
        """Whether the KV of ``node`` is on the device and completely stored on the host."""
        return node.on_device and node.host_value is not None and self.arrivals.done(node.store)

    def allocate(self, count: int) -> torch.Tensor | None:
        """Allocate ``count`` host pages, int64 [count], dropping unneeded nodes if necessary. None if there are not enough."""
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
