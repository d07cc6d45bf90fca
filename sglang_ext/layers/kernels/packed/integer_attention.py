"""Attention to packed partitions as integer products (HACK, arXiv 2502.03589).

A product of two quantized matrices is computed from their codes (equation 4). The inner dimension is divided into partitions. In each
partition, a row of either matrix is ``scale * code + zero``, so that a product of two rows is

    s_a s_b sum(a' b')  +  z_b s_a sum(a')  +  z_a s_b sum(b')  +  P z_a z_b

Only the first sum is over products of codes. The sums of codes in the other terms are stored beside the codes (summation elimination).
The result equals that of the dequantized rows, except for float32 rounding. :func:`product` computes it in PyTorch.

A step of the kernel :func:`integer_splits` is one partition of values, with as many tokens. Scores are products of key codes and query codes,
one for each partition of channels. The weights of a step are quantized too. Its scales, zero points and sums are in one cell each.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.flash_decoding import exact_split, head_and_rows, softmax_step, store_split
from sglang_ext.layers.kernels.packed.pack_blocks import ROUNDING

# Codes of rows that are quantized for one product: 8 bits, from the smallest int8 on.
LAST_CODE, FIRST_CODE = tl.constexpr(255), tl.constexpr(-128)
# The smallest scale. Numbers that hardly differ all get the first code.
SMALLEST_SCALE = tl.constexpr(1e-30)


class Partitioned(NamedTuple):
    """Quantized rows: ``scale * code + zero``, in partitions along the last dimension. The last partition may be shorter.

    ``codes``: int8 [..., rows, length]. ``scale``, ``zero``, ``sums``: float32 [..., rows, partitions]; ``sums`` are of codes, integers.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    sums: torch.Tensor


def quantize_partitions(rows: torch.Tensor, partition: int, from_zero: bool = False) -> Partitioned:
    """Quantize rows, float32 [..., rows, length], finite, for example queries or softmax weights, to 8 bits, rounded to the nearest code.

    ``partition``: numbers that share a scale; the last may have fewer. ``from_zero``: the first code means 0, not the partition's minimum; numbers
    must not be negative. Softmax weights of prompts use it, because their kernel computes no minimum.
    """
    length = rows.shape[-1]
    # The last number pads the last partition. That changes no range.
    filled = torch.cat([rows, rows[..., -1:].expand(*rows.shape[:-1], -length % partition)], -1).unflatten(-1, (-1, partition))
    least, most = filled.amin(-1, keepdim=True), filled.amax(-1, keepdim=True)
    if from_zero:
        least = torch.zeros_like(least)
    scale = ((most - least) * (1 / LAST_CODE.value)).clamp(min=SMALLEST_SCALE.value)
    codes = ((filled - least) * (1 / scale)).round().clamp(0, LAST_CODE.value) + FIRST_CODE.value
    codes = codes.flatten(-2)[..., :length]
    zero = (least - scale * FIRST_CODE.value).squeeze(-1)
    return Partitioned(codes.to(torch.int8), scale.squeeze(-1), zero, _split(codes, partition).sum(-1))


def product(left: Partitioned, right: Partitioned, partition: int) -> torch.Tensor:
    """Products of each row of ``left`` with each row of ``right``: float32 [..., rows of left, rows of right].

    A row of ``right`` is a column of the second matrix. ``partition``: numbers that share a scale, at most 128; the last may have fewer.
    """
    length = left.codes.shape[-1]
    # A sum of 128 int8 products is below 2 ** 24, so float32 holds it exactly.
    first, second = (_split(part.codes.float(), partition).transpose(-2, -3) for part in (left, right))
    integers = first @ second.mT
    scaled = (integers * left.scale.mT[..., None] * right.scale.mT[..., None, :]).sum(-3)
    sizes = torch.full_like(left.scale[..., 0, :], partition)
    sizes[..., -1] -= -length % partition
    of_left = left.scale * left.sums + left.zero * sizes[..., None, :]
    return scaled + of_left @ right.zero.mT + left.zero @ (right.scale * right.sums).mT


def _split(codes: torch.Tensor, partition: int) -> torch.Tensor:
    """Divide the last dimension into partitions, padded with 0: [..., rows, partitions, partition]."""
    return torch.nn.functional.pad(codes, (0, -codes.shape[-1] % partition)).unflatten(-1, (-1, partition))


@triton.jit
def quantize_8bit(numbers, AXIS: tl.constexpr):
    """Quantize float32 partitions along ``AXIS``. Returns int32 codes from FIRST_CODE on, and scales and zero points that keep the axis."""
    least = tl.min(numbers, AXIS, keep_dims=True)
    scale = tl.maximum((tl.max(numbers, AXIS, keep_dims=True) - least) * (1.0 / LAST_CODE), SMALLEST_SCALE)
    steps = (numbers - least) * (1.0 / scale) + ROUNDING
    codes = (steps.to(tl.int32, bitcast=True) & LAST_CODE) + FIRST_CODE
    return codes, scale, least - scale * FIRST_CODE


