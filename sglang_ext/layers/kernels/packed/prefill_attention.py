"""Causal attention of prompts over their own codes: the kernel that integer_prefill.py launches after the one of prompt_codes.py.

A program has rows of one block: some tokens of it, and each query head that shares a KV head. The rows attend causally to the sinks and to
the exact tokens of their block. They then attend to the codes of the earlier blocks with integer products, one partition of values after
another (HACK, arXiv 2502.03589, equation 4). Logarithms are to base 2. Float16 products compute the zero-point terms of scores and of
sums (prompt_codes.py).

Instructions limit a step, not products. The sums are therefore kept in units that save instructions: a weight's first code is 0, and its
last code is the partition's greatest weight. That weight is the unit until the next step. The instruction that adds also rescales the
earlier sums to the new unit.
"""

from math import log2

import triton
import triton.language as tl

from sglang_ext.layers.kernels.packed.integer_attention import LAST_CODE, quantize_8bit
from sglang_ext.layers.kernels.packed.prompt_codes import MEANS, SHIFT, SUM_ROW, TERMS, high_and_low

# Adding ROUNDING rounds a float32 from 0 to 255. The bits of the sum are ROUNDED plus the rounded number. The lowest byte is its code,
# an int8 that is SHIFT less.
ROUNDING, ROUNDED = tl.constexpr(1.5 * 2**23 - SHIFT.value), tl.constexpr(0x4B400000 - SHIFT.value)
LOG_LAST = tl.constexpr(log2(LAST_CODE.value))
# The unit is at most 2 ** FAR below the greatest weight so far. Smaller weights are beyond the digits of float32.
FAR = tl.constexpr(24.0)


@triton.jit
def _step(qk, best, total):
    """One step of online softmax in base 2: maximum, factor for older sums, weights, and total. Each row must have seen a token."""
    new = tl.maximum(best, tl.max(qk, 1))
    rescale, p = tl.exp2(best - new), tl.exp2(qk - new[:, None])
    return new, rescale, p, total * rescale + tl.sum(p, 1)


@triton.jit
def _exact_step(
    q, keys, values, table, token, end, place, best, total, acc, scaling, key_slot, value_slot, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One step over the tokens at ``token`` that are before ``end`` and not after the rows' own position ``place``."""
    dim, value_dim = tl.arange(0, DIM), tl.arange(0, VALUE_DIM)
    slot = tl.load(table + token, mask=token < end, other=0).to(tl.int64)
    k = tl.load(keys + (slot * key_slot)[:, None] + dim[None, :])
    qk = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
    # Masked scores are far below all others.
    qk = tl.where((token < end)[None, :] & (token[None, :] <= place[:, None]), qk, -1e30)
    best, rescale, p, total = _step(qk, best, total)
    v = tl.load(values + (slot * value_slot)[:, None] + value_dim[None, :])
    return best, total, acc * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)


