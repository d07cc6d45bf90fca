"""Fragments of the tensor cores: the number that each lane and register of a warp holds. And the layouts that follow from them, PTX
instructions for data in registers, and the constants of the kernel over packed blocks.

The fragments are those of ``mma.sync.m16n8k16``. With ``g = lane // 4`` and ``q = lane % 4``, a lane holds these elements.
Of A it holds the rows ``g, g + 8`` and the columns ``2q, 2q + 1, 2q + 8, 2q + 9``. Of B it holds the column ``g`` and these numbers as
rows. Of the sum it holds the rows ``g, g + 8`` and the columns ``2q, 2q + 1``.

Keys and values are A, queries and weights are B. B's eight columns are the queries that share a KV head. The order of the summed dimension
is free, if both operands use the same order. The assignment of tokens or channels to rows is free too. Therefore the codes of a load are
already in the positions of a fragment (gluon/tiles.py).
"""

from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path

from triton.experimental.gluon import language as gl

# Tokens of a block.
TOKENS = 64
# Layouts of the sums, of A, and of B.
SUM = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
A, B = (gl.DotOperandLayout(operand, SUM, 2) for operand in range(2))


def powers_of_two(first: int, end: int) -> list[int]:
    """Powers of 2 from ``first``, below ``end``."""
    return [1 << bit for bit in range(first.bit_length() - 1, end.bit_length() - 1)]


