"""Decode attention over rows that begin with compressed KV of ragged heads (ragged_heads.py), split over the context (flash decoding).

The programs of a request's first splits read a head's kept tokens, those of the others the tokens after the compressed KV.
flash_decoding.py's kernel combines the splits.
"""

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.addresses import pointer_at
from sglang_ext.layers.kernels.gpu_launch import launch_first_fitting, shape_name
from sglang_ext.layers.kernels.flash_decoding import SplitOutputs, exact_split, head_and_rows, scaled_queries, softmax_step, store_split
from sglang_ext.layers.kernels.decode_tile_sizes import MOST_ROWS, DecodeTile, tile_choices
from sglang_ext.mem_cache.compressed.layouts.ragged_heads import RaggedHeadLayout

# Tokens in a step, and steps of ragged heads and of pointers that are loaded ahead; tuned on an H200.
TOKENS, RAGGED_STAGES, POINTER_STAGES = 32, 2, 3


@triton.jit
def _buffers(table, layer, over, narrow, LAYERS: tl.constexpr):
    """Load addresses of the buffers ``over`` layers after ``layer``. A step spans at most two layers unless compressed KV is ``narrow``."""
    next_layer = tl.minimum(layer + 1, LAYERS - 1)
    found = tl.where(over > 0, tl.load(table + next_layer), tl.load(table + layer))
    if narrow:
        found = tl.load(table + tl.minimum(layer + over, LAYERS - 1))
    return found


