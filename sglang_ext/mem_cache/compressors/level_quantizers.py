"""Quantizers whose codes mean uneven levels: TurboQuant, Lynx's anchor, and KVQuant."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy
import torch

from sglang_ext.mem_cache.compressed.layouts.block_layout import PARAMETER, Grid, Outliers, Quantized
from sglang_ext.mem_cache.compressors.quantizer import LARGEST, Finding, Quantizer, code_values, grouped, round_to_float16, squeezed, stored_above
from sglang_ext.mem_cache.compressors.registry import register_quantizer

# Seed of the rotation, which is the same in all ranks and for all compressed KV.
SEED = 2504
# Points at which the distribution's density is sampled, and rounds of Lloyd's algorithm over them.
POINTS, ROUNDS = 1 << 15, 2000


@register_quantizer("turboquant", bits=(4, 2))
@dataclass(frozen=True)
class TurboQuant(Quantizer):
    """TurboQuant (Zandieh et al. 2025, arXiv 2504.19874): optimal levels for the coordinates of randomly rotated vectors.

    It is the variant for least squared error (algorithm 1), with a norm for each token and head.
    """

    finding: ClassVar[Finding | None] = "levels"

    def key_grid(self, dim: int) -> Grid:
        return Grid(1, dim)

    value_grid = key_grid

    def rotation(self, dim: int) -> torch.Tensor:
        """A random rotation: float32 [dim, dim], orthogonal."""
        noise = torch.randn(dim, dim, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
        rotation, upper = torch.linalg.qr(noise)
        return (rotation * upper.diagonal().sign()).float()

    def levels(self, dim: int) -> torch.Tensor:
        """Lloyd-Max levels of a coordinate of a random unit vector: float32 [2 ** bits], ascending."""
        return lloyd_max(dim, 2**self.bits).float()

    def quantize(self, numbers: torch.Tensor, grid: Grid) -> Quantized:
        """Quantize with norms as scales, and the nearest level of each coordinate of the unit vectors. Zero points are 0."""
        norm = numbers.norm(dim=-1, keepdim=True)
        levels = self.levels_on(numbers.device, numbers.shape[-1])
        codes = nearest(numbers / norm.clamp(min=1e-30), levels)
        return Quantized(codes, round_to_float16(norm), torch.zeros_like(norm))


@lru_cache
def lloyd_max(dim: int, count: int) -> torch.Tensor:
    """The ``count`` levels of least squared error for a coordinate of a random unit vector: float64, ascending.

    Its density is proportional to ``(1 - x^2) ^ ((dim - 3) / 2)`` (lemma 1), near a normal one of variance ``1 / dim``.
    """
    points = (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS * 2 - 1
    density = (1 - points**2) ** ((dim - 3) / 2)
    mass = torch.nn.functional.pad(density.cumsum(0), (1, 0))
    moment = torch.nn.functional.pad((density * points).cumsum(0), (1, 0))
    # Start from the distribution's quantiles.
    wanted = (torch.arange(count, dtype=torch.float64) + 0.5) / count * mass[-1]
    levels = points[torch.searchsorted(mass, wanted) - 1]
    for _ in range(ROUNDS):
        inner = torch.searchsorted(points, (levels[1:] + levels[:-1]) / 2)
        ends = torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), POINTS)])
        levels = (moment[ends[1:]] - moment[ends[:-1]]) / (mass[ends[1:]] - mass[ends[:-1]])
    return (levels - levels.flip(0)) / 2


@register_quantizer("lynx", bits=(4, 2))
@dataclass(frozen=True)
class Lynx(Quantizer):
    """Keys and values by channel, in chunks of tokens: ``level[code] * sigma + mu``, with levels that are finer near the mean.

    Lynx's anchor (Lynx, Algorithm 1; layers/kernels/lynx/layout.py): each number's sign and the highest bits of its companded distance from a mean.
    ``mu`` is a chunk's mean, and ``sigma`` its largest distance from it. The chunk's extreme is exact except for their rounding. Compressed
    KV is the anchor. Host memory stores the residual of full KV where compressed KV is shared. The residual is each number's index within
    the bin that code, ``mu`` and ``sigma`` define (host_tier/page_copies.py). Anchor and residual do not include the range of a page's
    channel, which saves nothing if ``mu`` and ``sigma`` are float16.

    Attributes:
        chunk: Tokens that share ``mu`` and ``sigma``.
    """

    chunk: int = 32
    finding: ClassVar[Finding | None] = "centred"

    def key_grid(self, dim: int) -> Grid:
        return Grid(self.chunk, 1)

    value_grid = key_grid

    def levels(self, dim: int) -> torch.Tensor:
        """Companded levels from -1 to 1: float32 [2 ** bits], ascending."""
        from sglang_ext.layers.kernels.lynx import layout

        return torch.tensor(layout.levels(self.bits))

    def bounds(self, dim: int) -> torch.Tensor:
        """Lower bounds of all codes but the first: float32 [2 ** bits - 1], ascending."""
        from sglang_ext.layers.kernels.lynx import layout

        return torch.tensor(layout.bounds(self.bits)[1:-1])

    def quantize(self, numbers: torch.Tensor, grid: Grid) -> Quantized:
        """Quantize with means as zero points and largest distances as scales. A code is the number of bounds that a distance reaches."""
        groups = grouped(numbers, grid)
        zero = round_to_float16(groups.mean((3, 5), keepdim=True))
        low, high = groups.amin((3, 5), keepdim=True), groups.amax((3, 5), keepdim=True)
        scale = stored_above(torch.maximum(high - zero, zero - low))
        # Distances are rounded: increase scales until the first and last code's bins cover all numbers.
        scale = _stored_next(scale, (zero + scale < high) | (zero - scale > low))
        codes = torch.zeros_like(groups, dtype=torch.uint8)
        for bound in self.bounds_on(numbers.device, numbers.shape[-1]):
            # The product is exact (layers/kernels/lynx/layout.py), so that the code's bin begins exactly here on every device.
            codes += (groups >= zero + bound * scale).view(torch.uint8)
        return Quantized(codes.view(numbers.shape), squeezed(scale), squeezed(zero))


def _stored_next(sizes: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Numbers of :func:`stored_above`, increased to the next float16 where ``where`` is true, finite: float32."""
    return (sizes.to(PARAMETER).view(torch.int16) + (where & (sizes < LARGEST))).view(PARAMETER).float()


