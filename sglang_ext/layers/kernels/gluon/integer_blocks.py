"""Decode attention over rows that begin with blocks of whole partitions, as integer products on NVIDIA tensor cores.

HACK, arXiv 2502.03589. A Gluon kernel for packed/packed_decode.py.

A program is one warp, as in packed_blocks.py, and codes are loaded into registers in the same way. The next step's key codes are loaded
as soon as this step's are multiplied, and then the next step's value codes. A column of a product is a query in one of a step's blocks
(integer_fragments.py). This kernel quantizes the queries itself while the first keys are loaded. A separate kernel would add a wait.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from sglang_ext.layers.kernels.gluon import fragments
from sglang_ext.layers.kernels.gluon.integer_products import (
    B8,
    BIAS,
    FIRST_CODE,
    LAST_CODE,
    ROUNDING,
    SMALLEST_SCALE,
    add_products,
    coded_weights,
    joined,
    numbers_of_keys,
    ones,
    products_with_keys,
    products_with_values,
    rounded_down,
    scores_of_products,
)
from sglang_ext.layers.kernels.gluon.packed_blocks import PARAMETERS
from sglang_ext.layers.kernels.gluon.tiles import LOG2E, QUERY, SUM, as_wide, exact_split, finish, store_rows

WIDE = gl.constexpr(fragments.WIDE_PRODUCT)


@gluon.jit
def _ranges(queries, scaling, F: gl.constexpr):
    """Scale and minimum of the queries' partitions, float32 [columns] each, as ``quantize_8bit`` of packed/integer_attention.py computes them."""
    query = gl.arange(0, F.value.columns, QUERY) % F.value.span
    channel, found = gl.arange(0, F.value.partition, gl.SliceLayout(1, SUM))[:, None], ()
    for partition in gl.static_range(gl.constexpr(F.value.partitions)):
        at = queries + ((query * F.value.dim)[None, :] + (partition * F.value.partition + channel))
        numbers = gl.load(at, mask=(query < F.value.group)[None, :], other=0).to(gl.float32) * scaling
        least = gl.min(numbers, 0)
        scale = gl.maximum((gl.max(numbers, 0) - least) * (1.0 / LAST_CODE), SMALLEST_SCALE)
        found = found + ((scale, least),)
    return found


