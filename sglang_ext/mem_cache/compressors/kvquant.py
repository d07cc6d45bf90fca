"""KVQuant (Hooper et al. 2024, arXiv 2401.18079): keys before rotary embedding, non-uniform levels, outliers apart.

For a CPU: no kernel packs or reads such blocks.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy
import torch

from sglang_ext.mem_cache.compressed.layouts.block_layout import Grid, Outliers, Quantized
from sglang_ext.mem_cache.compressors.contracts.quantizer import Quantizer, grouped, meant, nearest, squeezed, stored
from sglang_ext.mem_cache.compressors.contracts.registry import register_quantizer

# Standard deviations of the normal distribution that lie between the middle of a group's range and its ends. Fewer than a group
# has: keys of the demo model, with 4 bits, lose more to attention with 1.5 or 2.2, which leave too few levels near the ends.
HALF_RANGE = 0.7
# Least square of a deviation that distances are counted in.
SMALLEST = 1e-18


@register_quantizer("kvquant", bits=(4, 2))
@dataclass(frozen=True)
class KVQuant(Quantizer):
    """Keys by channel, as they were before rotary embedding mixed channels; values by token; some numbers nearly exact.

    Read from the paper's sections 3.1 (keys before rotary embedding), 3.2 (levels) and 3.3 (dense and sparse), without
    calibration:

    - Ranges are those of what a copy holds, of 64 tokens of a key channel and of half a value, not of calibration data.
    - Levels are the same for all models and layers, not k-means weighted by Fisher information: those of :func:`levels_of`,
      which are nearly even.
    - Of each block of 64 tokens and head the 1/64 of the numbers that are farthest from their group's mean, in the group's
      standard deviations, are outliers. The range is that of the others; what the code leaves over of them is kept in float16.
    - The newest tokens stay as they are, as KIVI's do. The first token, which the paper keeps, has no place of its own.

    Each token's position lies in its block, so that heads may keep tokens of their own choice (``snapkv+kvquant``).
    """

    recent: int = 128
    has_kernels: ClassVar[bool] = False
    before_rotary: ClassVar[bool] = True

    def key_grid(self, dim: int) -> Grid:
        """All tokens of a block, one channel."""
        return Grid(self.block, 1)

    def value_grid(self, dim: int) -> Grid:
        """One token, half of the channels."""
        return Grid(1, dim // 2)

    def levels(self, dim: int) -> torch.Tensor:
        """Shares of a group's range: float32 [2 ** bits], ascending from 0 to 1."""
        return levels_of(2**self.bits)

    def outliers(self, dim: int) -> int:
        """1/64 of a block's numbers."""
        return self.block * dim // 64

    def quantize(self, numbers: torch.Tensor, grid: Grid) -> Quantized:
        """Of each number the nearest level between the least and the greatest of its group, outliers left out."""
        dim = numbers.shape[-1]
        places = farthest(numbers, grid, self.outliers(dim))
        zero, scale = range_of_others(numbers, grid, places)
        levels = self.levels_on(numbers.device, dim)
        shares = (grouped(numbers, grid) - zero).mul_(torch.where(scale > 0, 1 / scale, 0.0)).clamp_(0, 1)
        codes = nearest(shares, levels).view(numbers.shape)
        block = Quantized(codes, squeezed(scale), squeezed(zero))
        rest = numbers.flatten(2).gather(-1, places) - meant_at(block, grid, levels, places)
        return block._replace(outliers=Outliers(places, stored(rest)))


def levels_of(count: int) -> torch.Tensor:
    """``count`` levels for normally distributed numbers, cut off :data:`HALF_RANGE` deviations from their mean: float32, 0 to 1.

    Levels of least squared error lie as densely as the third root of the density (Panter and Dite 1951), so as quantiles of a
    normal distribution that is wider by the root of 3. Both ends are levels: the largest numbers matter most to attention.
    """
    end = torch.tensor(HALF_RANGE / math.sqrt(6), dtype=torch.float64)
    spread = torch.linspace(-1, 1, count, dtype=torch.float64) * torch.erf(end)
    return (torch.erfinv(spread) / end + 1).div(2).clamp(0, 1).float()


def farthest(numbers: torch.Tensor, grid: Grid, count: int) -> torch.Tensor:
    """Places in each block of the numbers farthest from their group's mean, in deviations: int64 [heads, blocks, count].

    They ascend; of numbers as far the first are taken.

    Args:
        numbers: float32 [heads, blocks, tokens, dim].
        grid: the groups.
        count: of each block.
    """
    groups = grouped(numbers, grid)
    squares = (groups - groups.mean((3, 5), keepdim=True)).square_()
    deviation = squares.sum((3, 5), keepdim=True).div_(grid.tokens * grid.channels - 1)
    distances = squares.div_(deviation.clamp_(min=SMALLEST)).reshape(numbers.shape).flatten(2)
    # Without their signs they are ordered as their bits are; what is no number is farthest.
    bits = distances.view(torch.int32) & 0x7FFFFFFF
    return greatest(bits, count)


def greatest(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the ``count`` greatest along the last axis, ascending; of equal ones the first.

    numpy finds the least of the greatest several times as fast as PyTorch does.

    Args:
        numbers: int32, not negative, on a CPU.
        count: of each row.
    """
    size = numbers.shape[-1]
    least = torch.from_numpy(numpy.partition(numbers.numpy(), size - count, -1)[..., size - count, None])
    chosen = numbers >= least
    if int(chosen.sum()) > numbers.numel() // size * count:
        greater = numbers > least
        chosen = greater | (chosen & ((chosen & ~greater).cumsum(-1) <= count - greater.sum(-1, keepdim=True)))
    places = torch.from_numpy(numpy.flatnonzero(chosen.numpy()))
    return (places % size).view(*numbers.shape[:-1], count)


def range_of_others(numbers: torch.Tensor, grid: Grid, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero points and scales, as stored, of groups without the numbers in ``places``; 0 where these are all of a group.

    Args:
        numbers: float32 [heads, blocks, tokens, dim].
        grid: the groups.
        places: int64 [heads, blocks, count].
    """

    def others(filling: float) -> torch.Tensor:
        return grouped(numbers.flatten(2).scatter(-1, places, filling).view(numbers.shape), grid)

    least, most = others(math.inf).amin((3, 5), keepdim=True), others(-math.inf).amax((3, 5), keepdim=True)
    zero = stored(torch.where(least <= most, least, 0.0))
    return zero, stored((torch.where(least <= most, most, 0.0) - zero).clamp(min=0))


def meant_at(block: Quantized, grid: Grid, levels: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """What the codes in ``places``, int64 [heads, blocks, count], mean: float32, as ``places``."""
    dim = block.codes.shape[-1]
    groups = places // dim // grid.tokens * (dim // grid.channels) + places % dim // grid.channels
    scale, zero = (part.flatten(2).gather(-1, groups) for part in (block.scale, block.zero))
    return meant(block.codes.flatten(2).gather(-1, places), levels) * scale + zero