# Standard deviations of the normal distribution between the middle of a group's range and its ends. A real group has more. But with 1.5
# or 2.2, 4-bit keys of the demo model cause larger errors in attention, because too few levels are near the ends.
HALF_RANGE = 0.7
# Smallest squared deviation by which distances are divided.
SMALLEST = 1e-18


@register_quantizer("kvquant", bits=(4, 2))
@dataclass(frozen=True)
class KVQuant(Quantizer):
    """Keys by channel, from before rotary embedding mixes channels; values by token; some numbers nearly exact.

    KVQuant (Hooper et al. 2024, arXiv 2401.18079), on a CPU only: no kernel packs or reads such blocks. Implements the paper's sections 3.1
    (keys before rotary embedding), 3.2 (levels) and 3.3 (dense and sparse), without calibration:

    - Ranges are computed from the compressed KV itself, over 64 tokens of a key channel or half a value. The paper uses calibration data.
    - The paper's levels come from k-means weighted by Fisher information. Here all models and layers have the same levels, which are
      nearly even (:func:`levels_of`).
    - Outliers are 1/64 of the numbers of each block of 64 tokens and head. They are the numbers farthest from their group's mean, in the
      group's standard deviations. The range is computed without them. Their difference to the code's number is stored in float16.
    - The newest tokens stay exact, as in KIVI. The paper also keeps the first token; here it has no special slot.

    Blocks store each token's position, so that heads may keep different tokens (``snapkv+kvquant``).
    """

    recent: int = 128
    has_kernels: ClassVar[bool] = False
    before_rotary: ClassVar[bool] = True

    def key_grid(self, dim: int) -> Grid:
        return Grid(self.block, 1)

    def value_grid(self, dim: int) -> Grid:
        return Grid(1, dim // 2)

    def levels(self, dim: int) -> torch.Tensor:
        """Levels as shares of a group's range: float32 [2 ** bits], ascending from 0 to 1."""
        return levels_of(2**self.bits)

    def outliers(self, dim: int) -> int:
        return self.block * dim // 64

    def quantize(self, numbers: torch.Tensor, grid: Grid) -> Quantized:
        """Assign each number the nearest level between the smallest and the largest number of its group, without outliers."""
        dim = numbers.shape[-1]
        places = farthest(numbers, grid, self.outliers(dim))
        zero, scale = _range_of_others(numbers, grid, places)
        levels = self.levels_on(numbers.device, dim)
        shares = (grouped(numbers, grid) - zero).mul_(torch.where(scale > 0, 1 / scale, 0.0)).clamp_(0, 1)
        codes = nearest(shares, levels).view(numbers.shape)
        block = Quantized(codes, squeezed(scale), squeezed(zero))
        rest = numbers.flatten(2).gather(-1, places) - _meant_at(block, grid, levels, places)
        return block._replace(outliers=Outliers(places, round_to_float16(rest)))


def levels_of(count: int) -> torch.Tensor:
    """``count`` levels for normally distributed numbers, cut off :data:`HALF_RANGE` deviations from their mean: float32, 0 to 1.

    The density of levels of least squared error is the third root of the numbers' density (Panter and Dite 1951). They are therefore
    quantiles of a normal distribution that is wider by the root of 3. Both ends are levels: the largest numbers matter most to attention.
    """
    end = torch.tensor(HALF_RANGE / math.sqrt(6), dtype=torch.float64)
    spread = torch.linspace(-1, 1, count, dtype=torch.float64) * torch.erf(end)
    return (torch.erfinv(spread) / end + 1).div(2).clamp(0, 1).float()


def farthest(numbers: torch.Tensor, grid: Grid, count: int) -> torch.Tensor:
    """Indices in each block of the ``count`` numbers farthest from their group's mean, in deviations, as :func:`greatest` orders them."""
    groups = grouped(numbers, grid)
    squares = (groups - groups.mean((3, 5), keepdim=True)).square_()
    deviation = squares.sum((3, 5), keepdim=True).div_(grid.tokens * grid.channels - 1)
    distances = squares.div_(deviation.clamp_(min=SMALLEST)).reshape(numbers.shape).flatten(2)
    # Non-negative floats sort like their bits. NaN sorts as the farthest.
    bits = distances.view(torch.int32) & 0x7FFFFFFF
    return greatest(bits, count)


def greatest(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` largest numbers, int32 of at least 0 on a CPU, along the last axis: ascending; the first ones in a tie."""
    size = numbers.shape[-1]
    # numpy finds the smallest of them several times as fast as PyTorch.
    least = torch.from_numpy(numpy.partition(numbers.numpy(), size - count, -1)[..., size - count, None])
    chosen = numbers >= least
    if int(chosen.sum()) > numbers.numel() // size * count:
        greater = numbers > least
        chosen = greater | (chosen & ((chosen & ~greater).cumsum(-1) <= count - greater.sum(-1, keepdim=True)))
    places = torch.from_numpy(numpy.flatnonzero(chosen.numpy()))
    return (places % size).view(*numbers.shape[:-1], count)


def _range_of_others(numbers: torch.Tensor, grid: Grid, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero points and scales, as stored, of groups without the numbers in ``places``; 0 if no others are in a group."""

    def others(filling: float) -> torch.Tensor:
        return grouped(numbers.flatten(2).scatter(-1, places, filling).view(numbers.shape), grid)

    least, most = others(math.inf).amin((3, 5), keepdim=True), others(-math.inf).amax((3, 5), keepdim=True)
    zero = round_to_float16(torch.where(least <= most, least, 0.0))
    return zero, round_to_float16((torch.where(least <= most, most, 0.0) - zero).clamp(min=0))


def _meant_at(block: Quantized, grid: Grid, levels: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Numbers that the codes in ``places`` mean: float32, shaped as ``places``."""
    dim = block.codes.shape[-1]
    groups = places // dim // grid.tokens * (dim // grid.channels) + places % dim // grid.channels
    scale, zero = (part.flatten(2).gather(-1, groups) for part in (block.scale, block.zero))
    return code_values(block.codes.flatten(2).gather(-1, places), levels) * scale + zero


def nearest(numbers: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Index of the nearest of ``levels``, ascending, for each number; the lower one in a tie: uint8, shaped as ``numbers``.

    It counts the midpoints below a number. For about 16 levels this is three times as fast on a CPU as a search per number.
    """
    codes = torch.zeros(numbers.shape, dtype=torch.uint8, device=numbers.device)
    for midpoint in (levels[1:] + levels[:-1]) / 2:
        codes += (numbers > midpoint).view(torch.uint8)
    return codes
