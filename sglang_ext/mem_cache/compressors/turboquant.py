"""TurboQuant (Zandieh et al. 2025, arXiv 2504.19874): a random rotation, then optimal levels for the rotated coordinates."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch

from sglang_ext.mem_cache.compressed.layouts.block_layout import Grid, Quantized
from sglang_ext.mem_cache.compressors.contracts.quantizer import Finding, Quantizer, nearest, round_to_float16
from sglang_ext.mem_cache.compressors.contracts.registry import register_quantizer

# Seed of the rotation, which is the same in all ranks and for all compressed KV.
SEED = 2504
# Points at which the distribution's density is sampled, and rounds of Lloyd's algorithm over them.
POINTS, ROUNDS = 1 << 15, 2000


@register_quantizer("turboquant", bits=(4, 2))
@dataclass(frozen=True)
class TurboQuant(Quantizer):
    """The variant for least squared error (algorithm 1): a norm for each token and head, and levels for the coordinates."""

    finding: ClassVar[Finding | None] = "levels"

    def key_grid(self, dim: int) -> Grid:
        """One token, all channels."""
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
