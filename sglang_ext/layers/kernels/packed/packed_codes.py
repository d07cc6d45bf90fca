"""Dequantizes packed codes inside Triton kernels: code times scale plus zero point.

A byte holds the codes of ``8 / bits`` channels. Each is in another part of the head (mem_cache/compressed/layouts/block_layout.py), so a
tile of bytes yields ``8 / bits`` tiles of numbers.

On a GPU, codes of 2 and 4 bits become float16 without a conversion, two numbers per instruction. A code becomes the highest bits of
the mantissa of 2 ** bits, so that the float16 equals code + 2 ** bits. The zero point subtracts that offset.
"""

import triton
import triton.language as tl

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

    Args:
        numbers: The head's first cell, as float16.
        table: The block's slots that hold its scales, then its zero points.
        first: Index, within the block, of the first scale to load. The others are in the same cell.
        offset: Channel within a part. ``first`` and ``offset`` are broadcast, without the tile axis along which scales are equal.
        COUNT: Scales of a block.
        CELL: Numbers in a cell.
        slot_numbers: Numbers from one slot to the next.
        PART: Channels of a part.
        UNIT: Channels that share a scale.
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

    Args:
        raw: uint8, with three axes.
        s0, z0, s1, z1, s2, z2, s3, z3: From :func:`parameters`.
        levels: Value of each code, for TABLE.
        AXIS: Axis of ``raw`` along which scales are equal.
        FAST: Use NVIDIA instructions. LIKE is then float16, BITS is 2 or 4, and there is no table.
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
