"""Who says what a copy keeps: its method, another process, or both."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglang_ext.core import CompressedView
from sglang_ext.mem_cache.compressed.held_rows import Exchange, NewestRows
from sglang_ext.mem_cache.compressed.own_query import until_own

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressed.compressed_views import CompressedViews


def kept_tokens(
    views: "CompressedViews", row: int, view: CompressedView, renewed: bool, choose: Callable[[], torch.Tensor]
) -> torch.Tensor | Exchange | NewestRows | None:
    """What the copy of a request keeps, int64 [layers, kv_heads, count], or takes in, where it holds the rest; None where its method
    chooses as it is written.

    Args:
        views: the copies.
        row: the request's row in the token table.
        view: its copy, with all slots that it reads.
        renewed: whether these hold the first tokens already.
        choose: what the method chooses now, by full KV here.
    """
    wanted = row, view.covered, view.own_tokens
    if views.elsewhere is not None:
        return views.elsewhere.moved(*wanted, renewed) if views.elsewhere.sends_rows else views.elsewhere.kept(*wanted)
    if views.senders is None:
        return until_own(views.method(row).compressor, views.buffers, *wanted[1:])
    if views.is_alone(row):
        return views.beside.renewed(*wanted)
    kept = choose()
    views.beside.made(row, view.covered, kept)
    return kept