@triton.jit
def _query_parts(queries, row_at, mine, scaling, DIM: tl.constexpr, PARTITION: tl.constexpr, COLUMNS: tl.constexpr):
    """Codes and scales of the queries' partitions, and the factors of keys' terms, float16 [rows, columns]."""
    channel, column = tl.arange(0, PARTITION), tl.arange(0, COLUMNS)
    codes, scales = (), ()
    terms = tl.zeros((row_at.shape[0], COLUMNS), tl.float16)
    for group in tl.static_range(DIM // PARTITION):
        at = queries + row_at[:, None] + (group * PARTITION + channel)[None, :]
        found, scale, zero = quantize_8bit(tl.load(at, mask=mine[:, None], other=0.0).to(tl.float32) * scaling, 1)
        rest = scale * tl.sum(found, 1, keep_dims=True).to(tl.float32) + zero * PARTITION
        high, low = high_and_low(rest)
        first = group * TERMS
        terms = tl.where(column[None, :] == first, high, tl.where(column[None, :] == first + 1, low, terms))
        high, low = high_and_low(zero * PARTITION)
        terms = tl.where((column == first + 2)[None, :] | (column == first + 4)[None, :], high, terms)
        terms = tl.where(column[None, :] == first + 3, low, terms)
        codes, scales = codes + (found.to(tl.int8),), scales + (scale,)
    return codes, scales, terms


@triton.jit
def _leave(left, query, mine, codes, scales, terms, sums, DIM: tl.constexpr, PARTITION: tl.constexpr, COLUMNS: tl.constexpr):
    """Store query codes, scales, terms and log sums for another kernel. ``query`` is the index of each row's query among all."""
    all_codes, all_scales, all_terms, all_sums = left
    for group in tl.static_range(DIM // PARTITION):
        at = all_codes + (query * DIM + group * PARTITION)[:, None] + tl.arange(0, PARTITION)[None, :]
        tl.store(at, codes[group], mask=mine[:, None])
        tl.store(all_scales + (query * (DIM // PARTITION) + group)[:, None], scales[group], mask=mine[:, None])
    tl.store(all_terms + (query * COLUMNS)[:, None] + tl.arange(0, COLUMNS)[None, :], terms, mask=mine[:, None])
    tl.store(all_sums + query, sums, mask=mine)


@triton.jit
def _in_pairs(codes):
    """Weight codes, int8 [rows, tokens], in the token order of the stored values. Each thread then holds the codes for its product."""
    rows: tl.constexpr = codes.shape[0]
    tokens: tl.constexpr = codes.shape[1]
    return tl.reshape(tl.permute(tl.reshape(codes, (rows, tokens // 16, 2, 4, 2)), (0, 1, 3, 2, 4)), (rows, tokens))


@triton.jit
def _columns_of(numbers):
    """Columns of [rows, 1, 2 or 4]. Loading the array as a whole is faster than loading columns."""
    rows: tl.constexpr = numbers.shape[0]
    count: tl.constexpr = numbers.shape[1]
    if count == 1:
        return (tl.reshape(numbers, (rows,)),)
    elif count == 2:
        return tl.split(numbers)
    else:
        # Even: columns 0 and 2. Odd: columns 1 and 3.
        even, odd = tl.split(tl.reshape(numbers, (rows, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth


@triton.jit
def _sum_terms(sums, ZEROS: tl.constexpr, LACKING: tl.constexpr):
    """Factors of the rows of zero points (prompt_codes.py), [rows, ZEROS]: the sums, integers to 2 ** 15, and ``LACKING`` for means."""
    high, low = high_and_low(sums.to(tl.float32)[:, None])
    column = tl.arange(0, ZEROS)[None, :]
    rest = tl.where((column == SUM_ROW) | (column == SUM_ROW + 1), LACKING, 0.0).to(tl.float16)
    return tl.where(column == 0, high, tl.where(column == 1, low, rest))


@triton.jit(do_not_specialize=("count", "blocks"))
def prefill_tiles(
    queries, out, keys, values, codes, key_scales, key_terms, value_codes, value_scales, value_zeros, table, table_row, requests, count,
    blocks, scaling, key_slot, key_head, value_slot, value_head, left, HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PARTITION: tl.constexpr, BLOCK: tl.constexpr, SINKS: tl.constexpr, SINK_STEP: tl.constexpr,
    COLUMNS: tl.constexpr, ZEROS: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend for M rows of a block of one request. Blocks that read most are scheduled first. ``scaling``: times log2(e).

    ``left``: None, or ``PrefillQueryCodes`` for the kernel that attends to codes; ``out`` is then the mean of the exact tokens' values.
    """
    COUNT: tl.constexpr = DIM // PARTITION
    # One load gives each thread one scale. Otherwise each thread would load the scales of all its scores.
    WIDE: tl.constexpr = min(4, max(COUNT, WARPS * 32 // PARTITION))
    # Blocks are counted from one that ends where the sinks end, or earlier.
    AHEAD: tl.constexpr = (SINKS + BLOCK - 1) // BLOCK
    TILES: tl.constexpr = (BLOCK * GROUP + M - 1) // M
    tokens = blocks * BLOCK
    kv_head, request = tl.program_id(1).to(tl.int64), tl.program_id(2)
    known, length = tl.load(requests + count + request), tl.load(requests + 2 * count + request)
    block = (length - 1 - SINKS + AHEAD * BLOCK) // BLOCK - tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES * M
    begin = SINKS + (block - AHEAD) * BLOCK
    # The program has no new tokens, or no such block exists.
    if (begin + tl.minimum(BLOCK, (tile + M - 1) // GROUP + 1) <= known) | (begin + tile // GROUP >= length) | (block < 0):
        return
    row = tile + tl.arange(0, M)
    place = begin + row // GROUP
    mine = (row < BLOCK * GROUP) & (place >= known) & (place < length)
    head = (tl.load(requests + 3 * count + request) + place - known).to(tl.int64) * (HEADS * GROUP) + kv_head * GROUP + row % GROUP
    # Rows without a query also attend to one token.
    place = tl.maximum(place, 0)
    table += tl.load(requests + request).to(tl.int64) * table_row
    keys, values = keys + kv_head * key_head, values + kv_head * value_head
    best = tl.zeros([M], tl.float32) - 1e30
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, VALUE_DIM], tl.float32)
    q = tl.load(queries + (head * DIM)[:, None] + tl.arange(0, DIM)[None, :], mask=mine[:, None], other=0.0).to(keys.dtype.element_ty)
    for start in tl.range(tl.maximum(begin, SINKS), tl.minimum(begin + BLOCK, length), PARTITION):
        best, total, acc = _exact_step(
            q, keys, values, table, start + tl.arange(0, PARTITION), tl.minimum(begin + BLOCK, length), place, best, total, acc, scaling,
            key_slot, value_slot, DIM, VALUE_DIM, PRECISION,
        )  # fmt: skip
    for start in tl.range(0, tl.minimum(SINKS, length), SINK_STEP):
        best, total, acc = _exact_step(
            q, keys, values, table, start + tl.arange(0, SINK_STEP), tl.minimum(SINKS, length), place, best, total, acc, scaling,
            key_slot, value_slot, DIM, VALUE_DIM, PRECISION,
        )  # fmt: skip
    q_codes, q_scales, q_terms = _query_parts(queries, head * DIM, mine, scaling, DIM, PARTITION, COLUMNS)
    column = tl.arange(0, VALUE_DIM)
    if left is not None:
        _leave(left, head, mine, q_codes, q_scales, q_terms, best + tl.log2(total), DIM, PARTITION, COLUMNS)
    else:
        first = tl.load(requests + 4 * count + request) * BLOCK
        token = tl.arange(0, PARTITION)
        at_codes = codes + (kv_head * COUNT * tokens + first) * PARTITION
        at_terms = key_terms + (kv_head * tokens + first) * COLUMNS
        at_scales = key_scales + kv_head * COUNT * tokens + first
        part = (kv_head * tokens + first) // PARTITION
        at_values = value_codes + part * VALUE_DIM * PARTITION
        at_value_scales = value_scales + part * VALUE_DIM
        at_zeros = value_zeros + part * ZEROS * VALUE_DIM
        of_codes = token[:, None] * PARTITION + token[None, :]
        of_terms = token[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        of_scales = token[:, None] + (tl.arange(0, WIDE) % COUNT)[None, :] * tokens
        of_values = column[:, None] * PARTITION + token[None, :]
        of_zeros = tl.arange(0, ZEROS)[:, None] * VALUE_DIM + column[None, :]
        # Sums are in units of 2 ** unit / LAST_CODE.
        unit, total, acc = best, total * LAST_CODE, acc * LAST_CODE
        for step in tl.range(0, tl.maximum(block - AHEAD, 0) * (BLOCK // PARTITION), num_stages=STAGES):
            qk = tl.dot(q_terms, tl.trans(tl.load(at_terms + step * PARTITION * COLUMNS + of_terms)))
            scales = _columns_of(tl.load(at_scales + step * PARTITION + of_scales))
            for group in tl.static_range(COUNT):
                k = tl.load(at_codes + (group * tokens + step * PARTITION) * PARTITION + of_codes)
                qk += tl.dot(q_codes[group], tl.trans(k), out_dtype=tl.int32).to(tl.float32) * scales[group][None, :] * q_scales[group]
            most = tl.max(qk, 1)
            best = tl.maximum(best, most)
            new = tl.maximum(most, best - FAR)
            rescale = tl.exp2(unit - new)
            unit = new
            p = tl.exp2(qk - (new - LOG_LAST)[:, None])
            total = total * rescale + tl.sum(p, 1)
            bits = (p + ROUNDING).to(tl.int32, bitcast=True)
            p_sums = tl.sum(bits - ROUNDED, 1)
            v = tl.load(at_values + step * VALUE_DIM * PARTITION + of_values)
            products = tl.dot(_in_pairs(bits.to(tl.int8)), tl.trans(v), out_dtype=tl.int32)
            # Loaded after the product, because earlier there are not enough registers.
            scale = tl.load(at_value_scales + step * VALUE_DIM + column)
            acc = acc * rescale[:, None] + products.to(tl.float32) * scale[None, :]
            LACKING: tl.constexpr = SHIFT * PARTITION // MEANS
            acc = tl.dot(_sum_terms(p_sums, ZEROS, LACKING), tl.load(at_zeros + step * ZEROS * VALUE_DIM + of_zeros), acc)
    at = out + (head * VALUE_DIM)[:, None] + column[None, :]
    tl.store(at, (acc / total[:, None]).to(out.dtype.element_ty), mask=mine[:, None])
