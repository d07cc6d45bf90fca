"""Writes pointers to the kept tokens of each KV head into the slots of compressed KV, all layers in one launch (pointers.py)."""

import torch
import triton
import triton.language as tl

# Pointers that a program writes.
POINTERS = 128


@triton.jit(do_not_specialize=("count",))
def write_kept_pointers(
    key_table, kept, sources, targets, count, slot_stride, head_stride, HEADS: tl.constexpr, PER_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a block of one head's pointers."""
    layer, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    token = tl.load(kept + tl.program_id(0).to(tl.int64) * count + place, mask=inside, other=0)
    source = tl.load(sources + token, mask=inside, other=0)
    target = tl.load(targets + place // PER_SLOT, mask=inside, other=0)
    cells = tl.load(key_table + layer).to(tl.pointer_type(tl.int32))
    tl.store(cells + target * slot_stride + head * head_stride + place % PER_SLOT, source.to(tl.int32), mask=inside)


def write_pointers(
    key_table: torch.Tensor, like: torch.Tensor, kept: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """Point the ``j``-th pointer of ``targets`` to the head's ``j``-th kept token, for each layer and head.

    Args:
        key_table: int64 [layers], addresses of the layers' key buffers.
        like: A key buffer, [slots, kv_heads, head_dim]. All layers have its shape, strides and dtype.
        kept: int64 [layers, kv_heads, count], indices into ``sources``.
        sources: int64 [tokens], slots of the context's tokens.
        targets: int64, slots of the compressed KV. None of them is a source.
    """
    layers, heads, count = kept.shape
    cells = like.view(torch.int32)
    write_kept_pointers[(layers * heads, triton.cdiv(count, POINTERS))](
        key_table, kept.contiguous(), sources, targets, count, cells.stride(0), cells.stride(1),
        HEADS=heads, PER_SLOT=cells.shape[2], BLOCK=POINTERS,
    )  # fmt: skip
