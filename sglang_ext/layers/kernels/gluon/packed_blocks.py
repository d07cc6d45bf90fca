"""Decode attention over rows that begin with packed blocks, on NVIDIA tensor cores: a Gluon kernel for packed_decode.py.

A program is one warp, so that it never waits for other warps. Codes are loaded from memory into registers one block ahead, in the layout
that the tensor cores need (fragments.py, tiles.py). Scales and zero points, which many lanes share, are loaded through shared memory.
Neither is applied to each number. Scales are multiplied into queries or weights, and zero points have products of their own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from sglang_ext.layers.kernels.gluon import assembly
from sglang_ext.layers.kernels.gluon.exact_tokens import exact_split
from sglang_ext.layers.kernels.gluon.float_products import (
    add_values,
    query_sums,
    scaled_weights,
    scores_by_channel,
    scores_by_token,
    zero_rows,
)
from sglang_ext.layers.kernels.gluon.tiles import B, CODE, LOG2E, QUERY, SUM, as_weights, finish, key_byte, store_rows, totals

# Weights are scaled up so that the greatest is 2 ** HEADROOM. Multiplied by a small scale, they are still not subnormal.
HEADROOM = gl.constexpr(6.0)
WEIGHTS = gl.constexpr((*assembly.weights("f16"), gl.float16))
PARAMETERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _load_queries(queries, F: gl.constexpr):
    """Queries of each part, float16 [bytes, columns] as B, in the order of key_byte, divided by the powers of two of the part's codes."""
    COUNT: gl.constexpr = F.value.bytes
    index, column = gl.arange(0, COUNT, gl.SliceLayout(1, B)), gl.arange(0, F.value.columns, gl.SliceLayout(0, B))[None, :]
    byte = key_byte(index, COUNT)[:, None]
    found = ()
    for part in gl.static_range(gl.constexpr(F.value.parts)):
        q = gl.load(queries + column * F.value.dim + (part * COUNT + byte), mask=column < F.value.group, other=0.0)
        found = found + ((q.to(gl.float32) / F.value.powers[part]).to(gl.float16),)
    return found


@gluon.jit
def _load_words(words, slots, slot_words, SHIFT: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr, F: gl.constexpr):
    """Load COUNT bytes from byte SHIFT on, of each token of a block: int32 [cells, tokens, words]."""
    WORDS: gl.constexpr = F.value.bytes // 4
    token = gl.arange(0, F.value.cell_tokens, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    word = gl.arange(0, COUNT // 4, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    return gl.load(words + (slots.to(gl.int64) * slot_words)[:, None, None] + (token * WORDS + word + SHIFT // 4))


@gluon.jit
def _load_keys(words, slots, slot_words, F: gl.constexpr):
    """Load a block's key codes in the layout for products with queries."""
    LAYOUT: gl.constexpr = gl.SliceLayout(3, F.value.key_layout)
    return _load_words(words, slots, slot_words, 0, gl.constexpr(F.value.bytes), LAYOUT, F)


@gluon.jit
def _load_values(words, slots, slot_words, F: gl.constexpr):
    """Load a block's value codes by unit in the layout for products with weights."""
    UNIT: gl.constexpr = F.value.value_unit
    LAYOUT: gl.constexpr = gl.SliceLayout(3, F.value.value_layout)
    found = ()
    for unit in gl.static_range(gl.constexpr(F.value.value_units)):
        found = found + (_load_words(words, slots, slot_words, unit * UNIT, UNIT, LAYOUT, F),)
    return found


@gluon.jit
def _row_cells(SHAPE: gl.constexpr, LAYOUT: gl.constexpr, F: gl.constexpr):
    """Index of the block's cell in which each row of scales, then zero points, begins."""
    return F.value.cells + gl.arange(0, 2 * SHAPE[0], gl.SliceLayout(1, LAYOUT)) * SHAPE[1] // F.value.dim


@gluon.jit
def _load_slots(table, block, BLOCK_SLOTS: gl.constexpr, F: gl.constexpr):
    """Slots of a block: those of key codes, of value codes, and of the scales and zero points of both."""
    at = table + block * BLOCK_SLOTS
    KEYS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, F.value.key_layout)))
    VALUES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, F.value.value_layout)))
    return (
        gl.load(at + gl.arange(0, F.value.cells, KEYS)),
        gl.load(at + gl.arange(0, F.value.cells, VALUES)),
        gl.load(at + _row_cells(gl.constexpr(F.value.key_shape), gl.constexpr(F.value.key_copy), F)),
        gl.load(at + _row_cells(gl.constexpr(F.value.value_shape), gl.constexpr(F.value.value_copy), F)),
    )


