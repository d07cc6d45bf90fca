"""Constants of the kernel that multiplies packed blocks as integers, and layouts in which a warp holds their parts.

The fragments are those of ``mma.sync.m16n8k32`` of int8. With ``g = lane // 4`` and ``q = lane % 4``, a lane holds of A the rows
``g, g + 8`` and the columns ``4q`` to ``4q + 3`` and these plus 16, of B the column ``g`` and these as rows; its sum is that of
fragments.py. A column of B is a query in one *stream*: where at most four queries share a KV head, a step is of two blocks, and the
columns from the fourth on are the same queries over the second one, with a softmax of their own. A block of 128 tokens is two such by
itself, whose weights share a scale.
"""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from triton.experimental.gluon import language as gl

from sglang_ext.layers.kernels.gluon import assembly
from sglang_ext.layers.kernels.gluon.fragments import SUM, TOKENS, BlockFragments, linear_layout, row_copy_layout, powers_of_two

# Numbers that share a scale: channels of a token's keys, and tokens of a channel's values, which are a block's.
PARTITIONS = (TOKENS, 2 * TOKENS)
# Of int8.
A8, B8 = (gl.DotOperandLayout(operand, SUM, 4) for operand in range(2))
# As constants.py's: what constants' layouts and assembly come from.
_FILES = ("integer_fragments.py", "fragments.py", "assembly.py")
SOURCES = sha256(b"".join((Path(__file__).parent / name).read_bytes() for name in _FILES)).hexdigest()[:16]


@dataclass(frozen=True)
class IntegerFragments(BlockFragments):
    """How blocks of whole partitions lie in cells, and the layouts of their parts. At most 8 queries share a KV head, 4 where a block has
    128 tokens; ``cells`` are those with the codes of 64.

    Attributes:
        partition: one of :data:`PARTITIONS`.
        sources: of which code the layouts are.
    """

    partition: int = TOKENS
    sources: str = SOURCES

    @property
    def partitions(self) -> int:
        """Of a token's channels."""
        return self.dim // self.partition

    @property
    def together(self) -> int:
        """Parts of a partition: their codes are brought to the same bit."""
        return self.parts // self.partitions

    @property
    def streams(self) -> int:
        """Blocks of a step, or halves of one (:attr:`halves`)."""
        return 2 if self.group <= 4 else 1

    @property
    def halves(self) -> bool:
        """Whether a step is of a block's halves."""
        return self.partition > TOKENS

    @property
    def blocks(self) -> int:
        """Of a step."""
        return 1 if self.halves else self.streams

    @property
    def code_cells(self) -> int:
        """Of a block."""
        return self.cells * (self.streams // self.blocks)

    @property
    def span(self) -> int:
        """Columns of a stream."""
        return self.columns // self.streams

    @property
    def early(self) -> bool:
        """Whether the next step's codes are loaded before this step's products are scaled, not after: where registers suffice."""
        return self.streams * self.bytes <= 64

    @property
    def key_powers(self) -> tuple[float, ...]:
        """What each partition's products are too large by, as its codes lie at higher bits."""
        return tuple(2.0 ** (self.bits * self.together * partition) for partition in range(self.partitions))

    @property
    def key_signed(self) -> tuple[bool, ...]:
        """Whether each partition's codes are 128 less."""
        return tuple(
            assembly.is_signed(self.bits, self.bits * self.together * partition) for partition in range(self.partitions)
        )

    @property
    def value_powers(self) -> tuple[float, ...]:
        """What each part's products are too large by."""
        return tuple(2.0 ** (self.bits * part) for part in range(self.parts))

    @property
    def value_signed(self) -> tuple[bool, ...]:
        """Whether each part's codes are 128 less."""
        return tuple(assembly.is_signed(self.bits, self.bits * part) for part in range(self.parts))

    @property
    def doublings(self) -> int:
        """How often 16 rows are doubled until they are as many as a part's channels."""
        return (self.bytes // 16).bit_length() - 1

    @property
    def key_assembly(self) -> tuple[str, str]:
        """Instructions that make int8 of bytes of keys."""
        return assembly.key_codes(self.bits, self.together)

    @property
    def value_assembly(self) -> tuple[str, str]:
        """Instructions that make int8 of bytes of values."""
        return assembly.value_codes(self.bits)

    @property
    def weight_assembly(self) -> tuple[str, str]:
        """Instructions that make B of codes of weights."""
        return assembly.weight_codes(self.streams)

    def _values(self, neighbours: int) -> gl.DistributedLinearLayout:
        count = self.bytes
        inside = powers_of_two(1, count // 8)
        registers = [*inside[:neighbours], count, count * 4, *inside[neighbours:], count * 2, count * 32]
        lanes = [count * 8, count * 16, count // 8, count // 4, count // 2]
        return linear_layout([self.cells, self.cell_tokens, count // 4, 4], registers, lanes)

    @property
    def value_layout(self) -> gl.DistributedLinearLayout:
        """Of a block's values as they lie, [cells, tokens of a cell, bytes of a token]."""
        return self._values(len(powers_of_two(1, self.bytes // 8)))

    @property
    def quartet_layout(self) -> gl.DistributedLinearLayout:
        """The same, but four bytes of a token are followed by those of the three tokens beside it in a fragment."""
        return self._values(2)

    @property
    def key_numbers(self) -> gl.DistributedLinearLayout:
        """Of a number for each token and partition, [streams, tokens and partitions]: those of a lane's scores."""
        count = self.partitions
        lanes = [0, TOKENS * count * (self.streams - 1), *(count * token for token in (4, 8, 16))]
        return linear_layout([self.streams, TOKENS * count], powers_of_two(1, 4 * count) + [32 * count], lanes)

    @property
    def value_numbers(self) -> gl.DistributedLinearLayout:
        """Of a number for each channel of a part, [streams, channels]: those of a lane's outputs."""
        count = self.bytes
        lanes = [0, count * (self.streams - 1), count // 8, count // 4, count // 2]
        return linear_layout([self.streams, count], powers_of_two(1, count // 8), lanes)

    def _wide(self, rows: int) -> gl.DistributedLinearLayout:
        columns = self.columns
        lanes = [2, 4, columns, 2 * columns, 4 * columns]
        return linear_layout([rows, self.streams, self.span], [1, *powers_of_two(8 * columns, rows * columns)], lanes)

    @property
    def wide_tokens(self) -> gl.DistributedLinearLayout:
        """Of a sum of a block's tokens as [tokens, streams, columns of a stream]."""
        return self._wide(TOKENS)

    @property
    def wide_channels(self) -> gl.DistributedLinearLayout:
        """Of a sum of a part's channels, likewise."""
        return self._wide(self.bytes)

    @property
    def wide_rows(self) -> gl.DistributedLinearLayout:
        """Of a sum of 16 rows, likewise."""
        return self._wide(16)

    @property
    def scale_copy(self) -> gl.DistributedLinearLayout:
        """Of scales, then zero points, of all streams, as they are copied to shared memory."""
        return row_copy_layout(2 * self.streams, self.dim)

    @property
    def sum_copy(self) -> gl.DistributedLinearLayout:
        """The same of sums of codes."""
        return row_copy_layout(self.streams, self.dim)
