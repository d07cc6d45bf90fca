"""Running requests whose full KV may leave the device: which part of it is on the device, and how it is loaded back.

A request that drafts on compressed KV needs its full KV for verification only. Its prompt is in the prefix tree. Nodes stored on the host
may free their device slots while such requests run, and are loaded back before a verification (VeriCache, section 5). Nodes that other
requests need stay: a node is dropped only if all requests that lock it are holders that draft.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sglang_ext.mem_cache.prefix_cache.nodes import TieredNode, path
from sglang_ext.mem_cache.prefix_cache.segments import Segment

if TYPE_CHECKING:
    from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache


@dataclass(eq=False)
class CompressedRequest:
    """A running request that drafts on compressed KV, called a holder below.

    Attributes:
        row: Its row of the token table.
        node: The last node of its path in the prefix tree, which it locks.
        covered: Tokens that its compressed KV covers. Nodes that reach beyond must stay.
        pinned: Its full KV is being loaded, or is about to be read.
        stale: Its row points to slots that were freed.
    """

    row: int
    node: TieredNode
    covered: int
    pinned: bool = False
    stale: bool = False


@dataclass
class CompressedRequests:
    """The holders of one scheduler process.

    Attributes:
        by_row: Each holder, by its row.
        by_node: For each node, the holders whose path contains it.
    """

    by_row: dict[int, CompressedRequest] = field(default_factory=dict)
    by_node: dict[TieredNode, list[CompressedRequest]] = field(default_factory=dict)

    def update(self, running: dict[int, tuple[TieredNode, int]]) -> None:
        """Set the holders, by row: the last node of the path, and the number of tokens that the compressed KV covers."""
        self.by_row = {row: self._holder(row, *where) for row, where in running.items()}
        self.by_node = {}
        for holder in self.by_row.values():
            for node in path(holder.node):
                self.by_node.setdefault(node, []).append(holder)

    def _holder(self, row: int, node: TieredNode, covered: int) -> CompressedRequest:
        holder = self.by_row.get(row) or CompressedRequest(row, node, covered)
        holder.node, holder.covered = node, covered
        return holder

    def forget(self, row: int) -> None:
        """Remove the request in ``row``, which has ended or no longer drafts."""
        holder = self.by_row.pop(row, None)
        if holder is not None:
            for node in path(holder.node):
                if holder in (of_node := self.by_node.get(node, [])):
                    of_node.remove(holder)
                    if not of_node:
                        del self.by_node[node]

    def clear(self) -> None:
        """Remove all requests."""
        self.by_row.clear()
        self.by_node.clear()

    def get(self, row: int) -> CompressedRequest | None:
        """The holder in ``row``. None if there is none."""
        return self.by_row.get(row)

    def path(self, row: int) -> list[TieredNode]:
        """The nodes of the holder in ``row``, from the root's child down. Empty if there is no holder."""
        return path(self.by_row[row].node) if row in self.by_row else []


