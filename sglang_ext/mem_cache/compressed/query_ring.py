"""A ring of one request's newest queries: which places of a pool hold them."""

from bisect import bisect_left
from dataclasses import dataclass, field


@dataclass
class QueryRing:
    """Where one request's queries lie, in a ring: those of rejected drafts are overwritten.

    Positions may be missing between them: a CUDA graph of plain decoding leaves no queries.

    Attributes:
        first: the ring's first place in the pool.
        span: queries that the ring holds, in as many places.
        positions: of the queries, ascending; the last belongs to the newest.
        head: where the next query will lie, counted from :attr:`first` without modulo.
    """

    first: int
    span: int
    positions: list[int] = field(default_factory=list)
    head: int = 0

    def drop(self, position: int) -> None:
        """Forget the queries of ``position`` and later ones."""
        while self.positions and self.positions[-1] >= position:
            self.positions.pop()
            self.head -= 1

    def reserve(self, positions: range) -> list[int]:
        """Places for queries of ``positions``, over those of the same positions and later ones."""
        self.drop(positions.start)
        places = [self._place(self.head + i) for i in range(len(positions))]
        self.positions = [*self.positions, *positions][-self.span :]
        self.head += len(positions)
        return places

    def newest(self, count: int, end: int) -> tuple[list[int], list[int]]:
        """Places and positions of the newest ``count`` queries before position ``end``, oldest first."""
        until = bisect_left(self.positions, end)
        since = max(0, until - count)
        begin = self.head - len(self.positions)
        return [self._place(begin + i) for i in range(since, until)], self.positions[since:until]

    def _place(self, index: int) -> int:
        return self.first + index % self.span
