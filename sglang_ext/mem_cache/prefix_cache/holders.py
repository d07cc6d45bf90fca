"""Running requests that draft on their copies, and the nodes of the prefix tree that hold their full KV."""

from dataclasses import dataclass, field

from sglang_ext.mem_cache.prefix_cache.tiered_node import TieredNode, path


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
class Holders:
    """The holders of one scheduler process.

    Attributes:
        by_row: each of them.
        by_node: those whose path leads through a node.
    """

    by_row: dict[int, Holder] = field(default_factory=dict)
    by_node: dict[TieredNode, list[Holder]] = field(default_factory=dict)

    def update(self, running: dict[int, tuple[TieredNode, int]]) -> None:
        """These are the holders now, by row: the end of the path, and the tokens that the copy covers."""
        self.by_row = {row: self._holder(row, *where) for row, where in running.items()}
        self.by_node = {}
        for holder in self.by_row.values():
            for node in path(holder.node):
                self.by_node.setdefault(node, []).append(holder)

    def _holder(self, row: int, node: TieredNode, covered: int) -> Holder:
        holder = self.by_row.get(row) or Holder(row, node, covered)
        holder.node, holder.covered = node, covered
        return holder

    def forget(self, row: int) -> None:
        """The request in ``row`` is gone, or does not draft any more."""
        holder = self.by_row.pop(row, None)
        if holder is not None:
            for node in path(holder.node):
                if holder in (of_node := self.by_node.get(node, [])):
                    of_node.remove(holder)

    def clear(self) -> None:
        """All requests are gone."""
        self.by_row.clear()
        self.by_node.clear()

    def get(self, row: int) -> Holder | None:
        """The one in ``row``."""
        return self.by_row.get(row)

    def path(self, row: int) -> list[TieredNode]:
        """The nodes of the one in ``row``, from the root's child down; none where there is no holder."""
        return path(self.by_row[row].node) if row in self.by_row else []