@triton.jit
def _cells_part(
    queries, key_table, value_table, table, first, last, copied, scaling, row, key_slot, key_head, value_slot, value_head,
    LAYERS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr, N: tl.constexpr, LIKE: tl.constexpr,
):  # fmt: skip
    """Softmax over the cells [first, last) of a compressed KV of ``copied`` slots.

    Cells are consecutive, so the layer is divided for only once, at the start of a split. A step spans at most two layers, unless a layer
    has fewer cells than a step.
    """
    dim, value_dim = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_VALUE_DIM)
    q = scaled_queries(queries, row, dim, scaling, GROUP, DIM, LIKE)
    best = tl.zeros([M], dtype=tl.float32) - float("inf")
    total = tl.zeros([M], dtype=tl.float32)
    acc = tl.zeros([M, PADDED_VALUE_DIM], dtype=tl.float32)
    cells = tl.maximum(copied * HEADS, 1)
    narrow = cells < N
    layer, begin = first // cells, first % cells
    for start in tl.range(first, last, N):
        place = tl.arange(0, N)
        inside = start + place < last
        within = begin + place
        over = (within >= cells).to(tl.int32)
        if narrow:
            over = within // cells
        within -= over * cells
        slot = tl.load(table + within // HEADS, mask=inside, other=0).to(tl.int64)
        # Without the hint the compiler knows nothing of a loaded address, and loads keys number by number.
        keys = pointer_at(_buffers(key_table, layer, over, narrow, LAYERS), LIKE)
        values = pointer_at(_buffers(value_table, layer, over, narrow, LAYERS), LIKE)
        at = keys + slot * key_slot + within % HEADS * key_head
        k = tl.load(at[None, :] + dim[:, None], mask=inside[None, :] & (dim < DIM)[:, None], other=0.0)
        qk = tl.where(inside[None, :], tl.dot(q, k), float("-inf"))
        best, rescale, p, total = softmax_step(qk, best, total, 1)
        at = values + slot * value_slot + within % HEADS * value_head
        v = tl.load(at[:, None] + value_dim[None, :], mask=inside[:, None] & (value_dim < VALUE_DIM)[None, :], other=0.0)
        acc = acc * rescale[:, None] + tl.dot(p.to(LIKE), v)
        begin += N
        layer, begin = layer + begin // cells, begin % cells
    return best, total, acc


@triton.jit(do_not_specialize=("first_head",))
def _splits(
    queries, keys, values, key_table, value_table, token_table, table_row, rows, lengths, bounds, bounds_row, first_head,
    partial, lse, scaling, key_slot, key_head, value_slot, value_head, ALL_HEADS: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr, PACKED: tl.constexpr, SPLITS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    split, request = tl.program_id(0), tl.program_id(2)
    kv_head, row = head_and_rows(GROUP, M)
    table_at = tl.load(rows + request)
    table, bounds = token_table + table_at * table_row, bounds + table_at * bounds_row
    copied, length = tl.load(bounds + ALL_HEADS) // ALL_HEADS, tl.load(lengths + request).to(tl.int32)
    value_dim = tl.arange(0, PADDED_VALUE_DIM)
    LIKE: tl.constexpr = keys.dtype.element_ty
    head0 = request * HEADS * GROUP + kv_head * GROUP
    if split < PACKED:
        begin, end = tl.load(bounds + first_head + kv_head), tl.load(bounds + first_head + kv_head + 1)
        each = tl.cdiv(end - begin, PACKED)
        first = begin + each * split
        best, total, acc = _cells_part(
            queries + head0 * DIM, key_table, value_table, table, first, tl.minimum(first + each, end), copied, scaling, row,
            key_slot, key_head, value_slot, value_head, ALL_HEADS // HEADS, HEADS, GROUP, M, DIM, VALUE_DIM, PADDED_DIM,
            PADDED_VALUE_DIM, N, LIKE,
        )  # fmt: skip
    else:
        best, total, acc = exact_split(
            queries + head0 * DIM, keys + kv_head * key_head, values + kv_head * value_head, table, copied, length,
            split - PACKED, scaling, row, key_slot, value_slot, SPLITS - PACKED, GROUP, M, DIM, VALUE_DIM, PADDED_DIM,
            PADDED_VALUE_DIM, N, LIKE,
        )  # fmt: skip
    place = (head0 + row) * SPLITS + split
    store_split(partial, lse, place, value_dim, value_dim < VALUE_DIM, best, total, acc, row, GROUP, VALUE_DIM)


def ragged_decode(
    cells: RaggedHeadLayout,
    layer: int,
    queries: torch.Tensor,
    token_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
    splits: tuple[int, int] = (28, 4),
) -> torch.Tensor:
    """Attention of one token of each request over its row of the table: [requests, heads, dim of a value].

    Reads no device memory on the host, and ``cells`` always at the same addresses, so CUDA graphs may capture it. Raises OptionError if
    no tiles of such heads fit the GPU.

    Args:
        cells: Ragged-head layout: which rows begin with compressed KV, and the contents of its cells, which may be those of other layers.
        layer: Index of the layer in its buffers.
        queries: [requests, heads, dim], in the dtype of the buffers.
        token_table: int32 [rows, width]; a row has the slots of its compressed KV, then those of the tokens after it.
        rows: int64 [requests], rows of the table.
        lengths: int64 [requests], slots of each row.
        scaling: Factor on query-key products.
        splits: Parallel splits of a head's kept tokens, and of the tokens after the compressed KV.
    """
    keys, values = cells.buffers.keys[layer], cells.buffers.values[layer]
    requests, heads, dim = queries.shape
    kv_heads, parts = keys.shape[1], SplitOutputs(queries, values.shape[2], splits)
    group, queries = heads // kv_heads, queries.contiguous()

    def launch(tile: DecodeTile) -> None:
        _splits[(parts.num_splits, kv_heads * triton.cdiv(group, tile.rows), requests)](
            queries, keys, values, cells.buffers.key_table, cells.buffers.value_table, token_table, token_table.stride(0), rows,
            lengths, cells.bounds, cells.bounds.stride(0), layer * kv_heads, parts.partial, parts.lse, scaling, keys.stride(0),
            keys.stride(1), values.stride(0), values.stride(1), ALL_HEADS=cells.bounds.shape[1] - 1, HEADS=kv_heads, GROUP=group,
            M=tile.rows, DIM=dim, PADDED_DIM=triton.next_power_of_2(dim), SPLITS=parts.num_splits, N=tile.tokens,
            num_stages=tile.stages, **parts.shape,
        )  # fmt: skip

    def what() -> str:
        return f"attention over heads of different budgets with {shape_name(dim, group, keys.dtype)}"

    key = ("cells", dim, values.shape[2], group, keys.dtype, keys.device)
    launch_first_fitting(tile_choices(group, MOST_ROWS, TOKENS, RAGGED_STAGES), launch, key, what, "pass --kv-head-budgets equal")
    return parts.merged_output()
