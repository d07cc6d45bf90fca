"""Decode attention over rows that begin with packed blocks, on NVIDIA tensor cores: a Gluon kernel for packed_decode.py.

A program is one warp, so that it never waits for other warps. Codes are loaded from memory into registers one block ahead, in the layout
that the tensor cores need (fragments.py, tiles.py). Scales and zero points, which many lanes share, are loaded through shared memory.
Neither is applied to each number. Scales are multiplied into queries or weights, and zero points have products of their own.

Products of queries with packed keys, and weighted sums of packed values, have their inputs in a warp's registers. Their outputs are scores
or attention outputs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from sglang_ext.layers.kernels.gluon import fragments
from sglang_ext.layers.kernels.gluon.tiles import (
    CODE,
    LOG2E,
    QUERY,
    SUM,
    A,
    B,
    as_weights,
    as_wide,
    exact_split,
    finish,
    key_byte,
    numbers_of,
    products,
    store_rows,
    totals,
)


@gluon.jit
def _of_channels(numbers, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """One number per byte, [1, bytes], in the order of the sum over channels."""
    numbers = numbers.reshape(4, COUNT // 8, 2).permute(1, 0, 2).reshape(COUNT)
    return gl.convert_layout(numbers, LAYOUT, assert_trivial=True)


@gluon.jit
def _of_scores(numbers):
    """One number per token, [1, tokens], in the order of the scores' rows, as float32 [tokens, 1]."""
    rows = numbers.reshape(2, 8, 4).permute(0, 2, 1).reshape(64)
    return gl.expand_dims(gl.convert_layout(rows, gl.SliceLayout(1, SUM), assert_trivial=True).to(gl.float32), 1)


@gluon.jit
def _key_numbers(words, F: gl.constexpr):
    """Numbers of each part, float16 [cells, tokens, words, 4]."""
    ASSEMBLY: gl.constexpr = F.value.key_assembly
    return numbers_of(words, ASSEMBLY, 1, gl.constexpr(F.value.key_layout), gl.constexpr(F.value.parts))


@gluon.jit
def query_sums(queries, F: gl.constexpr):
    """Sum of each query's channels, float32 [columns]. ``queries`` are from :func:`_load_queries`."""
    sums = gl.full([F.value.columns], 0.0, gl.float32, QUERY)
    for part in gl.static_range(gl.constexpr(F.value.parts)):
        ones = gl.full([16, F.value.bytes], 1.0, gl.float16, A)
        found = mma_v2(ones, queries[part], gl.full([16, F.value.columns], 0.0, gl.float32, SUM))
        sums += gl.max(found, 0) * F.value.powers[part]
    return sums


