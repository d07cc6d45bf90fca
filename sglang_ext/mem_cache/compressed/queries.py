"""The newest queries of each request, for compressors that score keys by them.

Queries exist only inside a forward pass. While one runs, a hook on SGLang's attention backends (:func:`record_queries`) passes
each layer's queries to :class:`QueryWindows`, which keeps the newest of each request across prefill chunks and
verifications. A CUDA graph runs no Python: graphs that are captured with the hook active write their queries to the places
that a table on the device names, which is set before each replay.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from sglang_ext.device import to_device
from sglang_ext.mem_cache.compressed.remote_selector import LayerObserver

# SGLang calls the hooks below without saying for whom: whose queries are wanted while a forward runs, who is told which keys it wrote, and
# how many queries a prefix hit leaves.
_active: "QueryWindows | None" = None
_told: "Callable[[int, torch.Tensor], None] | None" = None
prefix_reserve = 0


@contextmanager
def recording_to(recorder: "QueryWindows") -> Iterator[None]:
    """Hand ``recorder`` the queries of forwards that run inside this context."""
    global _active
    _active = recorder
    try:
        yield
    finally:
        _active = None


def set_key_write_callback(told: "Callable[[int, torch.Tensor], None] | None") -> None:
    """Let ``told`` know of each layer of all forwards, graphs that are captured among them, and of the slots, int64 [tokens], to which its
    keys were written; None for nobody."""
    global _told
    _told = told


def record_queries(original: Callable, backend, q, k, v, layer, forward_batch, *args, **kwargs) -> torch.Tensor:
    """Hook around ``AttentionBackend.forward``: hand the queries to whoever records them, and tell what was written.

    SGLang's graphs of prefills leave out the attention backend, so that this is called between their pieces.
    """
    if _active is not None:
        _active.record(layer.layer_id, q.view(-1, layer.tp_q_head_num, layer.qk_head_dim))
    found = original(backend, q, k, v, layer, forward_batch, *args, **kwargs)
    if _told is not None and not forward_batch.forward_mode.is_idle():
        _told(layer.layer_id, forward_batch.out_cache_loc)
    return found


def reserve_queries(count: int) -> None:
    """Let prefix hits leave at least ``count`` tokens of each prompt to compute."""
    global prefix_reserve
    prefix_reserve = count


def cap_prefix_match(original: Callable, req, input_len: int) -> int:
    """Hook around ``Req._compute_max_prefix_len``: leave the query window uncached."""
    longest = original(req, input_len)
    return max(0, min(longest, input_len - prefix_reserve)) if prefix_reserve else longest


@dataclass(frozen=True)
class RecordedRows:
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

    def newest(self, count: int) -> "RecordedRows":
        """The last ``count`` of the rows."""
        skipped = max(0, self.end - self.start - count)
        return replace(self, start=self.start + skipped, position=self.position + skipped)


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


@dataclass
class QueryWindows:
    """Per request and layer, the newest queries of tokens whose KV is exact, in one pool of a bounded number of rings.

    A request draws a ring when its queries are first recorded, and gives it back with :meth:`forget`. Where no ring is left
    its queries are not kept: whoever wants them asks :meth:`has_enough`, and waits.

    Attributes:
        window: queries that compressors want at most; 0 keeps nothing and makes every call free.
        layers: indices of the model's attention layers, in the order of the pool.
        spare: tokens that may be recorded and then rejected, or while queries are read beside them.
    """

    window: int
    layers: Sequence[int]
    spare: int
    _rings: dict[int, QueryRing] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)
    _pool: torch.Tensor | None = None
    _running: tuple[RecordedRows, ...] = ()
    _picked: tuple[torch.Tensor, torch.Tensor] | None = None
    _watch: LayerObserver | None = None
    _targets: torch.Tensor | None = None
    _capturing: bool = False
    _aimed: bool = False
    _of_steps: bool = False

    @property
    def span(self) -> int:
        """Queries that a ring holds."""
        return self.window + self.spare

    @cached_property
    def _index(self) -> dict[int, int]:
        return {layer_id: index for index, layer_id in enumerate(self.layers)}

    def allocate(self, rings: int, heads: int, head_dim: int, like: torch.Tensor) -> None:
        """Make room for the queries of ``rings`` requests; before any is recorded.

        Args:
            rings: requests whose queries are kept at once.
            heads: query heads of this rank.
            head_dim: size of a query.
            like: a tensor with the queries' dtype and device.
        """
        if self.window and rings:
            # The first place is nobody's: what a graph computes for others than those recorded is left there.
            self._pool = like.new_zeros(len(self.layers), 1 + rings * self.span, heads, head_dim)
            self._free = [1 + ring * self.span for ring in reversed(range(rings))]

    @property
    def pool(self) -> torch.Tensor:
        """Where :meth:`newest_places` leads: [layers, places, heads, head_dim]; there is none where nothing is kept."""
        return self._pool

    @contextmanager
    def recording(self, rows: tuple[RecordedRows, ...], watch: LayerObserver | None = None) -> Iterator[None]:
        """Keep the queries of ``rows`` from the forward that runs inside this context; ``watch`` is told of its layers."""
        rows = self._fitting(rows)
        if not rows:
            yield
            return
        self._running, self._watch = rows, watch
        try:
            with recording_to(self):
                yield
        finally:
            self._running, self._picked, self._watch = (), None, None

    @contextmanager
    def capturing(self, tokens: int, steps: bool = False) -> Iterator[None]:
        """CUDA graphs captured inside this context leave queries where :meth:`set_targets` says.

        Args:
            tokens: of the largest of all that are ever captured so.
            steps: whether they are steps of one token a request.

        Raises:
            ValueError: earlier ones were said to be all smaller.
        """
        if self._pool is None:
            yield
            return
        if self._targets is None:
            self._targets = torch.zeros(tokens, dtype=torch.int64, device=self._pool.device)
        elif tokens > len(self._targets):
            raise ValueError(
                f"graphs of {tokens} tokens are captured after others of at most {len(self._targets)}, whose table they share: "
                "pass the most of all at first"
            )
        self._capturing, self._of_steps = True, self._of_steps or steps
        try:
            with recording_to(self):
                yield
        finally:
            self._capturing = False

    def record(self, layer_id: int, queries: torch.Tensor) -> None:
        """Take a layer's queries ([tokens, query_heads, head_dim]) of the running forward."""
        layer = self._index[layer_id]
        pool = self._pool[layer]
        if self._capturing:
            pool.index_copy_(0, self._targets[: len(queries)], queries)
            return
        if self._picked is None:
            # Not before: a forward that replays a graph does not come here, and leaves no queries.
            self._picked = self._reserve(self._running)
        tokens, places = self._picked
        if self._watch is not None:
            self._watch.on_layer_start(layer)
        if len(tokens):
            pool.index_copy_(0, places, queries.index_select(0, tokens))
        if self._watch is not None:
            self._watch.on_queries_recorded(layer)

    def set_targets(self, rows: tuple[RecordedRows, ...]) -> None:
        """Let the graph that is replayed next leave the queries of ``rows``, and of no others, in their rings."""
        if self._targets is None:
            return
        if self._aimed:
            self._targets.zero_()
        tokens, places = self._reserve(self._fitting(rows))
        self._aimed = len(tokens) > 0
        if self._aimed:
            self._targets.index_copy_(0, tokens, places)

    @property
    def has_step_queries(self) -> bool:
        """Whether graphs of steps leave queries."""
        return self._of_steps

    def set_step_targets(self, rows: tuple[RecordedRows, ...]) -> None:
        """As :meth:`set_targets`, before a step over copies; no-op where graphs of steps leave no queries."""
        if self._of_steps:
            self.set_targets(rows)

    def warm_up(self) -> None:
        """Do once what :meth:`set_targets` does, with row 0, which is no request's: a first time takes longer than those after."""
        if self._targets is not None:
            nobody = to_device([0], self._targets.device)
            self._targets.index_copy_(0, nobody, nobody)
            self._targets.zero_()

    def _fitting(self, rows: tuple[RecordedRows, ...]) -> tuple[RecordedRows, ...]:
        """Of ``rows``, what rings have room for."""
        return () if self._pool is None else tuple(row.newest(self.span) for row in rows)

    def _reserve(self, rows: tuple[RecordedRows, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of a forward whose queries are kept, and their places in the pool, both int64 [kept]; ``rows`` as far as
        there are rings."""
        tokens: list[int] = []
        places: list[int] = []
        for row in rows:
            ring = self._ring(row.key)
            if ring is not None:
                tokens += range(row.start, row.end)
                places += ring.reserve(range(row.position, row.position + row.end - row.start))
        # One copy to the device, whatever the requests.
        both = to_device(tokens + places, self._pool.device)
        return both[: len(tokens)], both[len(tokens) :]

    def _ring(self, key: int) -> QueryRing | None:
        """The ring of a request; None where it has none, and none is left."""
        if key not in self._rings and self._free:
            self._rings[key] = QueryRing(self._free.pop(), self.span)
        return self._rings.get(key)

    def insert(self, key: int, end: int, queries: torch.Tensor) -> None:
        """Keep queries that another server computed, of the tokens before position ``end``, as far as there are rings; no others.

        Args:
            queries: [layers, tokens, heads, head_dim], on any device.
        """
        self.forget(key)
        ring = None if self._pool is None else self._ring(key)
        if ring is not None:
            queries = queries[:, -self.span :]
            places = to_device(ring.reserve(range(end - queries.shape[1], end)), self._pool.device)
            self._pool.index_copy_(1, places, queries.to(self._pool.device))

    def get(
        self, key: int, end: int, count: int, layers: slice = slice(None)
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The newest ``count`` queries, at most :attr:`window`, before position ``end``, oldest first, and their positions.

        Of some layers, by their places, or of all. The queries are [layers, up to count, heads, head_dim], the positions int64; None
        when there are none.
        """
        found = self.newest_places(key, end, count)
        if not found[1]:
            return None
        places, positions = to_device([*found], self._pool.device)
        return self._pool[layers, places], positions

    def newest_places(self, key: int, end: int, count: int) -> tuple[list[int], list[int]]:
        """Of what :meth:`get` answers the places, which :meth:`at` reads as long as no more than :attr:`spare` tokens were recorded
        since, and the positions; empty where there are none."""
        ring = self._rings.get(key)
        return ([], []) if ring is None else ring.newest(count, end)

    def at(self, places: torch.Tensor, layers: slice) -> torch.Tensor:
        """Queries at ``places``, int64 [requests, window], of some layers: [requests, layers, heads, window, head_dim]."""
        found = self._pool[layers].index_select(1, places.flatten()).unflatten(1, places.shape)
        return found.permute(1, 0, 3, 2, 4)

    def newest(self, key: int) -> int | None:
        """The position after the newest query of a request; None when there are none."""
        ring = self._rings.get(key)
        return ring.positions[-1] + 1 if ring is not None and ring.positions else None

    def has_enough(self, key: int, count: int) -> bool:
        """Whether ``count`` queries of a request are kept."""
        ring = self._rings.get(key)
        return count == 0 or (ring is not None and len(ring.positions) >= count)

    def can_record(self, key: int) -> bool:
        """Whether queries of a request would be kept: it has a ring, or one is left."""
        return key in self._rings or bool(self._free)

    def drop_rejected(self, key: int, length: int) -> None:
        """Forget the queries of a request's drafts that were rejected: it has ``length`` tokens."""
        if key in self._rings:
            self._rings[key].drop(length)

    def forget(self, key: int) -> None:
        """Give back the ring of a request; no-op where it has none."""
        ring = self._rings.pop(key, None)
        if ring is not None:
            self._free.append(ring.first)

    def clear(self) -> None:
        """Give back all rings."""
        for key in list(self._rings):
            self.forget(key)

    @property
    def taken(self) -> int:
        """Rings that requests have."""
        return len(self._rings)

    @property
    def used_bytes(self) -> int:
        """Bytes of these."""
        return 0 if self._pool is None else self.taken * self.span * self._pool[:, 0].nbytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the pool, and of what tells graphs their places."""
        return sum(0 if tensor is None else tensor.nbytes for tensor in (self._pool, self._targets))
