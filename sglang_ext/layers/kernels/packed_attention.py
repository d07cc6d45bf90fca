"""Softmax over one part of a row that begins with packed blocks: the kernel that packed_decode.py launches.

Codes are unpacked in registers. Scales of keys, and of values that have one scale a token, stay outside of the products with
codes, as in layers/attention/packed.py.
"""

import triton
import triton.language as tl


@triton.jit
def _parameters(numbers, table, index, slot_numbers, head_numbers, kv_head, CODE_CELLS: tl.constexpr, CELL: tl.constexpr):
    """Scales or zero points of a block by their ``index``; ``table``: its slots, ``numbers``: a buffer as float16."""
    slot = tl.load(table + CODE_CELLS + index // CELL).to(tl.int64)
    return tl.load(numbers + slot * slot_numbers + kv_head * head_numbers + index % CELL).to(tl.float32)


@triton.jit
def _codes(raw, shift, levels, BITS: tl.constexpr, TABLE: tl.constexpr):
    """What the codes in bytes mean, before scale and zero point: float32."""
    codes = (raw.to(tl.int32) >> shift) & ((1 << BITS) - 1)
    if TABLE:
        return tl.load(levels + codes)
    return codes.to(tl.float32)


@triton.jit
def _softmax_step(qk, best, total):
    """New maximum, what older sums shrink by, and the weights of a step of online softmax."""
    new_best = tl.maximum(tl.max(qk, 1), best)
    # A row that has seen nothing yet has no maximum.
    finite = tl.where(new_best == float("-inf"), 0.0, new_best)
    rescale, p = tl.exp(best - finite), tl.exp(qk - finite[:, None])
    return new_best, rescale, p, total * rescale + tl.sum(p, 1)


@triton.jit
def _packed_part(
    queries, key_bytes, key_numbers, value_bytes, value_numbers, key_levels, value_levels, table, first, last, scaling,
    kv_head, row, key_slot, key_head, value_slot, value_head, best, total, acc,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr, BITS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_SLOTS: tl.constexpr,
    CODE_CELLS: tl.constexpr, KEY_CELL: tl.constexpr, VALUE_CELL: tl.constexpr, PER_CHANNEL: tl.constexpr,
    STEP: tl.constexpr, VALUE_GROUPS: tl.constexpr, TABLE: tl.constexpr, LIKE: tl.constexpr,
):  # fmt: skip
    """Softmax over the blocks [first, last) of a request's row."""
    TOKENS_PER_CELL: tl.constexpr = BLOCK_TOKENS // CODE_CELLS
    PART: tl.constexpr = DIM * BITS // 8
    VALUE_PART: tl.constexpr = VALUE_DIM * BITS // 8
    # Scales of a block; its zero points follow them.
    KEY_SCALES: tl.constexpr = BLOCK_TOKENS // STEP * DIM if PER_CHANNEL else BLOCK_TOKENS
    VALUE_SCALES: tl.constexpr = BLOCK_TOKENS * VALUE_GROUPS
    dim, value_dim = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_VALUE_DIM)
    # Channels that pad a head are read as the last one's, whose query is 0; of values they are never stored.
    dim_at, value_at = tl.minimum(dim, DIM - 1), tl.minimum(value_dim, VALUE_DIM - 1)
    q = tl.load(queries + row[:, None] * DIM + dim[None, :], mask=(row < GROUP)[:, None] & (dim < DIM)[None, :], other=0.0)
    q = q.to(tl.float32) * scaling
    for step in tl.range(first * (BLOCK_TOKENS // STEP), last * (BLOCK_TOKENS // STEP)):
        block, part = step // (BLOCK_TOKENS // STEP), step % (BLOCK_TOKENS // STEP)
        slots = table + block * BLOCK_SLOTS
        token = part * STEP + tl.arange(0, STEP)
        slot = tl.load(slots + token // TOKENS_PER_CELL).to(tl.int64)
        within = token % TOKENS_PER_CELL
        at = slot * key_slot + kv_head * key_head + within * PART
        raw = tl.load(key_bytes + at[None, :] + (dim_at % PART)[:, None])
        codes = _codes(raw, (dim_at // PART * BITS)[:, None], key_levels, BITS, TABLE)
        index = part * DIM + dim_at if PER_CHANNEL else token
        scale = _parameters(key_numbers, slots, index, key_slot // 2, key_head // 2, kv_head, CODE_CELLS, KEY_CELL)
        zero = _parameters(key_numbers, slots, index + KEY_SCALES, key_slot // 2, key_head // 2, kv_head, CODE_CELLS, KEY_CELL)
        if PER_CHANNEL:
            qk = tl.dot((q * scale[None, :]).to(LIKE), codes.to(LIKE)) + tl.sum(q * zero[None, :], 1)[:, None]
        else:
            qk = tl.dot(q.to(LIKE), codes.to(LIKE)) * scale[None, :] + tl.sum(q, 1)[:, None] * zero[None, :]
        best, rescale, p, total = _softmax_step(qk, best, total)
        at = slot * value_slot + kv_head * value_head + within * VALUE_PART
        raw = tl.load(value_bytes + at[:, None] + (value_at % VALUE_PART)[None, :])
        codes = _codes(raw, (value_at // VALUE_PART * BITS)[None, :], value_levels, BITS, TABLE)
        if VALUE_GROUPS == 1:
            index = token
        else:
            index = token[:, None] * VALUE_GROUPS + (value_at // (VALUE_DIM // VALUE_GROUPS))[None, :]
        scale = _parameters(value_numbers, slots, index, value_slot // 2, value_head // 2, kv_head, CODE_CELLS, VALUE_CELL)
        zero = _parameters(
            value_numbers, slots, index + VALUE_SCALES, value_slot // 2, value_head // 2, kv_head, CODE_CELLS, VALUE_CELL
        )
        acc *= rescale[:, None]
        if VALUE_GROUPS == 1:
            acc += tl.dot((p * scale[None, :]).to(LIKE), codes.to(LIKE)) + tl.sum(p * zero[None, :], 1)[:, None]
        else:
            acc += tl.dot(p.to(LIKE), (codes * scale + zero).to(LIKE))
    return best, total, acc


@triton.jit
def _exact_part(
    queries, keys, values, table, first, last, scaling, kv_head, row, key_slot, key_head, value_slot, value_head,
    best, total, acc, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr, N: tl.constexpr, LIKE: tl.constexpr,
):  # fmt: skip
    """Softmax over the tokens [first, last) of a request's row."""
    dim, value_dim = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_VALUE_DIM)
    q = tl.load(queries + row[:, None] * DIM + dim[None, :], mask=(row < GROUP)[:, None] & (dim < DIM)[None, :], other=0.0)
    q = (q.to(tl.float32) * scaling).to(LIKE)
    for start in tl.range(first, last, N):
        place = start + tl.arange(0, N)
        inside = place < last
        slot = tl.load(table + place, mask=inside, other=0).to(tl.int64)
        at = slot * key_slot + kv_head * key_head
        k = tl.load(keys + at[None, :] + dim[:, None], mask=inside[None, :] & (dim < DIM)[:, None], other=0.0)
        qk = tl.where(inside[None, :], tl.dot(q, k), float("-inf"))
        best, rescale, p, total = _softmax_step(qk, best, total)
        at = slot * value_slot + kv_head * value_head
        seen = inside[:, None] & (value_dim < VALUE_DIM)[None, :]
        v = tl.load(values + at[:, None] + value_dim[None, :], mask=seen, other=0.0)
        acc = acc * rescale[:, None] + tl.dot(p.to(LIKE), v)
    return best, total, acc


@triton.jit
def packed_splits(
    queries, rotated, keys, values, key_bytes, key_numbers, value_bytes, value_numbers, key_levels, value_levels,
    token_table, table_row, rows, lengths, packed_slots, partial, lse, scaling,
    key_slot, key_head, value_slot, value_head, HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr,
    BITS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_SLOTS: tl.constexpr, CODE_CELLS: tl.constexpr,
    KEY_CELL: tl.constexpr, VALUE_CELL: tl.constexpr, PER_CHANNEL: tl.constexpr, STEP: tl.constexpr,
    VALUE_GROUPS: tl.constexpr, TABLE: tl.constexpr, PACKED: tl.constexpr, EXACT: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    split, kv_head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    table_at = tl.load(rows + request)
    table = token_table + table_at * table_row
    # Both branches below count in one type.
    packed, length = tl.load(packed_slots + table_at).to(tl.int32), tl.load(lengths + request).to(tl.int32)
    row, value_dim = tl.arange(0, M), tl.arange(0, PADDED_VALUE_DIM)
    best = tl.zeros([M], dtype=tl.float32) - float("inf")
    total = tl.zeros([M], dtype=tl.float32)
    acc = tl.zeros([M, PADDED_VALUE_DIM], dtype=tl.float32)
    LIKE: tl.constexpr = keys.dtype.element_ty
    head0 = request * HEADS * GROUP + kv_head * GROUP
    if split < PACKED:
        blocks = packed // BLOCK_SLOTS
        each = tl.cdiv(blocks, PACKED)
        best, total, acc = _packed_part(
            rotated + head0 * DIM, key_bytes, key_numbers, value_bytes, value_numbers, key_levels, value_levels, table,
            each * split, tl.minimum(each * (split + 1), blocks), scaling, kv_head, row,
            key_slot * (KEY_CELL * 2 // DIM), key_head * (KEY_CELL * 2 // DIM),
            value_slot * (VALUE_CELL * 2 // VALUE_DIM), value_head * (VALUE_CELL * 2 // VALUE_DIM), best, total, acc,
            GROUP, DIM, VALUE_DIM, PADDED_DIM, PADDED_VALUE_DIM, BITS, BLOCK_TOKENS, BLOCK_SLOTS, CODE_CELLS, KEY_CELL,
            VALUE_CELL, PER_CHANNEL, STEP, VALUE_GROUPS, TABLE, LIKE,
        )  # fmt: skip
    else:
        each = tl.cdiv(length - packed, EXACT)
        first = packed + each * (split - PACKED)
        best, total, acc = _exact_part(
            queries + head0 * DIM, keys, values, table, first, tl.minimum(first + each, length), scaling, kv_head, row,
            key_slot, key_head, value_slot, value_head, best, total, acc, GROUP, DIM, VALUE_DIM, PADDED_DIM,
            PADDED_VALUE_DIM, N, LIKE,
        )  # fmt: skip
    place = (head0 + row) * (PACKED + EXACT) + split
    mine = row < GROUP
    found = mine & (total > 0)
    total = tl.where(total > 0, total, 1.0)
    tl.store(
        partial + place[:, None] * VALUE_DIM + value_dim[None, :], acc / total[:, None],
        mask=found[:, None] & (value_dim < VALUE_DIM)[None, :],
    )  # fmt: skip
    tl.store(lse + place, best + tl.log(total), mask=mine)