@gluon.jit
def scores_by_token(words, queries, sums, scale, zero, F: gl.constexpr):
    """Products of queries with keys whose channels share a scale: float32 [tokens, columns]. ``scale``, ``zero``: in shared memory."""
    COUNT: gl.constexpr = F.value.bytes
    numbers = _key_numbers(words, F)
    found = gl.full([64, F.value.columns], 0.0, gl.float32, SUM)
    for part in gl.static_range(gl.constexpr(F.value.parts)):
        tile = numbers[part].reshape(2, 8, 4, 4, COUNT // 8, 2).permute(0, 2, 1, 4, 3, 5).reshape(64, COUNT)
        found = mma_v2(gl.convert_layout(tile, A, assert_trivial=True), queries[part], found)
    scale = _of_scores(scale.load(F.value.score_layout)) * CODE
    zero = _of_scores(zero.load(F.value.score_layout))
    return gl.fma(found, as_wide(scale, found), zero * sums[None, :])


@gluon.jit
def _zero_products(queries, zero, HALF: gl.constexpr, F: gl.constexpr):
    """Products of queries with the zero points of one half of the tokens, in the units of code products: float32 [32, columns]."""
    COUNT: gl.constexpr = F.value.bytes
    found = gl.full([16, F.value.columns], 0.0, gl.float32, SUM)
    for part in gl.static_range(gl.constexpr(F.value.parts)):
        channels = zero.slice(HALF * F.value.parts + part, 1).load(F.value.channel_layout)
        channels = gl.expand_dims(_of_channels(channels, COUNT, gl.constexpr(gl.SliceLayout(0, A))), 0)
        rows = as_wide(channels, gl.full([16, COUNT], 0.0, gl.float16, A))
        of_part = mma_v2(rows, queries[part], gl.full([16, F.value.columns], 0.0, gl.float32, SUM))
        found += of_part * (F.value.powers[part] / CODE)
    found = gl.join(found, found).permute(2, 0, 1).reshape(32, F.value.columns)
    return gl.convert_layout(found, SUM, assert_trivial=True)


@gluon.jit
def scores_by_channel(words, queries, scale, zero, F: gl.constexpr):
    """As :func:`scores_by_token`, divided by CODE, where half of a block's tokens share a channel's scale: [parts of both halves, bytes]."""
    COUNT: gl.constexpr = F.value.bytes
    numbers = _key_numbers(words, F)
    early, late = _zero_products(queries, zero, 0, F), _zero_products(queries, zero, 1, F)
    for part in gl.static_range(gl.constexpr(F.value.parts)):
        tiles = numbers[part].reshape(2, 8, 4, 4, COUNT // 8, 2).permute(2, 1, 4, 3, 5, 0).reshape(32, COUNT, 2)
        first, second = gl.split(tiles)
        channels = scale.slice(part, 1).load(F.value.channel_layout)
        channels = gl.expand_dims(_of_channels(channels, COUNT, gl.constexpr(gl.SliceLayout(1, B))), 1)
        early = mma_v2(gl.convert_layout(first, A, assert_trivial=True), products(queries[part], channels), early)
        channels = scale.slice(F.value.parts + part, 1).load(F.value.channel_layout)
        channels = gl.expand_dims(_of_channels(channels, COUNT, gl.constexpr(gl.SliceLayout(1, B))), 1)
        late = mma_v2(gl.convert_layout(second, A, assert_trivial=True), products(queries[part], channels), late)
    found = gl.join(early, late).permute(2, 0, 1).reshape(64, F.value.columns)
    return gl.convert_layout(found, SUM, assert_trivial=True)


@gluon.jit
def _of_weights(numbers, GROUPS: gl.constexpr):
    """Numbers of each token's groups in the order of the scores' rows: [tokens, groups]."""
    return numbers.reshape(2, 4, 2, 4, GROUPS).permute(0, 3, 1, 2, 4).reshape(64, GROUPS)


@gluon.jit
def zero_rows(zero, F: gl.constexpr):
    """A, [16, tokens]: repeated rows of the values' zero points by group, then, from row 8 on, ones, which sum the weights."""
    GROUPS: gl.constexpr = F.value.groups
    LAYOUT: gl.constexpr = F.value.row_layout
    rows = _of_weights(zero.load(F.value.zero_layout), GROUPS).permute(1, 0)
    rows = gl.expand_dims(gl.convert_layout(rows, gl.SliceLayout(0, LAYOUT), assert_trivial=True), 0)
    rows = as_wide(rows, gl.full([16 // GROUPS, GROUPS, 64], 0.0, gl.float16, LAYOUT))
    again = gl.arange(0, 16 // GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    rows = gl.where(again * GROUPS < 8, rows, 1.0).to(gl.float16).reshape(16, 64)
    return gl.convert_layout(rows, A, assert_trivial=True)


@gluon.jit
def _apart(numbers, COUNT: gl.constexpr):
    """The columns of [tokens, COUNT], for COUNT 1, 2 or 4: [tokens] each."""
    if COUNT == 1:
        return (numbers.reshape(64),)
    elif COUNT == 2:
        return gl.split(numbers)
    else:
        even, odd = gl.split(numbers.reshape(64, 2, 2))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        return (first, second, third, fourth)


@gluon.jit
def scaled_weights(weights, scale, F: gl.constexpr):
    """Weights times the values' scales, which are in shared memory: B for each group."""
    scales = _apart(_of_weights(scale.load(F.value.weight_layout), gl.constexpr(F.value.groups)), gl.constexpr(F.value.groups))
    found = ()
    for group in gl.static_range(gl.constexpr(F.value.groups)):
        mine = gl.convert_layout(scales[group], gl.SliceLayout(1, B), assert_trivial=True)
        found = found + (products(weights, gl.expand_dims(mine, 1)),)
    return found


@gluon.jit
def add_values(outputs, words, weights, F: gl.constexpr):
    """Add weighted values, ``words`` for each unit, to outputs by part and unit, float32 [bytes of a unit, columns], divided by CODE."""
    UNIT: gl.constexpr = F.value.value_unit
    UNITS: gl.constexpr = F.value.value_units
    LAYOUT: gl.constexpr = F.value.paired_layout
    ASSEMBLY: gl.constexpr = F.value.value_assembly
    numbers = ()
    for unit in gl.static_range(UNITS):
        paired = gl.convert_layout(words[unit], gl.SliceLayout(3, LAYOUT), assert_trivial=True)
        numbers = numbers + (numbers_of(paired, ASSEMBLY, 2, LAYOUT, gl.constexpr(F.value.parts)),)
    found = ()
    for part in gl.static_range(gl.constexpr(F.value.parts)):
        for unit in gl.static_range(UNITS):
            # The assembly puts pairs of tokens in the positions of adjacent bytes.
            tile = numbers[unit][part].reshape(2, 4, 2, 4, 8, UNIT // 32, 2, 2).permute(5, 2, 6, 4, 0, 3, 1, 7).reshape(UNIT, 64)
            mine = weights[part * UNITS + unit if F.value.groups > 1 else 0]
            found = found + (mma_v2(gl.convert_layout(tile, A, assert_trivial=True), mine, outputs[part * UNITS + unit]),)
    return found


# Weights are scaled up so that the greatest is 2 ** HEADROOM. Multiplied by a small scale, they are still not subnormal.
HEADROOM = gl.constexpr(6.0)
WEIGHTS = gl.constexpr((*fragments.weights("f16"), gl.float16))
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
