"""Evicts device slots in the order of SGLang's eviction policy."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

from sglang_ext.mem_cache.prefix_cache.nodes import PrefixTree, TieredNode
from sglang_ext.mem_cache.prefix_cache.segments import Segment, Segments

if TYPE_CHECKING:
    from sglang_ext.mem_cache.prefix_cache.host_store import HostStore


class Eviction:
    """Frees device slots of unused segments and of unlocked nodes.

    Args:
        nodes: The tree.
        segments: Compressed chunks attached to the nodes.
        priority: Priority of a node. Nodes with the lowest priority are evicted first.
    """

    def __init__(self, nodes: PrefixTree, segments: Segments, priority: Callable[[TieredNode], Any]) -> None:
        self._nodes, self._segments, self._priority = nodes, segments, priority

    def free(self, wanted: int, host: "HostStore | None") -> int:
        """Free at least ``wanted`` slots, or all that can be freed, from the leaves up. Return the number of freed slots.

        A segment has the age of its node and is evicted before it. If the host stores residuals, it is evicted after all nodes that it
        covers. If segments replace a node's full KV, that full KV is freed first, and the node is dropped with the first of these
        segments. Otherwise, if ``host`` has space, the node stays there. All other nodes are dropped.
        """
        leaves, evicted = self._nodes.leaves, 0
        heap = [self._ranked(node, node.end, node.id) for node in leaves]
        anchors = host is not None and host.anchoring is not None
        # Each segment gets its own number, below those of nodes.
        numbers = count(1)
        for segment in self._segments.unused:
            if not self._is_after_full_kv(segment):
                heap.append(self._ranked(segment.node, segment.start if anchors else segment.node.end, -next(numbers), segment))
        heapq.heapify(heap)
        while evicted < wanted and heap:
            *_, node, segment = heapq.heappop(heap)
            if segment is not None:
                evicted += self._free(segment)
            elif node in leaves:
                evicted += self._evict_node(node, host)
                for coded in node.replacing_segments:
                    if not coded.users:
                        heapq.heappush(heap, self._ranked(node, node.end, -next(numbers), coded))
            if node.parent in leaves:
                heapq.heappush(heap, self._ranked(node.parent, node.parent.end, node.parent.id))
        return evicted

    def _is_after_full_kv(self, segment: Segment) -> bool:
        """Whether a segment must be evicted after the full KV that it replaces, which can be evicted."""
        node = segment.node
        return segment in node.replacing_segments and node.value is not None and node.lock_ref == 0

    def _free(self, segment: Segment) -> int:
        """Free a segment, and drop its node if nothing else is left. A locked node stays until it is recomputed or unlocked."""
        node = segment.node
        freed = self._segments.free(segment)
        if node is None or node.dropped:
            return freed
        if node.is_void and node.lock_ref == 0:
            return freed + self._nodes.drop(node)
        self._nodes.update_eviction_sets(node, node.parent)
        return freed

    def _ranked(self, node: TieredNode, depth: int, rank: int, segment: Segment | None = None) -> tuple:
        """An entry in the heap of eviction candidates, lowest priority first, then deepest. ``rank`` is unique.

        Segments that replace full KV of locked nodes are last: a prompt in progress restored full KV from them, and its compressed KV will
        read them.
        """
        awaited = segment is not None and segment in node.replacing_segments and node.lock_ref > 0
        return awaited, self._priority(node), -depth, rank, node, segment

    def _evict_node(self, node: TieredNode, host: "HostStore | None") -> int:
        if node.replacing_segments:
            return self._nodes.free_value(node)
        if host is not None:
            host.back_up(node)
        return self._nodes.drop(node) if node.host_value is None else self._nodes.free_value(node)
