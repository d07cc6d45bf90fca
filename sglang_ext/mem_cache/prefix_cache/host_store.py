"""Stores full KV of the prefix tree on the host, frees its device slots, loads it back, and drops pages that came back changed.

A shared segment whose Lynx blocks hold all tokens is the anchor of these tokens' full KV. The host then stores the full KV as a residual
and the anchor (host_tier/page_copies.py). While that segment is on the device, a load transfers only the residual, afterwards both. Another
segment may have been packed from other bits, even if it covers the same tokens.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch

from sglang_ext.core import TPRanks
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.host_tier.host_pool import HostPool
from sglang_ext.mem_cache.host_tier.page_copies import PageBlocks
from sglang_ext.mem_cache.host_tier.tier import HostLinkBandwidth, HostTier
from sglang_ext.mem_cache.host_tier.transfers import Transfer, TransferTracker
from sglang_ext.mem_cache.prefix_cache.nodes import PrefixTree, TieredNode, below
from sglang_ext.mem_cache.prefix_cache.segments import PageSegments, Segment, distinct_segments


@dataclass(frozen=True)
class Anchoring:
    """How segments of ``method`` are anchors of host pages of ``page_size`` tokens, which are whole blocks.

    They keep all tokens in blocks, laid out as in ``packing``. Its sinks are whole pages that no segment covers.
    """

    method: str
    page_size: int
    packing: Packing

    def _first(self, node: TieredNode) -> int:
        """The first page of a node that may have an anchor."""
        return max(0, self.packing.sinks - node.start) // self.page_size

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
        segments, page_slots = distinct_segments(tuple(chain.from_iterable(of_pages))), self.packing.packed_slots(self.page_size)
        if not segments:
            return None
        parts = []
        for node, anchors in zip(nodes, of_pages):
            position = node.start
            for segment, pages in groupby(anchors):
                count = len(list(pages))
                if segment is None:
                    parts.append(segments[0].slots.new_full((count, page_slots), -1))
                else:
                    first = (position - segment.start) // self.page_size * page_slots
                    parts.append(segment.slots[first : first + count * page_slots].view(count, page_slots))
                position += count * self.page_size
        return PageBlocks(torch.cat(parts), torch.tensor([segment is not None for anchors in of_pages for segment in anchors]))


@dataclass
class FaultInjector:
    """Simulates lost bits, for tests: flips a bit of the first page before every ``every``-th load.

    ``loads`` so far: it starts at the tensor-parallel rank, so that each rank has its fault in another load.
    """

    every: int
    loads: int = 0

    @torch.inference_mode()
    def flip_bit(self, pool: HostPool, pages: torch.Tensor) -> None:
        """Count a load of ``pages`` that is about to begin. Their stores must be complete."""
        self.loads += 1
        if self.loads % self.every == 0:
            pool.flip(int(pages[0]))


class HostStore:
    """The KV of a tree's nodes that is stored on the host. All calls come from one thread, and the trees of all ranks make the same calls.

    Nodes with the lowest ``priority`` are dropped first. ``allocate_slots`` returns this many device slots, int64, evicting from the tree if
    necessary, or None. ``on_load_start`` and ``on_load_done`` get slots, int64 [tokens], that a load is about to write, or has written.
    Raises ValueError if the tier's page size differs from the tree's.

    Attributes:
        anchoring: Which segments are anchors of pages stored as residuals. None stores pages whole.
        faults: Fault injection for tests. None otherwise.
        arrivals, link: Which transfers are done, and the measured bandwidth of loads.
        stored_bytes: Bytes of full KV stored to the host so far.
        loaded_bytes, restored_bytes: Bytes transferred by completed loads so far, and bytes of full KV that they produced.
        failed_pages: Host pages dropped so far because their KV came back changed.
    """

    def __init__(
        self,
        nodes: PrefixTree,
        tier: HostTier,
        priority: Callable[[TieredNode], Any],
        allocate_slots: Callable[[int], torch.Tensor | None],
        ranks: TPRanks = TPRanks(),
        anchoring: Anchoring | None = None,
        faults: FaultInjector | None = None,
        on_load_start: Callable[[torch.Tensor], None] = lambda slots: None,
        on_load_done: Callable[[torch.Tensor], None] = lambda slots: None,
    ) -> None:
        if tier.pool.page_size != nodes.page_size:
            raise ValueError(
                f"host pages of {tier.pool.page_size} tokens for a prefix tree of {nodes.page_size}: pass --page-size "
                f"{tier.pool.page_size}, so that nodes are whole host pages"
            )
        self.nodes, self.tier, self.anchoring, self.faults = nodes, tier, anchoring, faults
        nodes.host_pages = tier.pool.pages
        self._priority, self._allocate_slots = priority, allocate_slots
        self._on_load_start, self._on_load_done = on_load_start, on_load_done
        self.arrivals, self.link = TransferTracker(ranks), HostLinkBandwidth()
        self.stored_bytes = self.loaded_bytes = self.restored_bytes = self.failed_pages = 0
        # Number of segments that the tree had ever had when anchors of the node were last searched.
        self._searched_segments: WeakKeyDictionary[TieredNode, int] = WeakKeyDictionary()

    @property
    def bytes(self) -> int:
        """Bytes of full KV on the host."""
        pool = self.tier.pool
        return (pool.pages.count - pool.pages.free_pages) * pool.page_bytes

    def back_up(self, node: TieredNode) -> Transfer | None:
        """Store the KV of ``node`` on the host, unless it is there, and return the transfer that stores it. Its device slots stay.

        Returns None if the host is full even after it dropped unneeded nodes. Raises ValueError if the node's KV is not on the device.
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
        if self.anchoring is None or not self.anchoring.missing(node) or self._searched_segments.get(node) == self.nodes.segments.added:
            return
        if self.is_stored(node) and sum(map(bool, anchors := self._anchors(node))) > sum(map(bool, node.anchors)):
            self._store(node, node.host_value, anchors)

    def _store(self, node: TieredNode, pages: torch.Tensor, anchors: PageSegments) -> None:
        self.nodes.set_host(node, pages, anchors)
        node.store = self.tier.store(node.value, pages, self._blocks([node]))
        for segment in distinct_segments(anchors):
            segment.stored = node.store
        self.stored_bytes += node.store.size

    def _anchors(self, node: TieredNode) -> PageSegments:
        if self.anchoring is None:
            return ()
        self._searched_segments[node] = self.nodes.segments.added
        return self.anchoring.find(node, below(node))

    def _blocks(self, nodes: Sequence[TieredNode]) -> PageBlocks | None:
        """The blocks with which the host pages of ``nodes`` were stored, where they still exist."""
        return None if self.anchoring is None else self.anchoring.blocks(nodes)

    def free_device_slots(self, node: TieredNode) -> int:
        """Free the device slots, which no forward reads any more, of a node that :meth:`is_stored`, even a locked one. Return their number."""
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

    def load_back(self, nodes: list[TieredNode]) -> Transfer | None:
        """Copy the host's KV of ``nodes``, of one path, to device slots that the tree then owns, evicting if necessary.

        Rows may point to the nodes when :meth:`collect_loads` has processed the transfer. Returns None and loads nothing if there are too few
        device slots. Raises ValueError if a node is not on the host, or has device slots.
        """
        for node in nodes:
            if node.host_value is None:
                raise ValueError(f"tokens [{node.start}, {node.end}) of a path are not on the host; back them up before")
            if node.value is not None:
                raise ValueError(f"tokens [{node.start}, {node.end}) of a path have device slots; load back those without")
        deepest, lengths = max(nodes, key=lambda node: node.end), [len(node.key) for node in nodes]
        self.nodes.lock(deepest)
        slots = self._allocate_slots(sum(lengths))
        self.nodes.unlock(deepest)
        if slots is None:
            return None
        pages = torch.cat([node.host_value for node in nodes])
        if self.faults is not None:
            for node in nodes:
                node.store.synchronize()
            self.faults.flip_bit(self.tier.pool, pages)
        self._on_load_start(slots)
        load = self.tier.load(pages, slots, self._blocks(nodes))
        for segment in distinct_segments(tuple(chain.from_iterable(node.anchors for node in nodes))):
            segment.loaded = load
        for node, part in zip(nodes, slots.split(lengths)):
            node.load = load
            self.nodes.loading[node] = None
            self.nodes.set_value(node, part)
        return load

    def finish(self, load: Transfer) -> int:
        """Wait for a load, and process it as :meth:`collect_loads` does."""
        self.arrivals.wait(load)
        return self._complete(load)

    def collect_loads(self, stores: Iterable[Transfer] = ()) -> int:
        """Process the completed loads, and return the number of dropped host pages. Checks ``stores`` for completion too.

        The nodes are then on the device. Nodes with changed pages are dropped if unlocked. Locked ones stay without KV
        (:attr:`TieredNode.is_void`) until their requests end or provide it again. No match reaches the nodes below them.
        """
        loads = list(dict.fromkeys(node.load for node in self.nodes.loading))
        self.arrivals.update([*loads, *stores])
        return sum(self._complete(load) for load in loads if self.arrivals.done(load))

    def _complete(self, load: Transfer) -> int:
        seconds, failed, size = self.arrivals.outcome(load)
        self.loaded_bytes += size
        self.restored_bytes += load.size
        self.failed_pages += len(failed)
        self.link.add(size, seconds, load.size)
        if failed:
            wrong = torch.tensor(failed)
            for node in list(self.nodes):
                if node.host_value is not None and len(places := torch.isin(node.host_value, wrong).nonzero()):
                    if first := int(places[0]):
                        self.nodes.split(node, first * self.nodes.page_size)
                    self._lose(node)
        loaded = [node for node in self.nodes.loading if node.load is load]
        for node in loaded:
            node.load = None
            del self.nodes.loading[node]
        if loaded:
            self._on_load_done(torch.cat([node.value for node in loaded]))
        return len(failed)

    def _lose(self, node: TieredNode, is_unreachable: bool = False) -> None:
        """Drop a node's KV on the host. If that leaves nothing, drop the node, or, while it is locked, the KV of the nodes below alike."""
        if node.load is not None:
            self.nodes.free_value(node)
        self.nodes.free_host(node)
        if not (is_unreachable or node.is_void):
            return
        if node.lock_ref == 0:
            self.nodes.drop(node)
            return
        for child in list(node.children.values()):
            self._lose(child, is_unreachable=True)
