"""Keys of 8 or 4 bits for token selection (select_tokens.py): quantization of new keys, and logits by integer products.

Codes, scales and zero points are bit-identical to those of PyTorch (mem_cache/selection/scoring_keys.py). So the kernel divides by scales
instead of multiplying by their inverse, and uses no fused multiply-add.

In each group of channels a key is ``scale * code + zero``. Its product with a query is ``scale * sum(q code) + zero * sum(q)``. Queries
are rounded to 15-bit integers, which is more accurate than bfloat16. Each is split into two 8-bit parts, which are multiplied with the
codes as stored. The rows of a matrix product are the query heads, repeated for each group of channels, with 0 in all other groups. Tensor
cores take more rows than there are query heads per KV head, so the groups are free.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_ext.core import OptionError
from sglang_ext.layers.kernels.gpu_launch import gpu_name, has_ptx, launch_first_fitting, multiplies_integers, shape_name
from sglang_ext.layers.kernels.key_scores import (
    CHUNK,
    LEAST,
    PITCH,
    TO_POWERS,
    VARYING,
    LogitsRequest,
    layer_major,
    load_pair,
    store_chunk_normalizers,
    update_normalizers,
)

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
    """Quantize keys at ``slots``, int64 [tokens], of all layers, without waiting for the device.

    ``key_table``: int64 [layers], addresses of the layers' key buffers. ``like``: one of them, [slots, kv_heads, head_dim]; all have its shape,
    strides and dtype. ``codes``, ``words``: int8 and int32 [layers, all slots, kv_heads, ...], as in ``QuantizedKeys``. ``group``: channels that
    share a scale. ``ahead``: offset from the source slot to the target slot in ``codes`` and ``words``.
    """
    layers, held, heads, size = codes.shape
    bits, groups = 8 * size // like.shape[2], words.shape[3]
    grid = triton.cdiv(len(slots) * heads, ROWS), layers
    _quantize_keys[grid](
        key_table, like, slots, codes, words, len(slots), held, ahead, like.stride(0), like.stride(1), HEADS=heads, GROUP=group,
        GROUPS=groups, BITS=bits, PADDED_GROUPS=triton.next_power_of_2(groups), PADDED_PART=triton.next_power_of_2(group * bits // 8),
        ROWS=ROWS,
    )  # fmt: skip


# Keys per step, preferred first. Two of the stages load slots and run products, so three of five hold keys. Programs have few threads, so
# that many programs fit on a multiprocessor and rarely wait for each other.
BLOCKS = (
    {"BLOCK": 64, "STAGES": 5, "num_warps": 2}, {"BLOCK": 64, "STAGES": 3, "num_warps": 2}, {"BLOCK": 32, "STAGES": 3},
    {"BLOCK": 16, "STAGES": 1},
)  # fmt: skip
# Minimum rows of a product, set by tensor cores; maximum rows, set by registers; minimum bytes of a key in a product.
LEAST_ROWS, MOST_ROWS, LEAST_BYTES = 16, 32, 32
# Largest integer of a query. Its parts are the nearest multiple of 128, and the remainder.
MOST, PART_BITS, HALF_PART = tl.constexpr(127 * 128), tl.constexpr(7), tl.constexpr(64)
# Minimum unit of these integers, which avoids a division by 0 for all-zero queries.
SMALLEST_UNIT = tl.constexpr(1e-30)
REMEDY = "pass --kv-score-bits 16"


@triton.jit
def _parts(channels, mine, unit):
    """Return both int8 parts of the integers, in each row's ``unit``, of float32 at ``channels``; 0 outside ``mine``."""
    steps = tl.load(channels, mask=mine, other=0.0) * (1.0 / unit)[:, None] + ROUNDING
    integers = (steps.to(tl.int32, bitcast=True) & 0x7FFFFF) - (1 << 22)
    high = (integers + HALF_PART) >> PART_BITS
    return high.to(tl.int8), (integers - (high << PART_BITS)).to(tl.int8)


