"""Write where the kept tokens of each KV head lie into the slots of a copy, all layers in one launch (pointers.py)."""

import torch
import triton
import triton.language as tl

BLOCK = 128


@triton.jit(do_not_specialize=("count",))
def write_kept_pointers(
    key_table, kept, sources, targets, count, slot_stride, head_stride, HEADS: tl.constexpr, PER_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one head's pointers."""
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
    """For each layer and head, the ``j``-th pointer of ``targets`` leads to that head's ``j``-th kept token.

    Args:
        key_table: int64 [layers], addresses of the layers' key buffers.
        like: a key buffer, [slots, kv_heads, head_dim]; all have its shape, strides and dtype.
        kept: int64 [layers, kv_heads, count], tokens counted in ``sources``.
        sources: int64 [tokens], where the context's tokens lie.
        targets: int64, slots of the copy; none of them is a source.
    """
    layers, heads, count = kept.shape
    cells = like.view(torch.int32)
    write_kept_pointers[(layers * heads, triton.cdiv(count, BLOCK))](
        key_table, kept.contiguous(), sources, targets, count, cells.stride(0), cells.stride(1),
        HEADS=heads, PER_SLOT=cells.shape[2], BLOCK=BLOCK,
    )  # fmt: skip
