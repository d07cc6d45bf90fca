"""The newest queries of each request, for compressors that score keys by them.

Queries exist only inside a forward pass. While one runs, a hook on SGLang's attention backends (query_hooks.py) passes
each layer's queries to :class:`QueryWindows`, which keeps the newest of each request across prefill chunks and
verifications. A CUDA graph runs no Python: graphs that are captured with the hook active copy their queries to one buffer,
from which the windows are filled after a replay.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch

from sglang_ext.device import to_device
from sglang_ext.mem_cache import query_hooks
from sglang_ext.mem_cache.query_ring import QueryRing


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
class QueryWindows:
    """Per request and layer, the newest queries of tokens whose KV is exact.

    Attributes:
        window: queries that compressors want at most; 0 keeps nothing and makes every call free.
        layers: indices of the model's attention layers, in the order of :attr:`QueryRing.ring`.
        spare: tokens that may be recorded and then rejected.
        wanted_by: whether anything is kept of the request with a key: its compressor may want none.
    """

    window: int
    layers: Sequence[int]
    spare: int
    wanted_by: Callable[[int], bool] = lambda key: True
    _kept: dict[int, QueryRing] = field(default_factory=dict)
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
            with query_hooks.recording_to(self):
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
        with query_hooks.recording_to(self):
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

    def _ring(self, key: int, like: torch.Tensor) -> QueryRing:
        """The ring of a request; a new one for queries as in ``like``, [layers, tokens, heads, head_dim]."""
        if key not in self._kept:
            self._kept[key] = QueryRing(like.new_zeros(len(self.layers), self.span, *like.shape[-2:]))
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
