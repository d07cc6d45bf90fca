"""Constants of the kernel that attends to prompts' codes (prefill_codes.py): a step's sizes, and how its parts lie in registers.

The layouts are those of ``wgmma``: a warp of four has 16 rows of a sum, and of each row a lane has two columns of eight.
"""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from triton.experimental.gluon import language as gl

from sglang_ext.layers.kernels.hack.prompt_codes import MEANS, SHIFT

# As constants.py's.
SOURCES = sha256(Path(__file__).read_bytes()).hexdigest()[:16]
# Rows of a warp group, and those of a program; partitions that are taken.
ROWS, PROGRAM_ROWS, PARTITIONS = 64, 128, (64, 128)
# Tokens of a product.
TILE = 64


def _sums(columns: int, inner: int) -> gl.NVMMADistributedLayout:
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, inner])


def _columns(columns: int) -> gl.DistributedLinearLayout:
    registers, lanes = [1, *(1 << bit for bit in range(3, columns.bit_length() - 1))], [2, 4, 0, 0, 0]
    return gl.DistributedLinearLayout(*([[0, step] for step in bases] for bases in (registers, lanes, [0, 0], [])), [1, columns])


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
    def tile(self) -> int:
        """Tokens of a product."""
        return TILE

    @property
    def spans(self) -> int:
        """Tiles of a step's tokens."""
        return self.partition // TILE

    @property
    def tiles(self) -> int:
        """Programs with rows of a block: two warp groups each."""
        return -(-self.block * self.group // PROGRAM_ROWS)

    @property
    def bytes(self) -> int:
        """Of a step."""
        keys = self.partition * (self.dim + 2 * self.columns + 4 * self.count)
        return keys + self.value_dim * (self.partition + 4 + 2 * self.zeros)

    @property
    def sums(self) -> gl.NVMMADistributedLayout:
        """Of products of terms and keys' terms, float16, and of scores: [rows, 64 tokens]."""
        return _sums(TILE, 16)

    @property
    def integers(self) -> gl.NVMMADistributedLayout:
        """Of products of queries' codes and keys', as ``sums``."""
        return _sums(TILE, 32)

    @property
    def outputs(self) -> gl.NVMMADistributedLayout:
        """Of products of weights' sums and values' zero points, float16, and of outputs: [rows, channels]."""
        return _sums(self.value_dim, 16)

    @property
    def products(self) -> gl.NVMMADistributedLayout:
        """Of products of weights' codes and values', as ``outputs``."""
        return _sums(self.value_dim, 32)

    @property
    def codes(self) -> gl.DotOperandLayout:
        """Of weights, [rows, 64 tokens]."""
        return gl.DotOperandLayout(0, self.integers, 4)

    @property
    def query_copy(self) -> gl.BlockedLayout:
        """Of a partition of queries, [rows, channels], on its way to shared memory: 16 bytes a thread."""
        threads = self.partition // 16
        return gl.BlockedLayout([1, 16], [32 // threads, threads], [4, 1], [1, 0])

    @property
    def query_room(self) -> gl.NVMMASharedLayout:
        """Of the same in shared memory."""
        return gl.NVMMASharedLayout.get_default_for([ROWS, self.partition], gl.int8)

    @property
    def terms(self) -> gl.DotOperandLayout:
        """Of what float16 is multiplied with: of queries, [rows, columns], and of weights, [rows, zeros]."""
        return gl.DotOperandLayout(0, self.sums, 2)

    @property
    def quads(self) -> gl.DistributedLinearLayout:
        """Of a number for each thread of a quad, which has a row of a sum: [rows, 4]."""
        lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
        return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [ROWS, 4])

    @property
    def token_columns(self) -> gl.DistributedLinearLayout:
        """Of a number for each of 64 tokens, [1, tokens]: those of a lane's scores."""
        return _columns(TILE)

    @property
    def channel_columns(self) -> gl.DistributedLinearLayout:
        """Of a number for each channel, [1, channels]: those of a lane's outputs."""
        return _columns(self.value_dim)

    @property
    def lacking(self) -> float:
        """What the rows of ``zeros`` after values' zero points are multiplied with: see hack/prompt_codes.py."""
        return float(SHIFT.value * self.partition // MEANS.value)
