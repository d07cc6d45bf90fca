"""Constants of the kernel that attends to prompts' codes (prefill_codes.py): sizes of a step, and register layouts of its parts.

The layouts are those of ``wgmma``. Each of four warps has 16 rows of a sum. Of each row, a lane has two of every eight columns.
"""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from triton.experimental.gluon import language as gl

from sglang_ext.layers.kernels.packed.prompt_codes import MEANS, SHIFT

# As in fragments.py.
SOURCES = sha256(Path(__file__).read_bytes()).hexdigest()[:16]
# Rows of a warp group and of a program, and supported partitions.
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
        partition: Channels of a key that share a scale, and tokens of values that share a scale. Also the tokens of a step.
        dim, value_dim: Channels of a key, and of a value.
        heads, group: KV heads, and query heads that share one.
        block, sinks: Tokens of a block, and tokens before all blocks.
        columns, zeros: Columns of the keys' terms, and rows of the values' zero points.
        stages: Steps that shared memory holds.
        sources: Hash of the code that defines the layouts.
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
        """Rows of a warp group."""
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
        """Programs with rows of a block, with two warp groups each."""
        return -(-self.block * self.group // PROGRAM_ROWS)

    @property
    def bytes(self) -> int:
        """Bytes of a step."""
        keys = self.partition * (self.dim + 2 * self.columns + 4 * self.count)
        return keys + self.value_dim * (self.partition + 4 + 2 * self.zeros)

    @property
    def sums(self) -> gl.NVMMADistributedLayout:
        """Layout of products of terms and keys' terms, float16, and of scores: [rows, 64 tokens]."""
        return _sums(TILE, 16)

    @property
    def integers(self) -> gl.NVMMADistributedLayout:
        """Layout of products of query codes and key codes, [rows, 64 tokens]."""
        return _sums(TILE, 32)

    @property
    def outputs(self) -> gl.NVMMADistributedLayout:
        """Layout of products of weights' sums and values' zero points, float16, and of outputs: [rows, channels]."""
        return _sums(self.value_dim, 16)

    @property
    def products(self) -> gl.NVMMADistributedLayout:
        """Layout of products of weight codes and value codes, [rows, channels]."""
        return _sums(self.value_dim, 32)

    @property
    def codes(self) -> gl.DotOperandLayout:
        """Layout of weights as an operand, [rows, 64 tokens]."""
        return gl.DotOperandLayout(0, self.integers, 4)

    @property
    def query_copy(self) -> gl.BlockedLayout:
        """Layout of the copy of a query partition, [rows, channels], to shared memory: 16 bytes per thread."""
        threads = self.partition // 16
        return gl.BlockedLayout([1, 16], [32 // threads, threads], [4, 1], [1, 0])

    @property
    def query_room(self) -> gl.NVMMASharedLayout:
        """Layout of a query partition in shared memory."""
        return gl.NVMMASharedLayout.get_default_for([ROWS, self.partition], gl.int8)

    @property
    def terms(self) -> gl.DotOperandLayout:
        """Layout of float16 operands: of queries, [rows, columns], and of weights, [rows, zeros]."""
        return gl.DotOperandLayout(0, self.sums, 2)

    @property
    def quads(self) -> gl.DistributedLinearLayout:
        """Layout of one number for each of the four threads that share a row of a sum: [rows, 4]."""
        lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
        return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [ROWS, 4])

    @property
    def token_columns(self) -> gl.DistributedLinearLayout:
        """Layout of one number for each of 64 tokens, [1, tokens]. A lane holds the numbers of its scores."""
        return _columns(TILE)

    @property
    def channel_columns(self) -> gl.DistributedLinearLayout:
        """Layout of one number per channel, [1, channels]. A lane holds the numbers of its outputs."""
        return _columns(self.value_dim)

    @property
    def lacking(self) -> float:
        """Factor of the rows of ``zeros`` after the values' zero points. See packed/prompt_codes.py."""
        return float(SHIFT.value * self.partition // MEANS.value)
