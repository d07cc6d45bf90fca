"""Quantizers whose codes are integers: plain ones, KIVI, RotateKV, and HACK."""

from dataclasses import dataclass
from math import gcd
from typing import ClassVar

import torch

from sglang_ext.mem_cache.compressed.layouts.block_layout import PARAMETER, Grid, Quantized
from sglang_ext.mem_cache.compressors.quantizer import LARGEST, Finding, Quantizer, grouped, squeezed, stored_above
from sglang_ext.mem_cache.compressors.registry import register_quantizer


@register_quantizer("int4", bits=(4,))
@register_quantizer("int8", bits=(8,))
@dataclass(frozen=True)
class PlainInt(Quantizer):
    """Asymmetric integers per token and head, for keys and values alike."""

    def key_grid(self, dim: int) -> Grid:
        return Grid(1, dim)

    value_grid = key_grid


@register_quantizer("kivi", bits=(4, 2))
@dataclass(frozen=True)
class Kivi(Quantizer):
    """KIVI (Liu et al. 2024, arXiv 2402.02750): ``group`` tokens of a channel of keys share a scale, or channels of a token of values.

    The reason is that keys have channels of large numbers, and values have none. The newest tokens stay exact.
    """

    recent: int = 128
    group: int = 32

    def key_grid(self, dim: int) -> Grid:
        return Grid(self.group, 1)

    def value_grid(self, dim: int) -> Grid:
        return Grid(1, gcd(self.group, dim))


@register_quantizer("rotatekv", bits=(4, 2))
@dataclass(frozen=True)
class RotateKV(PlainInt):
    """RotateKV (Su et al. 2025, arXiv 2501.16383): asymmetric integers after a Walsh-Hadamard rotation, which spreads outliers.

    Each head is rotated separately, after rotary embedding, since the cache stores such keys. The paper rotates keys of several heads
    together, before rotary embedding. The paper's reordering of channels is replaced by the fixed one of :func:`reordering`. It matters
    only if a head has several Hadamard blocks, since one block mixes all channels in any order. Attention sinks are not stored
    separately: each token has its own scale.
    """

    def rotation(self, dim: int) -> torch.Tensor:
        """Reordering of channels, then Hadamard blocks: float32 [dim, dim], orthogonal."""
        size = dim & -dim
        blocks = torch.block_diag(*[hadamard(size)] * (dim // size))
        return torch.eye(dim)[:, reordering(dim, size)] @ blocks


def hadamard(size: int) -> torch.Tensor:
    """The orthogonal Walsh-Hadamard matrix (Sylvester's): float32 [size, size]; ``size`` is a power of 2."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def reordering(dim: int, size: int) -> torch.Tensor:
    """An order of channels that puts neighbours, which have the outliers of keys, into different blocks of ``size``: int64 [dim]."""
    blocks = dim // size
    return torch.arange(dim).view(size, blocks).t().flatten()


# The smallest float16.
SMALLEST = 2.0**-24


@register_quantizer("hack", bits=(4, 2), partitions=(64, 32, 128))
@dataclass(frozen=True)
class Hack(Quantizer):
    """HACK (Zhang et al. 2025, arXiv 2502.03589): integers in partitions of channels of a token's keys, and of tokens of a channel's values.

    Partitions are along the inner dimension of attention's products. A partition's product is therefore one of integers, which scales,
    zero points and sums of codes complete (equation 4; layers/kernels/packed/integer_attention.py). Tokens that do not fill a partition of values
    stay exact until they do (requantization elimination).

    Attributes:
        partition: Numbers that share a scale: 32, 64 or 128. The head dimension is a multiple of it, and a block holds whole ones.
    """

    partition: int = 64
    finding: ClassVar[Finding | None] = "stochastic"
    sums: ClassVar[bool] = True
    stochastic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", max(self.block, self.partition))

    def key_grid(self, dim: int) -> Grid:
        return Grid(1, self.partition)

    def value_grid(self, dim: int) -> Grid:
        return Grid(self.partition, 1)

    def quantize(self, numbers: torch.Tensor, grid: Grid, noise: torch.Tensor | None = None) -> Quantized:
        """Compute codes, scales, zero points and the sums of each partition's codes.

        The smallest number of a partition is rounded down to float16, and its scale up. Each number is then between two codes, and the
        expected value of its stochastic rounding is the number itself. ``noise``, shaped as ``numbers``, uniform over [0, 1), is added to
        steps before truncation. None rounds to the nearest code.
        """
        groups, last = grouped(numbers, grid), 2**self.bits - 1
        zero = stored_below(groups.amin((3, 5), keepdim=True))
        # Numbers below the smallest float16 are below the zero point.
        scale = stored_above((groups.amax((3, 5), keepdim=True) - zero).clamp(min=0) * (1 / last))
        # One division per partition, as in kernels.
        steps = (groups - zero) * (1 / scale.clamp(min=SMALLEST))
        steps += 0.5 if noise is None else grouped(noise, grid)
        codes = steps.clamp_(0, last).to(torch.uint8)
        sums = codes.sum((3, 5), keepdim=True)
        return Quantized(codes.view(numbers.shape), squeezed(scale), squeezed(zero), sums=squeezed(sums))


def stored_below(numbers: torch.Tensor) -> torch.Tensor:
    """``numbers`` rounded down to float16, finite: float32. For numbers that must not become larger when stored."""
    numbers = numbers.clamp(-LARGEST, LARGEST)
    near = numbers.to(PARAMETER)
    # For negative numbers and -0, the bits of the lower float16 are those of the greater integer.
    lower = torch.where(numbers < 0, 1, -1).to(torch.int16)
    return (near.view(torch.int16) + lower * (near.float() > numbers)).view(PARAMETER).float()
