"""The newest queries of each request, for compressors that score keys by them.

Queries exist only during a forward. A hook on SGLang's attention backends (:func:`record_queries`) passes each layer's queries to
:class:`QueryWindows`, which keeps the newest ones of each request across prefill chunks and verifications. A CUDA graph runs no Python.
Graphs captured with the hook active therefore write queries to the pool indices in a device table, which is set before each replay.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch

from sglang_ext.device import to_device

# SGLang calls the hooks below without a context argument, so the state is global: the recorder of the running forward, the callback for
# written keys, and the number of tokens that prefix hits leave uncached.
_active: "QueryWindows | None" = None
_key_write_callback: "Callable[[int, torch.Tensor], None] | None" = None
uncached_tokens = 0


@contextmanager
def recording_to(recorder: "QueryWindows") -> Iterator[None]:
    """Pass the queries of forwards inside this context to ``recorder``."""
    global _active
    _active = recorder
    try:
        yield
    finally:
        _active = None


def set_key_write_callback(callback: "Callable[[int, torch.Tensor], None] | None") -> None:
    """Set the callback for written keys: it gets each layer id of each forward, also of captures, and the slots of the keys, int64 [tokens]."""
    global _key_write_callback
    _key_write_callback = callback


def record_queries(original: Callable, backend, q, k, v, layer, forward_batch, *args, **kwargs) -> torch.Tensor:
    """Hook around ``AttentionBackend.forward``: pass the queries to the recorder, and report written keys to the callback.

    SGLang's prefill graphs exclude the attention backend, so that this hook runs between their pieces.
    """
    if _active is not None:
        _active.record(layer.layer_id, q.view(-1, layer.tp_q_head_num, layer.qk_head_dim))
    found = original(backend, q, k, v, layer, forward_batch, *args, **kwargs)
    if _key_write_callback is not None and not forward_batch.forward_mode.is_idle():
        _key_write_callback(layer.layer_id, forward_batch.out_cache_loc)
    return found


def reserve_queries(count: int) -> None:
    """Make prefix hits leave at least ``count`` tokens of each prompt uncached."""
    global uncached_tokens
    uncached_tokens = count


def cap_prefix_match(original: Callable, req, input_len: int) -> int:
    """Hook around ``Req._compute_max_prefix_len``: leave the query window uncached."""
    longest = original(req, input_len)
    return max(0, min(longest, input_len - uncached_tokens)) if uncached_tokens else longest


class LayerObserver(Protocol):
    """Receives the progress of a forward. Layers are counted from 0."""

    def on_layer_start(self, layer: int) -> None:
        """Called before the layer's attention."""

    def on_queries_recorded(self, layer: int) -> None:
        """Called when the layer's queries are recorded."""


@dataclass(frozen=True)
class RecordedRows:
    """Rows ``[start, end)`` in a forward's token dimension whose queries are recorded.

    They are of the request in ``row`` of the token table, and ``position`` is the first one's in the request.
    """

    row: int
    start: int
    end: int
    position: int

    def newest(self, count: int) -> "RecordedRows":
        """The last ``count`` rows."""
        skipped = max(0, self.end - self.start - count)
        return replace(self, start=self.start + skipped, position=self.position + skipped)


@dataclass
class QueryRing:
    """Pool indices of one request's queries: a ring of ``span`` indices from ``first`` on. New queries overwrite those of rejected drafts.

    The queries' ``positions``, ascending, may have gaps: a CUDA graph of plain decoding records no queries. ``head`` is the index of the next
    query, relative to ``first``, without modulo.
    """

    first: int
    span: int
    positions: list[int] = field(default_factory=list)
    head: int = 0

    def drop(self, position: int) -> None:
        """Drop the queries of ``position`` and later ones."""
        while self.positions and self.positions[-1] >= position:
            self.positions.pop()
            self.head -= 1

    def reserve(self, positions: range) -> list[int]:
        """Indices for queries of ``positions``. They replace those of the same and later positions."""
        self.drop(positions.start)
        places = [self._place(self.head + i) for i in range(len(positions))]
        self.positions = [*self.positions, *positions][-self.span :]
        self.head += len(positions)
        return places

    def newest(self, count: int, end: int) -> tuple[list[int], list[int]]:
        """Indices and positions of the newest ``count`` queries before position ``end``, oldest first."""
        until = bisect_left(self.positions, end)
        since = max(0, until - count)
        begin = self.head - len(self.positions)
        return [self._place(begin + i) for i in range(since, until)], self.positions[since:until]

    def _place(self, index: int) -> int:
        return self.first + index % self.span


