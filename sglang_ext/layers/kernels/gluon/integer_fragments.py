"""Constants of the kernel that multiplies packed blocks as integers, and the register layouts of their parts in a warp.

The fragments are those of ``mma.sync.m16n8k32`` for int8. With ``g = lane // 4`` and ``q = lane % 4``, a lane holds these elements.
Of A it holds the rows ``g, g + 8`` and the columns ``4q`` to ``4q + 3`` and these plus 16. Of B it holds the column ``g`` and these numbers
as rows. Of the sum it holds the same elements as in fragments.py.

A column of B is a query in one *stream*. If at most four queries share a KV head, a step covers two blocks. The columns from the fourth on
are then the same queries over the second block, with a softmax of their own. A block of 128 tokens has two streams, and the weights of
both share a scale.
"""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from triton.experimental.gluon import language as gl

from sglang_ext.layers.kernels.gluon import fragments
from sglang_ext.layers.kernels.gluon.fragments import SUM, TOKENS, BlockFragments, linear_layout, powers_of_two, row_copy_layout

# Numbers that share a scale: channels of a token's keys, and tokens of a channel's values (those of a block).
PARTITIONS = (TOKENS, 2 * TOKENS)
# Layouts of the int8 operands.
A8, B8 = (gl.DotOperandLayout(operand, SUM, 4) for operand in range(2))
# As in fragments.py.
SOURCES = sha256(Path(__file__).read_bytes() + fragments.SOURCES.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class IntegerFragments(BlockFragments):
    """The storage of blocks with whole partitions in cells, and the layouts of their parts.

    At most 8 queries share a KV head, or 4 if a block has 128 tokens. ``cells`` is the number of cells with the codes of 64 tokens.

    Attributes:
        partition: One of :data:`PARTITIONS`.
        sources: Hash of the code that defines the layouts.
    """

    partition: int = TOKENS
    sources: str = SOURCES

    @property
    def partitions(self) -> int:
        """Partitions of a token's channels."""
        return self.dim // self.partition

    @property
    def together(self) -> int:
        """Parts of a partition. Their codes are shifted to the same bit."""
        return self.parts // self.partitions

    @property
    def streams(self) -> int:
        """Blocks of a step, or halves of one block (:attr:`halves`)."""
        return 2 if self.group <= 4 else 1

    @property
    def halves(self) -> bool:
        """Whether a step covers the two halves of one block."""
        return self.partition > TOKENS

    @property
    def blocks(self) -> int:
        """Blocks of a step."""
        return 1 if self.halves else self.streams

    @property
    def code_cells(self) -> int:
        """Cells with a block's codes."""
        return self.cells * (self.streams // self.blocks)

    @property
    def span(self) -> int:
        """Columns of a stream."""
        return self.columns // self.streams

    @property
    def early(self) -> bool:
        """Load the next step's codes before this step's products are scaled, not after. Used where registers suffice."""
        return self.streams * self.bytes <= 64

    @property
    def key_powers(self) -> tuple[float, ...]:
        """Factors by which each partition's products are too large, because its codes are at higher bits."""
        return tuple(2.0 ** (self.bits * self.together * partition) for partition in range(self.partitions))

    @property
    def key_signed(self) -> tuple[bool, ...]:
        """Whether each partition's codes are lower by 128."""
        return tuple(
            fragments.is_signed(self.bits, self.bits * self.together * partition) for partition in range(self.partitions)
        )

    @property
    def value_powers(self) -> tuple[float, ...]:
        """Factors by which each part's products are too large."""
        return tuple(2.0 ** (self.bits * part) for part in range(self.parts))

    @property
    def value_signed(self) -> tuple[bool, ...]:
        """Whether each part's codes are lower by 128."""
        return tuple(fragments.is_signed(self.bits, self.bits * part) for part in range(self.parts))

    @property
    def doublings(self) -> int:
        """How often 16 rows are doubled to get as many rows as a part has channels."""
        return (self.bytes // 16).bit_length() - 1

    @property
    def key_assembly(self) -> tuple[str, str]:
        """PTX and register constraints that convert bytes of keys to int8."""
        return fragments.key_codes(self.bits, self.together)

    @property
    def value_assembly(self) -> tuple[str, str]:
        """PTX and register constraints that convert bytes of values to int8."""
        return fragments.value_codes(self.bits)

    @property
    def weight_assembly(self) -> tuple[str, str]:
        """PTX and register constraints that convert codes of weights to B."""
        return fragments.weight_codes(self.streams)

    def _values(self, neighbours: int) -> gl.DistributedLinearLayout:
        count = self.bytes
        inside = powers_of_two(1, count // 8)
        registers = [*inside[:neighbours], count, count * 4, *inside[neighbours:], count * 2, count * 32]
        lanes = [count * 8, count * 16, count // 8, count // 4, count // 2]
        return linear_layout([self.cells, self.cell_tokens, count // 4, 4], registers, lanes)

    @property
    def value_layout(self) -> gl.DistributedLinearLayout:
        """Layout of a block's values as stored, [cells, tokens of a cell, bytes of a token]."""
        return self._values(len(powers_of_two(1, self.bytes // 8)))

    @property
    def quartet_layout(self) -> gl.DistributedLinearLayout:
        """As ``value_layout``, but four bytes of a token are followed by those of the three adjacent tokens in a fragment."""
        return self._values(2)

    @property
    def key_numbers(self) -> gl.DistributedLinearLayout:
        """Layout of one number per token and partition, [streams, tokens and partitions]. A lane holds the numbers of its scores."""
        count = self.partitions
        lanes = [0, TOKENS * count * (self.streams - 1), *(count * token for token in (4, 8, 16))]
        return linear_layout([self.streams, TOKENS * count], powers_of_two(1, 4 * count) + [32 * count], lanes)

    @property
    def value_numbers(self) -> gl.DistributedLinearLayout:
        """Layout of one number per channel of a part, [streams, channels]. A lane holds the numbers of its outputs."""
        count = self.bytes
        lanes = [0, count * (self.streams - 1), count // 8, count // 4, count // 2]
        return linear_layout([self.streams, count], powers_of_two(1, count // 8), lanes)

    def _wide(self, rows: int) -> gl.DistributedLinearLayout:
        columns = self.columns
        lanes = [2, 4, columns, 2 * columns, 4 * columns]
        return linear_layout([rows, self.streams, self.span], [1, *powers_of_two(8 * columns, rows * columns)], lanes)

    @property
    def wide_tokens(self) -> gl.DistributedLinearLayout:
        """Layout of a sum over a block's tokens, [tokens, streams, columns of a stream]."""
        return self._wide(TOKENS)

    @property
    def wide_channels(self) -> gl.DistributedLinearLayout:
        """Layout of a sum over a part's channels, [channels, streams, columns of a stream]."""
        return self._wide(self.bytes)

    @property
    def wide_rows(self) -> gl.DistributedLinearLayout:
        """Layout of a sum of 16 rows, [16, streams, columns of a stream]."""
        return self._wide(16)

    @property
    def scale_copy(self) -> gl.DistributedLinearLayout:
        """Layout of the copy of all streams' scales, then zero points, to shared memory."""
        return row_copy_layout(2 * self.streams, self.dim)

    @property
    def sum_copy(self) -> gl.DistributedLinearLayout:
        """Layout of the copy of all streams' sums of codes to shared memory."""
        return row_copy_layout(self.streams, self.dim)
