"""Copies the kept tokens of each KV head into the cells of ragged compressed KV (ragged_heads.py), all layers in one launch."""

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.addresses import buffer_pointer

# Programs per head.
PROGRAMS = 16


@triton.jit
def _copy_cells(table, like, layer, into, read, written, inside, DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Copy numbers from the offsets ``read`` of one layer's buffer to the offsets ``written`` of the buffers of layers ``into``."""
    dim = tl.arange(0, PADDED_DIM)
    mask = inside[:, None] & (dim < DIM)[None, :]
    # The hints tell the compiler that loaded addresses are aligned. Without them it would copy cells number by number.
    source = buffer_pointer(table, layer, like.dtype.element_ty)
    target = tl.load(table + into, mask=inside, other=0).to(tl.pointer_type(like.dtype.element_ty))
    target = tl.multiple_of(target, 16) + written
    found = tl.load(source + read[:, None] + dim[None, :], mask=mask)
    tl.store(target[:, None] + dim[None, :], found, mask=mask)


@triton.jit(do_not_specialize=("copied",))
def scatter_kept(
    key_table, value_table, keys, values, kept, bounds, sources, targets, copied, key_slot, key_head, value_slot, value_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a share of the cells of one head of one layer. Only the device knows the number of cells."""
    head = tl.program_id(0)
    layer, column = head // HEADS, head % HEADS
    first, last = tl.load(bounds + head), tl.load(bounds + head + 1)
    for start in tl.range(first + tl.program_id(1) * BLOCK, last, PROGRAMS * BLOCK):
        cell = start + tl.arange(0, BLOCK)
        inside = cell < last
        token = tl.load(kept + cell, mask=inside, other=0)
        source = tl.load(sources + token, mask=inside, other=0)
        into, within = cell // (copied * HEADS), cell % (copied * HEADS)
        target = tl.load(targets + within // HEADS, mask=inside, other=0)
        read, written = source * key_slot + column * key_head, target * key_slot + within % HEADS * key_head
        _copy_cells(key_table, keys, layer, into, read, written, inside, DIM, PADDED_DIM)
        read, written = source * value_slot + column * value_head, target * value_slot + within % HEADS * value_head
        _copy_cells(value_table, values, layer, into, read, written, inside, VALUE_DIM, PADDED_VALUE_DIM)


def scatter_cells(
    key_table: torch.Tensor,
    value_table: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kept: torch.Tensor,
    bounds: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """Fill the cells of the compressed KV with the kept tokens of each head. Does not wait for the device.

    Args:
        key_table, value_table: int64 [layers], addresses of the layers' buffers.
        keys, values: One layer's buffers, [slots, kv_heads, dim]. All layers have their shape, strides and dtype.
        kept: int64 [cells], indices into ``sources``, head after head.
        bounds: int32 [layers * kv_heads + 1], first cell of each head, and the end of the last head.
        sources: int64 [tokens], slots of the context's tokens.
        targets: int64, slots of the compressed KV, whose cells ``kept`` fills. None of them is a source.
    """
    heads, dim, value_dim = keys.shape[1], keys.shape[2], values.shape[2]
    scatter_kept[(len(bounds) - 1, PROGRAMS)](
        key_table, value_table, keys, values, kept, bounds, sources, targets, len(targets), keys.stride(0), keys.stride(1),
        values.stride(0), values.stride(1), HEADS=heads, DIM=dim, VALUE_DIM=value_dim,
        PADDED_DIM=triton.next_power_of_2(dim), PADDED_VALUE_DIM=triton.next_power_of_2(value_dim), PROGRAMS=PROGRAMS,
        BLOCK=BLOCK,
    )  # fmt: skip
