"""Constants of the kernel over packed blocks: the storage of the blocks, and the register layouts of their parts in a warp."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from triton.experimental.gluon import language as gl

from sglang_ext.layers.kernels.gluon import assembly
from sglang_ext.layers.kernels.gluon.fragments import TOKENS, BlockFragments, parameter_copy_layout, linear_layout, powers_of_two

# Triton caches compiled kernels by the text of their constants. The hash adds the source of the layouts and of the assembly to that text.
_FILES = ("constants.py", "fragments.py", "assembly.py")
SOURCES = sha256(b"".join((Path(__file__).parent / name).read_bytes() for name in _FILES)).hexdigest()[:16]


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
        return assembly.key_numbers(self.bits)

    @property
    def value_assembly(self) -> tuple[str, str]:
        """PTX and register constraints that convert bytes of values to numbers."""
        return assembly.value_numbers(self.bits)

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
        return parameter_copy_layout(*self.key_shape)

    @property
    def value_copy(self) -> gl.DistributedLinearLayout:
        """Layout of the copy of the values' scales, then zero points, to shared memory."""
        return parameter_copy_layout(*self.value_shape)