def linear_layout(shape: list[int], registers: list[int], lanes: list[int]) -> gl.DistributedLinearLayout:
    """Layout from steps in a flat tensor of ``shape``, for each bit of a register's and of a lane's index. 0 means the same number."""

    def place(span: int) -> list[int]:
        return [span // prod(shape[axis + 1 :]) % size for axis, size in enumerate(shape)]

    lanes = lanes + [0] * (5 - len(lanes))
    return gl.DistributedLinearLayout([place(s) for s in registers], [place(s) for s in lanes], [], [], shape)


def row_copy_layout(rows: int, columns: int) -> gl.DistributedLinearLayout:
    """Layout of a copy of 16-bit numbers, [rows, columns]: up to 16 bytes per lane."""
    every = powers_of_two(1, rows * columns)
    inside = min(3, len(every) - 5)
    return linear_layout([rows, columns], every[:inside] + every[inside + 5 :], every[inside : inside + 5])


# PTX instructions for data in a warp's registers, with their register constraints. An output register holds two numbers of 16 bits.
#
# A code becomes a number without arithmetic. In the lowest bits of a float16 it is a subnormal: the code times 2 ** SUBNORMAL, or times
# 2 ** (bit + SUBNORMAL) at a higher bit. Tensor cores multiply subnormals exactly. Queries and outputs undo the powers of two.
SUBNORMAL = -24
# BIASED plus an integer below 2 ** 22, in int32, has the bits of a float32 that is greater than the integer by BIAS.
BIASED, BIAS = 0x4B400000, 1.5 * 2.0**23
# From two numbers of a token, then of another token: two outputs, with one number of each token.
PAIRED_TOKENS = "prmt.b32 $0, $2, $3, 0x5410;\nprmt.b32 $1, $2, $3, 0x7632;", "=&r,=r,r,r"
# Products of two pairs of float16.
PRODUCTS = "mul.rn.f16x2 $0, $1, $2;", "=r,r,r"
# Reinterprets the bits of a float32.
AS_FLOAT = "mov.b32 $0, $1;", "=f,r"
# Clears the two lowest bits of a float32, so that BIAS times it is exact in float32.
ROUNDED_DOWN = "and.b32 $0, $1, 0xfffffffc;", "=f,f"
# Product of two int32 as int64.
WIDE_PRODUCT = "mul.wide.s32 $0, $1, $2;", "=l,r,r"
# From two int16 of at least 0: float32. The int16 become the lowest bits of a float32 of at least 2 ** 23.
LARGER_INTEGERS = (
    "{ .reg .b32 t, u; .reg .f32 a, b;\nprmt.b32 t, $2, 0x4b00, 0x5410;\nprmt.b32 u, $2, 0x4b00, 0x5432;\nmov.b32 a, t;\nmov.b32 b, u;\n"
    "add.rn.f32 $0, a, 0fCB000000;\nadd.rn.f32 $1, b, 0fCB000000;\n}",
    "=&f,=f,r",
)
# From two int16 from 0 to 1023: float16. The int16 become the lowest bits of a float16 of at least 1024.
SMALL_INTEGERS = (
    "{ .reg .b32 t, u;\nor.b32 t, $1, 0x64006400;\nmov.b32 u, 0xe400e400;\nadd.rn.f16x2 $0, t, u;\n}", "=r,r"
)


def _mask(bits: int, part: int) -> str:
    mask = ((1 << bits) - 1) << bits * part
    return f"{mask << 16 | mask:#x}"


def _numbers(bits: int, selects: list[str], sources: int) -> tuple[str, str]:
    """Each of ``selects`` moves two bytes that become adjacent into the halves of a register. Each part masks that register."""
    parts, count = 8 // bits, len(selects)
    first = parts * count
    inputs = f"${first}, " + (f"${first + 4}" if sources == 2 else "0")
    lines = []
    for place, select in enumerate(selects):
        lines.append(f"prmt.b32 t, {inputs}, {select};")
        lines += [f"and.b32 ${part * count + place}, t, {_mask(bits, part)};" for part in range(parts)]
    return "\n".join(["{ .reg .b32 t;", *lines, "}"]), ",".join(["=&r"] * first + ["r"] * (4 * sources))


def key_numbers(bits: int) -> tuple[str, str]:
    """From four bytes of a token: two outputs for each part, with adjacent numbers."""
    return _numbers(bits, ["0x4140", "0x4342"], 1)


def value_numbers(bits: int) -> tuple[str, str]:
    """From four bytes of a token, then of another token: four outputs for each part, with the same byte of both tokens."""
    return _numbers(bits, ["0x0400", "0x0501", "0x0602", "0x0703"], 2)


def weights(dtype: str) -> tuple[str, str]:
    """Two to the power of two adjacent elements of a sum, as f16 or bf16. Each 8 x 8 tile is transposed, so that a sum becomes B."""
    lines = (
        "ex2.approx.ftz.f32 a, $1;",
        "ex2.approx.ftz.f32 b, $2;",
        f"cvt.rn.{dtype}x2.f32 t, b, a;",
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, t;",
    )
    return "\n".join(["{ .reg .f32 a, b; .reg .b32 t;", *lines, "}"]), "=r,f,f"


def is_signed(bits: int, lowest: int) -> bool:
    """Whether a code that begins at bit ``lowest`` of its byte contains the highest bit. Its int8 is then lower by 128."""
    return lowest + bits == 8


def _codes(target: str, source: str, bits: int, lowest: int) -> str:
    """The code at a bit of each byte, not shifted. Lower by 128 if it is signed."""
    mask = f"{(((1 << bits) - 1) << lowest) * 0x01010101:#x}"
    if is_signed(bits, lowest):
        return f"lop3.b32 {target}, {source}, {mask}, 0x80808080, 0x6a;"
    return f"and.b32 {target}, {source}, {mask};"


def key_codes(bits: int, together: int) -> tuple[str, str]:
    """From four bytes of a token: four int8 for each part. ``together``: number of adjacent parts that are shifted to one bit."""
    parts, lines = 8 // bits, []
    for shift in range(together):
        source = f"${parts}"
        if shift:
            lines.append(f"shr.b32 t, ${parts}, {bits * shift};")
            source = "t"
        lines += [_codes(f"${part + shift}", source, bits, bits * part) for part in range(0, parts, together)]
    return "\n".join(["{ .reg .b32 t;", *lines, "}"]), ",".join(["=&r"] * parts + ["r"] * 4)


def value_codes(bits: int) -> tuple[str, str]:
    """From four bytes of each of four tokens: four outputs for each part, with the same byte of all tokens, as int8, not shifted."""
    parts = 8 // bits
    first, second, third, fourth = (f"${4 * parts + 4 * token}" for token in range(4))
    lines = ["{ .reg .b32 a, b, c, d, t;"]
    for target, sources, select in zip("abcd", 2 * [f"{first}, {second}", f"{third}, {fourth}"], ["0x5140"] * 2 + ["0x7362"] * 2):
        lines.append(f"prmt.b32 {target}, {sources}, {select};")
    for byte, (sources, select) in enumerate((("a, b", "0x5410"), ("a, b", "0x7632"), ("c, d", "0x5410"), ("c, d", "0x7632"))):
        lines.append(f"prmt.b32 t, {sources}, {select};")
        lines += [_codes(f"${4 * part + byte}", "t", bits, bits * part) for part in range(parts)]
    return "\n".join([*lines, "}"]), ",".join(["=&r"] * (4 * parts) + ["r"] * 16)


def weight_codes(streams: int) -> tuple[str, str]:
    """From float32 in the layout of a sum, whose lowest bytes are int8: B, transposed. With two streams, B where a mask is set, and elsewhere."""
    first, second, third, fourth = (f"${streams + place}" for place in range(4))
    lines = [
        "{ .reg .b32 t, u;",
        f"prmt.b32 t, {first}, {third}, 0x40;",
        f"prmt.b32 u, {second}, {fourth}, 0x40;",
        "prmt.b32 t, t, u, 0x5410;",
    ]
    if streams == 1:
        return "\n".join([*lines, "movmatrix.sync.aligned.m8n8.trans.b16 $0, t;", "}"]), "=r,r,r,r,r"
    lines += ["movmatrix.sync.aligned.m8n8.trans.b16 t, t;", "and.b32 $0, t, $6;", "lop3.b32 $1, t, $6, 0, 0x30;", "}"]
    return "\n".join(lines), ",".join(["=&r"] * 2 + ["r"] * 8)


@dataclass(frozen=True)
class BlockFragments:
    """Constants of a kernel over packed blocks and exact tokens, with heads of one size.

    Attributes:
        dim: Channels of keys and of values: 64 or 128.
        group: Queries that share a KV head, at most 16.
        bits: Bits of a code.
        cells: Cells with a block's codes.
    """

    dim: int
    group: int
    bits: int
    cells: int

    @property
    def columns(self) -> int:
        """Columns of B: the queries, padded."""
        return 8 if self.group <= 8 else 16

    @property
    def exact_keys(self) -> gl.DistributedLinearLayout:
        """Layout of 32 exact keys as stored, [tokens, channels]."""
        dim = self.dim
        return linear_layout([32, dim], [1, 2, 4, *powers_of_two(32, dim), 8 * dim, 16 * dim], [8, 16, dim, 2 * dim, 4 * dim])

    def _exact_values(self, neighbours: int) -> gl.DistributedLinearLayout:
        dim = self.dim
        inside = powers_of_two(1, dim // 8)
        registers = [*inside[:neighbours], dim, *inside[neighbours:], 8 * dim, 16 * dim]
        return linear_layout([32, dim], registers, [2 * dim, 4 * dim, dim // 8, dim // 4, dim // 2])

    @property
    def exact_values(self) -> gl.DistributedLinearLayout:
        """Layout of 32 exact values as stored, [tokens, channels]."""
        return self._exact_values(len(powers_of_two(1, self.dim // 8)))

    @property
    def exact_paired(self) -> gl.DistributedLinearLayout:
        """As ``exact_values``, but two channels of a token are followed by two channels of the adjacent token in a fragment."""
        return self._exact_values(1)

    @property
    def parts(self) -> int:
        """Codes per byte."""
        return 8 // self.bits

    @property
    def bytes(self) -> int:
        """Bytes of a token's codes, which equal the channels of a part."""
        return self.dim // self.parts

    @property
    def cell_tokens(self) -> int:
        """Tokens whose codes are in one cell."""
        return TOKENS // self.cells

    @property
    def key_layout(self) -> gl.DistributedLinearLayout:
        """Layout of a block's keys as stored, [cells, tokens of a cell, bytes of a token]."""
        count = self.bytes
        tokens = [count * token for token in (1, 2, 32)]
        lanes = [count // 4, count // 2, *(count * token for token in (4, 8, 16))]
        return linear_layout([self.cells, self.cell_tokens, count // 4, 4], powers_of_two(1, count // 4) + tokens, lanes)


# Triton caches compiled kernels by the text of their constants. The hash adds the source of the layouts and of the assembly to that text.
SOURCES = sha256(Path(__file__).read_bytes()).hexdigest()[:16]


@dataclass(frozen=True)
class PackedFragments(BlockFragments):
    """The storage of blocks in cells, and the layouts of their parts.

    Attributes:
        unit: Channels of a value that share a scale.
        by_channel: 32 tokens of keys share a scale for each channel. If false, all channels of a token share one.
        sources: Hash of the code that defines the layouts.
    """

    unit: int
    by_channel: bool
    sources: str = SOURCES

    @property
    def key_assembly(self) -> tuple[str, str]:
        """PTX and register constraints that convert bytes of keys to numbers."""
        return key_numbers(self.bits)

    @property
    def value_assembly(self) -> tuple[str, str]:
        """PTX and register constraints that convert bytes of values to numbers."""
        return value_numbers(self.bits)

    @property
    def powers(self) -> tuple[float, ...]:
        """Factors by which each part's numbers are too large, because its codes are at higher bits."""
        return tuple(2.0 ** (self.bits * part) for part in range(self.parts))

    @property
    def ahead(self) -> bool:
        """Whether a block's codes are loaded during the products of the previous block. Used where registers suffice and it is faster."""
        return self.bits < 8 and not self.by_channel

    @property
    def value_unit(self) -> int:
        """Bytes of a token's values that are multiplied by one weight."""
        return min(self.unit, self.bytes)

    @property
    def value_units(self) -> int:
        """Number of units in a token's bytes."""
        return self.bytes // self.value_unit

    @property
    def groups(self) -> int:
        """Scales of a token's values."""
        return self.dim // self.unit

    @property
    def key_shape(self) -> tuple[int, int]:
        """Shape of the keys' scales, and of their zero points: [parts of both halves, bytes], or [1, tokens]."""
        return (2 * self.parts, self.bytes) if self.by_channel else (1, TOKENS)

    @property
    def value_shape(self) -> tuple[int, int]:
        """Shape of the values' scales, and of their zero points: by token, then by group, in rows that fit cells."""
        rows = max(1, TOKENS * self.groups // self.dim)
        return rows, TOKENS * self.groups // rows

    def _values(self, neighbours: int) -> gl.DistributedLinearLayout:
        count = self.value_unit
        inside = powers_of_two(1, count // 8)
        registers = inside[:neighbours] + [count * 4] + inside[neighbours:] + [count * token for token in (1, 2, 32)]
        lanes = [count * 8, count * 16, count // 8, count // 4, count // 2]
        return linear_layout([self.cells, self.cell_tokens, count // 4, 4], registers, lanes)

    @property
    def value_layout(self) -> gl.DistributedLinearLayout:
        """Layout of one unit of each of a block's values, as stored: [cells, tokens of a cell, bytes of a unit]."""
        return self._values(len(powers_of_two(1, self.value_unit // 8)))

    @property
    def paired_layout(self) -> gl.DistributedLinearLayout:
        """As ``value_layout``, but four bytes of a token are followed by four bytes of the adjacent token in a fragment."""
        return self._values(2)

    @property
    def channel_layout(self) -> gl.DistributedLinearLayout:
        """Layout of one number per byte of a token's keys, [1, bytes]. A lane holds the numbers of the bytes that it multiplies."""
        return linear_layout([1, self.bytes], powers_of_two(1, self.bytes // 4), [self.bytes // 4, self.bytes // 2])

    @property
    def score_layout(self) -> gl.DistributedLinearLayout:
        """Layout of one number per token, [1, tokens]. A lane holds the numbers of its scores' tokens."""
        return linear_layout([1, TOKENS], [1, 2, 32], [0, 0, 4, 8, 16])

    @property
    def weight_layout(self) -> gl.DistributedLinearLayout:
        """Layout of one number per token and group, as copied. A lane holds the numbers of its weights."""
        groups = self.groups
        tokens = [groups * token for token in (1, 2, 4, 32)]
        return linear_layout([*self.value_shape], powers_of_two(1, groups) + tokens, [groups * 8, groups * 16])

    @property
    def zero_layout(self) -> gl.DistributedLinearLayout:
        """As ``weight_layout``, with the groups as rows of A. A lane has one group."""
        groups = self.groups
        lanes = [groups * 8, groups * 16, *powers_of_two(1, groups)]
        return linear_layout([*self.value_shape], [groups * token for token in (1, 2, 4, 32)], lanes)

    @property
    def row_layout(self) -> gl.DistributedLinearLayout:
        """Layout of A with 16 rows, as [16 / groups, groups, tokens]."""
        lanes = [2, 4, *(TOKENS * row for row in (1, 2, 4))]
        return linear_layout([16 // self.groups, self.groups, TOKENS], [1, 8 * TOKENS, 8, 16, 32], lanes)

    @property
    def key_copy(self) -> gl.DistributedLinearLayout:
        """Layout of the copy of the keys' scales, then zero points, to shared memory."""
        return row_copy_layout(2 * self.key_shape[0], self.key_shape[1])

    @property
    def value_copy(self) -> gl.DistributedLinearLayout:
        """Layout of the copy of the values' scales, then zero points, to shared memory."""
        return row_copy_layout(2 * self.value_shape[0], self.value_shape[1])
