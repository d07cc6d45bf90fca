"""Quantizes the keys that a forward has written to the KV pool, in all layers, in one launch.

A program quantizes some keys of a layer. Codes, scales and zero points are bit-identical to those of PyTorch
(mem_cache/selection/scoring_keys.py). So the kernel divides by scales instead of multiplying by their inverse, and uses no fused
multiply-add.
"""

import torch
import triton
import triton.language as tl

# Keys, each of one token and head, that a program quantizes.
ROWS = 16
# The largest float16. Adding ROUNDING rounds a small float32 to an integer, ties to even; the lowest bits of the sum hold it.
LARGEST, ROUNDING = tl.constexpr(65504.0), tl.constexpr(1.5 * 2**23)
# Codes of 8 bits are stored as int8, minus this offset.
MIDDLE = tl.constexpr(128)


@triton.jit
def _stored(parameter):
    """Return scales or zero points as they are stored: float16, finite."""
    return tl.minimum(tl.maximum(parameter, -LARGEST), LARGEST).to(tl.float16)


@triton.jit
def _codes(numbers, scale, zero, LAST: tl.constexpr):
    """Return codes, int32, of float32 [rows, groups, channels], by the groups' scales and zero points, float32 [rows, groups]."""
    steps = tl.div_rn(numbers - zero[:, :, None], scale[:, :, None])
    # With a scale of 0, all codes have the same meaning.
    steps = tl.where(scale[:, :, None] > 0, steps, 0.0)
    return (tl.minimum(tl.maximum(steps, 0.0), LAST * 1.0) + ROUNDING).to(tl.int32, bitcast=True) & LAST


@triton.jit(do_not_specialize=["count", "held", "ahead"], do_not_specialize_on_alignment=["slots"])
def _quantize_keys(
    key_table, like, slots, codes, words, count, held, ahead, slot_stride, head_stride, HEADS: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, BITS: tl.constexpr, PADDED_GROUPS: tl.constexpr, PADDED_PART: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Quantize ROWS keys of a layer, each of a token and head. The heads of a token are consecutive."""
    LIKE: tl.constexpr = like.dtype.element_ty
    LAST: tl.constexpr = (1 << BITS) - 1
    PART: tl.constexpr = GROUP * BITS // 8
    layer, row = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < count * HEADS
    slot, head = tl.load(slots + row // HEADS, mask=there, other=0).to(tl.int64), row % HEADS
    group, column = tl.arange(0, PADDED_GROUPS), tl.arange(0, PADDED_PART)
    some = there[:, None] & (group < GROUPS)[None, :]
    inside = some[:, :, None] & (column < PART)[None, None, :]
    keys = tl.load(key_table + layer).to(tl.pointer_type(LIKE)) + slot * slot_stride + head * head_stride
    channels = (keys[:, None] + group[None, :] * GROUP)[:, :, None] + column[None, None, :]
    first = tl.load(channels, mask=inside, other=0.0).to(tl.float32)
    least, most = tl.where(inside, first, float("inf")), tl.where(inside, first, float("-inf"))
    if BITS == 4:
        second = tl.load(channels + PART, mask=inside, other=0.0).to(tl.float32)
        least = tl.where(inside, tl.minimum(first, second), float("inf"))
        most = tl.where(inside, tl.maximum(first, second), float("-inf"))
    short_zero = _stored(tl.min(least, 2))
    zero = short_zero.to(tl.float32)
    short_scale = _stored(tl.div_rn(tl.max(most, 2) - zero, tl.full(zero.shape, LAST, tl.float32)))
    scale = short_scale.to(tl.float32)
    packed = _codes(first, scale, zero, LAST)
    if BITS == 4:
        packed |= _codes(second, scale, zero, LAST) << BITS
    else:
        packed -= MIDDLE
    # Index over all heads of all slots of the previous layers and this one.
    place = (layer.to(tl.int64) * held + slot + ahead) * HEADS + head
    target = (codes + place[:, None] * (GROUPS * PART) + group[None, :] * PART)[:, :, None] + column[None, None, :]
    tl.store(target, packed.to(tl.int8), mask=inside)
    low = short_scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    word = low | (short_zero.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    tl.store(words + place[:, None] * GROUPS + group[None, :], word, mask=some)


def quantize_keys(
    key_table: torch.Tensor, like: torch.Tensor, slots: torch.Tensor, codes: torch.Tensor, words: torch.Tensor, group: int, ahead: int = 0
) -> None:
    """Quantize keys at ``slots`` of all layers, without waiting for the device.

    Args:
        key_table: int64 [layers], addresses of the layers' key buffers.
        like: A key buffer, [slots, kv_heads, head_dim]; all have its shape, strides and dtype.
        slots: int64 [tokens].
        codes, words: int8 and int32 [layers, all slots, kv_heads, ...], as in ``QuantizedKeys``.
        group: Channels that share a scale.
        ahead: Offset from the source slot to the target slot in ``codes`` and ``words``.
    """
    layers, held, heads, size = codes.shape
    bits, groups = 8 * size // like.shape[2], words.shape[3]
    grid = triton.cdiv(len(slots) * heads, ROWS), layers
    _quantize_keys[grid](
        key_table, like, slots, codes, words, len(slots), held, ahead, like.stride(0), like.stride(1), HEADS=heads, GROUP=group,
        GROUPS=groups, BITS=bits, PADDED_GROUPS=triton.next_power_of_2(groups), PADDED_PART=triton.next_power_of_2(group * bits // 8),
        ROWS=ROWS,
    )  # fmt: skip
