"""KVQuant (Hooper et al. 2024, arXiv 2401.18079): keys before rotary embedding, non-uniform levels, separate outliers.

CPU only: no kernel packs or reads such blocks.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy
import torch

from sglang_ext.mem_cache.compressed.layouts.block_layout import Grid, Outliers, Quantized
from sglang_ext.mem_cache.compressors.contracts.quantizer import Quantizer, grouped, code_values, nearest, squeezed, round_to_float16
from sglang_ext.mem_cache.compressors.contracts.registry import register_quantizer

# Standard deviations of the normal distribution between the middle of a group's range and its ends. A real group has more. But with 1.5
# or 2.2, 4-bit keys of the demo model cause larger errors in attention, because too few levels are near the ends.
HALF_RANGE = 0.7
# Smallest squared deviation by which distances are divided.
SMALLEST = 1e-18


@register_quantizer("kvquant", bits=(4, 2))
@dataclass(frozen=True)
class KVQuant(Quantizer):
    """Keys by channel, from before rotary embedding mixes channels; values by token; some numbers nearly exact.

    Implements the paper's sections 3.1 (keys before rotary embedding), 3.2 (levels) and 3.3 (dense and sparse), without calibration:

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
        """All tokens of a block, one channel."""
        return Grid(self.block, 1)

    def value_grid(self, dim: int) -> Grid:
        """One token, half of the channels."""
        return Grid(1, dim // 2)

    def levels(self, dim: int) -> torch.Tensor:
        """Levels as shares of a group's range: float32 [2 ** bits], ascending from 0 to 1."""
        return levels_of(2**self.bits)

    def outliers(self, dim: int) -> int:
        """1/64 of a block's numbers."""
        return self.block * dim // 64

    def quantize(self, numbers: torch.Tensor, grid: Grid) -> Quantized:
        """Assign each number the nearest level between the smallest and the largest number of its group, without outliers."""
        dim = numbers.shape[-1]
        places = farthest(numbers, grid, self.outliers(dim))
        zero, scale = range_of_others(numbers, grid, places)
        levels = self.levels_on(numbers.device, dim)
        shares = (grouped(numbers, grid) - zero).mul_(torch.where(scale > 0, 1 / scale, 0.0)).clamp_(0, 1)
        codes = nearest(shares, levels).view(numbers.shape)
        block = Quantized(codes, squeezed(scale), squeezed(zero))
        rest = numbers.flatten(2).gather(-1, places) - meant_at(block, grid, levels, places)
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
    """Indices in each block of the numbers farthest from their group's mean, in deviations: int64 [heads, blocks, count].

    They are ascending. In a tie the first numbers are taken.

    Args:
        numbers: float32 [heads, blocks, tokens, dim].
        grid: The groups.
        count: Numbers of each block.
    """
    groups = grouped(numbers, grid)
    squares = (groups - groups.mean((3, 5), keepdim=True)).square_()
    deviation = squares.sum((3, 5), keepdim=True).div_(grid.tokens * grid.channels - 1)
    distances = squares.div_(deviation.clamp_(min=SMALLEST)).reshape(numbers.shape).flatten(2)
    # Non-negative floats sort like their bits. NaN sorts as the farthest.
    bits = distances.view(torch.int32) & 0x7FFFFFFF
    return greatest(bits, count)


def greatest(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` largest numbers along the last axis, ascending; the first ones in a tie.

    numpy finds the smallest of them several times as fast as PyTorch.

    Args:
        numbers: int32, not negative, on a CPU.
        count: Numbers of each row.
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
    """Zero points and scales, as stored, of groups without the numbers in ``places``; 0 if no others are in a group.

    Args:
        numbers: float32 [heads, blocks, tokens, dim].
        grid: The groups.
        places: int64 [heads, blocks, count].
    """

    def others(filling: float) -> torch.Tensor:
        return grouped(numbers.flatten(2).scatter(-1, places, filling).view(numbers.shape), grid)

    least, most = others(math.inf).amin((3, 5), keepdim=True), others(-math.inf).amax((3, 5), keepdim=True)
    zero = round_to_float16(torch.where(least <= most, least, 0.0))
    return zero, round_to_float16((torch.where(least <= most, most, 0.0) - zero).clamp(min=0))


def meant_at(block: Quantized, grid: Grid, levels: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Numbers that the codes in ``places``, int64 [heads, blocks, count], mean: float32, shaped as ``places``."""
    dim = block.codes.shape[-1]
    groups = places // dim // grid.tokens * (dim // grid.channels) + places % dim // grid.channels
    scale, zero = (part.flatten(2).gather(-1, groups) for part in (block.scale, block.zero))
    return code_values(block.codes.flatten(2).gather(-1, places), levels) * scale + zero