@triton.jit
def _query_codes(
    queries, codes, scales, zeros, rests, scaling, DIM: tl.constexpr, PARTITION: tl.constexpr, COUNT: tl.constexpr,
    PADDED_COUNT: tl.constexpr,
):  # fmt: skip
    """Quantize one head's query of one token."""
    place = tl.program_id(0)
    part, channel = tl.arange(0, PADDED_COUNT), tl.arange(0, PARTITION)
    there = part < COUNT
    at = place * DIM + part[:, None] * PARTITION + channel[None, :]
    numbers = tl.load(queries + at, mask=there[:, None], other=0.0).to(tl.float32) * scaling
    found, scale, zero = quantize_8bit(numbers, 1)
    tl.store(codes + at, found.to(tl.int8), mask=there[:, None])
    rest = scale * tl.sum(found, 1, keep_dims=True).to(tl.float32) + zero * PARTITION
    at = (place * COUNT + part)[:, None]
    tl.store(scales + at, scale, mask=there[:, None])
    tl.store(zeros + at, zero, mask=there[:, None])
    tl.store(rests + at, rest, mask=there[:, None])


def query_codes(queries: torch.Tensor, partition: int, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize queries, contiguous [requests, heads, dim], times ``scaling``, to 8 bits, in partitions along their channels.

    Returns codes, int8, shaped like ``queries``, and float32 [3, requests, heads, partitions]: scales, zero points, and the factors of the keys'
    zero points (equation 4), ``scale * sum of codes + partition * zero point``.
    """
    requests, heads, dim = queries.shape
    codes, count = torch.empty_like(queries, dtype=torch.int8), dim // partition
    parameters = torch.empty(3, requests, heads, count, device=queries.device)
    _query_codes[(requests * heads,)](
        queries, codes, *parameters, scaling, DIM=dim, PARTITION=partition, COUNT=count, PADDED_COUNT=triton.next_power_of_2(count),
        num_warps=1,
    )  # fmt: skip
    return codes, parameters


@triton.jit
def _cell(numbers, slots, first, slot_numbers, CELL: tl.constexpr):
    """Pointer to the number ``first`` of a block's parameters."""
    return numbers + tl.load(slots + first // CELL).to(tl.int64) * slot_numbers + first % CELL


@triton.jit
def _codes(raw, shift, BITS: tl.constexpr):
    """Codes of one part of bytes: int8."""
    return ((raw >> shift) & ((1 << BITS) - 1)).to(tl.int8)


@triton.jit
def _bytes(at, column, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Load a tile of bytes. Padding bytes have codes 0."""
    return tl.load(at) if WIDTH == COLUMNS else tl.load(at, mask=(column < WIDTH)[None, :], other=0)


@triton.jit
def _scores(
    q, scales, zeros, rests, raw, numbers, sums_at, slots, step, slot_numbers, DIM: tl.constexpr, PARTITION: tl.constexpr,
    WIDTH: tl.constexpr, BITS: tl.constexpr, STEPS: tl.constexpr, CELL: tl.constexpr,
):  # fmt: skip
    """Products of a step's keys with the queries, float32 [tokens, rows]. Codes ``q`` and bytes ``raw`` are by WIDTH channels."""
    COUNT: tl.constexpr = DIM // PARTITION
    PART: tl.constexpr = DIM * BITS // 8
    TOKENS: tl.constexpr = raw[0].shape[0]
    scale_at = _cell(numbers, slots, step * DIM, slot_numbers, CELL)
    zero_at = _cell(numbers, slots, (STEPS + step) * DIM, slot_numbers, CELL)
    sum_at = _cell(sums_at, slots, (2 * STEPS + step) * DIM, slot_numbers, CELL)
    token = tl.arange(0, TOKENS) * COUNT
    found = tl.zeros((TOKENS, q[0].shape[1]), tl.float32)
    for group in tl.static_range(COUNT):
        integers = tl.zeros((TOKENS, q[0].shape[1]), tl.int32)
        for piece in tl.static_range(PARTITION // WIDTH):
            # The first channel is group * PARTITION + piece * WIDTH.
            codes = _codes(
                raw[(group * PARTITION + piece * WIDTH) % PART // WIDTH], (group * PARTITION + piece * WIDTH) // PART * BITS, BITS
            )  # fmt: skip
            integers = tl.dot(codes, q[group * (PARTITION // WIDTH) + piece], integers, out_dtype=tl.int32)
        scale = tl.load(scale_at + token + group).to(tl.float32)
        zero = tl.load(zero_at + token + group).to(tl.float32)
        sums = tl.load(sum_at + token + group).to(tl.int32)
        found += integers.to(tl.float32) * scale[:, None] * scales[group][None, :]
        found += zero[:, None] * rests[group][None, :] + (scale * sums.to(tl.float32))[:, None] * zeros[group][None, :]
    return found


@triton.jit
def _summed(p, p_scale, p_zero, p_rest, codes, scale, zero, sums):
    """The weighted values of a step, float32 [rows, channels]. Codes are int8: ``p`` [rows, tokens], and ``codes`` [tokens, channels]."""
    scaled = tl.dot(p, codes, out_dtype=tl.int32).to(tl.float32) * p_scale * scale[None, :]
    return scaled + p_rest * zero[None, :] + p_zero * (scale * sums)[None, :]


@triton.jit
def _weights(p, TOKENS):
    """Quantize weights, float32 [rows, tokens]. Returns codes, scales, zero points, and the factors of the values' zero points (equation 4)."""
    codes, scale, zero = quantize_8bit(p, 1)
    return codes.to(tl.int8), scale, zero, scale * tl.sum(codes, 1, keep_dims=True).to(tl.float32) + zero * TOKENS


@triton.jit
def _integer_part(
    codes, parameters, heads, key_bytes, key_numbers, value_bytes, value_numbers, key_sums, value_sums, table, first, last, row,
    partial, lse, place, key_slot, value_slot, GROUP: tl.constexpr, M: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PARTITION: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, BITS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_SLOTS: tl.constexpr, CODE_CELLS: tl.constexpr, KEY_CELL: tl.constexpr,
    VALUE_CELL: tl.constexpr,
):  # fmt: skip
    """Softmax over the blocks [first, last) of a request's row. Buffers begin at the head's cells, queries at the KV head's first."""
    PARTS: tl.constexpr = 8 // BITS
    STEPS: tl.constexpr = BLOCK_TOKENS // PARTITION
    CELL_TOKENS: tl.constexpr = BLOCK_TOKENS // CODE_CELLS
    PART: tl.constexpr = DIM // PARTS
    VALUE_PART: tl.constexpr = VALUE_DIM // PARTS
    COUNT: tl.constexpr = DIM // PARTITION
    mine = row < GROUP
    column, value_column, token = tl.arange(0, COLUMNS), tl.arange(0, VALUE_COLUMNS), tl.arange(0, PARTITION)
    q, scales, zeros, rests = (), (), (), ()
    for piece in tl.static_range(DIM // WIDTH):
        there = (column < WIDTH)[:, None] & mine[None, :]
        q = q + (tl.load(codes + row[None, :] * DIM + piece * WIDTH + column[:, None], mask=there, other=0),)
    for group in tl.static_range(COUNT):
        at = parameters + row * COUNT + group
        scales = scales + (tl.load(at, mask=mine, other=0.0),)
        zeros = zeros + (tl.load(at + heads * COUNT, mask=mine, other=0.0),)
        rests = rests + (tl.load(at + 2 * heads * COUNT, mask=mine, other=0.0),)
    best = tl.zeros([M], dtype=tl.float32) - float("inf")
    total = tl.zeros([M], dtype=tl.float32)
    acc0 = tl.zeros([M, VALUE_COLUMNS], dtype=tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    for at in tl.range(first * STEPS, last * STEPS):
        block, step = table + at // STEPS * BLOCK_SLOTS, at % STEPS
        slot = tl.load(block + (step * PARTITION + token) // CELL_TOKENS).to(tl.int64)
        in_cell = (step * PARTITION + token) % CELL_TOKENS
        key_at = key_bytes + (slot * key_slot + in_cell * PART)[:, None] + column[None, :]
        raw = ()
        for piece in tl.static_range(PART // WIDTH):
            raw = raw + (_bytes(key_at + piece * WIDTH, column, WIDTH, COLUMNS),)
        value_at = value_bytes + (slot * value_slot + in_cell * VALUE_PART)[:, None] + value_column[None, :]
        value_raw = _bytes(value_at, value_column, VALUE_PART, VALUE_COLUMNS)
        slots = block + CODE_CELLS
        qk = _scores(
            q, scales, zeros, rests, raw, key_numbers, key_sums, slots, step, key_slot // 2, DIM, PARTITION, WIDTH, BITS, STEPS,
            KEY_CELL,
        )  # fmt: skip
        best, rescale, p, total = softmax_step(qk, best, total, 0)
        p, p_scale, p_zero, p_rest = _weights(tl.trans(p), PARTITION)
        scale_at = _cell(value_numbers, slots, step * VALUE_DIM, value_slot // 2, VALUE_CELL)
        zero_at = _cell(value_numbers, slots, (STEPS + step) * VALUE_DIM, value_slot // 2, VALUE_CELL)
        sum_at = _cell(value_sums, slots, (2 * STEPS + step) * VALUE_DIM, value_slot // 2, VALUE_CELL)
        added = ()
        for part in tl.static_range(PARTS):
            channel = part * VALUE_PART + tl.minimum(value_column, VALUE_PART - 1)
            part_codes = _codes(value_raw, part * BITS, BITS)
            sums = tl.load(sum_at + channel).to(tl.float32)
            scale, zero = tl.load(scale_at + channel).to(tl.float32), tl.load(zero_at + channel).to(tl.float32)
            added = added + (_summed(p, p_scale, p_zero, p_rest, part_codes, scale, zero, sums),)
        acc0 = acc0 * rescale[:, None] + added[0]
        acc1 = acc1 * rescale[:, None] + added[1]
        if PARTS > 2:
            acc2 = acc2 * rescale[:, None] + added[2]
            acc3 = acc3 * rescale[:, None] + added[3]
    there = value_column < VALUE_PART
    store_split(partial, lse, place, value_column, there, best, total, acc0, row, GROUP, VALUE_DIM)
    store_split(partial, lse, place, VALUE_PART + value_column, there, best, total, acc1, row, GROUP, VALUE_DIM)
    if PARTS > 2:
        store_split(partial, lse, place, 2 * VALUE_PART + value_column, there, best, total, acc2, row, GROUP, VALUE_DIM)
        store_split(partial, lse, place, 3 * VALUE_PART + value_column, there, best, total, acc3, row, GROUP, VALUE_DIM)


@triton.jit
def integer_splits(
    queries, codes, parameters, keys, values, key_bytes, key_numbers, key_sums, value_bytes, value_numbers, value_sums,
    token_table, table_row, rows, lengths, packed_slots, partial, lse, scaling, key_slot, key_head, value_slot, value_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr, PARTITION: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, BITS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr, CODE_CELLS: tl.constexpr, KEY_CELL: tl.constexpr, VALUE_CELL: tl.constexpr,
    PACKED: tl.constexpr, EXACT: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Attend to one split of a row, for a KV head."""
    split, request = tl.program_id(0), tl.program_id(2)
    kv_head, row = head_and_rows(GROUP, M)
    table_at = tl.load(rows + request)
    table = token_table + table_at * table_row
    # Both branches below use the same integer type.
    packed, length = tl.load(packed_slots + table_at).to(tl.int32), tl.load(lengths + request).to(tl.int32)
    LIKE: tl.constexpr = keys.dtype.element_ty
    # Bytes per number of the pool.
    KEY_BYTES: tl.constexpr = KEY_CELL * 2 // DIM
    VALUE_BYTES: tl.constexpr = VALUE_CELL * 2 // VALUE_DIM
    head0 = request * HEADS * GROUP + kv_head * GROUP
    place = (head0 + row) * (PACKED + EXACT) + split
    if split < PACKED:
        blocks = packed // BLOCK_SLOTS
        each = tl.cdiv(blocks, PACKED)
        key_at, value_at = kv_head * key_head * KEY_BYTES, kv_head * value_head * VALUE_BYTES
        _integer_part(
            codes + head0 * DIM, parameters + head0 * (DIM // PARTITION), tl.num_programs(2) * HEADS * GROUP, key_bytes + key_at,
            key_numbers + key_at // 2, value_bytes + value_at, value_numbers + value_at // 2, key_sums + key_at // 2,
            value_sums + value_at // 2, table, each * split, tl.minimum(each * (split + 1), blocks), row, partial, lse, place,
            key_slot * KEY_BYTES, value_slot * VALUE_BYTES, GROUP, M, DIM, VALUE_DIM, PARTITION, WIDTH, COLUMNS, VALUE_COLUMNS,
            BITS, BLOCK_TOKENS, BLOCK_SLOTS, CODE_CELLS, KEY_CELL, VALUE_CELL,
        )  # fmt: skip
    else:
        best, total, acc = exact_split(
            queries + head0 * DIM, keys + kv_head * key_head, values + kv_head * value_head, table, packed, length,
            split - PACKED, scaling, row, key_slot, value_slot, EXACT, GROUP, M, DIM, VALUE_DIM, PADDED_DIM,
            PADDED_VALUE_DIM, N, LIKE,
        )  # fmt: skip
        channel = tl.arange(0, PADDED_VALUE_DIM)
        store_split(partial, lse, place, channel, channel < VALUE_DIM, best, total, acc, row, GROUP, VALUE_DIM)
