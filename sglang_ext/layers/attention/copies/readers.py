"""Who reads which format of copies: in PyTorch, for a few tokens of a request, and on a GPU, for one token of each."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from sglang_ext.layers.attention.copies.copy_decode import CopyDecode
from sglang_ext.layers.attention.copies.kept_by_heads import (
    PagesDecode, PointerDecode, RowsDecode, UnevenDecode, pointer_attention, uneven_attention,
)  # fmt: skip
from sglang_ext.layers.attention.copies.packed import PackedDecode, packed_attention
from sglang_ext.mem_cache.compressed.formats.chosen_pages import ChosenPages
from sglang_ext.mem_cache.compressed.formats.head_cells import HeadCells
from sglang_ext.mem_cache.compressed.formats.kv_format import KVFormat, RowsOfHeads
from sglang_ext.mem_cache.compressed.formats.packing import PackedRows
from sglang_ext.mem_cache.compressed.formats.slot_pointers import PointerRows


class Reader(NamedTuple):
    """Attention over rows that begin with one format.

    Attributes:
        attend: causal attention of a request's newest tokens over its row, in PyTorch: [count, heads, dim of a value]. Takes the format,
            the row, how much of it the row begins with, queries [count, heads, dim], a layer's key and value buffers
            [slots, kv_heads, dim], the row's slots int64, and the factor on query-key products. None where rows are read as any tokens.
        decode: the backend of one token a request.
    """

    attend: Callable[[KVFormat, int, int, Tensor, Tensor, Tensor, Tensor, float | None], Tensor] | None
    decode: type[CopyDecode]


def _packed(
    rows: PackedRows, row: int, packed: int, queries: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scaling: float
) -> Tensor:
    return packed_attention(rows.form, queries, keys, values, slots, packed, scaling)


READERS: dict[type[KVFormat], Reader] = {
    PackedRows: Reader(_packed, PackedDecode),
    HeadCells: Reader(uneven_attention, UnevenDecode),
    PointerRows: Reader(pointer_attention, PointerDecode),
    ChosenPages: Reader(pointer_attention, PagesDecode),
    RowsOfHeads: Reader(None, RowsDecode),
}
"""Of all formats but plain tokens, which any attention reads."""
