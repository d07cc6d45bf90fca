"""A ring of one request's newest queries, over all layers."""

from bisect import bisect_left
from dataclasses import dataclass, field

import torch


@dataclass
class QueryRing:
    """One request's queries, in a ring: those of rejected drafts are overwritten.

    Positions may be missing between them: a CUDA graph of plain decoding leaves no queries.

    Attributes:
        ring: [layers, span, query_heads, head_dim]; the newest lies before :attr:`head`, modulo its span.
        positions: of the queries, ascending; the last belongs to the newest.
        head: where the next query will lie, counted without modulo.
    """

    ring: torch.Tensor
    positions: list[int] = field(default_factory=list)
    head: int = 0

    @property
    def span(self) -> int:
        """Queries that the ring holds."""
        return self.ring.shape[1]

    def drop(self, position: int) -> None:
        """Forget the queries of ``position`` and later ones."""
        while self.positions and self.positions[-1] >= position:
            self.positions.pop()
            self.head -= 1

    def reserve(self, positions: range) -> list[int]:
        """Places in the ring for queries of ``positions``, over those of the same positions and later ones."""
        self.drop(positions.start)
        places = [(self.head + i) % self.span for i in range(len(positions))]
        self.positions = [*self.positions, *positions][-self.span :]
        self.head += len(positions)
        return places

    def newest(self, count: int, end: int) -> tuple[list[int], list[int]]:
        """Places and positions of the newest ``count`` queries before position ``end``, oldest first."""
        until = bisect_left(self.positions, end)
        since = max(0, until - count)
        begin = self.head - len(self.positions)
        return [(begin + i) % self.span for i in range(since, until)], self.positions[since:until]