@triton.jit
def _halves(packed, PTX: tl.constexpr):
    """Return the lower and the upper 4 bits of bytes, int8. PTX handles four bytes at once, where Triton handles them one by one."""
    if PTX:
        lower = tl.inline_asm_elementwise("and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4)
        upper = tl.inline_asm_elementwise(
            "shr.u32 $0, $1, 4; and.b32 $0, $0, 0x0F0F0F0F;", "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        lower, upper = packed & 15, (packed >> 4) & 15
    return lower, upper


@triton.jit(do_not_specialize=(*VARYING, "held"))
def _compute_quantized_logits(
    queries, codes, words, scalings, token_table, numbers, logits, tops, masses, first_layer, first_request, requests, pitches, chunks,
    table_row, held, HEADS: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr, PADDED_GROUP: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr,
    PADDED_BYTES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PTX: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Like ``_compute_exact_logits``, for ROWS of the SHARED query heads of a KV head, with keys as stored in QuantizedKeys."""
    SPLITS: tl.constexpr = (SHARED + ROWS - 1) // ROWS
    PART: tl.constexpr = GROUP * BITS // 8
    head, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    chunk, pair = tl.program_id(1), tl.program_id(2)
    layer, _, at, length = load_pair(numbers, pair, first_layer, first_request, requests)
    begin = chunk * CHUNK
    if begin < length:
        row, byte, column = tl.arange(0, PADDED_GROUPS * ROWS), tl.arange(0, PADDED_BYTES), tl.arange(0, BLOCK)
        group, of_group = row // ROWS, tl.arange(0, PADDED_GROUP)
        there = (split * ROWS + row % ROWS < SHARED) & (group < GROUPS)
        of_head = pair * HEADS + head
        mine = queries + (of_head * SHARED + split * ROWS + row % ROWS) * DIM + group * GROUP
        inside = there[:, None] & (of_group < GROUP)[None, :]
        channels = tl.load(mine[:, None] + of_group[None, :], mask=inside, other=0.0)
        # One unit per query head for all groups, multiplied with their sum.
        largest = tl.max(tl.reshape(tl.max(tl.abs(channels), 1), (PADDED_GROUPS, ROWS)), 0)
        unit = tl.maximum(largest * (1.0 / MOST), SMALLEST_UNIT)
        of_row = tl.reshape(tl.broadcast_to(unit[None, :], (PADDED_GROUPS, ROWS)), (PADDED_GROUPS * ROWS,))
        rest = tl.reshape(tl.sum(channels, 1) / of_row, (PADDED_GROUPS, ROWS, 1))
        factor = (unit * (tl.load(scalings + layer) * TO_POWERS))[:, None]
        here = there[:, None] & (byte // PART == group[:, None]) & (byte < BYTES)[None, :]
        channel = mine[:, None] + (byte % PART)[None, :]
        high, low = _parts(channel, here, of_row)
        if BITS == 4:
            high_of_second, low_of_second = _parts(channel + PART, here, of_row)
        # Slots of the previous layers.
        before, table = layer.to(tl.int64) * held, token_table + at * table_row
        out_row = split * ROWS + tl.arange(0, ROWS)
        kept = out_row < SHARED
        out = logits + (of_head.to(tl.int64) * SHARED + out_row)[:, None] * (pitches.to(tl.int64) * PITCH)
        group_of_word = tl.arange(0, PADDED_GROUPS)
        # Each column has its own, joined at the end, so that no thread waits for another.
        top = tl.full((ROWS, BLOCK), LEAST, tl.float32)
        mass = tl.zeros((ROWS, BLOCK), tl.float32)
        # Set here, the stages apply to all loads, including those of words. Otherwise they apply only to loads that feed the products.
        for first in tl.range(begin, tl.minimum(begin + CHUNK, length), BLOCK, num_stages=STAGES):
            # Beyond the end, reload the last key: a mask would cost more than these loads.
            key = (before + tl.load(table + tl.minimum(first + column, length - 1))) * HEADS + head
            code_places, word_places = codes + key[:, None] * BYTES + byte[None, :], words + key[None, :] * GROUPS + group_of_word[:, None]
            if BYTES == PADDED_BYTES:
                packed = tl.load(code_places)
            else:
                packed = tl.load(code_places, mask=(byte < BYTES)[None, :], other=0)
            if GROUPS == PADDED_GROUPS:
                word = tl.load(word_places)
            else:
                word = tl.load(word_places, mask=(group_of_word < GROUPS)[:, None], other=0)
            if BITS == 4:
                lower, upper = _halves(packed, PTX)
                sums = tl.dot(high, tl.trans(lower), out_dtype=tl.int32)
                sums = tl.dot(high_of_second, tl.trans(upper), sums, out_dtype=tl.int32) << PART_BITS
                sums = tl.dot(low, tl.trans(lower), sums, out_dtype=tl.int32)
                sums = tl.dot(low_of_second, tl.trans(upper), sums, out_dtype=tl.int32)
            else:
                sums = tl.dot(high, tl.trans(packed), out_dtype=tl.int32) << PART_BITS
                sums = tl.dot(low, tl.trans(packed), sums, out_dtype=tl.int32)
            scale = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            zero = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            if BITS == 8:
                zero += MIDDLE * scale
            sums = tl.reshape(sums.to(tl.float32), (PADDED_GROUPS, ROWS, BLOCK))
            found = tl.sum(sums * scale[:, None, :] + rest * zero[:, None, :], 0) * factor
            found = tl.where((first + column < length)[None, :], found, float("-inf"))
            # Whole blocks, so that stores are vectorized.
            tl.store(out + tl.multiple_of(first, BLOCK) + column[None, :], found.to(logits.dtype.element_ty), mask=kept[:, None])
            top, mass = update_normalizers(found, top, mass)
        store_chunk_normalizers(tops, masses, (of_head * SHARED + out_row) * chunks + chunk, kept, top, mass)


@dataclass(frozen=True)
class QuantizedKeyTensors:
    """Keys of 8 or 4 bits in all layers, as ``QuantizedKeys`` (mem_cache/selection/scoring_keys.py) stores them.

    ``codes``, ``words``: int8 and int32 [layers, slots, kv_heads, ...]. ``group``: channels that share a scale.
    """

    codes: torch.Tensor
    words: torch.Tensor
    group: int

    def compute_logits(self, queries: torch.Tensor, asked: LogitsRequest) -> None:
        """Compute logits and their normalizers, like key_scores.py:compute_exact_logits, from float32 [requests, layers, query_heads, head_dim].

        Raises:
            OptionError: The GPU has no integer products, or no tiles of such heads fit.
        """
        _, held, heads, size = self.codes.shape
        groups, dim = self.words.shape[3], queries.shape[3]
        if not multiplies_integers(self.codes):
            raise OptionError(f"integer products, which score quantized keys, do not compile for {gpu_name()}: {REMEDY}")
        shared, padded_groups, queries = queries.shape[2] // heads, triton.next_power_of_2(groups), layer_major(queries)
        rows = min(max(triton.next_power_of_2(shared), LEAST_ROWS // padded_groups), MOST_ROWS // padded_groups)

        def launch(block: dict[str, int]) -> None:
            _compute_quantized_logits[(heads * triton.cdiv(shared, rows), asked.chunks, asked.pairs)](
                queries, self.codes, self.words, *asked.arguments, held, HEADS=heads,
                SHARED=shared, ROWS=rows, DIM=dim, GROUP=self.group, GROUPS=groups, PADDED_GROUPS=padded_groups,
                PADDED_GROUP=triton.next_power_of_2(self.group), BITS=8 * size // dim, BYTES=size,
                PADDED_BYTES=max(LEAST_BYTES, triton.next_power_of_2(size)), CHUNK=CHUNK,
                PTX=has_ptx(self.codes), **block,
            )  # fmt: skip

        def what() -> str:
            return f"token selection with keys of {8 * size // dim} bits and {shape_name(dim, shared, queries.dtype)}"

        launch_first_fitting(BLOCKS, launch, ("coded choice", shared, dim, size, self.codes.device), what, REMEDY)
