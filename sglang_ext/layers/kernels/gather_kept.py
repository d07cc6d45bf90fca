"""Copy the kept tokens of each KV head into the slots of a compressed copy, all layers in one launch."""

import torch
import triton
import triton.language as tl

BLOCK = 32


@triton.jit(do_not_specialize=("count",))
def _gather_kept(
    key_table,
    value_table,
    like,
    kept,
    sources,
    targets,
    count,
    slot_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    layer, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, PADDED_DIM)
    inside = (place < count)[:, None] & (dim < DIM)[None, :]
    token = tl.load(kept + tl.program_id(0) * count + place, mask=place < count, other=0)
    source = tl.load(sources + token, mask=place < count, other=0)
    target = tl.load(targets + place, mask=place < count, other=0)
    read = source[:, None] * slot_stride + head * DIM + dim[None, :]
    written = target[:, None] * slot_stride + head * DIM + dim[None, :]
    for table in tl.static_range(2):
        address = tl.load((key_table if table == 0 else value_table) + layer)
        buffer = address.to(tl.pointer_type(like.dtype.element_ty))
        tl.store(buffer + written, tl.load(buffer + read, mask=inside), mask=inside)


def gather_kept(
    key_table: torch.Tensor,
    value_table: torch.Tensor,
    like: torch.Tensor,
    kept: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """Slot ``targets[j]`` of each layer gets, for each head, that head's ``j``-th kept token.

    Args:
        key_table, value_table: int64 [layers], addresses of the layers' buffers.
        like: a key buffer, [slots, kv_heads, head_dim]; all have its shape, strides and dtype.
        kept: int64 [layers, kv_heads, count], tokens counted in ``sources``.
        sources: int64 [tokens], where the context's tokens lie.
        targets: int64 [count], slots of the copy; none of them is a source.
    """
    layers, heads, count = kept.shape
    dim = like.shape[2]
    _gather_kept[(layers * heads, triton.cdiv(count, BLOCK))](
        key_table, value_table, like, kept.contiguous(), sources, targets, count, like.stride(0),
        HEADS=heads, DIM=dim, PADDED_DIM=triton.next_power_of_2(dim), BLOCK=BLOCK,
    )
