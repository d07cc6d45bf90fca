"""Where the newest queries come from: a hook on SGLang's attention backends hands them out, one on its prefix tree leaves some.

SGLang calls both without saying for whom: whose queries are wanted stands in this module while a forward runs, and how many
a prefix hit leaves from the start on.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class Recorder(Protocol):
    """What takes the queries of a running forward."""

    def record(self, layer_id: int, queries: torch.Tensor) -> None:
        """Take a layer's queries, [tokens, query_heads, head_dim]."""


_active: Recorder | None = None
prefix_reserve = 0


@contextmanager
def recording_to(recorder: Recorder) -> Iterator[None]:
    """Hand ``recorder`` the queries of forwards that run inside this context."""
    global _active
    _active = recorder
    try:
        yield
    finally:
        _active = None


def record_queries(original: Callable, backend, q, k, v, layer, *args, **kwargs) -> torch.Tensor:
    """Hook around ``AttentionBackend.forward``: hand the queries to whoever records them.

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
