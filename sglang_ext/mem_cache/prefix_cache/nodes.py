"""The prefix tree and its nodes, whose KV is on the device, on the host, or both: ownership, locks, and eviction from the device."""

import sys
import time
from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode
from sglang.srt.mem_cache.utils import split_node_hash_value

from sglang_ext.mem_cache.prefix_cache.segments import PageSegments, Segment, Segments, set_anchors

if TYPE_CHECKING:
    from sglang_ext.mem_cache.host_tier.host_pool import HostPages
    from sglang_ext.mem_cache.host_tier.transfers import Transfer


class TieredNode(TreeNode):
    """Tokens ``[start, end)`` of every path through the node, in whole pages. Only the tree writes the fields.

    SGLang's field ``value`` is int64 [tokens], slots on the device. ``host_value`` is int64 [tokens / page_size], pages of the host tier.
    Each is None if the KV is not there.

    Attributes:
        segments: Compressed chunks that end in it.
        store: The transfer that writes ``host_value``. The node's KV is on the host completely when it is done.
        load: The transfer that writes ``value``, until its checksums are compared. None if ``value`` holds exact KV.
        anchors: For each page on the host, the segment with which a load transfers fewer bytes (host_store.py).
        replacing_segments: Segments that replace its full KV when that is freed (quantized_only.py). () if they do not cover it, or must not.
        dropped: Whether it was removed from the tree.
    """

    parent: "TieredNode"
    children: dict[object, "TieredNode"]

    def __init__(self, start: int, priority: int = 0) -> None:
        super().__init__(priority=priority)
        self.start = start
        self.segments: list[Segment] = []
        self.store: "Transfer | None" = None
        self.load: "Transfer | None" = None
        self.anchors: PageSegments = ()
        self.replacing_segments: tuple[Segment, ...] = ()
        self.dropped = False

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + len(self.key)

    @property
    def on_device(self) -> bool:
        """Whether ``value`` holds its exact KV, for work enqueued on the current stream from now on."""
        return self.value is not None and self.load is None

    @property
    def device_tokens(self) -> int:
        """Device slots that it owns."""
        return 0 if self.value is None else len(self.value)

    @property
    def is_void(self) -> bool:
        """Whether its KV is lost: it is in no tier and in no segment, but the paths of requests contain the node."""
        return self.value is None and self.host_value is None and not self.replacing_segments

    @property
    def is_quantized_only(self) -> bool:
        """Whether it has quantized-only KV: compressed, and neither on the device nor on the host."""
        return self.value is None and self.host_value is None and bool(self.replacing_segments)

    @property
    def is_device_leaf(self) -> bool:
        """Whether its slots may be evicted next: it is unlocked, and segments replace its full KV, or no child has slots or such segments."""
        if self.value is None or self.lock_ref:
            return False
        return bool(self.replacing_segments) or all(child.value is None and not child.replacing_segments for child in self.children.values())

    @property
    def is_host_leaf(self) -> bool:
        """Whether the host may drop it: it is unlocked, has no device slots and no children."""
        return self.value is None and self.host_value is not None and self.lock_ref == 0 and not self.children

    def await_transfers(self) -> None:
        """Make the current stream wait for transfers that read or write its device slots."""
        for transfer in (self.store, self.load):
            if transfer is not None:
                transfer.wait()


class SharedPrefix(NamedTuple):
    """The beginning of a context that earlier contexts share: ``tokens`` tokens, on the path to a locked ``node``."""

    node: TieredNode
    tokens: int


def path(node: TieredNode) -> list[TieredNode]:
    """The nodes from the root's child down to ``node``. Empty for the root."""
    nodes = []
    while node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


def below(node: TieredNode) -> Iterator[TieredNode]:
    """Iterate over all nodes below ``node``, parents before their children. The tree must not change during the iteration."""
    stack = list(node.children.values())
    while stack:
        child = stack.pop()
        yield child
        stack.extend(child.children.values())


