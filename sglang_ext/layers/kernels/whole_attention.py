"""Softmax over one part of a row that begins with blocks that have outliers, or keys from before rotary embedding.

The kernel that packed_decode.py launches for such blocks. A program makes a block of one head whole (whole_blocks.py), but for
its outliers: few as they are, these add to the scores of their tokens, and to the sums of their channels, by products with
matrices that have a 1 for each outlier.
"""

import triton
import triton.language as tl

from sglang_ext.layers.kernels.flash_parts import exact_part, head_and_rows, softmax_step, store_part
from sglang_ext.layers.kernels.whole_blocks import (
    at_most,
    cell,
    cosine_and_sine,
    first_channel,
    meant,
    other_channel,
    outliers,
    scales_and_zeros,
    second_channel,
)


@triton.jit
def _queries(queries, channel, there, row, scaling, DIM: tl.constexpr, GROUP: tl.constexpr):
    """Some channels of the queries that share a KV head, 0 for what is not there: float32 [channels, rows]."""
    mask = there[:, None] & (row < GROUP)[None, :]
    return tl.load(queries + row[None, :] * DIM + channel[:, None], mask=mask, other=0.0).to(tl.float32) * scaling


@triton.jit
def _outliers_products(
    queries, excess, channel, position, steps, row, scaling, DIM: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """What each outlier of keys adds to the products of its token: float32 [outliers, rows]."""
    there = excess != 0
    own = _queries(queries, channel, there, row, scaling, DIM, GROUP)
    if PAIRS > 0:
        other = _queries(queries, other_channel(channel, PAIRS, INTERLEAVED), there, row, scaling, DIM, GROUP)
        cosine, sine = cosine_and_sine(position, tl.load(steps + channel), FAST)
        own = own * cosine[:, None] + other * sine[:, None]
    return own * excess[:, None]


@triton.jit
def _whole_part(
    queries, key_bytes, key_numbers, key_places, key_positions, value_bytes, value_numbers, value_places, steps, middle, linear,
    cubic, fifth, table, first, last, scaling, row, partial, lse, place, key_slot, value_slot, GROUP: tl.constexpr,
    M: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    BITS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_SLOTS: tl.constexpr, CODE_CELLS: tl.constexpr, KEY_CELL: tl.constexpr,
    VALUE_CELL: tl.constexpr, KEY_SHARING: tl.constexpr, KEY_CHANNELS: tl.constexpr, VALUE_CHANNELS: tl.constexpr,
    OUTLIERS: tl.constexpr, VALUE_OUTLIERS: tl.constexpr, PLACES: tl.constexpr, VALUE_PLACES: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, FAST: tl.constexpr, LIKE: tl.constexpr,
):  # fmt: skip
    """Softmax over the blocks [first, last) of a request's row.

    Bytes, numbers, places and positions are views of the head's first cell; ``key_slot`` and ``value_slot``: bytes from one slot
    to the next. Cells are in bytes. PLACES: of outliers, padded.
    """
    # Channels of a token's part of codes, which are as many as its bytes.
    PART: tl.constexpr = DIM * BITS // 8
    VALUE_PART: tl.constexpr = VALUE_DIM * BITS // 8
    HALF: tl.constexpr = VALUE_DIM // 2
    # After the codes, in float16: scales and zero points, positions, places of outliers.
    SCALES: tl.constexpr = 2 * (TOKENS // KEY_SHARING) * (DIM // KEY_CHANNELS)
    AFTER: tl.constexpr = SCALES + (2 * TOKENS if PAIRS > 0 else 0)
    VALUE_AFTER: tl.constexpr = 2 * TOKENS * (VALUE_DIM // VALUE_CHANNELS)
    KEY_GROUP: tl.constexpr = 0 if KEY_CHANNELS == DIM else -1
    IN_ONE: tl.constexpr = VALUE_CHANNELS % HALF == 0
    # Where both channels of all pairs have their codes in the same bytes.
    TOGETHER: tl.constexpr = BITS < 8 and not INTERLEAVED and (PAIRS == 0 or 2 * PAIRS == DIM)
    token, inside = tl.arange(0, TOKENS), tl.arange(0, COLUMNS) < DIM // 2
    # What pads a tile is read as its last pair, whose query is 0; of values it is never stored.
    pair = at_most(tl.arange(0, COLUMNS), DIM // 2, COLUMNS)
    value = at_most(tl.arange(0, VALUE_COLUMNS), HALF, VALUE_COLUMNS)
    a_channel, b_channel = first_channel(pair, DIM, PAIRS, INTERLEAVED), second_channel(pair, DIM, PAIRS, INTERLEAVED)
    a_query = _queries(queries, a_channel, inside, row, scaling, DIM, GROUP).to(LIKE)
    b_query = _queries(queries, b_channel, inside, row, scaling, DIM, GROUP).to(LIKE)
    if PAIRS > 0:
        pair_steps = tl.load(steps + a_channel)
    best = tl.zeros([M], dtype=tl.float32) - float("inf")
    total = tl.zeros([M], dtype=tl.float32)
    a_sum = tl.zeros([M, VALUE_COLUMNS], dtype=tl.float32)
    b_sum = a_sum
    for block in tl.range(first, last):
        slots = table + block * BLOCK_SLOTS
        ends = slots + CODE_CELLS
        codes = cell(key_bytes, slots, token * PART, key_slot, KEY_CELL, 0, TOKENS * PART)[:, None]
        raw = tl.load(codes + (a_channel % PART)[None, :])
        scale, zero = scales_and_zeros(
            key_numbers, ends, token, a_channel, key_slot // 2, KEY_CELL // 2, TOKENS, DIM, KEY_SHARING, KEY_CHANNELS, KEY_GROUP
        )  # fmt: skip
        a = meant(raw, a_channel, scale, zero, middle, linear, cubic, fifth, BITS, PART)
        if not TOGETHER:
            raw = tl.load(codes + (b_channel % PART)[None, :])
        scale, zero = scales_and_zeros(
            key_numbers, ends, token, b_channel, key_slot // 2, KEY_CELL // 2, TOKENS, DIM, KEY_SHARING, KEY_CHANNELS, KEY_GROUP
        )  # fmt: skip
        b = meant(raw, b_channel, scale, zero, middle, linear, cubic, fifth, BITS, PART)
        if PAIRS > 0:
            position = tl.load(cell(key_positions, ends, token, key_slot // 4, KEY_CELL // 4, SCALES // 2, TOKENS))
            cosine, sine = cosine_and_sine(position[:, None], pair_steps[None, :], FAST)
            a, b = a * cosine - b * sine, b * cosine + a * sine
        qk = tl.dot(b.to(LIKE), b_query, tl.dot(a.to(LIKE), a_query))
        if PLACES > 0:
            owner, channel, excess = outliers(
                key_places, key_numbers, ends, key_slot // 2, KEY_CELL // 2, AFTER, DIM, OUTLIERS, PLACES
            )  # fmt: skip
            position = channel
            if PAIRS > 0:
                owned = tl.maximum(owner, 0)
                position = tl.load(cell(key_positions, ends, owned, key_slot // 4, KEY_CELL // 4, SCALES // 2, TOKENS))
            more = _outliers_products(
                queries, excess, channel, position, steps, row, scaling, DIM, GROUP, PAIRS, INTERLEAVED, FAST
            )  # fmt: skip
            qk = tl.dot((token[:, None] == owner[None, :]).to(LIKE), more.to(LIKE), qk)
        best, rescale, p, total = softmax_step(qk, best, total, 0)
        p = tl.trans(p).to(LIKE)
        codes = cell(value_bytes, slots, token * VALUE_PART, value_slot, VALUE_CELL, 0, TOKENS * VALUE_PART)[:, None]
        raw = tl.load(codes + (value % VALUE_PART)[None, :])
        scale, zero = scales_and_zeros(
            value_numbers, ends, token, value, value_slot // 2, VALUE_CELL // 2, TOKENS, VALUE_DIM, 1, VALUE_CHANNELS,
            0 if IN_ONE else -1,
        )  # fmt: skip
        a = meant(raw, value, scale, zero, middle, linear, cubic, fifth, BITS, VALUE_PART)
        if BITS == 8:
            raw = tl.load(codes + HALF + value[None, :])
        scale, zero = scales_and_zeros(
            value_numbers, ends, token, HALF + value, value_slot // 2, VALUE_CELL // 2, TOKENS, VALUE_DIM, 1, VALUE_CHANNELS,
            HALF // VALUE_CHANNELS if IN_ONE else -1,
        )  # fmt: skip
        b = meant(raw, HALF + value, scale, zero, middle, linear, cubic, fifth, BITS, VALUE_PART)
        a_sum = tl.dot(p, a.to(LIKE), a_sum * rescale[:, None])
        b_sum = tl.dot(p, b.to(LIKE), b_sum * rescale[:, None])
        if VALUE_PLACES > 0:
            owner, channel, excess = outliers(
                value_places, value_numbers, ends, value_slot // 2, VALUE_CELL // 2, VALUE_AFTER, VALUE_DIM, VALUE_OUTLIERS,
                VALUE_PLACES,
            )  # fmt: skip
            weights = tl.dot(p, (token[:, None] == owner[None, :]).to(LIKE)) * excess[None, :]
            a_sum = tl.dot(weights.to(LIKE), (channel[:, None] == value[None, :]).to(LIKE), a_sum)
            b_sum = tl.dot(weights.to(LIKE), (channel[:, None] == HALF + value[None, :]).to(LIKE), b_sum)
    value = tl.arange(0, VALUE_COLUMNS)
    there = value < HALF
    store_part(partial, lse, place, value, there, best, total, a_sum, row, GROUP, VALUE_DIM)
    store_part(partial, lse, place, HALF + value, there, best, total, b_sum, row, GROUP, VALUE_DIM)


@triton.jit
def whole_splits(
    queries, rotated, keys, values, key_bytes, key_numbers, key_places, key_positions, value_bytes, value_numbers, value_places,
    steps, middle, linear, cubic, fifth, token_table, table_row, rows, lengths, packed_slots, partial, lse, scaling,
    key_slot, key_head, value_slot, value_head, HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_SLOTS: tl.constexpr, CODE_CELLS: tl.constexpr,
    KEY_CELL: tl.constexpr, VALUE_CELL: tl.constexpr, KEY_SHARING: tl.constexpr, KEY_CHANNELS: tl.constexpr,
    VALUE_CHANNELS: tl.constexpr, OUTLIERS: tl.constexpr, VALUE_OUTLIERS: tl.constexpr, PLACES: tl.constexpr,
    VALUE_PLACES: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, FAST: tl.constexpr, PACKED: tl.constexpr,
    EXACT: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    split, request = tl.program_id(0), tl.program_id(2)
    kv_head, row = head_and_rows(GROUP, M)
    table_at = tl.load(rows + request)
    table = token_table + table_at * table_row
    # Both branches below count in one type.
    packed, length = tl.load(packed_slots + table_at).to(tl.int32), tl.load(lengths + request).to(tl.int32)
    LIKE: tl.constexpr = keys.dtype.element_ty
    # Numbers of the pool to bytes.
    KEY_BYTES: tl.constexpr = KEY_CELL // DIM
    VALUE_BYTES: tl.constexpr = VALUE_CELL // VALUE_DIM
    head0 = request * HEADS * GROUP + kv_head * GROUP
    place = (head0 + row) * (PACKED + EXACT) + split
    if split < PACKED:
        blocks = packed // BLOCK_SLOTS
        each = tl.cdiv(blocks, PACKED)
        key_at, value_at = kv_head * key_head * KEY_BYTES, kv_head * value_head * VALUE_BYTES
        _whole_part(
            rotated + head0 * DIM, key_bytes + key_at, key_numbers + key_at // 2, key_places + key_at // 2,
            key_positions + key_at // 4, value_bytes + value_at, value_numbers + value_at // 2, value_places + value_at // 2,
            steps, middle, linear, cubic, fifth, table, each * split, tl.minimum(each * (split + 1), blocks), scaling, row,
            partial, lse, place, key_slot * KEY_BYTES, value_slot * VALUE_BYTES, GROUP, M, DIM, VALUE_DIM, COLUMNS,
            VALUE_COLUMNS, BITS, TOKENS, BLOCK_SLOTS, CODE_CELLS, KEY_CELL, VALUE_CELL, KEY_SHARING, KEY_CHANNELS,
            VALUE_CHANNELS, OUTLIERS, VALUE_OUTLIERS,
            PLACES, VALUE_PLACES, PAIRS, INTERLEAVED, FAST, tl.float16 if FAST else LIKE,
        )  # fmt: skip
    else:
        best, total, acc = exact_part(
            queries + head0 * DIM, keys + kv_head * key_head, values + kv_head * value_head, table, packed, length,
            split - PACKED, scaling, row, key_slot, value_slot, EXACT, GROUP, M, DIM, VALUE_DIM, PADDED_DIM,
            PADDED_VALUE_DIM, N, LIKE,
        )  # fmt: skip
        channel = tl.arange(0, PADDED_VALUE_DIM)
        store_part(partial, lse, place, channel, channel < VALUE_DIM, best, total, acc, row, GROUP, VALUE_DIM)