@dataclass
class Residency:
    """The full KV of one scheduler process' holders.

    Attributes:
        tree: The prefix tree, with a host tier.
        token_table: int32, SGLang's token table.
        offload_at_once: Full KV leaves the device as soon as it is on the host. Otherwise it leaves when its slots are needed.
        max_offloaded: Maximum number of requests whose full KV may be off the device when more requests wait. None for no limit.
        holders: Requests whose full KV may leave.
    """

    tree: "TieredRadixCache"
    token_table: torch.Tensor
    offload_at_once: bool
    max_offloaded: int | None = None
    holders: CompressedRequests = field(default_factory=CompressedRequests)

    def update(self, running: dict[int, tuple[TieredNode, int]]) -> None:
        """Set the requests that draft on compressed KV, by row: the last node of the path, and the number of tokens covered.

        Stores nodes that are not on the host yet, if there is space, and stores nodes again that can now be residuals.
        """
        self.holders.update(running)
        if self.tree.host.anchoring is not None:
            for holder in self.holders.by_row.values():
                self._share_copy(holder)
        for holder in self.holders.by_row.values():
            for node in path(holder.node):
                if node.on_device and node.end <= holder.covered:
                    if node.host_value is None:
                        self.tree.host.back_up(node)
                    else:
                        self.tree.host.store_as_residual(node)
        if self.offload_at_once:
            for node in self._droppable():
                self._drop(node)

    def _share_copy(self, holder: CompressedRequest) -> None:
        """Let the tree own a holder's packed blocks as a segment, if the tree has all tokens that the compressed KV covers.

        No data is moved: the draft row points to the same slots.
        """
        compressed_kv, node = self.tree.compressed_kv, holder.node
        compressed = compressed_kv.get(holder.row)
        if not compressed.own_packed or compressed.shared_len + compressed.own_tokens < compressed.covered or compressed.covered > node.end:
            return
        method, tokens, packed = compressed_kv.method(holder.row).name, compressed.own_tokens, compressed.own_packed
        start, slots = compressed.shared_len, compressed.detach_blocks(tokens, packed)
        made = Segment(start, compressed.covered, slots, tokens=tokens, packed=packed, method=method)
        compressed.segments.append(made)
        self.tree.nodes.attach(node, made)
        self.tree.segments.use(made)

    def collect_loads(self) -> None:
        """Process the loads and stores that have completed since the last call."""
        self.tree.reloads.collect_loads(node.store for node in self.holders.by_node if node.store is not None)

    def forget(self, row: int) -> None:
        """Remove the request in ``row``, which has ended or no longer drafts."""
        self.holders.forget(row)

    def clear(self) -> None:
        """Remove all requests."""
        self.holders.clear()

    @property
    def offloaded_tokens(self) -> int:
        """Tokens of holders' full KV that are not on the device. Shared tokens count once."""
        return sum(len(node.key) for node in self.holders.by_node if node.value is None)

    @property
    def load_capacity(self) -> int:
        """Device slots that all loads may use together: free slots, slots that can be freed, and slots that loads use now."""
        tree = self.tree
        free = tree.token_to_kv_pool_allocator.available_size() + tree.nodes.evictable + tree.segments.unused_tokens
        pinned = {node for holder in self.holders.by_row.values() if holder.pinned for node in path(holder.node)}
        return free + sum(node.device_tokens for node in {*self._droppable(), *pinned})

    @property
    def droppable_tokens(self) -> int:
        """Device slots that :meth:`drop` can free for waiting requests. Excludes the slots of the longest reload."""
        if self.max_offloaded is not None and sum(holder.stale for holder in self.holders.by_row.values()) >= self.max_offloaded:
            return 0
        longest = max((holder.node.end for holder in self.holders.by_row.values()), default=0)
        return max(0, sum(node.device_tokens for node in self._droppable()) - longest)

    def drop(self, tokens: int) -> int:
        """Free at least ``tokens`` device slots, large nodes first, so that few requests must load. Return the number of freed slots."""
        freed = 0
        for node in sorted(self._droppable(), key=lambda node: len(node.key), reverse=True):
            if freed >= tokens:
                break
            freed += self._drop(node)
        return freed

    def _droppable(self) -> list[TieredNode]:
        return [node for node, holders in self.holders.by_node.items() if self._can_drop(node, holders)]

    def _can_drop(self, node: TieredNode, holders: list[CompressedRequest]) -> bool:
        """Whether nothing reads a node's device slots before they can be loaded again."""
        if not holders or node.lock_ref != len(holders):
            return False
        return all(node.end <= holder.covered and not holder.pinned for holder in holders) and self.tree.host.is_stored(node)

    def _drop(self, node: TieredNode) -> int:
        freed = self.tree.host.drop_device(node)
        for holder in self.holders.by_node[node] if freed else []:
            holder.stale = True
        return freed

    def missing_tokens(self, row: int) -> int:
        """Tokens of a request's full KV that are neither on the device nor being loaded. 0 if it is no holder."""
        return sum(len(node.key) for node in self.holders.path(row) if node.value is None)

    def is_lost(self, row: int) -> bool:
        """Whether some of a request's full KV is in no tier, so that it must be recomputed."""
        return any(node.is_void for node in self.holders.path(row))

    def is_offloaded(self, row: int) -> bool:
        """Whether a request's row must not be read, because full KV is missing or in other slots."""
        holder = self.holders.get(row)
        return holder is not None and holder.stale

    def load(self, row: int) -> bool:
        """Start loading a request's full KV to the device, and keep it there until :meth:`release`.

        Returns:
            False if slots are missing or the full KV is lost. Nothing is loaded then.
        """
        if self.is_lost(row):
            return False
        missing = [node for node in self.holders.path(row) if node.value is None]
        with self.pin_while_reading(row):
            begun = not missing or self.tree.reloads.load_back(missing) is not None
        if begun and (holder := self.holders.get(row)) is not None:
            holder.pinned = True
        return begun

    @contextmanager
    def pin_while_reading(self, row: int) -> Iterator[None]:
        """Keep the part of a request's full KV that is on the device, inside the context."""
        holder = self.holders.get(row)
        before = holder is not None and holder.pinned
        if holder is not None:
            holder.pinned = True
        try:
            yield
        finally:
            if holder is not None:
                holder.pinned = before

    def ready(self, row: int) -> bool:
        """Whether all of a request's full KV is on the device and pinned."""
        holder = self.holders.get(row)
        return holder is None or (holder.pinned and all(node.on_device for node in path(holder.node)))

    def is_loaded(self, row: int) -> bool:
        """Whether the loads of a request have completed."""
        return self.holders.get(row) is not None and self.ready(row)

    def restore(self, row: int) -> None:
        """Point a request's row to its full KV, which is :meth:`ready`."""
        if self.is_offloaded(row):
            slots = torch.cat([node.value for node in self.holders.path(row)])
            self.token_table[row, : len(slots)] = slots.to(self.token_table.dtype)
            self.holders.get(row).stale = False

    def release(self, row: int) -> None:
        """Allow a request's full KV to leave again. The work that reads it is already on the current stream."""
        if (holder := self.holders.get(row)) is not None:
            holder.pinned = False