@gluon.jit
def _query_codes(queries, ranges, scaling, F: gl.constexpr):
    """Query codes of each part and stream, int8 [bytes, columns] as B, in the order of the keys' bytes. 0 in columns of other streams."""
    COUNT: gl.constexpr = F.value.bytes
    STREAMS: gl.constexpr = F.value.streams
    COLUMN: gl.constexpr = gl.SliceLayout(0, B8)
    index, column = gl.arange(0, COUNT, gl.SliceLayout(1, B8)), gl.arange(0, F.value.columns, COLUMN)[None, :]
    byte = (index // 4 % 4 * (COUNT // 4) + index // 16 * 4 + index % 4)[:, None]
    query, found = column % F.value.span, ()
    for part in gl.static_range(gl.constexpr(F.value.parts)):
        scale, least = ranges[part // F.value.together]
        scale, least = gl.convert_layout(scale, COLUMN), gl.convert_layout(least, COLUMN)
        there = query < F.value.group
        numbers = gl.load(queries + (query * F.value.dim + (part * COUNT + byte)), mask=there, other=0).to(gl.float32) * scaling
        steps = (numbers - least[None, :]) * (1.0 / scale)[None, :] + ROUNDING
        for stream in gl.static_range(STREAMS):
            mine = there & (column // F.value.span == stream)
            found = found + (gl.where(mine, steps - BIAS, 0.0).to(gl.int8),)
    return found


@gluon.jit
def _code_sums(queries, F: gl.constexpr):
    """Sums of the query codes of each partition: int32 [16, columns] with equal rows."""
    EACH: gl.constexpr = F.value.together * F.value.streams
    found = ()
    for partition in gl.static_range(gl.constexpr(F.value.partitions)):
        sums = gl.full([16, F.value.columns], 0, gl.int32, SUM)
        for at in gl.static_range(EACH):
            sums = mma_v2(ones(gl.constexpr(F.value.bytes)), queries[partition * EACH + at], sums)
        found = found + (sums,)
    return found


@gluon.jit
def _query_numbers(ranges, code_sums, F: gl.constexpr):
    """Parameters of each partition in base 2, float32 [columns]: scales over the powers of two of its codes, zero points, and rests."""
    found = ()
    for partition in gl.static_range(gl.constexpr(F.value.partitions)):
        scale, least = ranges[partition]
        zero = least - scale * FIRST_CODE
        rest = scale * gl.max(code_sums[partition], 0).to(gl.float32) + zero * F.value.partition
        found = found + ((rounded_down(scale * (LOG2E / F.value.key_powers[partition])), zero * LOG2E, rest * LOG2E),)
    return found


@gluon.jit
def _slots_of_rows(
    table, block, last, FIRST: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr, BLOCK_SLOTS: gl.constexpr, F: gl.constexpr
):  # fmt: skip
    """Slots of COUNT cells of parameters from cell FIRST on, for all streams each."""
    row = gl.arange(0, COUNT * F.value.streams, gl.SliceLayout(1, LAYOUT))
    at = gl.minimum(block + row % F.value.blocks, last - 1) * BLOCK_SLOTS + (F.value.code_cells + FIRST)
    return gl.load(table + at + row // F.value.streams)


@gluon.jit
def _slots_of(table, block, last, BLOCK_SLOTS: gl.constexpr, F: gl.constexpr):
    """Slots of a step's blocks: each stream's key and value codes, and all streams' parameters. The last block replaces missing ones."""
    KEYS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, F.value.key_layout)))
    VALUES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, F.value.value_layout)))
    of_keys, of_values = (), ()
    for stream in gl.static_range(gl.constexpr(F.value.streams)):
        at = table + gl.minimum(block + stream % F.value.blocks, last - 1) * BLOCK_SLOTS + stream // F.value.blocks * F.value.cells
        of_keys = of_keys + (gl.load(at + gl.arange(0, F.value.cells, KEYS)),)
        of_values = of_values + (gl.load(at + gl.arange(0, F.value.cells, VALUES)),)
    scales = _slots_of_rows(table, block, last, 0, 2, gl.constexpr(F.value.scale_copy), BLOCK_SLOTS, F)
    return of_keys, of_values, scales, _slots_of_rows(table, block, last, 2, 1, gl.constexpr(F.value.sum_copy), BLOCK_SLOTS, F)


@gluon.jit
def _begins(slots, cell_units, UNIT: gl.constexpr):
    """Offsets of the slots' cells, in numbers: int64. One slot has ``cell_units`` units of UNIT numbers."""
    cell_units = as_wide(cell_units, slots)
    return gl.inline_asm_elementwise(WIDE[0], WIDE[1], [slots, cell_units], gl.int64, True, 1) * UNIT