@gluon.jit
def _copy_rows(shared, numbers, slots, slot_numbers, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, F: gl.constexpr):
    """Start an asynchronous copy of scales, then zero points, to shared memory."""
    row = gl.arange(0, 2 * SHAPE[0], gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, SHAPE[1], gl.SliceLayout(0, LAYOUT))[None, :]
    at = (slots.to(gl.int64) * slot_numbers + row * SHAPE[1] % F.value.dim)[:, None]
    async_copy.async_copy_global_to_shared(shared, numbers + at + column)


@gluon.jit
def _copy_parameters(of_keys, of_values, key_numbers, value_numbers, slots, key_slot, value_slot, F: gl.constexpr):
    """Start an asynchronous copy of a block's scales and zero points, as one group."""
    _copy_rows(of_keys, key_numbers, slots[2], key_slot, gl.constexpr(F.value.key_shape), gl.constexpr(F.value.key_copy), F)
    SHAPE: gl.constexpr = F.value.value_shape
    _copy_rows(of_values, value_numbers, slots[3], value_slot, SHAPE, gl.constexpr(F.value.value_copy), F)
    async_copy.commit_group()


@gluon.jit
def _store(partial, lse, place, splits, best, outputs, side, F: gl.constexpr):
    """Store the result of a split: the sums of outputs, and ``side``, the sums of zero points and of weights."""
    UNIT: gl.constexpr = F.value.value_unit
    UNITS: gl.constexpr = F.value.value_units
    row = gl.arange(0, 16, gl.SliceLayout(1, SUM))[:, None]
    total = totals(side)
    finish(lse, place, splits, best, total, F)
    for at in gl.static_range(gl.constexpr(F.value.parts * F.value.value_units)):
        zeros = gl.sum(gl.where(row == (at if F.value.groups > 1 else 0), side, 0.0), 0)
        found = outputs[at] * (CODE / F.value.powers[at // UNITS]) + zeros[None, :]
        store_rows(partial, place, splits, found, total, at * UNIT, UNIT, F)


@gluon.jit
def _packed_part(
    queries, key_words, key_numbers, value_words, value_numbers, table, first, last, scaling, partial, lse, place, splits,
    key_slot, value_slot, BLOCK_SLOTS: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """Softmax over the blocks [first, last) of a request's row. Buffers begin at the head's cells."""
    N: gl.constexpr = F.value.columns
    KEY_ROWS: gl.constexpr = F.value.key_shape[0]
    VALUE_ROWS: gl.constexpr = F.value.value_shape[0]
    of_keys = gl.allocate_shared_memory(gl.float16, [2, 2 * KEY_ROWS, F.value.key_shape[1]], PARAMETERS)
    of_values = gl.allocate_shared_memory(gl.float16, [2, 2 * VALUE_ROWS, F.value.value_shape[1]], PARAMETERS)
    q = _load_queries(queries, F)
    sums = query_sums(q, F)
    outputs = ()
    for _ in gl.static_range(gl.constexpr(F.value.parts * F.value.value_units)):
        outputs = outputs + (gl.full([F.value.value_unit, N], 0.0, gl.float32, SUM),)
    side = gl.full([16, N], 0.0, gl.float32, SUM)
    best = gl.full([N], float("-inf"), gl.float32, QUERY)
    factor = scaling * LOG2E * (CODE if F.value.by_channel else 1.0)
    if first < last:
        slots = _load_slots(table, first, BLOCK_SLOTS, F)
        _copy_parameters(of_keys.index(0), of_values.index(0), key_numbers, value_numbers, slots, key_slot, value_slot, F)
        keys = _load_keys(key_words, slots[0], key_slot // 2, F)
        value_slots = slots[1]
        if F.value.ahead:
            values = _load_values(value_words, value_slots, value_slot // 2, F)
        slots = _load_slots(table, gl.minimum(first + 1, last - 1), BLOCK_SLOTS, F)
        for block in range(first, last):
            if F.value.ahead:
                coming_keys = _load_keys(key_words, slots[0], key_slot // 2, F)
                coming_values = _load_values(value_words, slots[1], value_slot // 2, F)
            else:
                values = _load_values(value_words, value_slots, value_slot // 2, F)
            now = (block - first) % 2
            mine = of_keys.index(1 - now), of_values.index(1 - now)
            _copy_parameters(mine[0], mine[1], key_numbers, value_numbers, slots, key_slot, value_slot, F)
            async_copy.wait_group(1)
            scale, zero = of_keys.index(now).slice(0, KEY_ROWS), of_keys.index(now).slice(KEY_ROWS, KEY_ROWS)
            if F.value.by_channel:
                scores = scores_by_channel(keys, q, scale, zero, F)
            else:
                scores = scores_by_token(keys, q, sums, scale, zero, F)
            if F.value.ahead:
                keys = coming_keys
            else:
                keys = _load_keys(key_words, slots[0], key_slot // 2, F)
            # Keeps the compiler from delaying the load to a point with more free registers.
            gl.thread_barrier()
            new_best = gl.maximum(best, gl.max(scores, 0) * factor)
            rescale = gl.exp2(best - new_best)[None, :]
            best = new_best
            weights = as_weights(scores * factor - (best - HEADROOM)[None, :], WEIGHTS)
            scale, zero = of_values.index(now).slice(0, VALUE_ROWS), of_values.index(now).slice(VALUE_ROWS, VALUE_ROWS)
            side = mma_v2(zero_rows(zero, F), weights, side * rescale)
            rescaled = ()
            for at in gl.static_range(gl.constexpr(F.value.parts * F.value.value_units)):
                rescaled = rescaled + (outputs[at] * rescale,)
            outputs = add_values(rescaled, values, scaled_weights(weights, scale, F), F)
            if F.value.ahead:
                values = coming_values
            else:
                value_slots = slots[1]
            slots = _load_slots(table, gl.minimum(block + 2, last - 1), BLOCK_SLOTS, F)
        async_copy.wait_group(0)
    _store(partial, lse, place, splits, best - HEADROOM, outputs, side, F)


@gluon.jit
def packed_splits_gluon(
    queries, rotated, keys, values, key_words, key_numbers, value_words, value_numbers, token_table, table_row, rows, lengths,
    packed_slots, partial, lse, scaling, key_slot, key_head, value_slot, value_head, packed_parts, exact_parts,
    HEADS: gl.constexpr, BLOCK_SLOTS: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """As ``packed_splits`` of ../packed/packed_attention.py. ``key_words``, ``key_numbers``: the buffer as int32 and as float16."""
    split, kv_head, request = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    table_at = gl.load(rows + request)
    table = token_table + table_at * table_row
    packed, length = gl.load(packed_slots + table_at).to(gl.int32), gl.load(lengths + request).to(gl.int32)
    splits = packed_parts + exact_parts
    head0 = (request * HEADS + kv_head) * F.value.group
    place = head0 * splits + split
    key_at, value_at = kv_head * key_head, kv_head * value_head
    if split < packed_parts:
        blocks = packed // BLOCK_SLOTS
        each = gl.cdiv(blocks, packed_parts)
        _packed_part(
            rotated + head0 * F.value.dim, key_words + key_at // 2, key_numbers + key_at, value_words + value_at // 2,
            value_numbers + value_at, table, each * split, gl.minimum(each * (split + 1), blocks), scaling, partial, lse,
            place, splits, key_slot, value_slot, BLOCK_SLOTS, F,
        )  # fmt: skip
    else:
        exact_split(
            queries + head0 * F.value.dim, keys + key_at, values + value_at, table, packed, length, split - packed_parts, scaling,
            partial, lse, place, splits, key_slot, value_slot, exact_parts, F,
        )  # fmt: skip
