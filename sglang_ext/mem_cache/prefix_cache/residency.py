"""Running requests whose full KV may leave the device: which part of it is on the device, and how it is loaded back.

A request that drafts on compressed KV needs its full KV for verification only. If all requests that lock a node draft so, and the host
stores it, its device slots may be freed. It is loaded back before a verification (VeriCache, section 5).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sglang_ext.mem_cache.prefix_cache.nodes import TieredNode, path

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
    from sglang_ext.mem_cache.prefix_cache.host_store import HostStore


@dataclass(eq=False)
class Holder:
    """A running request with compressed KV of ``covered`` tokens, called a holder below. It locks the path to ``node``.

    ``pinned``: its full KV is being loaded, or is about to be read. ``stale``: its row points to slots that were freed.
    """

    row: int
    node: TieredNode
    covered: int
    pinned: bool = False
    stale: bool = False


@dataclass
class Holders:
    """All holders of one scheduler process, by row, and by each node that their path contains."""

    by_row: dict[int, Holder] = field(default_factory=dict)
    by_node: dict[TieredNode, list[Holder]] = field(default_factory=dict)

    def update(self, running: dict[int, tuple[TieredNode, int]]) -> None:
        """Set the holders, by row: the last node of the path, and the number of tokens that the compressed KV covers."""
        before, self.by_row, self.by_node = self.by_row, {}, {}
        for row, (node, covered) in running.items():
            holder = self.by_row[row] = before.get(row) or Holder(row, node, covered)
            holder.node, holder.covered = node, covered
            for each in path(node):
                self.by_node.setdefault(each, []).append(holder)

    def forget(self, row: int) -> None:
        """Remove the request in ``row``, which has ended or no longer drafts."""
        holder = self.by_row.pop(row, None)
        for node in () if holder is None else path(holder.node):
            if holder in (of_node := self.by_node.get(node, [])):
                of_node.remove(holder)
                if not of_node:
                    del self.by_node[node]

    def clear(self) -> None:
        """Remove all requests."""
        self.by_row.clear()
        self.by_node.clear()

    def replace(self, node: TieredNode) -> bool:
        """Whether compressed KV replaces a node's full KV: all requests that lock it are holders, and their compressed KV covers it."""
        holders = self.by_node[node]
        return node.lock_ref == len(holders) and all(node.end <= holder.covered for holder in holders)

    def path(self, row: int) -> list[TieredNode]:
        """The nodes of the holder in ``row``, from the root's child down. Empty if there is no holder."""
        return path(self.by_row[row].node) if row in self.by_row else []


@dataclass
class Residency:
    """The full KV of one scheduler process' holders, which may leave the device.

    With ``offload_at_once`` it leaves as soon as it is on the host. Otherwise it leaves when its slots are needed. ``max_offloaded`` is the
    maximum number of requests whose full KV may be off the device when more requests wait. None for no limit.
    """

    host: "HostStore"
    compressed_kv: "CompressedKVCache"
    offload_at_once: bool
    max_offloaded: int | None = None
    holders: Holders = field(default_factory=Holders)

    def update(self, running: dict[int, tuple[TieredNode, int]]) -> None:
        """Set the requests that draft on compressed KV, by row: the last node of the path, and the number of tokens covered.

        Stores nodes that are not on the host yet, if there is space, and stores nodes again that can now be residuals.
        """
        self.holders.update(running)
        if self.host.anchoring is not None:
            for holder in self.holders.by_row.values():
                self._share_blocks(holder)
        for holder in self.holders.by_row.values():
            for node in path(holder.node):
                if node.on_device and node.end <= holder.covered:
                    if node.host_value is None:
                        self.host.back_up(node)
                    else:
                        self.host.store_as_residual(node)
        if self.offload_at_once:
            for node in self._droppable():
                self._drop(node)

    def _share_blocks(self, holder: Holder) -> None:
        """Let the tree own a holder's packed blocks as a segment, if the tree has all tokens that the compressed KV covers."""
        compressed, node = self.compressed_kv.get(holder.row), holder.node
        if not compressed.own_packed or compressed.shared_len + compressed.own_tokens < compressed.covered or compressed.covered > node.end:
            return
        method = self.compressed_kv.method(holder.row).name
        self.host.nodes.attach(node, compressed.detach_blocks(compressed.own_tokens, compressed.own_packed, compressed.covered, method))

    def collect_loads(self) -> None:
        """Process the loads and stores that have completed since the last call."""
        self.host.collect_loads(node.store for node in self.holders.by_node if node.store is not None)

    def forget(self, row: int) -> None:
        """Remove the request in ``row``, which has ended or no longer drafts."""
        self.holders.forget(row)

    @property
    def offloaded_tokens(self) -> int:
        """Tokens of holders' full KV that are not on the device. Shared tokens count once."""
        return sum(len(node.key) for node in self.holders.by_node if node.value is None)

    @property
    def load_capacity(self) -> int:
        """Device slots that all loads may use together: free slots, slots that can be freed, and slots that loads use now."""
        nodes = self.host.nodes
        free = nodes.allocator.available_size() + nodes.evictable + nodes.segments.unused_tokens
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
        """Nodes whose device slots nothing reads before they can be loaded again."""
        unpinned = [node for node, holders in self.holders.by_node.items() if not any(holder.pinned for holder in holders)]
        return [node for node in unpinned if self.holders.replace(node) and self.host.is_stored(node)]

    def _drop(self, node: TieredNode) -> int:
        freed = self.host.free_device_slots(node)
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
        holder = self.holders.by_row.get(row)
        return holder is not None and holder.stale

    def load(self, row: int) -> bool:
        """Start loading a request's full KV, to keep it until :meth:`release`. False, and no load, if slots are missing or full KV is lost."""
        if self.is_lost(row):
            return False
        missing = [node for node in self.holders.path(row) if node.value is None]
        with self.pin_while_reading(row):
            begun = not missing or self.host.load_back(missing) is not None
        if begun and row in self.holders.by_row:
            self.holders.by_row[row].pinned = True
        return begun

    @contextmanager
    def pin_while_reading(self, row: int) -> Iterator[None]:
        """Keep the part of a request's full KV that is on the device, inside the context."""
        if (holder := self.holders.by_row.get(row)) is None:
            yield
            return
        before, holder.pinned = holder.pinned, True
        try:
            yield
        finally:
            holder.pinned = before

    def ready(self, row: int) -> bool:
        """Whether all of a request's full KV is on the device and pinned."""
        holder = self.holders.by_row.get(row)
        return holder is None or (holder.pinned and all(node.on_device for node in path(holder.node)))

    def is_loaded(self, row: int) -> bool:
        """Whether the loads of a request have completed."""
        return row in self.holders.by_row and self.ready(row)

    def restore(self, row: int) -> None:
        """Point a request's row to its full KV, which is :meth:`ready`."""
        if self.is_offloaded(row):
            slots = torch.cat([node.value for node in self.holders.path(row)])
            self.compressed_kv.token_table[row, : len(slots)] = slots.to(self.compressed_kv.token_table.dtype)
            self.holders.by_row[row].stale = False

    def release(self, row: int) -> None:
        """Allow a request's full KV to leave again. The work that reads it is already on the current stream."""
        if (holder := self.holders.by_row.get(row)) is not None:
            holder.pinned = False
