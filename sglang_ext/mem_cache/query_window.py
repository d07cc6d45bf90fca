"""The newest queries of each request, for compressors that score keys by them.

Queries exist only inside a forward pass. While one runs, :func:`record_queries` (a hook on SGLang's
attention backends) passes each layer's queries to the active :class:`QueryWindows`, which keeps the newest
of each request across prefill chunks and verifications. A CUDA graph runs no Python: graphs that are captured
with the hook active copy their queries to one buffer, from which the windows are filled after a replay.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

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
    """One request's queries, in a ring by position: those of rejected drafts are overwritten.

    Attributes:
        ring: [layers, span, query_heads, head_dim]; position ``p`` lies at ``p % span``.
        first: first position since which none is missing.
        end: one past the newest position.
    """

    ring: torch.Tensor
    first: int
    end: int


@dataclass
class QueryWindows:
    """Per request and layer, the newest queries of tokens whose KV is exact.

    Attributes:
        window: queries that a compressor wants; 0 keeps nothing and makes every call free.
        layers: indices of the model's attention layers, in the order of :attr:`Kept.ring`.
        spare: tokens that may be recorded and then rejected.
    """

    window: int
    layers: Sequence[int]
    spare: int
    _kept: dict[int, Kept] = field(default_factory=dict)
    _running: tuple[Recorded, ...] = ()
    _places: torch.Tensor | None = None
    _picked: torch.Tensor | None = None
    _captured: torch.Tensor | None = None

    @property
    def span(self) -> int:
        """Positions that a ring holds."""
        return self.window + self.spare

    @cached_property
    def _index(self) -> dict[int, int]:
        return {layer_id: index for index, layer_id in enumerate(self.layers)}

    @contextmanager
    def recording(self, rows: tuple[Recorded, ...]) -> Iterator[None]:
        """Keep the queries of ``rows`` from the forward that runs inside this context."""
        if not self.window or not rows:
            yield
            return
        self._running = tuple(row.newest(self.span) for row in rows)
        try:
            with _active_windows(self):
                yield
            if self._picked is not None:
                self._keep(self._running, self._picked)
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

    def _keep(self, rows: tuple[Recorded, ...], picked: torch.Tensor) -> None:
        """Put ``picked``, [layers, rows' tokens, heads, head_dim], one row after another, into their rings."""
        start = 0
        for row in rows:
            count = row.end - row.start
            self._write(Recorded(row.key, start, start + count, row.position), picked)
            start += count

    def keep_replayed(self, rows: tuple[Recorded, ...]) -> None:
        """Keep the queries of ``rows`` from the graph that was replayed last."""
        if self._captured is not None:
            for row in rows:
                self._write(row.newest(self.span), self._captured)

    def _write(self, row: Recorded, queries: torch.Tensor) -> None:
        """Put a row's queries, out of [layers, tokens, heads, head_dim], into its ring."""
        end = row.position + row.end - row.start
        kept = self._ring(row.key, row.position, queries)
        places = torch.arange(row.position, end, device=queries.device) % self.span
        kept.ring.index_copy_(1, places, queries[:, row.start : row.end])
        kept.end = end

    def _ring(self, key: int, position: int, queries: torch.Tensor) -> Kept:
        """The ring of a request, for queries from ``position`` on; new, or begun anew after a gap."""
        kept = self._kept.get(key)
        if kept is None:
            ring = queries.new_zeros(len(self.layers), self.span, *queries.shape[-2:])
            kept = self._kept[key] = Kept(ring, position, position)
        if not kept.first <= position <= kept.end:
            kept.first = position
        return kept

    def get(self, key: int, end: int) -> tuple[torch.Tensor, int] | None:
        """The newest queries before position ``end``, oldest first, and the oldest's position.

        The queries are [layers, up to window, heads, head_dim]; None when there are none.
        """
        kept = self._kept.get(key)
        if kept is None:
            return None
        end = min(end, kept.end)
        first = max(kept.first, end - self.window)
        if first >= end:
            return None
        places = torch.arange(first, end, device=kept.ring.device) % self.span
        return kept.ring[:, places], first

    def newest(self, key: int) -> int | None:
        """The position after the newest query of a request; None when there are none."""
        kept = self._kept.get(key)
        return None if kept is None else kept.end

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
