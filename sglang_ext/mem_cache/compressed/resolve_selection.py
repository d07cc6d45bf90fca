"""Who says what a copy keeps: its method, another process, or both."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglang_ext.core import CompressedKV
from sglang_ext.mem_cache.compressed.row_exchange import RowExchange, NewestRows
from sglang_ext.mem_cache.compressed.synchronous_selector import initial_selection

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressed.cache import CompressedKVCache


def resolve_selection(
    compressed_kv: "CompressedKVCache", row: int, view: CompressedKV, renewed: bool, choose: Callable[[], torch.Tensor]
) -> torch.Tensor | RowExchange | NewestRows | None:
    """What the copy of a request keeps, int64 [layers, kv_heads, count], or takes in, where it holds the rest; None where its method
    chooses as it is written.

    Args:
        compressed_kv: the copies.
        row: the request's row in the token table.
        view: its copy, with all slots that it reads.
        renewed: whether these hold the first tokens already.
        choose: what the method chooses now, by full KV here.
    """
    wanted = row, view.covered, view.own_tokens
    if compressed_kv.remote_selector is not None:
        return compressed_kv.remote_selector.moved(*wanted, renewed) if compressed_kv.remote_selector.sends_rows else compressed_kv.remote_selector.kept(*wanted)
    if compressed_kv.row_sender is None:
        return initial_selection(compressed_kv.method(row).compressor, compressed_kv.buffers, *wanted[1:])
    if compressed_kv.can_lack_full_kv(row):
        return compressed_kv.async_selector.renewed(*wanted)
    kept = choose()
    compressed_kv.async_selector.made(row, view.covered, kept)
    return kept
