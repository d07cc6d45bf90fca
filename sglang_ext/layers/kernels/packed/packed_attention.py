"""Softmax over one split of a row that begins with packed blocks: the Triton kernel that packed_decode.py launches.

It dequantizes codes in registers: code times scale plus zero point.

A byte holds the codes of ``8 / bits`` channels. Each is in another part of the head (mem_cache/compressed/layouts/block_layout.py), so a
tile of bytes yields ``8 / bits`` tiles of numbers.

On a GPU, codes of 2 and 4 bits become float16 without a conversion, two numbers per instruction. A code becomes the highest bits of
the mantissa of 2 ** bits, so that the float16 equals code + 2 ** bits. The zero point subtracts that offset.
"""

import triton
import triton.language as tl

from sglang_ext.layers.kernels.flash_decoding import exact_split, head_and_rows, softmax_step, store_split

# Mantissa bits and exponent bias of float16.
MANTISSA, BIAS = 10, 15


def _assembly(bits: int) -> str:
    """PTX that dequantizes four bytes with ``8 / bits`` scales and as many zero points. Outputs are part 0, part 1..., two per register."""
    parts, shift = 8 // bits, MANTISSA - bits
    source, mask, power = 2 * parts, ((1 << bits) - 1) << shift, (BIAS + bits) << MANTISSA
    lines = ["{ .reg .b32 t, u, c;", f"prmt.b32 t, ${source}, 0, 0x4140;", f"prmt.b32 u, ${source}, 0, 0x4342;"]
    for part in range(parts):
        for half, register in enumerate("tu"):
            scale, zero = (source + 1 + 4 * part + 2 * kind + half for kind in range(2))
            lines.append(f"shl.b32 c, {register}, {shift - part * bits};")
            lines.append(f"lop3.b32 c, c, {mask << 16 | mask:#x}, {power << 16 | power:#x}, 0xEA;")
            lines.append(f"fma.rn.f16x2 ${2 * part + half}, c, ${scale}, ${zero};")
    return "\n".join([*lines, "}"])


def _registers(bits: int) -> str:
    parts = 8 // bits
    return ",".join(["=r"] * 2 * parts + ["r"] * (1 + 4 * parts))


ASSEMBLY_4, REGISTERS_4 = tl.constexpr(_assembly(4)), tl.constexpr(_registers(4))
ASSEMBLY_2, REGISTERS_2 = tl.constexpr(_assembly(2)), tl.constexpr(_registers(2))


@triton.jit
def _number(codes, scale, zero, levels, TABLE: tl.constexpr, LIKE: tl.constexpr):
    meaning = tl.load(levels + codes.to(tl.int32)) if TABLE else codes.to(tl.float32)
    return (meaning * scale.to(tl.float32) + zero.to(tl.float32)).to(LIKE)


