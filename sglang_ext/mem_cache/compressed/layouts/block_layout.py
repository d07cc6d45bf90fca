"""How quantized tokens are stored in cells, and the noise of stochastic rounding: pure functions.

A *cell* is the part of one slot of the KV pool that belongs to one layer, KV head and kind (keys or values). It has ``head_dim`` numbers
of the pool's dtype, used here as plain bytes. Tokens are packed in *blocks*. The cells of a block contain, in this order:

1. The codes, token after token, as many tokens per cell as fit.
2. From the next cell on: the scales, then the zero points, float16, group after group.
3. If the method needs them: the sum of each group's codes (int16), the tokens' positions (int32), and the outliers. Outliers are their
   indices in the block (int16), token after token, and the differences to what the codes mean (float16).

The codes in one byte are not of neighbouring channels. With ``p`` codes per byte, byte ``b`` has channels ``b``, ``b + dim/p``, ..., from
the lowest bits on. A kernel therefore unpacks contiguous channels by shift and mask.

*Stochastic rounding* rounds a number between two codes up with a probability equal to its distance from the lower code. Sums of many
numbers are therefore unbiased (HACK, arXiv 2502.03589). The noise comes from a hash, not from a random generator. Its inputs are the prompt
before the token's page, the token's index, its layer, KV head and channel, and the kind. Ranks with different heads, and servers that pack
the same prefix, therefore compute the same codes. Later tokens do not change the noise, so prompts with a common block have equal codes. A
kernel computes the same as :func:`noise` (layers/kernels/packed/pack_blocks.py).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import NamedTuple

import numpy
import torch

from sglang_ext.device import to_device

# dtype of scales and zero points.
PARAMETER = torch.float16


class Grid(NamedTuple):
    """A group of neighbouring tokens and channels that share a scale and a zero point. Both numbers divide those of a block."""

    tokens: int
    channels: int


class Outliers(NamedTuple):
    """Numbers stored beside their codes: ``token * dim + channel`` in the block, int64 [heads, blocks, count], and the difference to the code's."""

    places: torch.Tensor
    excess: torch.Tensor


