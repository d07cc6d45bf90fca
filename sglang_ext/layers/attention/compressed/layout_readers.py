"""Attention by layout of the compressed KV: in PyTorch for a few tokens of a request, and on a GPU for one token of each request."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from sglang_ext.layers.attention.compressed.decode_backend import CompressedDecode
from sglang_ext.layers.attention.compressed.per_head import (
    PagesDecode, PointerDecode, SentRowsDecode, RaggedHeadsDecode, pointer_attention, uneven_attention,
)  # fmt: skip
from sglang_ext.layers.attention.compressed.packed import PackedDecode, packed_attention
from sglang_ext.mem_cache.compressed.layouts.pages import PagePointerLayout
from sglang_ext.mem_cache.compressed.layouts.ragged_heads import RaggedHeadLayout
from sglang_ext.mem_cache.compressed.layouts.base import KVLayout, ExchangedRowLayout
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import QuantizedLayout
from sglang_ext.mem_cache.compressed.layouts.pointers import PointerLayout


class LayoutReader(NamedTuple):
    """Attention over rows that begin with compressed KV of one layout.

    Attributes:
        attend: Causal attention of a request's newest tokens over its row, in PyTorch. Returns [count, heads, value_dim]. None if rows are
            read as plain tokens. Its arguments are the layout, the row, the length of the compressed part, and queries [count, heads, dim].
            Then come a layer's key and value buffers [slots, kv_heads, dim], the row's slots int64, and the factor on query-key products.
        decode: The backend for one token per request.
    """

    attend: Callable[[KVLayout, int, int, Tensor, Tensor, Tensor, Tensor, float | None], Tensor] | None
    decode: type[CompressedDecode]


def _packed(
    rows: QuantizedLayout, row: int, packed: int, queries: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scaling: float
) -> Tensor:
    return packed_attention(rows.layout, queries, keys, values, slots, packed, scaling)


LAYOUT_READERS: dict[type[KVLayout], LayoutReader] = {
    QuantizedLayout: LayoutReader(_packed, PackedDecode),
    RaggedHeadLayout: LayoutReader(uneven_attention, RaggedHeadsDecode),
    PointerLayout: LayoutReader(pointer_attention, PointerDecode),
    PagePointerLayout: LayoutReader(pointer_attention, PagesDecode),
    ExchangedRowLayout: LayoutReader(None, SentRowsDecode),
}
"""All layouts except plain tokens, which any attention reads."""
