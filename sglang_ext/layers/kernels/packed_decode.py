"""Decode attention over rows that begin with packed blocks, split over the context (flash decoding).

Programs of a request's first splits read its packed blocks, those of the others its exact tokens; a second kernel joins what
they found by log-sum-exp. What comes of packed and of exact tokens is summed apart, as the former may have to be rotated
back.
"""

import torch
import triton

from sglang_ext.layers.kernels.flash_parts import join_parts
from sglang_ext.layers.kernels.packed_attention import packed_splits
from sglang_ext.mem_cache.packed_layout import Layout
from sglang_ext.mem_cache.packing import Packing, as_bytes

# Found on an H200: programs of one warp do best, with so many tokens in a step where scales of keys are a token's, or are a
# channel's; and so many exact tokens.
BY_TOKEN, BY_CHANNEL, EXACT = 64, 32, 32
WARPS = 1


def on_gpu(keys: torch.Tensor) -> bool:
    """Whether kernels run on the GPU that holds ``keys``, not in the interpreter."""
    return keys.is_cuda


def _columns(layout: Layout) -> int:
    """Bytes of a token's codes, as a tile has them."""
    return max(16, triton.next_power_of_2(layout.token_bytes))


def packed_decode(
    packing: Packing,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    token_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    packed_slots: torch.Tensor,
    scaling: float,
    splits: tuple[int, int] = (16, 4),
) -> torch.Tensor:
    """Attention of one token of each request over its row of the table: [requests, heads, dim of a value].

    Args:
        packing: how blocks are packed.
        queries: [requests, heads, dim].
        keys, values: a layer's buffers, [slots, kv_heads, dim].
        token_table: int32 [rows, width]; a row leads to its blocks' slots, then to those of exact tokens.
        rows: int64 [requests], rows of the table.
        lengths: int64 [requests], slots of each row.
        packed_slots: int32 [rows], of these, those with blocks; 0 for none.
        scaling: factor on query-key products.
        splits: parts of the blocks, and of the exact tokens, that are read at the same time.
    """
    requests, heads, dim = queries.shape
    kv_heads, value_dim, most = keys.shape[1], values.shape[2], sum(splits)
    key, value = packing.keys, packing.values
    device = queries.device
    (to_keys, to_values), (key_levels, value_levels) = packing.rotations(device), packing.levels(device)
    queries = queries.contiguous()
    rotated = queries if to_keys is None else queries.float() @ to_keys
    partial = torch.empty(requests * heads * most, value_dim, device=device)
    lse = torch.empty(requests * heads, most, device=device)
    table = key_levels is not None
    # Without a table the kernel reads none of it.
    levels = (key_levels, value_levels) if table else (lse, lse)
    key_groups = key.groups[0] if key.grid.channels == 1 else 1
    fast = on_gpu(keys) and keys.dtype != torch.float32 and key.bits < 8 and not table
    shape = {
        "VALUE_DIM": value_dim, "PADDED_VALUE_DIM": triton.next_power_of_2(value_dim), "PACKED": splits[0],
    }  # fmt: skip
    packed_splits[(most, kv_heads, requests)](
        queries, rotated, keys, values, as_bytes(keys), keys.view(torch.float16), as_bytes(values),
        values.view(torch.float16), *levels, token_table, token_table.stride(0), rows, lengths, packed_slots, partial, lse,
        scaling, keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), HEADS=kv_heads, GROUP=heads // kv_heads,
        M=max(8, triton.next_power_of_2(heads // kv_heads)), DIM=dim, PADDED_DIM=triton.next_power_of_2(dim),
        COLUMNS=_columns(key), VALUE_COLUMNS=_columns(value), BITS=key.bits, BLOCK_TOKENS=key.tokens,
        BLOCK_SLOTS=packing.block_slots, CODE_CELLS=key.code_cells, KEY_CELL=key.cell_bytes // 2,
        VALUE_CELL=value.cell_bytes // 2, KEY_GROUPS=key_groups, KEY_UNIT=key.grid.channels, VALUE_UNIT=value.grid.channels,
        TABLE=table, FAST=fast, STEP=BY_CHANNEL if key.grid.channels == 1 else BY_TOKEN, EXACT=splits[1], N=EXACT,
        num_warps=WARPS, **shape,
    )  # fmt: skip
    far, near = torch.empty(2, requests, heads, value_dim, device=device)
    join_parts[(requests * heads,)](partial, lse, far, near, SPLITS=most, PADDED_SPLITS=triton.next_power_of_2(most), **shape)
    back = far if to_values is None else far @ to_values.t()
    return (back + near).to(queries.dtype)
