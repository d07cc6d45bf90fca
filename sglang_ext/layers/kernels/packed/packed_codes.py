"""From bytes to the numbers that they stand for, inside Triton kernels: code times scale plus zero point.

A byte holds the codes of ``8 / bits`` channels, each of another part of the head (mem_cache/compressed/layouts/block_layout.py): a tile of bytes
gives as many tiles of numbers.

On a GPU codes of 2 and 4 bits become float16 without a conversion, two numbers an instruction: as the highest bits of the
mantissa of 2 ** bits they are so much more than the code, which the zero point takes back.
"""

import triton
import triton.language as tl

# Of float16.
MANTISSA, BIAS = 10, 15


def _assembly(bits: int) -> str:
    """Of four bytes, ``8 / bits`` scales and as many zero points: the numbers of part 0, of part 1...; two a register."""
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
    """Of a part that begins ``AHEAD`` channels later."""
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
    """Scale and zero point of each part, of a tile of one block, in turn: eight; of parts that are none, those of another.

    Args:
        numbers: the head's first cell, as float16.
        table: the slots of the block that hold its scales, then its zero points.
        first: which scale of the block is the first that may be meant; the others lie in its cell.
        offset: channel within a part. Both are broadcast, without the axis of the tile along which scales are the same.
        COUNT: scales of a block.
        CELL: numbers in a cell.
        slot_numbers: numbers from one slot to the next.
        PART: channels of a part.
        UNIT: channels that share a scale.
    """
    s0, z0 = _scale_and_zero(numbers, table, first, offset, COUNT, CELL, slot_numbers, UNIT, 0)
    s1, z1, s2, z2, s3, z3 = s0, z0, s0, z0, s0, z0
    # Where all channels share a scale, so do the parts.
    if BITS < 8 and UNIT < PART * (8 // BITS):
        s1, z1 = _scale_and_zero(numbers, table, first, offset, COUNT, CELL, slot_numbers, UNIT, PART)
        if BITS == 2:
            s2, z2 = _scale_and_zero(numbers, table, first, offset, COUNT, CELL, slot_numbers, UNIT, 2 * PART)
            s3, z3 = _scale_and_zero(numbers, table, first, offset, COUNT, CELL, slot_numbers, UNIT, 3 * PART)
    return s0, z0, s1, z1, s2, z2, s3, z3


@triton.jit
def _broad(scale, zero, AXIS: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr):
    """With the axis that they lack. Where codes come with an offset, the zero point is less by that."""
    if FAST:
        zero = zero - scale * (1 << BITS)
    return tl.expand_dims(scale, AXIS), tl.expand_dims(zero, AXIS)


@triton.jit
def dequantize(
    raw, s0, z0, s1, z1, s2, z2, s3, z3, levels, AXIS: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr,
    FAST: tl.constexpr, LIKE: tl.constexpr,
):  # fmt: skip
    """Numbers of a tile of bytes of one block: four tiles of LIKE, which are those of ``8 // BITS`` parts again and again.

    Args:
        raw: uint8, of three axes.
        s0, z0, s1, z1, s2, z2, s3, z3: what :func:`parameters` gave.
        levels: what codes mean, for TABLE.
        AXIS: of ``raw``, along which scales are the same.
        FAST: with instructions of NVIDIA's; LIKE is float16 then, and there are 2 or 4 bits and no table.
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
