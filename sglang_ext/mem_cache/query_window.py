"""The newest queries of each request, for compressors that score keys by them.

Queries exist only inside a forward pass. While one runs, :func:`record_queries` (a hook on SGLang's
attention backends) passes each layer's queries to the active :class:`QueryWindows`, which keeps the newest
of each request across prefill chunks and verifications. A CUDA graph runs no Python: graphs that are captured
with the hook active copy their queries to one buffer, from which the windows are filled after a replay.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch

from sglang_ext.device import to_device


@dataclass(frozen=True)
class Recorded:
    """Rows of a forward whose queries shall be kept.

    Attributes:
        key: the request's row in the token table.
        start: first of the request's rows in the forward's token dimension.
        end: one past its last row.
        position: absolute position of the first row's token.
    """

    key: int
    start: int
    end: int
    position: int

    def newest(self, count: int) -> "Recorded":
        """The last ``count`` of the rows."""
        skipped = max(0, self.end - self.start - count)
        return replace(self, start=self.start + skipped, position=self.position + skipped)


@dataclass
class Kept:
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


@dataclass
class QueryWindows:
    """Per request and layer, the newest queries of tokens whose KV is exact.

    Attributes:
        window: queries that compressors want at most; 0 keeps nothing and makes every call free.
        layers: indices of the model's attention layers, in the order of :attr:`Kept.ring`.
        spare: tokens that may be recorded and then rejected.
        wanted_by: whether anything is kept of the request with a key: its compressor may want none.
    """

    window: int
    layers: Sequence[int]
    spare: int
    wanted_by: Callable[[int], bool] = lambda key: True
    _kept: dict[int, Kept] = field(default_factory=dict)
    _running: tuple[Recorded, ...] = ()
    _places: torch.Tensor | None = None
    _picked: torch.Tensor | None = None
    _captured: torch.Tensor | None = None

    @property
    def span(self) -> int:
        """Queries that a ring holds."""
        return self.window + self.spare

    @cached_property
    def _index(self) -> dict[int, int]:
        return {layer_id: index for index, layer_id in enumerate(self.layers)}

    @contextmanager
    def recording(self, rows: tuple[Recorded, ...]) -> Iterator[None]:
        """Keep the queries of ``rows`` from the forward that runs inside this context."""
        rows = self._wanted(rows)
        if not self.window or not rows:
            yield
            return
        self._running = rows
        try:
            with _active_windows(self):
                yield
            if self._picked is not None:
                self._keep(_one_after_another(self._running), self._picked)
        finally:
            self._running, self._places, self._picked = (), None, None

    @contextmanager
    def capturing(self, tokens: int, heads: int, head_dim: int, like: torch.Tensor) -> Iterator[None]:
        """CUDA graphs captured inside this context leave their queries for :meth:`keep_replayed`.

        Args:
            tokens: tokens of the largest graph.
            heads: query heads of this rank.
            head_dim: size of a query.
            like: a tensor with the queries' dtype and device.
        """
        if not self.window:
            yield
            return
        self._captured = like.new_zeros(len(self.layers), tokens, heads, head_dim)
        self._running = ()
        with _active_windows(self):
            yield

    def record(self, layer_id: int, queries: torch.Tensor) -> None:
        """Take a layer's queries ([tokens, query_heads, head_dim]) of the running forward."""
        index = self._index[layer_id]
        if not self._running:
            self._captured[index, : len(queries)] = queries
            return
        if self._picked is None:
            places = [place for row in self._running for place in range(row.start, row.end)]
            self._places = to_device(places, queries.device)
            self._picked = queries.new_empty(len(self.layers), len(places), *queries.shape[1:])
        # One operation a layer, whatever the requests.
        torch.index_select(queries, 0, self._places, out=self._picked[index])

    def keep_replayed(self, rows: tuple[Recorded, ...]) -> None:
        """Keep the queries of ``rows`` from the graph that was replayed last."""
        rows = self._wanted(rows)
        if self._captured is not None and rows:
            self._keep(rows, self._captured)

    def warm_up(self) -> None:
        """Keep once what graphs left, for row 0, which is no request's: a first time takes longer than those after."""
        self.keep_replayed((Recorded(0, 0, self.spare, 0),))
        self.forget(0)

    def _wanted(self, rows: tuple[Recorded, ...]) -> tuple[Recorded, ...]:
        """Of ``rows``, what rings have room for, and somebody will read."""
        return tuple(row.newest(self.span) for row in rows if self.wanted_by(row.key))

    def _keep(self, rows: tuple[Recorded, ...], queries: torch.Tensor) -> None:
        """Put the queries of ``rows``, out of [layers, tokens, heads, head_dim], into their rings."""
        rings = [self._ring(row.key, queries) for row in rows]
        reserved = [ring.reserve(range(row.position, row.position + row.end - row.start)) for ring, row in zip(rings, rows)]
        # One copy to the device, whatever the requests.
        places = to_device([place for of_row in reserved for place in of_row], queries.device)
        for kept, row, mine in zip(rings, rows, places.split([len(of_row) for of_row in reserved])):
            kept.ring.index_copy_(1, mine, queries[:, row.start : row.end])

    def _ring(self, key: int, like: torch.Tensor) -> Kept:
        """The ring of a request; a new one for queries as in ``like``, [layers, tokens, heads, head_dim]."""
        if key not in self._kept:
            self._kept[key] = Kept(like.new_zeros(len(self.layers), self.span, *like.shape[-2:]))
        return self._kept[key]

    def get(self, key: int, end: int, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The newest ``count`` queries, at most :attr:`window`, before position ``end``, oldest first, and their positions.

        The queries are [layers, up to count, heads, head_dim], the positions int64; None when there are none.
        """
        kept = self._kept.get(key)
        if kept is None:
            return None
        found = kept.newest(count, end)
        if not found[1]:
            return None
        places, positions = to_device([*found], kept.ring.device)
        return kept.ring[:, places], positions

    def newest(self, key: int) -> int | None:
        """The position after the newest query of a request; None when there are none."""
        kept = self._kept.get(key)
        return kept.positions[-1] + 1 if kept is not None and kept.positions else None

    def drop_rejected(self, key: int, length: int) -> None:
        """Forget the queries of a request's drafts that were rejected: it has ``length`` tokens."""
        if key in self._kept:
            self._kept[key].drop(length)

    def forget(self, key: int) -> None:
        """Release what is kept for a request."""
        self._kept.pop(key, None)

    def clear(self) -> None:
        """Release everything."""
        self._kept.clear()

    @property
    def held_bytes(self) -> int:
        """Bytes of all rings, and of the buffer that graphs write."""
        tensors = [kept.ring for kept in self._kept.values()]
        tensors += [] if self._captured is None else [self._captured]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _one_after_another(rows: tuple[Recorded, ...]) -> tuple[Recorded, ...]:
    """``rows`` as they lie where only their tokens were picked."""
    ends = list(accumulate(row.end - row.start for row in rows))
    return tuple(Recorded(row.key, start, end, row.position) for row, start, end in zip(rows, [0, *ends], ends))


_active: QueryWindows | None = None
prefix_reserve = 0


@contextmanager
def _active_windows(windows: QueryWindows) -> Iterator[None]:
    global _active
    _active = windows
    try:
        yield
    finally:
        _active = None


def record_queries(original: Callable, backend, q, k, v, layer, *args, **kwargs) -> torch.Tensor:
    """Hook around ``AttentionBackend.forward``: hand the queries to the active windows.

    SGLang's graphs of prefills leave out the attention backend, so that this is called between their pieces.
    """
    if _active is not None:
        _active.record(layer.layer_id, q.view(-1, layer.tp_q_head_num, layer.qk_head_dim))
    return original(backend, q, k, v, layer, *args, **kwargs)


def reserve_queries(count: int) -> None:
    """Let prefix hits leave at least ``count`` tokens of each prompt to compute."""
    global prefix_reserve
    prefix_reserve = count


def cap_prefix_match(original: Callable, req, input_len: int) -> int:
    """Hook around ``Req._compute_max_prefix_len``: leave the query window uncached."""
    longest = original(req, input_len)
    return max(0, min(longest, input_len - prefix_reserve)) if prefix_reserve else longest
