"""Constants of the kernel over packed blocks: how these lie, and the layouts in which a warp holds their parts."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from triton.experimental.gluon import language as gl

from sglang_ext.layers.kernels.gluon import assembly
from sglang_ext.layers.kernels.gluon.fragments import TOKENS, BlockFragments, parameter_copy_layout, linear_layout, powers_of_two

# Triton keeps compiled kernels by their constants as text: what the constants' layouts and assembly come from is part of that.
_FILES = ("constants.py", "fragments.py", "assembly.py")
SOURCES = sha256(b"".join((Path(__file__).parent / name).read_bytes() for name in _FILES)).hexdigest()[:16]


@dataclass(frozen=True)
class PackedFragments(BlockFragments):
    """How blocks lie in cells, and the layouts of their parts.

    Attributes:
        unit: channels of a value that share a scale.
        by_channel: whether 32 tokens of keys share a scale for each channel; else all channels of a token do.
        sources: of which code the layouts are.
    """

    unit: int
    by_channel: bool
    sources: str = SOURCES

    @property
    def key_assembly(self) -> tuple[str, str]:
        """Instructions that make numbers of bytes of keys."""
        return assembly.key_numbers(self.bits)

    @property
    def value_assembly(self) -> tuple[str, str]:
        """Instructions that make numbers of bytes of values."""
        return assembly.value_numbers(self.bits)

    @property
    def powers(self) -> tuple[float, ...]:
        """What each part's numbers are too large by, as its codes lie at higher bits."""
        return tuple(2.0 ** (self.bits * part) for part in range(self.parts))

    @property
    def ahead(self) -> bool:
        """Whether a block's codes are loaded while the block before is multiplied: where registers suffice, and it was faster."""
        return self.bits < 8 and not self.by_channel

    @property
    def value_unit(self) -> int:
        """Bytes of a token's values that are multiplied by one weight."""
        return min(self.unit, self.bytes)

    @property
    def value_units(self) -> int:
        """Of a token's bytes."""
        return self.bytes // self.value_unit

    @property
    def groups(self) -> int:
        """Scales of a token's values."""
        return self.dim // self.unit

    @property
    def key_shape(self) -> tuple[int, int]:
        """Of the keys' scales, as of their zero points: [parts of both halves, bytes], or [1, tokens]."""
        return (2 * self.parts, self.bytes) if self.by_channel else (1, TOKENS)

    @property
    def value_shape(self) -> tuple[int, int]:
        """Of the values' scales, as of their zero points: by token, then group, in rows that fit cells."""
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
        """Of a unit of each of a block's values as they lie, [cells, tokens of a cell, bytes of a unit]."""
        return self._values(len(powers_of_two(1, self.value_unit // 8)))

    @property
    def paired_layout(self) -> gl.DistributedLinearLayout:
        """The same, but four bytes of a token are followed by those of the token beside it in a fragment."""
        return self._values(2)

    @property
    def channel_layout(self) -> gl.DistributedLinearLayout:
        """Of a number for each byte of a token's keys, [1, bytes]: those that a lane multiplies."""
        return linear_layout([1, self.bytes], powers_of_two(1, self.bytes // 4), [self.bytes // 4, self.bytes // 2])

    @property
    def score_layout(self) -> gl.DistributedLinearLayout:
        """Of a number for each token, [1, tokens]: those of a lane's scores."""
        return linear_layout([1, TOKENS], [1, 2, 32], [0, 0, 4, 8, 16])

    @property
    def weight_layout(self) -> gl.DistributedLinearLayout:
        """Of a number for each token and group as they are copied: those of a lane's weights."""
        groups = self.groups
        tokens = [groups * token for token in (1, 2, 4, 32)]
        return linear_layout([*self.value_shape], powers_of_two(1, groups) + tokens, [groups * 8, groups * 16])

    @property
    def zero_layout(self) -> gl.DistributedLinearLayout:
        """The same, with the groups as rows of A: a lane has one of them."""
        groups = self.groups
        lanes = [groups * 8, groups * 16, *powers_of_two(1, groups)]
        return linear_layout([*self.value_shape], [groups * token for token in (1, 2, 4, 32)], lanes)

    @property
    def row_layout(self) -> gl.DistributedLinearLayout:
        """Of A with 16 rows as [16 / groups, groups, tokens]."""
        lanes = [2, 4, *(TOKENS * row for row in (1, 2, 4))]
        return linear_layout([16 // self.groups, self.groups, TOKENS], [1, 8 * TOKENS, 8, 16, 32], lanes)

    @property
    def key_copy(self) -> gl.DistributedLinearLayout:
        """Of the keys' scales, then zero points, as they are copied to shared memory."""
        return parameter_copy_layout(*self.key_shape)

    @property
    def value_copy(self) -> gl.DistributedLinearLayout:
        """The same of the values'."""
        return parameter_copy_layout(*self.value_shape)