class PrefixTree:
    """A radix tree whose nodes own device slots, host pages and segments, in any subset.

    An unlocked node has its KV on the device or on the host. All nodes below it are unlocked too, and can be dropped with it. A locked
    node may lose both (:attr:`TieredNode.is_void`). It stays until it is unlocked, or until a request provides its KV again. Keys are
    whole pages. ``removed`` is called with a node that is removed from the tree, while its parent is still set.

    Attributes:
        root: Counts as on the device and on the host, and is always locked, as in SGLang.
        leaves, host_leaves: Nodes whose device slots may be evicted next, and nodes that the host may drop.
        quantized_only: Nodes with quantized-only KV.
        loading: Nodes whose KV is being loaded to the device, in the order in which their loads began, which is that of all ranks.
        evictable, protected: Device slots of unlocked nodes, and of locked nodes.
        host_pages: The allocator of the nodes' host pages. None without a host tier.
        changed: Whether a node changed since the last check of the tree (tree_integrity.py).
    """

    def __init__(self, allocator: BaseTokenToKVPoolAllocator, page_size: int, segments: Segments, removed: Callable[[TieredNode], None]) -> None:
        self.allocator, self.page_size, self.segments, self._removed = allocator, page_size, segments, removed
        self.host_pages: "HostPages | None" = None
        self.changed = False
        self._begin()

    def _begin(self) -> None:
        root = TieredNode(0, priority=-sys.maxsize)
        root.key = RadixKey(token_ids=array("q"))
        root.value, root.host_value, root.hash_value, root.lock_ref = [], [], [], 1
        self.root = root
        self.leaves: set[TieredNode] = set()
        self.host_leaves: set[TieredNode] = set()
        self.quantized_only: set[TieredNode] = set()
        self.loading: dict[TieredNode, None] = {}
        self.evictable = self.protected = 0

    def __iter__(self) -> Iterator[TieredNode]:
        """Iterate over all nodes except the root, parents before their children. The tree must not change during the iteration."""
        return below(self.root)

    def clear(self) -> None:
        """Remove all nodes and segments, after their transfers. Frees host pages, but not device slots: SGLang clears its pool."""
        for node in self:
            node.await_transfers()
            self.free_host(node)
        self.segments.clear()
        self._begin()

    def walk(self, key: RadixKey, split_at: Callable[[int], int] = lambda tokens: tokens) -> list[TieredNode]:
        """Return the nodes of the longest path that is a prefix of ``key``, in whole pages. The last node is split where the key diverges.

        ``split_at`` returns the position of the split, given that of the divergence. It is earlier where segments of a quantized-only node end.
        """
        now, node = time.monotonic(), self.root
        node.last_access_time = now
        nodes = []
        while len(key) > 0:
            child = node.children.get(key.child_key(self.page_size))
            if child is None:
                break
            matched = child.key.match(key, page_size=self.page_size)
            whole = matched == len(child.key)
            if not whole and (matched := split_at(child.start + matched) - child.start) <= 0:
                break
            parts = [child] if whole else self._split_node(child, matched)
            for part in parts:
                part.last_access_time = now
            nodes += parts
            if not whole:
                break
            node, key = child, key[matched:]
        return nodes

    def _split_node(self, node: TieredNode, tokens: int) -> list[TieredNode]:
        """Split ``node`` and return the nodes that hold its first ``tokens``: one that ends with a block, then one with full KV only, or either."""
        if not node.replacing_segments:
            return [self.split(node, tokens)]
        parts, at = [], node.start + tokens
        segment = next(segment for segment in node.replacing_segments if segment.start < at <= segment.end)
        cut = self.segments.boundary(segment, at)
        if cut > node.start:
            if segment.start < cut < segment.end:
                self.segments.split(segment, cut, node)
            parts.append(self.split(node, cut - node.start))
        if node.value is not None and node.start < at:
            parts.append(self.split(node, at - node.start))
        return parts

    def split(self, child: TieredNode, tokens: int) -> TieredNode:
        """Insert a new node above ``child`` that takes its first ``tokens``, whole pages. Return the new node."""
        upper, key = TieredNode(child.start, priority=child.priority), child.key
        upper.hit_count, upper.lock_ref, upper.last_access_time = child.hit_count, child.lock_ref, child.last_access_time
        upper.parent, upper.key = child.parent, key[:tokens]
        upper.parent.children[key.child_key(self.page_size)] = upper
        upper.store, upper.load = child.store, child.load
        if child.value is not None:
            upper.value, child.value = child.value[:tokens].clone(), child.value[tokens:].clone()
        if child.host_value is not None:
            pages, anchors = tokens // self.page_size, child.anchors
            upper.host_value, child.host_value = child.host_value[:pages].clone(), child.host_value[pages:].clone()
            set_anchors(upper, anchors[:pages])
            set_anchors(child, anchors[pages:])
        upper.hash_value, child.hash_value = split_node_hash_value(child.hash_value, tokens, self.page_size)
        child.start, child.parent, child.key = upper.end, upper, key[tokens:]
        upper.children[child.key.child_key(self.page_size)] = child
        # A segment that crosses the cut stays with the lower node: it is valid on every path through that node.
        for segment in [segment for segment in child.segments if segment.end <= child.start]:
            child.segments.remove(segment)
            upper.segments.append(segment)
            segment.node = upper
        if child.load is not None:
            self.loading[upper] = None
        if self.segments.blocks is not None:
            for node in (upper, child):
                self.segments.update_replacing_segments(node)
            self.update_eviction_sets(upper, child)
        return upper

    def add(self, parent: TieredNode, key: RadixKey, slots: torch.Tensor, priority: int) -> TieredNode:
        """Add a node below ``parent`` that owns ``slots``, int64 [tokens of the key]."""
        node = self._add(parent, key, priority)
        self.set_value(node, slots)
        return node

    def add_on_host(self, parent: TieredNode, key: RadixKey, pages: torch.Tensor, store: "Transfer") -> TieredNode:
        """Add a node below ``parent`` that owns host ``pages``, int64 [pages of the key], which ``store`` has filled."""
        node = self._add(parent, key, parent.priority)
        node.store = store
        self.set_host(node, pages, ())
        self.update_eviction_sets(parent)
        return node

    def _add(self, parent: TieredNode, key: RadixKey, priority: int) -> TieredNode:
        """Add a node without KV below ``parent``."""
        node = TieredNode(parent.end, priority=priority)
        node.parent, node.key = parent, key
        parent.children[key.child_key(self.page_size)] = node
        return node

    def set_value(self, node: TieredNode, slots: torch.Tensor) -> None:
        """Let a node without device slots own ``slots``, int64 [tokens of the node]."""
        node.value = slots.clone()
        self._count(node, len(slots))
        self.update_eviction_sets(node, node.parent)

    def free_value(self, node: TieredNode) -> int:
        """Free a node's device slots, after the transfers that read or write them. Return the number of freed slots."""
        if node.value is None:
            return 0
        node.await_transfers()
        slots, node.value, node.load = node.value, None, None
        self.loading.pop(node, None)
        self.allocator.free_segment(slots, start_pos=0)
        self._count(node, -len(slots))
        self.update_eviction_sets(node, node.parent)
        return len(slots)

    def set_host(self, node: TieredNode, pages: torch.Tensor, anchors: PageSegments) -> None:
        """Let a node own host ``pages``, int64 [pages of the node], stored with ``anchors``."""
        node.host_value = pages
        set_anchors(node, anchors)
        self.update_eviction_sets(node)

    def free_host(self, node: TieredNode) -> None:
        """Free a node's host pages, if it has any."""
        if node.host_value is not None:
            set_anchors(node, ())
            self.host_pages.free(node.host_value)
            node.host_value = node.store = None
            self.update_eviction_sets(node)

    def drop(self, node: TieredNode) -> int:
        """Remove an unlocked node and all nodes below it, with their KV, unless dropped already. Return the number of freed slots."""
        if node.dropped:
            return 0
        freed = 0
        for gone in [*list(below(node))[::-1], node]:
            freed += sum(self.segments.free(segment) for segment in list(gone.segments))
            freed += self.free_value(gone)
            self.free_host(gone)
            self._removed(gone)
            gone.dropped = True
            del gone.parent.children[gone.key.child_key(self.page_size)]
            for among in (self.leaves, self.host_leaves, self.quantized_only):
                among.discard(gone)
        self.update_eviction_sets(node.parent)
        return freed

    def free_segment(self, segment: Segment) -> int:
        """Free a segment, and drop its node if nothing else is left. A locked node stays until it is recomputed or unlocked."""
        node = segment.node
        freed = self.segments.free(segment)
        if node is None or node.dropped:
            return freed
        if node.is_void and node.lock_ref == 0:
            return freed + self.drop(node)
        self.update_eviction_sets(node, node.parent)
        return freed

    def lock(self, node: TieredNode) -> int:
        """Lock the path to ``node`` against eviction. Return the change of the evictable slots, at most 0, as SGLang counts it."""
        before = self.evictable
        while node is not self.root:
            if node.lock_ref == 0:
                self.evictable -= node.device_tokens
                self.protected += node.device_tokens
            node.lock_ref += 1
            self.update_eviction_sets(node)
            node = node.parent
        return self.evictable - before

    def unlock(self, node: TieredNode) -> int:
        """Undo one :meth:`lock`, and drop unlocked nodes whose KV is lost. Return the change of the evictable slots, at least 0."""
        before, lost = self.evictable, []
        while node is not self.root:
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self.evictable += node.device_tokens
                self.protected -= node.device_tokens
                lost += [node] if node.is_void else []
            self.update_eviction_sets(node)
            node = node.parent
        delta = self.evictable - before
        for node in lost:
            self.drop(node)
        return delta

    def attach(self, node: TieredNode, segment: Segment) -> None:
        """Let the tree own ``segment``, of the path to ``node``. Raises ValueError as :meth:`Segments.add`, or if ``node`` was dropped."""
        if node.dropped:
            raise ValueError(f"a path of {node.end} tokens was dropped from the tree; match it again before attaching to it")
        self.segments.add(segment, path(node))
        self.update_eviction_sets(segment.node)

    def segments_to(self, last: TieredNode, length: int, method: str = "", start: int = 0) -> list[Segment]:
        """Return consecutive segments of ``method`` to ``last``, from token ``start`` up to ``length``. Of those that begin alike, the longest."""
        farthest: dict[int, Segment] = {}
        for node in path(last):
            for segment in node.segments:
                best = farthest.get(segment.start)
                if segment.method == method and segment.end <= length and (best is None or segment.end > best.end):
                    farthest[segment.start] = segment
        found: list[Segment] = []
        while (segment := farthest.get(found[-1].end if found else start)) is not None:
            found.append(segment)
        return found

    def _count(self, node: TieredNode, tokens: int) -> None:
        if node.lock_ref:
            self.protected += tokens
        else:
            self.evictable += tokens

    def update_eviction_sets(self, *nodes: TieredNode) -> None:
        """Update the sets of evictable nodes after ``nodes`` changed."""
        self.changed = True
        for node in nodes:
            belongs = node.is_device_leaf, node.is_host_leaf, node.is_quantized_only
            for belongs_there, among in zip(belongs, (self.leaves, self.host_leaves, self.quantized_only)):
                (among.add if belongs_there else among.discard)(node)