@dataclass
class QueryWindows:
    """The newest queries of each request and layer, of tokens with exact KV, in one pool with a fixed number of rings.

    A request takes a ring when its queries are first recorded, and :meth:`forget` frees the ring. If no ring is free, the request's
    queries are not recorded. Callers check :meth:`has_enough` and wait.

    Attributes:
        window: Maximum queries that a compressor needs; 0: nothing is recorded.
        layers: Indices of the model's attention layers, in pool order.
        extra_queries: Additional queries per ring: of rejected drafts, and of steps that run while a selection reads older queries.
        pool: The memory that :meth:`newest_places` indexes: [layers, places, heads, head_dim]; None if nothing is kept.
        has_step_queries: Whether graphs of draft steps record queries.
    """

    window: int
    layers: Sequence[int]
    extra_queries: int
    pool: torch.Tensor | None = None
    has_step_queries: bool = False
    _rings: dict[int, QueryRing] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)
    _running: tuple[RecordedRows, ...] = ()
    _reserved: tuple[torch.Tensor, torch.Tensor] | None = None
    _observer: "LayerObserver | None" = None
    _targets: torch.Tensor | None = None
    _capturing: bool = False
    _has_targets: bool = False

    @property
    def span(self) -> int:
        """Queries that a ring holds."""
        return self.window + self.extra_queries

    @cached_property
    def _index(self) -> dict[int, int]:
        return {layer_id: index for index, layer_id in enumerate(self.layers)}

    def allocate(self, rings: int, heads: int, head_dim: int, like: torch.Tensor) -> None:
        """Allocate memory for the queries of ``rings`` requests, with the dtype and device of ``like``. Called before any query is recorded."""
        if self.window and rings:
            # No request owns index 0. Graphs write queries there that are not recorded.
            self.pool = like.new_zeros(len(self.layers), 1 + rings * self.span, heads, head_dim)
            self._free = [1 + ring * self.span for ring in reversed(range(rings))]

    @contextmanager
    def recording(self, rows: tuple[RecordedRows, ...], observer: "LayerObserver | None" = None) -> Iterator[None]:
        """Record the queries of ``rows`` of the forward inside this context. ``observer`` observes its layers."""
        self._running, self._observer = self._fitting(rows), observer
        try:
            with recording_to(self) if self._running else nullcontext():
                yield
        finally:
            self._running, self._reserved, self._observer = (), None, None

    @contextmanager
    def capturing(self, tokens: int, steps: bool = False) -> Iterator[None]:
        """CUDA graphs captured inside this context write queries to the indices of :meth:`set_targets`.

        ``tokens`` are those of the largest such graph of all captures. ``steps``: the graphs are draft steps of one token per request.

        Raises:
            ValueError: An earlier call passed a smaller number of tokens.
        """
        if self.pool is None:
            yield
            return
        if self._targets is None:
            self._targets = torch.zeros(tokens, dtype=torch.int64, device=self.pool.device)
        elif tokens > len(self._targets):
            raise ValueError(
                f"graphs of {tokens} tokens are captured after others of at most {len(self._targets)} tokens, and they share one table: "
                "pass the largest number of tokens first"
            )
        self._capturing, self.has_step_queries = True, self.has_step_queries or steps
        try:
            with recording_to(self):
                yield
        finally:
            self._capturing = False

    def record(self, layer_id: int, queries: torch.Tensor) -> None:
        """Record one layer's queries, [tokens, query_heads, head_dim], of the running forward."""
        layer = self._index[layer_id]
        pool = self.pool[layer]
        if self._capturing:
            pool.index_copy_(0, self._targets[: len(queries)], queries)
            return
        if self._reserved is None:
            # Reserved lazily: a forward that replays a graph does not call this method, and records no queries.
            self._reserved = self._reserve(self._running)
        tokens, places = self._reserved
        if self._observer is not None:
            self._observer.on_layer_start(layer)
        if len(tokens):
            pool.index_copy_(0, places, queries.index_select(0, tokens))
        if self._observer is not None:
            self._observer.on_queries_recorded(layer)

    def set_targets(self, rows: tuple[RecordedRows, ...]) -> None:
        """Make the next replayed graph record the queries of exactly these ``rows`` in their rings."""
        if self._targets is None:
            return
        if self._has_targets:
            self._targets.zero_()
        tokens, places = self._reserve(self._fitting(rows))
        self._has_targets = len(tokens) > 0
        if self._has_targets:
            self._targets.index_copy_(0, tokens, places)

    def warm_up(self) -> None:
        """Run the operations of :meth:`set_targets` once on index 0, which no request owns: the first run is slower than later ones."""
        if self._targets is not None:
            nobody = to_device([0], self._targets.device)
            self._targets.index_copy_(0, nobody, nobody)
            self._targets.zero_()

    def _fitting(self, rows: tuple[RecordedRows, ...]) -> tuple[RecordedRows, ...]:
        """``rows``, shortened to what a ring holds."""
        return () if self.pool is None else tuple(row.newest(self.span) for row in rows)

    def _reserve(self, rows: tuple[RecordedRows, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Reserve ring entries, as far as rings are free. Returns the forward's recorded tokens and their pool indices, int64 [kept] each."""
        tokens: list[int] = []
        places: list[int] = []
        for row in rows:
            ring = self._ring(row.row)
            if ring is not None:
                tokens += range(row.start, row.end)
                places += ring.reserve(range(row.position, row.position + row.end - row.start))
        # One transfer to the device for all requests.
        both = to_device(tokens + places, self.pool.device)
        return both[: len(tokens)], both[len(tokens) :]

    def _ring(self, key: int) -> QueryRing | None:
        """The ring of a request, allocated if needed; None if no ring is free."""
        if key not in self._rings and self._free:
            self._rings[key] = QueryRing(self._free.pop(), self.span)
        return self._rings.get(key)

    def insert(self, key: int, end: int, queries: torch.Tensor) -> None:
        """Replace a request's queries with those that another server computed, if a ring is free.

        ``queries``, [layers, tokens, heads, head_dim], on any device, are those of the tokens before position ``end``.
        """
        self.forget(key)
        ring = None if self.pool is None else self._ring(key)
        if ring is not None:
            queries = queries[:, -self.span :]
            places = to_device(ring.reserve(range(end - queries.shape[1], end)), self.pool.device)
            self.pool.index_copy_(1, places, queries.to(self.pool.device))

    def get(
        self, key: int, end: int, count: int, layers: slice = slice(None)
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The newest ``count`` queries, at most :attr:`window`, before position ``end``, oldest first, and their positions.

        The queries are [layers, up to count, heads, head_dim], the positions int64. None if there are no queries.
        """
        found = self.newest_places(key, end, count)
        if not found[1]:
            return None
        places, positions = to_device([*found], self.pool.device)
        return self.pool[layers, places], positions

    def newest_places(self, key: int, end: int, count: int) -> tuple[list[int], list[int]]:
        """Pool indices and positions of the queries that :meth:`get` returns; empty if there are none.

        :meth:`read` can read them until more than :attr:`extra_queries` further tokens are recorded.
        """
        ring = self._rings.get(key)
        return ([], []) if ring is None else ring.newest(count, end)

    def read(self, places: torch.Tensor, layers: slice) -> torch.Tensor:
        """Queries at ``places``, int64 [requests, window], in some layers: [requests, layers, heads, window, head_dim]."""
        found = self.pool[layers].index_select(1, places.flatten()).unflatten(1, places.shape)
        return found.permute(1, 0, 3, 2, 4)

    def newest(self, key: int) -> int | None:
        """Position after a request's newest query; None if there are no queries."""
        ring = self._rings.get(key)
        return ring.positions[-1] + 1 if ring is not None and ring.positions else None

    def has_enough(self, key: int, count: int) -> bool:
        """Whether at least ``count`` queries of a request are recorded."""
        ring = self._rings.get(key)
        return count == 0 or (ring is not None and len(ring.positions) >= count)

    def can_record(self, key: int) -> bool:
        """Whether a request's queries would be recorded: it has a ring, or one is free."""
        return key in self._rings or bool(self._free)

    def drop_rejected(self, key: int, length: int) -> None:
        """Drop the queries of a request's rejected draft tokens. The request has ``length`` tokens."""
        if key in self._rings:
            self._rings[key].drop(length)

    def forget(self, key: int) -> None:
        """Free a request's ring; no-op without one."""
        ring = self._rings.pop(key, None)
        if ring is not None:
            self._free.append(ring.first)

    def clear(self) -> None:
        """Free all rings."""
        for key in list(self._rings):
            self.forget(key)

    @property
    def taken(self) -> int:
        """Number of rings in use."""
        return len(self._rings)

    @property
    def used_bytes(self) -> int:
        """Bytes of the rings in use."""
        return 0 if self.pool is None else self.taken * self.span * self.pool[:, 0].nbytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the pool and of the table of graph targets."""
        return sum(0 if tensor is None else tensor.nbytes for tensor in (self.pool, self._targets))
