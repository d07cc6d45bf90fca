"""Lynx's anchor (papers/lynx.md, Algorithm 1): of each number the sign and the highest bits of its companded distance from a mean."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.layers.kernels.lynx import levels
from sglang_ext.mem_cache.compressed.formats.packed_layout import Grid, Quantized
from sglang_ext.mem_cache.compressors.contracts.quantizer import Finding, Quantizer, grouped, squeezed, stored, stored_above
from sglang_ext.mem_cache.compressors.contracts.registry import register_quantizer


@register_quantizer("lynx", bits=(4, 2))
@dataclass(frozen=True)
class Lynx(Quantizer):
    """Keys and values by channel, in chunks of tokens: ``level[code] * sigma + mu``, of levels that are finer near the mean.

    ``mu`` is a chunk's mean and ``sigma`` its greatest distance from it; the chunk's extreme is exact but for their rounding. What
    the paper sends after the anchor, the residual, is no part of a copy: full KV verifies. Nor is the range of a page's
    channel, which spares nothing where ``mu`` and ``sigma`` are float16.

    Attributes:
        chunk: tokens that share ``mu`` and ``sigma``.
    """

    chunk: int = 32
    finding: ClassVar[Finding | None] = "centred"

    def key_grid(self, dim: int) -> Grid:
        """A chunk of tokens, one channel."""
        return Grid(self.chunk, 1)

    value_grid = key_grid

    def levels(self, dim: int) -> torch.Tensor:
        """Companded, from -1 to 1: float32 [2 ** bits], ascending."""
        return torch.tensor(levels.levels(self.bits))

    def bounds(self, dim: int) -> torch.Tensor:
        """Where codes begin, but the first: float32 [2 ** bits - 1], ascending."""
        return torch.tensor(levels.bounds(self.bits)[1:-1])

    def quantize(self, numbers: torch.Tensor, grid: Grid) -> Quantized:
        """Means as zero points, greatest distances from them as scales; codes count the bounds that a distance reaches."""
        groups = grouped(numbers, grid)
        zero = stored(groups.mean((3, 5), keepdim=True))
        apart = groups - zero
        scale = stored_above(apart.abs().amax((3, 5), keepdim=True))
        codes = torch.zeros_like(apart, dtype=torch.uint8)
        for bound in self.bounds_on(numbers.device, numbers.shape[-1]):
            codes += (apart >= bound * scale).view(torch.uint8)
        return Quantized(codes.view(numbers.shape), squeezed(scale), squeezed(zero))
