"""Which component selects the tokens of compressed KV: its method, another process, or both."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglang_ext.core import CompressedKV
from sglang_ext.mem_cache.compressed.row_exchange import NewestRows
from sglang_ext.mem_cache.compressed.synchronous_selector import initial_selection

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressed.cache import CompressedKVCache


def resolve_selection(
    compressed_kv: "CompressedKVCache", row: int, compressed: CompressedKV, choose: Callable[[], torch.Tensor]
) -> torch.Tensor | NewestRows | None:
    """The tokens that a request's compressed KV keeps, int64 [layers, kv_heads, count], or the rows to add to existing ones.

    None if the method selects while it writes.

    Args:
        compressed_kv: The compressed KV cache.
        row: The request's row in the token table.
        compressed: The compressed KV, with all slots that it reads.
        choose: Returns the method's selection from the full KV here.
    """
    if compressed_kv.row_sender is None:
        return initial_selection(compressed_kv.method(row).compressor, compressed_kv.buffers, compressed.covered, compressed.own_tokens)
    if compressed_kv.can_lack_full_kv(row):
        return compressed_kv.async_selector.plan_refresh(row, compressed.covered, compressed.own_tokens)
    kept = choose()
    compressed_kv.async_selector.on_compressed(row, compressed.covered, kept)
    return kept
