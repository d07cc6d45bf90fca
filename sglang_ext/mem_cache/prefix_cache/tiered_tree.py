"""The prefix tree below SGLang's contract: its nodes, and what they own."""

import sys
import time
from array import array
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import split_node_hash_value

from sglang_ext.mem_cache.host_tier.tier import HostTier
from sglang_ext.mem_cache.prefix_cache.radix_cache import KVViewsRadixCache
from sglang_ext.mem_cache.prefix_cache.segments import Segment, Segments, covering
from sglang_ext.mem_cache.prefix_cache.tiered_node import TieredNode, below, path

if TYPE_CHECKING:
    from sglang_ext.mem_cache.prefix_cache.residency import Residency


class TieredTree(KVViewsRadixCache):
    """Nodes that own device slots, host pages and segments, in any subset.

    What they own is counted as evictable or protected, as they are locked (tiered_locks.py).

    Attributes:
        segments: the compressed chunks that hang on the nodes.
        host_tier: where full KV lies in host memory; None without one.
        residency: running requests whose full KV may leave the device; None where it stays.
        changed: whether a node was since the tree was checked last (tree_integrity.py).
        host_leaves: nodes that the host may forget.
    """

    host_tier: HostTier | None = None
    residency: "Residency | None" = None
    changed: bool = False

    def __init__(self, params: CacheInitParams) -> None:
        self.segments = Segments(params.token_to_kv_pool_allocator, params.page_size)
        self.host_leaves: set[TieredNode] = set()
        # In the order in which their loads began, as on all ranks.
        self._loading: dict[TieredNode, None] = {}
        self.root_node = TieredNode(0)
        super().__init__(params)

    def reset(self) -> None:
        """Forget the tree, all segments and all copies, and give the host pages back."""
        for node in below(self.root_node):
            self._await_transfers(node)
            if node.host_value is not None:
                self.host_tier.pool.pages.free(node.host_value)
        if self.residency is not None:
            self.residency.clear()
        self.segments.clear()
        self.host_leaves.clear()
        self._loading.clear()
        super().reset()
        root = TieredNode(0, priority=-sys.maxsize)
        root.key = RadixKey(token_ids=array("q"))
        # As SGLang has it: the root is on the device and on the host, and locked for ever.
        root.value, root.host_value, root.hash_value, root.lock_ref = [], [], [], 1
        self.root_node = root
        self._empty_match_result = self._empty_match_result._replace(
            last_device_node=root, last_host_node=root, best_match_node=root
        )

    def path_segments(self, node: TieredNode, length: int, method: str = "", start: int = 0) -> list[Segment]:
        """Segments of ``method`` that stand for the path to ``node`` from token ``start`` on, one after another.

        None ends after ``length``. Of alternatives that begin at one position it names the one that reaches farthest.
        """
        return covering(path(node), length, method, start)

    def attach(self, node: TieredNode, segment: Segment) -> None:
        """Let the tree own ``segment``, which stands for tokens of the path to ``node``, and its slots.

        Unless it has users it may be evicted from now on.

        Raises:
            ValueError: it does not lie on the path, is attached already, or is not made of whole pages.
        """
        if node.dropped:
            raise ValueError(f"a path of {node.end} tokens was dropped from the tree; match it again before attaching to it")
        self.segments.add(segment, path(node))

    def use(self, segment: Segment) -> None:
        """Count a running request that reads ``segment``; it outlives its node.

        Raises:
            ValueError: the tree does not have it any more.
        """
        self.segments.use(segment)

    def release(self, segment: Segment) -> None:
        """Undo one :meth:`use`; a segment whose node is gone is freed with its last user.

        Raises:
            ValueError: no request reads it.
        """
        self.segments.release(segment)

    def _walk(self, key: RadixKey) -> list[TieredNode]:
        """Nodes of the longest path that begins ``key``, in whole pages; the last is split where they part."""
        now, node = time.monotonic(), self.root_node
        node.last_access_time = now
        nodes = []
        while len(key) > 0:
            child = node.children.get(key.child_key(self.page_size))
            if child is None:
                break
            matched = child.key.match(key, page_size=self.page_size)
            if matched < len(child.key):
                child = self._split_node(child.key, child, matched)
            child.last_access_time = now
            nodes.append(child)
            node, key = child, key[matched:]
        return nodes

    def _split_node(self, key: RadixKey, child: TieredNode, split_len: int) -> TieredNode:
        """Put a new node above ``child`` that takes over its first ``split_len`` tokens; returns the new one."""
        upper = TieredNode(child.start, priority=child.priority)
        upper.hit_count, upper.lock_ref, upper.last_access_time = child.hit_count, child.lock_ref, child.last_access_time
        upper.parent, upper.key = child.parent, key[:split_len]
        upper.parent.children[key.child_key(self.page_size)] = upper
        child.split_tiers(upper, split_len, self.page_size)
        upper.hash_value, child.hash_value = split_node_hash_value(child.hash_value, split_len, self.page_size)
        child.parent, child.key = upper, key[split_len:]
        upper.children[child.key.child_key(self.page_size)] = child
        if child.load is not None:
            self._loading[upper] = None
        return upper

    def _set_value(self, node: TieredNode, slots: torch.Tensor) -> None:
        node.value = slots.clone()
        self._count(node, len(slots))
        self._update_leaf_status(node)
        self._update_leaf_status(node.parent)

    def _free_value(self, node: TieredNode) -> int:
        """Free a node's device slots, after transfers that read or write them; returns how many."""
        if node.value is None:
            return 0
        self._await_transfers(node)
        slots, node.value, node.load = node.value, None, None
        self._loading.pop(node, None)
        self.token_to_kv_pool_allocator.free_segment(slots, start_pos=0)
        self._count(node, -len(slots))
        self._update_leaf_status(node)
        self._update_leaf_status(node.parent)
        return len(slots)

    def _free_host(self, node: TieredNode) -> None:
        if node.host_value is not None:
            self.host_tier.pool.pages.free(node.host_value)
            node.host_value = node.store = None
            self._update_leaf_status(node)

    def _drop(self, node: TieredNode) -> int:
        """Take a node that nobody locks out of the tree, and all below it, with what they own; no-op if that was done.

        Returns:
            Device slots that were freed.
        """
        if node.dropped:
            return 0
        freed = 0
        for gone in [*list(below(node))[::-1], node]:
            freed += sum(self.segments.free(segment) for segment in list(gone.segments))
            freed += self._free_value(gone)
            self._free_host(gone)
            self._record_remove_event(gone)
            gone.dropped = True
            del gone.parent.children[gone.key.child_key(self.page_size)]
            self.evictable_leaves.discard(gone)
            self.host_leaves.discard(gone)
        self._update_leaf_status(node.parent)
        return freed

    def _count(self, node: TieredNode, tokens: int) -> None:
        if node.lock_ref:
            self.protected_size_ += tokens
        else:
            self.evictable_size_ += tokens

    def _update_leaf_status(self, node: TieredNode) -> None:
        super()._update_leaf_status(node)
        self.changed = True
        if node.is_host_leaf:
            self.host_leaves.add(node)
        else:
            self.host_leaves.discard(node)

    @staticmethod
    def _await_transfers(node: TieredNode) -> None:
        """Let the current stream wait for what reads or writes a node's device slots."""
        for transfer in (node.store, node.load):
            if transfer is not None:
                transfer.wait()
