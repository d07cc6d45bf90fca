"""The newest queries of each request, for compressors that score keys by them.

Queries exist only inside a forward pass. While one runs, :func:`record_queries` (a hook on SGLang's
attention layer) passes each layer's queries to the active :class:`QueryWindows`, which keeps the last
``window`` of each request across prefill chunks and verifications.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from sglang_ext.options import MAX_DRAFT_LENGTH


@dataclass(frozen=True)
class Recorded:
    """Rows of the running forward whose queries shall be kept.

    Attributes:
        key: the request's row in the token table.
        start: first of the request's rows in the forward's token dimension.
        end: one past its last row.
    """

    key: int
    start: int
    end: int


# Queries kept beyond the window: a verification's rejected rows are taken back after the forward.
SPARE = MAX_DRAFT_LENGTH + 1


@dataclass
class QueryWindows:
    """Per request and layer, the last ``window`` queries of tokens whose KV is exact.

    Attributes:
        window: queries kept; 0 keeps nothing and makes every call free.
    """

    window: int
    _kept: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    _running: tuple[Recorded, ...] = ()

    @contextmanager
    def recording(self, rows: tuple[Recorded, ...]) -> Iterator[None]:
        """Keep the queries of ``rows`` from the forward that runs inside this context."""
        global _active
        if not self.window or not rows:
            yield
            return
        self._running, _active = rows, self
        try:
            yield
        finally:
            self._running, _active = (), None

    def record(self, layer_id: int, queries: torch.Tensor) -> None:
        """Append a layer's queries ([tokens, query_heads, head_dim]) of the running forward."""
        for row in self._running:
            longest = self.window + SPARE
            new = queries[max(row.start, row.end - longest) : row.end]
            layers = self._kept.setdefault(row.key, {})
            old = layers.get(layer_id)
            if old is not None and len(new) < longest:
                layers[layer_id] = torch.cat([old, new])[-longest:]
            else:
                layers[layer_id] = new.clone()

    def drop_newest(self, key: int, count: int) -> None:
        """Forget the newest ``count`` queries of a request: their tokens were rejected."""
        if count <= 0:
            return
        for layer_id, queries in self._kept.get(key, {}).items():
            self._kept[key][layer_id] = queries[: max(0, len(queries) - count)]

    def get(self, key: int, layer_id: int) -> torch.Tensor | None:
        """Queries of a request and layer, oldest first: [up to window, heads, head_dim]."""
        queries = self._kept.get(key, {}).get(layer_id)
        return None if queries is None else queries[-self.window :]

    def forget(self, key: int) -> None:
        """Release what is kept for a request."""
        self._kept.pop(key, None)

    def clear(self) -> None:
        """Release everything."""
        self._kept.clear()


_active: QueryWindows | None = None
prefix_reserve = 0


def record_queries(
    original: Callable, layer, q, k, v, forward_batch, save_kv_cache=True, *args, **kwargs
) -> torch.Tensor:
    """Hook around ``RadixAttention.forward``: hand the queries to the active windows."""
    if _active is not None:
        _active.record(layer.layer_id, q.view(-1, layer.tp_q_head_num, layer.qk_head_dim))
    return original(layer, q, k, v, forward_batch, save_kv_cache, *args, **kwargs)


def reserve_queries(count: int) -> None:
    """Let prefix hits leave at least ``count`` tokens of each prompt to compute."""
    global prefix_reserve
    prefix_reserve = count


def cap_prefix_match(original: Callable, req, input_len: int) -> int:
    """Hook around ``Req._compute_max_prefix_len``: leave the query window uncached."""
    longest = original(req, input_len)
    return max(0, min(longest, input_len - prefix_reserve)) if prefix_reserve else longest
