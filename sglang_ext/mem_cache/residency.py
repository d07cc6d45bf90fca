"""Running requests whose full KV may leave the device: which of it is there, and how it comes back.

A request that drafts on its copy needs its full KV for verifications only. Its prompt lies in the prefix tree: nodes that
are stored on the host may give up their device slots while such requests run, and are loaded back before a verification
(VeriCache, section 5). What others need stays: a node goes only when all that lock it are holders that draft.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sglang_ext.mem_cache.tiered_node import TieredNode, path

if TYPE_CHECKING:
    from sglang_ext.mem_cache.tiered_loads import TieredLoads


@dataclass(eq=False)
class Holder:
    """A running request that drafts on its copy.

    Attributes:
        row: of the token table.
        node: the end of its path in the prefix tree, which it locks.
        covered: tokens that its copy stands for; nodes that reach beyond must stay.
        pinned: its full KV is being loaded, or about to be read.
        stale: its row leads to slots that were given up.
    """

    row: int
    node: TieredNode
    covered: int
    pinned: bool = False
    stale: bool = False


@dataclass
class Residency:
    """The holders of one scheduler process.

    Attributes:
        tree: the prefix tree, with a host tier.
        token_table: int32, SGLang's token table.
        always: full KV leaves the device as soon as it is on the host; else when its slots are needed.
        most: requests whose full KV may be off the device, when more wait to run; None for any number.
        holders: by row.
        recomputed: requests so far whose full KV was lost.
    """

    tree: "TieredLoads"
    token_table: torch.Tensor
    always: bool
    most: int | None = None
    holders: dict[int, Holder] = field(default_factory=dict)
    recomputed: int = 0
    _of_node: dict[TieredNode, list[Holder]] = field(default_factory=dict)

    def update(self, running: dict[int, tuple[TieredNode, int]]) -> None:
        """Tell which requests draft on copies now, by row: the end of the path, and the tokens that the copy covers.

        Stores what is not on the host yet, as far as there is room.
        """
        self.holders = {row: self._holder(row, *where) for row, where in running.items()}
        self._of_node = {}
        for holder in self.holders.values():
            for node in path(holder.node):
                self._of_node.setdefault(node, []).append(holder)
                if node.on_device and node.host_value is None and node.end <= holder.covered:
                    self.tree.back_up(node)
        if self.always:
            for node in self._droppable():
                self._drop(node)

    def settle(self) -> None:
        """Take in what has come to the device since the last call, and to the host."""
        self.tree.settle(node.store for node in self._of_node if node.store is not None)

    def _holder(self, row: int, node: TieredNode, covered: int) -> Holder:
        holder = self.holders.get(row) or Holder(row, node, covered)
        holder.node, holder.covered = node, covered
        return holder

    def forget(self, row: int) -> None:
        """The request in ``row`` is gone, or does not draft any more."""
        holder = self.holders.pop(row, None)
        if holder is not None:
            for node in path(holder.node):
                if holder in (of_node := self._of_node.get(node, [])):
                    of_node.remove(holder)

    def clear(self) -> None:
        """All requests are gone."""
        self.holders.clear()
        self._of_node.clear()

    @property
    def offloaded_tokens(self) -> int:
        """Tokens of holders' full KV that are not on the device; what several share counts once."""
        return sum(len(node.key) for node in self._of_node if node.value is None)

    @property
    def room(self) -> int:
        """Device slots that loads may hold together: what is free, what can be, and what they hold now."""
        tree = self.tree
        free = tree.token_to_kv_pool_allocator.available_size() + tree.evictable_size_ + tree.segments.unused_tokens
        pinned = {node for holder in self.holders.values() if holder.pinned for node in path(holder.node)}
        return free + sum(node.device_tokens for node in {*self._droppable(), *pinned})

    @property
    def offered_tokens(self) -> int:
        """Device slots that :meth:`drop` can free for requests that wait; room for the longest reload is kept back."""
        if self.most is not None and sum(holder.stale for holder in self.holders.values()) >= self.most:
            return 0
        longest = max((holder.node.end for holder in self.holders.values()), default=0)
        return max(0, sum(node.device_tokens for node in self._droppable()) - longest)

    def drop(self, tokens: int) -> int:
        """Free ``tokens`` device slots or more, large nodes first, so that few requests have to load; how many were freed."""
        freed = 0
        for node in sorted(self._droppable(), key=lambda node: len(node.key), reverse=True):
            if freed >= tokens:
                break
            freed += self._drop(node)
        return freed

    def _droppable(self) -> list[TieredNode]:
        return [node for node, holders in self._of_node.items() if self._may_go(node, holders)]

    def _may_go(self, node: TieredNode, holders: list[Holder]) -> bool:
        """Whether nobody reads a node's device slots before they could be loaded again."""
        if not holders or node.lock_ref != len(holders):
            return False
        return all(node.end <= holder.covered and not holder.pinned for holder in holders) and self.tree.is_stored(node)

    def _drop(self, node: TieredNode) -> int:
        freed = self.tree.drop_device(node)
        for holder in self._of_node[node] if freed else []:
            holder.stale = True
        return freed

    def missing_tokens(self, row: int) -> int:
        """Tokens of a request's full KV that are not on the device, nor being loaded; 0 of one that is no holder."""
        return sum(len(node.key) for node in self._path(row) if node.value is None)

    def _path(self, row: int) -> list[TieredNode]:
        return path(self.holders[row].node) if row in self.holders else []

    def is_lost(self, row: int) -> bool:
        """Whether some of a request's full KV is in no tier: it has to be computed again."""
        return any(node.is_void for node in self._path(row))

    def is_stale(self, row: int) -> bool:
        """Whether a request's row must not be read: full KV is missing, or lies elsewhere."""
        return row in self.holders and self.holders[row].stale

    def load(self, row: int) -> bool:
        """Begin to bring a request's full KV to the device, and keep it there until :meth:`release`.

        Returns:
            False when slots lack, or it is lost; then nothing was begun.
        """
        if self.is_lost(row):
            return False
        missing = [node for node in self._path(row) if node.value is None]
        with self.reading(row):
            begun = not missing or self.tree.load_back(missing) is not None
        if begun and row in self.holders:
            self.holders[row].pinned = True
        return begun

    @contextmanager
    def reading(self, row: int) -> Iterator[None]:
        """Keep what is on the device of a request's full KV."""
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
        """Whether all of a request's full KV is on the device, and stays."""
        holder = self.holders.get(row)
        return holder is None or (holder.pinned and all(node.on_device for node in path(holder.node)))

    def waits(self, row: int) -> bool:
        """Whether what was loaded for a request is there."""
        return row in self.holders and self.ready(row)

    def restore(self, row: int) -> None:
        """Let a request's row lead to its full KV, which is :meth:`ready`."""
        if self.is_stale(row):
            slots = torch.cat([node.value for node in self._path(row)])
            self.token_table[row, : len(slots)] = slots.to(self.token_table.dtype)
            self.holders[row].stale = False

    def release(self, row: int) -> None:
        """A request's full KV was read by what the current stream was given: it may go again."""
        if row in self.holders:
            self.holders[row].pinned = False
