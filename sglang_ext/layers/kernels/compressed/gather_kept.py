"""Copies the kept tokens of each KV head into the slots of the compressed KV, all layers in one launch."""

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.addresses import buffer_pointer

# Tokens that a program copies at a time.
BLOCK = 32


@triton.jit
def _copy_tokens(table, like, layer, read, written, inside, DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Copy numbers of one layer's buffer from the offsets ``read`` to the offsets ``written``."""
    dim = tl.arange(0, PADDED_DIM)
    mask = inside[:, None] & (dim < DIM)[None, :]
    buffer = buffer_pointer(table, layer, like.dtype.element_ty)
    tl.store(buffer + (written[:, None] + dim[None, :]), tl.load(buffer + (read[:, None] + dim[None, :]), mask=mask), mask=mask)


@triton.jit(do_not_specialize=("count",))
def _gather_kept(
    key_table, value_table, keys, values, kept, sources, targets, count, key_slot, key_head, value_slot, value_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    layer, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    token = tl.load(kept + tl.program_id(0) * count + place, mask=inside, other=0)
    source = tl.load(sources + token, mask=inside, other=0)
    target = tl.load(targets + place, mask=inside, other=0)
    read, written = source * key_slot + head * key_head, target * key_slot + head * key_head
    _copy_tokens(key_table, keys, layer, read, written, inside, DIM, PADDED_DIM)
    read, written = source * value_slot + head * value_head, target * value_slot + head * value_head
    _copy_tokens(value_table, values, layer, read, written, inside, VALUE_DIM, PADDED_VALUE_DIM)


def gather_kept(
    key_table: torch.Tensor,
    value_table: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kept: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """Copy each head's ``j``-th kept token to slot ``targets[j]``, in each layer.

    Args:
        key_table, value_table: int64 [layers], addresses of the layers' buffers.
        keys, values: One layer's buffers, [slots, kv_heads, dim of a key or of a value]. All layers have their shape, strides and
            dtype.
        kept: int64 [layers, kv_heads, count], indices into ``sources``.
        sources: int64 [tokens], slots of the context's tokens.
        targets: int64 [count], slots of the compressed KV. None of them is a source.
    """
    layers, heads, count = kept.shape
    dim, value_dim = keys.shape[2], values.shape[2]
    _gather_kept[(layers * heads, triton.cdiv(count, BLOCK))](
        key_table, value_table, keys, values, kept.contiguous(), sources, targets, count, keys.stride(0), keys.stride(1),
        values.stride(0), values.stride(1), HEADS=heads, DIM=dim, VALUE_DIM=value_dim, PADDED_DIM=triton.next_power_of_2(dim),
        PADDED_VALUE_DIM=triton.next_power_of_2(value_dim), BLOCK=BLOCK,
    )  # fmt: skip
