"""Constants of the kernel that attends to prompts' codes (prefill_codes.py): a step's sizes, and how its parts lie in registers.

The layouts are those of ``wgmma``: a warp of four has 16 rows of a sum, and of each row a lane has two columns of eight.
"""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from triton.experimental.gluon import language as gl

# As constants.py's.
SOURCES = sha256(Path(__file__).read_bytes()).hexdigest()[:16]
# Rows of a warp group, and those of a program; partitions that are taken.
ROWS, PROGRAM_ROWS, PARTITIONS = 64, 128, (64, 128)


def _sums(columns: int, inner: int) -> gl.NVMMADistributedLayout:
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, inner])


def _columns(columns: int, count: int) -> gl.DistributedLinearLayout:
    inside = [count >> bit for bit in range(count.bit_length() - 1, 0, -1)]
    registers = [*inside, count, *(count << bit for bit in range(3, columns.bit_length() - 1))]
    lanes = [2 * count, 4 * count, 0, 0, 0]
    return gl.DistributedLinearLayout(*([[0, step] for step in bases] for bases in (registers, lanes, [0, 0], [])), [1, columns * count])


@dataclass(frozen=True)
class PrefillSteps:
    """Sizes of a step, and layouts.

    Attributes:
        partition: channels of a key, as tokens of values, that share a scale; tokens of a step.
        dim, value_dim: channels of a key, and of a value.
        heads: KV heads.
        group: query heads that share one.
        block: tokens of a block.
        sinks: tokens before all blocks.
        columns: of keys' terms.
        zeros: rows of values' zero points.
        stages: steps that shared memory holds.
        sources: of which code the layouts are.
    """

    partition: int
    dim: int
    value_dim: int
    heads: int
    group: int
    block: int
    sinks: int
    columns: int
    zeros: int
    stages: int
    sources: str = SOURCES

    @property
    def rows(self) -> int:
        """Of a warp group."""
        return ROWS

    @property
    def count(self) -> int:
        """Partitions of a key."""
        return self.dim // self.partition

    @property
    def tiles(self) -> int:
        """Programs with rows of a block: two warp groups each."""
        return -(-self.block * self.group // PROGRAM_ROWS)

    @property
    def bytes(self) -> int:
        """Of a step."""
        keys = self.partition * (self.dim + 2 * self.columns + 4 * self.count)
        return keys + self.value_dim * (self.partition + 8 + 2 * self.zeros)

    @property
    def scores(self) -> gl.NVMMADistributedLayout:
        """Of products of terms and keys' terms, float16, and of scores: [rows, tokens]."""
        return _sums(self.partition, 16)

    @property
    def integers(self) -> gl.NVMMADistributedLayout:
        """Of products of queries' codes and keys'."""
        return _sums(self.partition, 32)

    @property
    def outputs(self) -> gl.NVMMADistributedLayout:
        """Of products of weights' sums and values' zero points, float16, and of outputs: [rows, channels]."""
        return _sums(self.value_dim, 16)

    @property
    def products(self) -> gl.NVMMADistributedLayout:
        """Of products of weights' codes and values'."""
        return _sums(self.value_dim, 32)

    @property
    def query_codes(self) -> gl.DotOperandLayout:
        """Of a partition of queries: [rows, channels]."""
        return gl.DotOperandLayout(0, self.integers, 4)

    @property
    def query_terms(self) -> gl.DotOperandLayout:
        """[rows, columns]."""
        return gl.DotOperandLayout(0, self.scores, 2)

    @property
    def weight_codes(self) -> gl.DotOperandLayout:
        """[rows, tokens]."""
        return gl.DotOperandLayout(0, self.products, 4)

    @property
    def weight_sums(self) -> gl.DotOperandLayout:
        """[rows, zeros]."""
        return gl.DotOperandLayout(0, self.outputs, 2)

    @property
    def quads(self) -> gl.DistributedLinearLayout:
        """Of a number for each thread of a quad, which has a row of a sum: [rows, 4]."""
        lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
        return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [ROWS, 4])

    @property
    def key_scales(self) -> gl.DistributedLinearLayout:
        """Of a step's, [1, tokens and partitions]: those of a lane's scores."""
        return _columns(self.partition, self.count)

    @property
    def value_numbers(self) -> gl.DistributedLinearLayout:
        """Of a step's, [1, channels and pairs]: those of a lane's outputs."""
        return _columns(self.value_dim, 2)
