"""What leaves the device when slots are needed: what is needed least, by SGLang's eviction policy."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

from sglang_ext.mem_cache.prefix_cache.host_store import HostStore
from sglang_ext.mem_cache.prefix_cache.nodes import PrefixTree, TieredNode
from sglang_ext.mem_cache.prefix_cache.segments import Segment, Segments


class Eviction:
    """Frees device slots of segments that nobody reads, and of nodes that nobody locks.

    Args:
        nodes: of the tree.
        segments: compressed chunks that hang on them.
        priority: of a node; those with the lowest go first.
    """

    def __init__(self, nodes: PrefixTree, segments: Segments, priority: Callable[[TieredNode], Any]) -> None:
        self._nodes, self._segments, self._priority = nodes, segments, priority

    def free(self, wanted: int, host: HostStore | None) -> int:
        """Free ``wanted`` slots, or more, or all that can be, from the leaves up; how many.

        Segments are as old as the node that they hang on, and go before it; where nodes are stored with them, after all that they
        stand for. Where there is a ``host`` with room, nodes stay there; where segments stand for a node's full KV that goes first, and
        the node with the first of these; else nodes are dropped.
        """
        leaves, evicted = self._nodes.leaves, 0
        heap = [self._ranked(node, node.end, node.id) for node in leaves]
        anchors = host is not None and host.anchoring is not None
        # Each gets a number of its own, below those of nodes.
        numbers = count(1)
        for segment in self._segments.unused:
            if not self._waits(segment):
                heap.append(self._ranked(segment.node, segment.start if anchors else segment.node.end, -next(numbers), segment))
        heapq.heapify(heap)
        while evicted < wanted and heap:
            *_, node, segment = heapq.heappop(heap)
            if segment is not None:
                evicted += self._free(segment)
            elif node in leaves:
                evicted += self._leave(node, host)
                for coded in node.codes:
                    if not coded.users:
                        heapq.heappush(heap, self._ranked(node, node.end, -next(numbers), coded))
            if node.parent in leaves:
                heapq.heappush(heap, self._ranked(node.parent, node.parent.end, node.parent.id))
        return evicted

    def _waits(self, segment: Segment) -> bool:
        """Whether a segment goes after full KV for which it stands, and which may go."""
        node = segment.node
        return segment in node.codes and node.value is not None and node.lock_ref == 0

    def _free(self, segment: Segment) -> int:
        """Free a segment, and drop its node where that has nothing else; a locked one stays, until it is computed again or unlocked."""
        node = segment.node
        freed = self._segments.free(segment)
        if node is None or node.dropped:
            return freed
        if node.is_void and node.lock_ref == 0:
            return freed + self._nodes.drop(node)
        self._nodes.update_eviction_sets(node, node.parent)
        return freed

    def _ranked(self, node: TieredNode, depth: int, rank: int, segment: Segment | None = None) -> tuple:
        """An entry of the heap of what may be evicted, least needed first, then deepest; ``rank`` differs between all.

        Last come codes of locked nodes: full KV was made of them for a prompt that is computed, whose copy is going to read them.
        """
        awaited = segment is not None and segment in node.codes and node.lock_ref > 0
        return awaited, self._priority(node), -depth, rank, node, segment

    def _leave(self, node: TieredNode, host: HostStore | None) -> int:
        if node.codes:
            return self._nodes.free_value(node)
        if host is not None:
            host.back_up(node)
        return self._nodes.drop(node) if node.host_value is None else self._nodes.free_value(node)
