"""Which format the copies of a server have."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang_ext.mem_cache.compressed.formats.head_cells import HeadCells
from sglang_ext.mem_cache.compressed.formats.kv_format import KVFormat, PlainTokens
from sglang_ext.mem_cache.compressed.formats.packing import PackedRows, Packing
from sglang_ext.mem_cache.compressed.formats.slot_pointers import PointerRows, Pointers
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.rotary import Rotary

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressors.catalogue import Method


def format_of(
    methods: "Sequence[Method]",
    adaptive: bool,
    buffers: KVBuffers,
    page_size: int,
    token_table: torch.Tensor,
    rotary: Rotary | None,
) -> KVFormat:
    """That of the copies of ``methods``, of which at most one packs tokens, or leads into full KV and is alone.

    Captured graphs read what rows begin with, so that this comes before any is captured.

    Args:
        methods: of the server.
        adaptive: whether heads keep different numbers of tokens.
        buffers: the pool's.
        page_size: slots that the pool hands out together.
        token_table: int32 [rows, width], with the draft rows.
        rotary: the model's rotary embedding, where a method needs it.

    Raises:
        ValueError: heads of this size cannot be packed so.
    """
    quantizer = next((method.quantizer for method in methods if method.quantizer is not None), None)
    if quantizer is not None:
        return PackedRows.of_table(Packing.of(quantizer, buffers, page_size, rotary), token_table)
    if any(method.compressor.points for method in methods):
        return PointerRows.of_table(Pointers.of(buffers, page_size), token_table)
    return HeadCells.of(buffers, len(token_table)) if adaptive else PlainTokens()