@gluon.jit
def _codes_of(words, slots, slot_units, LAYOUT: gl.constexpr, F: gl.constexpr):
    """Codes of each stream's block, int32 [cells, tokens, words]. ``slot_units``: units of 16 bytes from one slot to the next."""
    token = gl.arange(0, F.value.cell_tokens, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))[None, :, None]
    word = gl.arange(0, F.value.bytes // 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))[None, None, :]
    inside, found = token * (F.value.bytes // 4) + word, ()
    for stream in gl.static_range(gl.constexpr(F.value.streams)):
        found = found + (gl.load(words + _begins(slots[stream], slot_units, 4)[:, None, None] + inside),)
    return found


@gluon.jit
def _copy_rows(of_keys, of_values, key_numbers, value_numbers, slots, key_units, value_units, LAYOUT: gl.constexpr, F: gl.constexpr):
    """Start an asynchronous copy of one cell for each of ``slots``. Halves of a block share a cell of key numbers; a row begins with its own."""
    column = gl.arange(0, F.value.dim, gl.SliceLayout(0, LAYOUT))[None, :]
    at = column
    if F.value.halves:
        stream = gl.arange(0, slots.shape[0], gl.SliceLayout(1, LAYOUT)) % F.value.streams
        at = (column + (stream * (F.value.dim // 2))[:, None]) % F.value.dim
    async_copy.async_copy_global_to_shared(of_keys, key_numbers + _begins(slots, key_units, 8)[:, None] + at)
    async_copy.async_copy_global_to_shared(of_values, value_numbers + _begins(slots, value_units, 8)[:, None] + column)


@gluon.jit
def _copy_numbers(of_keys, of_values, key_numbers, value_numbers, slots, key_units, value_units, F: gl.constexpr):
    """Start an asynchronous copy of a step's scales, zero points and sums, one cell each, as one group. Units are 16 bytes."""
    STREAMS: gl.constexpr = F.value.streams
    SCALES: gl.constexpr = F.value.scale_copy
    SUMS: gl.constexpr = F.value.sum_copy
    mine = of_keys.slice(0, 2 * STREAMS), of_values.slice(0, 2 * STREAMS)
    _copy_rows(mine[0], mine[1], key_numbers, value_numbers, slots[2], key_units, value_units, SCALES, F)
    rest = of_keys.slice(2 * STREAMS, STREAMS), of_values.slice(2 * STREAMS, STREAMS)
    _copy_rows(rest[0], rest[1], key_numbers, value_numbers, slots[3], key_units, value_units, SUMS, F)
    async_copy.commit_group()


@gluon.jit
def _store(partial, lse, place, splits, best, outputs, total, F: gl.constexpr):
    """Store the result of a split, from each stream's maximum, outputs, and sums of weights by row, [16, columns]."""
    ROWS: gl.constexpr = F.value.wide_rows
    BYTES: gl.constexpr = F.value.bytes
    CHANNELS: gl.constexpr = F.value.wide_channels
    whole = gl.max(joined(as_wide(best[None, :], total), True, 16, ROWS, F), 0)
    # A split without blocks has no maximum.
    weight = gl.exp2(best - gl.where(whole == float("-inf"), 0.0, whole))[None, :]
    total = gl.sum(joined(total * weight, False, 16, ROWS, F), 0)
    finish(lse, place, splits, whole, total, F)
    for part in gl.static_range(gl.constexpr(F.value.parts)):
        found = joined(outputs[part] * weight, False, BYTES, CHANNELS, F)
        store_rows(partial, place, splits, found, total, part * BYTES, BYTES, F)


@gluon.jit
def _integer_part(
    queries, key_words, key_numbers, value_words, value_numbers, table, first, last, scaling, partial, lse, place, splits, key_slot,
    value_slot, BLOCK_SLOTS: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """Softmax over the blocks [first, last) of a request's row. Buffers begin at the head's cells."""
    N: gl.constexpr = F.value.columns
    STREAMS: gl.constexpr = F.value.streams
    BLOCKS: gl.constexpr = F.value.blocks
    KEYS: gl.constexpr = F.value.key_layout
    VALUES: gl.constexpr = F.value.value_layout
    of_keys = gl.allocate_shared_memory(gl.float16, [2, 4 * STREAMS, F.value.dim], PARAMETERS)
    of_values = gl.allocate_shared_memory(gl.float16, [2, 4 * STREAMS, F.value.dim], PARAMETERS)
    # Cells are multiples of 16 bytes.
    key_units, value_units = key_slot >> 3, value_slot >> 3
    mask = gl.where((gl.arange(0, 64, gl.SliceLayout(1, SUM)) & 4) == 0, -1, 0).to(gl.int32)[:, None]
    mask = as_wide(mask, gl.full([64, N], 0, gl.int32, SUM))
    ahead = gl.arange(0, N, QUERY) // F.value.span % BLOCKS
    outputs = ()
    for _ in gl.static_range(gl.constexpr(F.value.parts)):
        outputs = outputs + (gl.full([F.value.bytes, N], 0.0, gl.float32, SUM),)
    total = gl.full([16, N], 0.0, gl.float32, SUM)
    best = gl.full([N], float("-inf"), gl.float32, QUERY)
    if first < last:
        slots = _slots_of(table, first, last, BLOCK_SLOTS, F)
        _copy_numbers(of_keys.index(0), of_values.index(0), key_numbers, value_numbers, slots, key_units, value_units, F)
        keys = _codes_of(key_words, slots[0], key_units, KEYS, F)
        values = _codes_of(value_words, slots[1], value_units, VALUES, F)
        slots = _slots_of(table, first + BLOCKS, last, BLOCK_SLOTS, F)
        # Computed while the first codes are loaded.
        ranges = _ranges(queries, scaling, F)
        q = _query_codes(queries, ranges, scaling, F)
        code_sums = _code_sums(q, F)
        of_queries = _query_numbers(ranges, code_sums, F)
        for block in range(first, last, BLOCKS):
            now = (block - first) // BLOCKS % 2
            _copy_numbers(of_keys.index(1 - now), of_values.index(1 - now), key_numbers, value_numbers, slots, key_units, value_units, F)
            async_copy.wait_group(1)
            if not F.value.early:
                numbers = numbers_of_keys(of_keys.index(now), F)
            products = products_with_keys(keys, q, code_sums, F)
            # Barriers keep the compiler from delaying loads, above all if shared memory that is read after them is needed soon.
            if F.value.early:
                keys = _codes_of(key_words, slots[0], key_units, KEYS, F)
                gl.thread_barrier()
                numbers = numbers_of_keys(of_keys.index(now), F)
            scores = scores_of_products(products, of_queries, numbers, F)
            if not F.value.early:
                keys = _codes_of(key_words, slots[0], key_units, KEYS, F)
                gl.thread_barrier()
            best, rescale, added, sides, scale, zero, rest, sums = coded_weights(scores, best, block + ahead < last, mask, F)
            total = total * rescale[None, :] + added
            products = products_with_values(values, sides, sums, F)
            if F.value.early:
                values = _codes_of(value_words, slots[1], value_units, VALUES, F)
                gl.thread_barrier()
            outputs = add_products(outputs, products, rescale, scale, zero, rest, of_values.index(now), F)
            if not F.value.early:
                values = _codes_of(value_words, slots[1], value_units, VALUES, F)
            slots = _slots_of(table, block + 2 * BLOCKS, last, BLOCK_SLOTS, F)
            gl.thread_barrier()
        async_copy.wait_group(0)
    _store(partial, lse, place, splits, best, outputs, total, F)


@gluon.jit
def integer_splits_gluon(
    queries, keys, values, key_words, key_numbers, value_words, value_numbers, token_table, table_row, rows, lengths,
    packed_slots, partial, lse, scaling, key_slot, key_head, value_slot, value_head, packed_parts, exact_parts,
    HEADS: gl.constexpr, BLOCK_SLOTS: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """As ``integer_splits`` of ../packed/integer_attention.py. ``key_words``, ``key_numbers``: the buffer as int32 and as float16."""
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
        # Rounded up to whole steps.
        each = gl.cdiv(gl.cdiv(blocks, packed_parts), F.value.blocks) * F.value.blocks
        _integer_part(
            queries + head0 * F.value.dim, key_words + key_at // 2, key_numbers + key_at, value_words + value_at // 2,
            value_numbers + value_at, table, each * split, gl.minimum(each * (split + 1), blocks), scaling, partial, lse, place,
            splits, key_slot, value_slot, BLOCK_SLOTS, F,
        )  # fmt: skip
    else:
        exact_split(
            queries + head0 * F.value.dim, keys + key_at, values + value_at, table, packed, length, split - packed_parts, scaling,
            partial, lse, place, splits, key_slot, value_slot, exact_parts, F,
        )  # fmt: skip