class Quantized(NamedTuple):
    """Blocks of codes with their parameters. A number is ``level[code] * scale + zero``, plus the excess of an outlier.

    Attributes:
        codes: uint8 [heads, blocks, tokens, dim].
        scale, zero: [heads, blocks, tokens / grid.tokens, dim / grid.channels].
        outliers: None if the layout has none.
        positions: int64 [heads, blocks, tokens], of the tokens in their context; None if the layout has none.
        sums: int64, shaped as ``scale``: the sum of each group's codes; None if the layout has none.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    outliers: Outliers | None = None
    positions: torch.Tensor | None = None
    sums: torch.Tensor | None = None


@dataclass(frozen=True)
class BlockLayout:
    """How blocks of ``tokens`` keys, or values, of ``dim`` channels are stored in cells of ``cell_bytes`` bytes.

    Attributes:
        bits: Bits of a code: 2, 4 or 8.
        grid: The groups that share a scale.
        outliers: Outliers per block.
        positions: Whether the tokens' positions are stored.
        sums: Whether the sum of each group's codes is stored.

    Raises:
        ValueError: A block's codes do not fill whole cells, the grid does not divide it, or sums or outlier indices do not fit 16 bits.
    """

    bits: int
    tokens: int
    dim: int
    cell_bytes: int
    grid: Grid
    outliers: int = 0
    positions: bool = False
    sums: bool = False

    def __post_init__(self) -> None:
        grid = self.grid
        if self.bits not in (2, 4, 8) or self.dim * self.bits % 8 or self.tokens * self.token_bytes % self.cell_bytes:
            raise ValueError(
                f"codes of {self.bits} bits of {self.tokens} tokens with {self.dim} channels do not fill cells of "
                f"{self.cell_bytes} bytes; use 2, 4 or 8 bits and blocks of a multiple of 64 tokens"
            )
        if self.tokens % grid.tokens or self.dim % grid.channels:
            raise ValueError(
                f"groups of {grid.tokens} tokens and {grid.channels} channels do not divide blocks of {self.tokens} tokens "
                f"with {self.dim} channels; use divisors of both"
            )
        if self.sums and grid.tokens * grid.channels * ((1 << self.bits) - 1) >= 1 << 15:
            raise ValueError(
                f"sums of {grid.tokens * grid.channels} codes of {self.bits} bits do not fit 16 bits; keep no sums, or use groups of "
                f"less than {(1 << 15) // ((1 << self.bits) - 1)} numbers"
            )
        if self.outliers and self.tokens * self.dim > 1 << 15:
            raise ValueError(
                f"places among {self.tokens} tokens of {self.dim} channels do not fit 16 bits; keep no outliers, or pack blocks "
                f"of at most {(1 << 15) // self.dim} tokens"
            )

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's codes."""
        return self.dim * self.bits // 8

    @property
    def code_cells(self) -> int:
        """Cells of a block's codes."""
        return self.tokens * self.token_bytes // self.cell_bytes

    @property
    def groups(self) -> tuple[int, int]:
        """Groups of a block, along tokens and along channels."""
        return self.tokens // self.grid.tokens, self.dim // self.grid.channels

    @property
    def plain(self) -> bool:
        """Whether codes, scales and zero points are all the data; sums follow from the codes."""
        return not self.outliers and not self.positions

    @property
    def parameters(self) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        """dtype and shape of each part that follows a block's codes."""
        scales = ((PARAMETER, self.groups),) * 2
        sums = ((torch.int16, self.groups),) * self.sums
        positions = ((torch.int32, (self.tokens,)),) * self.positions
        outliers = ((torch.int16, (self.outliers,)), (PARAMETER, (self.outliers,))) if self.outliers else ()
        return (*scales, *sums, *positions, *outliers)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of a block's :attr:`parameters`."""
        return sum(dtype.itemsize * prod(shape) for dtype, shape in self.parameters)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, without the padding of its last cell."""
        return self.tokens * self.token_bytes + self.parameter_bytes

    @property
    def cells(self) -> int:
        """Cells of a block."""
        return self.code_cells - (-self.parameter_bytes // self.cell_bytes)

    def pack(self, block: Quantized, cells: int) -> torch.Tensor:
        """Pack whole blocks: uint8 [heads, blocks, ``cells``, cell_bytes]. ``cells`` is at least :attr:`cells`."""
        heads, blocks = block.codes.shape[:2]
        codes = pack_codes(block.codes, self.bits).reshape(heads, blocks, -1)
        given = (block.scale, block.zero, *(part for part in (block.sums, block.positions) if part is not None), *(block.outliers or ()))
        parameters = [part.to(dtype).reshape(heads, blocks, -1) for part, (dtype, _) in zip(given, self.parameters, strict=True)]
        packed = torch.cat([codes, *(part.view(torch.uint8) for part in parameters)], -1)
        spare = cells * self.cell_bytes - packed.shape[-1]
        return torch.nn.functional.pad(packed, (0, spare)).view(heads, blocks, cells, self.cell_bytes)

    def unpack(self, cells: torch.Tensor) -> Quantized:
        """Inverse of :meth:`pack`, from uint8 [heads, blocks, cells, cell_bytes]. Scales and zero points are float32."""
        heads, blocks = cells.shape[:2]
        flat = cells.reshape(heads, blocks, -1)
        end = self.tokens * self.token_bytes
        codes = unpack_codes(flat[..., :end].reshape(heads, blocks, self.tokens, self.token_bytes), self.bits)
        found = []
        for dtype, shape in self.parameters:
            begin, end = end, end + dtype.itemsize * prod(shape)
            part = flat[..., begin:end].contiguous().view(dtype).view(heads, blocks, *shape)
            found.append(part.float() if dtype is PARAMETER else part.long())
        scale, zero, *rest = found
        sums = rest.pop(0) if self.sums else None
        positions = rest.pop(0) if self.positions else None
        return Quantized(codes, scale, zero, Outliers(*rest) if self.outliers else None, positions, sums)


def as_bytes(buffer: torch.Tensor) -> torch.Tensor:
    """A layer's buffer, [slots, kv_heads, head_dim], as uint8 [slots, kv_heads, cell_bytes] over the same memory."""
    return buffer.view(torch.uint8)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes below ``2 ** bits``, uint8 [..., dim], into bytes: uint8 [..., dim * bits / 8]."""
    packed = torch.zeros_like(codes[..., : codes.shape[-1] * bits // 8])
    for index, part in enumerate(codes.chunk(8 // bits, dim=-1)):
        packed |= part << (bits * index)
    return packed


def unpack_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of :func:`pack_codes`: uint8 [..., bytes * 8 / bits]."""
    mask = (1 << bits) - 1
    return torch.cat([(packed >> (bits * index)) & mask for index in range(8 // bits)], dim=-1)


# Tokens of a page. A page's noise depends on one hash of the prompt.
SEED_PAGE = 64
# Factors of the lane and channel numbers in the hash: odd, near 2 ** 32 over the golden ratio, and another odd number.
LANE_STEP, CHANNEL_STEP = 0x9E3779B9, 0x85EBCA6B
# Shifts and factors, alternating, of a 32-bit hash that spreads each bit over all others.
SHIFTS, FACTORS = (16, 15, 15), (0x21F0AAAD, 0x735A2D97)
# Bits of noise that float32 holds exactly.
NOISE_BITS = 24
MASK = 0xFFFFFFFF


def prefix_hashes(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield for each part a hash of it and of all parts before it, 16 bytes."""
    digest = b""
    for part in parts:
        digest = blake2b(digest + part, digest_size=16).digest()
        yield digest


def token_seeds(prompt: Sequence[int], tokens: int, device: torch.device) -> torch.Tensor:
    """Seeds of a context's tokens, before layer, head and channel are added: int32 [tokens]. The host does not wait for the device.

    If the prompt fills all pages before a page, the page's seed is a hash of them. The seed of a later page is a hash of the prompt's
    whole pages and the page's number. The context may be longer or shorter than the prompt.
    """
    ids = numpy.asarray(prompt, numpy.int64)
    before = (ids[max(0, end - SEED_PAGE) : end] if end <= len(ids) else ids[:0] for end in range(0, tokens, SEED_PAGE))
    pages = [int.from_bytes(digest[:4], "little", signed=True) for digest in prefix_hashes(page.tobytes() for page in before)]
    of_pages = to_device(pages, device, torch.int32)
    # int32 wraps around, as the kernels' integers do.
    return (of_pages[:, None] + torch.arange(SEED_PAGE, dtype=torch.int32, device=device)).flatten()[:tokens]


def lane(layer: int, head: int, is_value: bool) -> int:
    """Number of one KV head's keys or values in one layer, unique in the model."""
    return (layer << 12 | head) << 1 | is_value


def noise(seeds: torch.Tensor, lanes: torch.Tensor, dim: int) -> torch.Tensor:
    """Rounding noise, added to steps before truncation: float32 [heads, tokens, dim], uniform over [0, 1).

    ``seeds``, int32 [heads, tokens], are those of the tokens that each head keeps, ``lanes``, int64 [heads], numbers of :func:`lane`.
    """
    of_tokens = _spread(seeds.long() + (lanes[:, None] + 1) * LANE_STEP)
    channels = torch.arange(dim, device=seeds.device) * CHANNEL_STEP
    return (_spread(of_tokens[..., None] + channels) >> (32 - NOISE_BITS)).float() * 2.0**-NOISE_BITS


def _spread(numbers: torch.Tensor) -> torch.Tensor:
    """Hash of the lowest 32 bits: int64, at least 0."""
    numbers = numbers & MASK
    for shift, factor in zip(SHIFTS, FACTORS):
        numbers = (numbers ^ numbers >> shift) * factor & MASK
    return numbers ^ numbers >> SHIFTS[-1]
