"""How quantized tokens lie in cells: pure functions between codes, their scales and zero points, and bytes.

A *cell* is what one slot of the KV pool holds of one layer, KV head and kind (keys or values): ``head_dim`` numbers of the
pool's dtype, here plain bytes. Tokens are packed in *blocks*. The first cells of a block hold its codes, token after token,
as many tokens in a cell as fit; those after them hold its scales, then its zero points, in float16, group after group; then,
where a method asks for them, the sums of each group's codes (int16), the positions of its tokens (int32), and its outliers: their
places in the block (int16), token after token, and what each lacks (float16).
A token's codes lie in parts, not in neighbours: of ``p`` codes in a byte, byte ``b`` holds channels ``b``, ``b + dim/p``, ...,
from the lowest bits on, so that a kernel unpacks contiguous channels by shift and mask.
"""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

# Of scales and zero points.
PARAMETER = torch.float16


class Grid(NamedTuple):
    """Numbers of a block that share a scale and a zero point.

    Attributes:
        tokens: neighbouring tokens; divides those of the block.
        channels: neighbouring channels; divides ``head_dim``.
    """

    tokens: int
    channels: int


class Outliers(NamedTuple):
    """Numbers of each block that are kept beside its codes.

    Attributes:
        places: int64 [heads, blocks, count], ``token * dim + channel`` in the block.
        excess: float32, as ``places``, what is added to what the codes mean there.
    """

    places: torch.Tensor
    excess: torch.Tensor


class Quantized(NamedTuple):
    """Blocks of codes and what they mean: a number is ``level[code] * scale + zero``, and an outlier's excess.

    Attributes:
        codes: uint8 [heads, blocks, tokens, dim].
        scale, zero: [heads, blocks, tokens / grid.tokens, dim / grid.channels].
        outliers: None where the layout has none.
        positions: int64 [heads, blocks, tokens], of the tokens in their context; None where the layout has none.
        sums: int64, as ``scale``: of each group's codes; None where the layout has none.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    outliers: Outliers | None = None
    positions: torch.Tensor | None = None
    sums: torch.Tensor | None = None


@dataclass(frozen=True)
class BlockLayout:
    """How the blocks of one kind lie in cells.

    Attributes:
        bits: of a code: 2, 4 or 8.
        tokens: of a block; whole cells of codes.
        dim: channels of a token, whole bytes of each part.
        cell_bytes: of a cell.
        grid: what shares a scale.
        outliers: numbers of a block that are kept beside its codes.
        positions: whether its tokens' positions are kept.
        sums: whether those of each group's codes are kept.

    Raises:
        ValueError: a block's codes are not whole cells, the grid does not divide it, or sums or outliers' places do not fit.
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
        """Groups of a block along tokens and channels."""
        return self.tokens // self.grid.tokens, self.dim // self.grid.channels

    @property
    def plain(self) -> bool:
        """Whether codes, scales and zero points say all; sums follow from them."""
        return not self.outliers and not self.positions

    @property
    def parameters(self) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        """What follows the codes of a block: dtype and shape of each."""
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
        """Bytes of a block, without what fills up its last cell."""
        return self.tokens * self.token_bytes + self.parameter_bytes

    @property
    def cells(self) -> int:
        """Cells of a block."""
        return self.code_cells - (-self.parameter_bytes // self.cell_bytes)

    def pack(self, block: Quantized, cells: int) -> torch.Tensor:
        """Bytes of whole blocks: uint8 [heads, blocks, ``cells``, cell_bytes]; ``cells`` is at least :attr:`cells`."""
        heads, blocks = block.codes.shape[:2]
        codes = pack_codes(block.codes, self.bits).reshape(heads, blocks, -1)
        given = (block.scale, block.zero, *(part for part in (block.sums, block.positions) if part is not None), *(block.outliers or ()))
        parameters = [part.to(dtype).reshape(heads, blocks, -1) for part, (dtype, _) in zip(given, self.parameters, strict=True)]
        packed = torch.cat([codes, *(part.view(torch.uint8) for part in parameters)], -1)
        spare = cells * self.cell_bytes - packed.shape[-1]
        return torch.nn.functional.pad(packed, (0, spare)).view(heads, blocks, cells, self.cell_bytes)

    def unpack(self, cells: torch.Tensor) -> Quantized:
        """What :meth:`pack` was given, from uint8 [heads, blocks, cells, cell_bytes]; scales and zero points in float32."""
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


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes below ``2 ** bits``, uint8 [..., dim], as bytes: uint8 [..., dim * bits / 8]."""
    packed = torch.zeros_like(codes[..., : codes.shape[-1] * bits // 8])
    for index, part in enumerate(codes.chunk(8 // bits, dim=-1)):
        packed |= part << (bits * index)
    return packed


def unpack_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes that :func:`pack_codes` was given: uint8 [..., bytes * 8 / bits]."""
    mask = (1 << bits) - 1
    return torch.cat([(packed >> (bits * index)) & mask for index in range(8 // bits)], dim=-1)