@triton.jit
def _scale_and_zero(
    numbers, table, first, offset, COUNT: tl.constexpr, CELL: tl.constexpr, slot_numbers, UNIT: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """Scale and zero point of the part that begins ``AHEAD`` channels later."""
    index, zeros = (AHEAD + offset) // UNIT, first + COUNT
    cell = tl.load(table + first // CELL).to(tl.int64) * slot_numbers + first % CELL
    scale = tl.load(numbers + cell + index)
    cell = tl.load(table + zeros // CELL).to(tl.int64) * slot_numbers + zeros % CELL
    return scale, tl.load(numbers + cell + index)


@triton.jit
def parameters(
    numbers, table, first, offset, COUNT: tl.constexpr, CELL: tl.constexpr, slot_numbers, PART: tl.constexpr, UNIT: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Scale and zero point of each part for a tile of one block, alternating: eight tensors. Missing parts repeat another part's.

    ``table``: the block's slots that hold its scales, then its zero points. ``first``: index of the first scale to load, in the block; the others
    are in the same cell. ``offset``: channel within a part. Both lack the tile axis along which scales are equal. COUNT, CELL: scales of a block,
    and numbers in a cell. PART, UNIT: channels of a part, and channels that share a scale.
    """
    s0, z0 = _scale_and_zero(numbers, table, first, offset, COUNT, CELL, slot_numbers, UNIT, 0)
    s1, z1, s2, z2, s3, z3 = s0, z0, s0, z0, s0, z0
    # If all channels share a scale, the parts do too.
    if BITS < 8 and UNIT < PART * (8 // BITS):
        s1, z1 = _scale_and_zero(numbers, table, first, offset, COUNT, CELL, slot_numbers, UNIT, PART)
        if BITS == 2:
            s2, z2 = _scale_and_zero(numbers, table, first, offset, COUNT, CELL, slot_numbers, UNIT, 2 * PART)
            s3, z3 = _scale_and_zero(numbers, table, first, offset, COUNT, CELL, slot_numbers, UNIT, 3 * PART)
    return s0, z0, s1, z1, s2, z2, s3, z3


@triton.jit
def _broad(scale, zero, AXIS: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr):
    """Add the missing tile axis. If codes have an offset (FAST), subtract it from the zero point."""
    if FAST:
        zero = zero - scale * (1 << BITS)
    return tl.expand_dims(scale, AXIS), tl.expand_dims(zero, AXIS)


@triton.jit
def dequantize(
    raw, s0, z0, s1, z1, s2, z2, s3, z3, levels, AXIS: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr,
    FAST: tl.constexpr, LIKE: tl.constexpr,
):  # fmt: skip
    """Dequantize a tile of bytes of one block into four tiles of LIKE: those of the ``8 // BITS`` parts, repeated.

    ``raw``, uint8, has three axes; scales and zero points are equal along ``AXIS``. FAST: LIKE is float16, BITS 2 or 4, without a table.
    """
    s0, z0 = _broad(s0, z0, AXIS, BITS, FAST)
    if BITS == 8:
        a = _number(raw, s0, z0, levels, TABLE, LIKE)
        return a, a, a, a
    else:
        s1, z1 = _broad(s1, z1, AXIS, BITS, FAST)
        if BITS == 4:
            if FAST:
                a, b = tl.inline_asm_elementwise(
                    ASSEMBLY_4, REGISTERS_4, [raw, s0, z0, s1, z1], (tl.float16, tl.float16), True, 4
                )
            else:
                a = _number(raw & 15, s0, z0, levels, TABLE, LIKE)
                b = _number(raw >> 4, s1, z1, levels, TABLE, LIKE)
            return a, b, a, b
        else:
            s2, z2 = _broad(s2, z2, AXIS, BITS, FAST)
            s3, z3 = _broad(s3, z3, AXIS, BITS, FAST)
            if FAST:
                a, b, c, d = tl.inline_asm_elementwise(
                    ASSEMBLY_2, REGISTERS_2, [raw, s0, z0, s1, z1, s2, z2, s3, z3],
                    (tl.float16, tl.float16, tl.float16, tl.float16), True, 4,
                )  # fmt: skip
            else:
                a = _number(raw & 3, s0, z0, levels, TABLE, LIKE)
                b = _number((raw >> 2) & 3, s1, z1, levels, TABLE, LIKE)
                c = _number((raw >> 4) & 3, s2, z2, levels, TABLE, LIKE)
                d = _number(raw >> 6, s3, z3, levels, TABLE, LIKE)
            return a, b, c, d


@triton.jit
def _queries(
    queries, channel, row, scaling, AHEAD: tl.constexpr, PART: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr,
    LIKE: tl.constexpr,
):  # fmt: skip
    """The channels of one part of the queries, with padding set to 0: LIKE [channels, rows]."""
    mask = (channel < PART)[:, None] & (row < GROUP)[None, :]
    found = tl.load(queries + row[None, :] * DIM + AHEAD + channel[:, None], mask=mask, other=0.0)
    return (found.to(tl.float32) * scaling).to(LIKE)


@triton.jit
def _step_parameters(
    numbers, table, step, end, first, offset, SPAN: tl.constexpr, STRIDE: tl.constexpr, COUNT: tl.constexpr, CELL: tl.constexpr,
    slot_numbers, PART: tl.constexpr, UNIT: tl.constexpr, BITS: tl.constexpr, STEPS: tl.constexpr, BLOCK_SLOTS: tl.constexpr,
    CODE_CELLS: tl.constexpr,
):  # fmt: skip
    """Scales and zero points of a step, which ``SPAN`` steps share. Beyond the last step they repeat its own and are not used."""
    step = tl.maximum(tl.minimum(step, end - 1), 0)
    slots = table + step // STEPS * BLOCK_SLOTS + CODE_CELLS
    first += step % STEPS // SPAN * STRIDE
    return parameters(numbers, slots, first, offset, COUNT, CELL, slot_numbers, PART, UNIT, BITS)


@triton.jit
def _packed_part(
    queries, key_bytes, key_numbers, value_bytes, value_numbers, key_levels, value_levels, table, first, last, scaling, row,
    partial, lse, place, key_slot, value_slot, GROUP: tl.constexpr, M: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, BITS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr, CODE_CELLS: tl.constexpr, KEY_CELL: tl.constexpr, VALUE_CELL: tl.constexpr,
    KEY_TOKENS: tl.constexpr, KEY_UNIT: tl.constexpr, VALUE_TOKENS: tl.constexpr, VALUE_UNIT: tl.constexpr,
    TABLE: tl.constexpr, FAST: tl.constexpr, STEP: tl.constexpr, LIKE: tl.constexpr,
):  # fmt: skip
    """Softmax over the blocks [first, last) of a request's row. Buffers begin at the head's cells; strides of slots are in bytes."""
    PARTS: tl.constexpr = 8 // BITS
    STEPS: tl.constexpr = BLOCK_TOKENS // STEP
    CELL_TOKENS: tl.constexpr = BLOCK_TOKENS // CODE_CELLS
    PART: tl.constexpr = DIM // PARTS
    VALUE_PART: tl.constexpr = VALUE_DIM // PARTS
    VALUE_GROUPS: tl.constexpr = VALUE_DIM // VALUE_UNIT
    KEY_SCALES: tl.constexpr = BLOCK_TOKENS // KEY_TOKENS * (DIM // KEY_UNIT)
    VALUE_SCALES: tl.constexpr = BLOCK_TOKENS // VALUE_TOKENS * VALUE_GROUPS
    channel = tl.arange(0, COLUMNS)
    q0 = _queries(queries, channel, row, scaling, 0, PART, DIM, GROUP, LIKE)
    q1, q2, q3 = q0, q0, q0
    if PARTS > 1:
        q1 = _queries(queries, channel, row, scaling, PART, PART, DIM, GROUP, LIKE)
    if PARTS > 2:
        q2 = _queries(queries, channel, row, scaling, 2 * PART, PART, DIM, GROUP, LIKE)
        q3 = _queries(queries, channel, row, scaling, 3 * PART, PART, DIM, GROUP, LIKE)
    # Slots and scales of a tile are loaded without the tile's other axes. Otherwise Triton would choose the tile's layout for them.
    # Padding bytes of a part repeat its last byte. For keys their query is 0; for values they are never stored.
    BY_TOKEN: tl.constexpr = KEY_UNIT == DIM
    # Groups of keys along a step's tokens, and steps that share one group's scales.
    OUTER: tl.constexpr = STEP // KEY_TOKENS if STEP > KEY_TOKENS else 1
    KEY_SPAN: tl.constexpr = KEY_TOKENS // STEP if KEY_TOKENS > STEP else 1
    # Key scales from one such step to the next.
    KEY_STRIDE: tl.constexpr = OUTER * (1 if BY_TOKEN else DIM)
    outer = tl.arange(0, OUTER)[:, None]
    key_token = outer * (STEP // OUTER) + tl.arange(0, STEP // OUTER)[None, :]
    byte = channel if COLUMNS == PART else tl.minimum(channel, PART - 1)
    key_at = (key_token % CELL_TOKENS * PART)[:, :, None] + byte[None, None, :]
    key_first = outer if BY_TOKEN else outer * DIM
    key_offset = tl.zeros([1, 1], dtype=tl.int32) if BY_TOKEN else byte[None, :]
    # If tokens of a channel share a scale, the layout of values is that of keys. Otherwise values are read in groups of bytes that share a
    # scale if these groups are whole, else byte by byte.
    VALUES_BY_TOKEN: tl.constexpr = VALUE_TOKENS == 1
    VALUE_AXIS: tl.constexpr = 2 if VALUES_BY_TOKEN else 1
    VALUE_OUTER: tl.constexpr = STEP // VALUE_TOKENS if STEP > VALUE_TOKENS else 1
    VALUE_SPAN: tl.constexpr = VALUE_TOKENS // STEP if VALUE_TOKENS > STEP else 1
    VALUE_STRIDE: tl.constexpr = VALUE_OUTER * VALUE_GROUPS
    WHOLE: tl.constexpr = VALUE_COLUMNS == VALUE_PART and VALUE_PART % VALUE_UNIT == 0
    WIDTH: tl.constexpr = VALUE_COLUMNS if VALUE_GROUPS == 1 else VALUE_UNIT if WHOLE else 1
    if VALUES_BY_TOKEN:
        token, group = tl.arange(0, STEP), tl.arange(0, VALUE_COLUMNS // WIDTH)[None, :]
        value_byte = (group * WIDTH)[:, :, None] + tl.arange(0, WIDTH)[None, None, :]
        value_offset = group * WIDTH
        if VALUE_COLUMNS > VALUE_PART:
            value_byte, value_offset = tl.minimum(value_byte, VALUE_PART - 1), tl.minimum(value_offset, VALUE_PART - 1)
        value_at = (token % CELL_TOKENS * VALUE_PART)[:, None, None] + value_byte
        value_first = (token * VALUE_GROUPS)[:, None]
    else:
        value_outer = tl.arange(0, VALUE_OUTER)[:, None]
        token = value_outer * (STEP // VALUE_OUTER) + tl.arange(0, STEP // VALUE_OUTER)[None, :]
        value_offset = tl.minimum(tl.arange(0, VALUE_COLUMNS), VALUE_PART - 1)[None, :]
        value_at = (token % CELL_TOKENS * VALUE_PART)[:, :, None] + value_offset[:, None, :]
        value_first = value_outer * VALUE_GROUPS
    best = tl.zeros([M], dtype=tl.float32) - float("inf")
    total = tl.zeros([M], dtype=tl.float32)
    acc0 = tl.zeros([M, VALUE_COLUMNS], dtype=tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    # Scales are loaded one step ahead, because their address needs a load first.
    end = last * STEPS
    k_s0, k_z0, k_s1, k_z1, k_s2, k_z2, k_s3, k_z3 = _step_parameters(
        key_numbers, table, first * STEPS, end, key_first, key_offset, KEY_SPAN, KEY_STRIDE, KEY_SCALES, KEY_CELL,
        key_slot // 2, PART, KEY_UNIT, BITS, STEPS, BLOCK_SLOTS, CODE_CELLS,
    )  # fmt: skip
    v_s0, v_z0, v_s1, v_z1, v_s2, v_z2, v_s3, v_z3 = _step_parameters(
        value_numbers, table, first * STEPS, end, value_first, value_offset, VALUE_SPAN, VALUE_STRIDE,
        VALUE_SCALES, VALUE_CELL, value_slot // 2, VALUE_PART, VALUE_UNIT, BITS, STEPS,
        BLOCK_SLOTS, CODE_CELLS,
    )  # fmt: skip
    for step in tl.range(first * STEPS, end):
        n_s0, n_z0, n_s1, n_z1, n_s2, n_z2, n_s3, n_z3 = _step_parameters(
            key_numbers, table, step + 1, end, key_first, key_offset, KEY_SPAN, KEY_STRIDE, KEY_SCALES, KEY_CELL, key_slot // 2,
            PART, KEY_UNIT, BITS, STEPS, BLOCK_SLOTS, CODE_CELLS,
        )  # fmt: skip
        w_s0, w_z0, w_s1, w_z1, w_s2, w_z2, w_s3, w_z3 = _step_parameters(
            value_numbers, table, step + 1, end, value_first, value_offset, VALUE_SPAN, VALUE_STRIDE, VALUE_SCALES,
            VALUE_CELL, value_slot // 2, VALUE_PART, VALUE_UNIT, BITS, STEPS, BLOCK_SLOTS, CODE_CELLS,
        )  # fmt: skip
        # A step's code cells follow those of the block's earlier steps.
        slots = table + step // STEPS * BLOCK_SLOTS + step % STEPS * (STEP // CELL_TOKENS)
        slot = tl.load(slots + key_token // CELL_TOKENS).to(tl.int64) * key_slot
        raw = tl.load(key_bytes + slot[:, :, None] + key_at)
        slot = tl.load(slots + token // CELL_TOKENS).to(tl.int64) * value_slot
        slot = slot[:, None, None] if VALUES_BY_TOKEN else slot[:, :, None]
        value_raw = tl.load(value_bytes + slot + value_at)
        k0, k1, k2, k3 = dequantize(
            raw, k_s0, k_z0, k_s1, k_z1, k_s2, k_z2, k_s3, k_z3, key_levels, 1, BITS, TABLE, FAST, LIKE
        )  # fmt: skip
        qk = tl.dot(tl.reshape(k0, (STEP, COLUMNS)), q0)
        if PARTS > 1:
            qk = tl.dot(tl.reshape(k1, (STEP, COLUMNS)), q1, qk)
        if PARTS > 2:
            qk = tl.dot(tl.reshape(k3, (STEP, COLUMNS)), q3, tl.dot(tl.reshape(k2, (STEP, COLUMNS)), q2, qk))
        best, rescale, p, total = softmax_step(qk, best, total, 0)
        p = tl.trans(p).to(LIKE)
        v0, v1, v2, v3 = dequantize(
            value_raw, v_s0, v_z0, v_s1, v_z1, v_s2, v_z2, v_s3, v_z3, value_levels, VALUE_AXIS, BITS, TABLE, FAST, LIKE
        )  # fmt: skip
        acc0 = tl.dot(p, tl.reshape(v0, (STEP, VALUE_COLUMNS)), acc0 * rescale[:, None])
        if PARTS > 1:
            acc1 = tl.dot(p, tl.reshape(v1, (STEP, VALUE_COLUMNS)), acc1 * rescale[:, None])
        if PARTS > 2:
            acc2 = tl.dot(p, tl.reshape(v2, (STEP, VALUE_COLUMNS)), acc2 * rescale[:, None])
            acc3 = tl.dot(p, tl.reshape(v3, (STEP, VALUE_COLUMNS)), acc3 * rescale[:, None])
        k_s0, k_z0, k_s1, k_z1, k_s2, k_z2, k_s3, k_z3 = n_s0, n_z0, n_s1, n_z1, n_s2, n_z2, n_s3, n_z3
        v_s0, v_z0, v_s1, v_z1, v_s2, v_z2, v_s3, v_z3 = w_s0, w_z0, w_s1, w_z1, w_s2, w_z2, w_s3, w_z3
    channel = tl.arange(0, VALUE_COLUMNS)
    there = channel < VALUE_PART
    store_split(partial, lse, place, channel, there, best, total, acc0, row, GROUP, VALUE_DIM)
    if PARTS > 1:
        store_split(partial, lse, place, VALUE_PART + channel, there, best, total, acc1, row, GROUP, VALUE_DIM)
    if PARTS > 2:
        store_split(partial, lse, place, 2 * VALUE_PART + channel, there, best, total, acc2, row, GROUP, VALUE_DIM)
        store_split(partial, lse, place, 3 * VALUE_PART + channel, there, best, total, acc3, row, GROUP, VALUE_DIM)


@triton.jit
def packed_splits(
    queries, rotated, keys, values, key_bytes, key_numbers, value_bytes, value_numbers, key_levels, value_levels,
    token_table, table_row, rows, lengths, packed_slots, partial, lse, scaling,
    key_slot, key_head, value_slot, value_head, HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, BITS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr, CODE_CELLS: tl.constexpr, KEY_CELL: tl.constexpr, VALUE_CELL: tl.constexpr,
    KEY_TOKENS: tl.constexpr, KEY_UNIT: tl.constexpr, VALUE_TOKENS: tl.constexpr, VALUE_UNIT: tl.constexpr,
    TABLE: tl.constexpr, FAST: tl.constexpr, STEP: tl.constexpr, PACKED: tl.constexpr, EXACT: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
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
        _packed_part(
            rotated + head0 * DIM, key_bytes + key_at, key_numbers + key_at // 2, value_bytes + value_at,
            value_numbers + value_at // 2, key_levels, value_levels, table, each * split,
            tl.minimum(each * (split + 1), blocks), scaling, row, partial, lse, place, key_slot * KEY_BYTES,
            value_slot * VALUE_BYTES, GROUP, M, DIM, VALUE_DIM, COLUMNS, VALUE_COLUMNS, BITS, BLOCK_TOKENS, BLOCK_SLOTS,
            CODE_CELLS, KEY_CELL, VALUE_CELL, KEY_TOKENS, KEY_UNIT, VALUE_TOKENS, VALUE_UNIT, TABLE, FAST, STEP,
            tl.float16 if FAST else LIKE,
        )  # fmt: skip
    else:
        best, total, acc = exact_split(
            queries + head0 * DIM, keys + kv_head * key_head, values + kv_head * value_head, table, packed, length,
            split - PACKED, scaling, row, key_slot, value_slot, EXACT, GROUP, M, DIM, VALUE_DIM, PADDED_DIM,
            PADDED_VALUE_DIM, N, LIKE,
        )  # fmt: skip
        channel = tl.arange(0, PADDED_VALUE_DIM)
        store_split(partial, lse, place, channel, channel < VALUE_DIM, best, total, acc, row, GROUP, VALUE_DIM)
