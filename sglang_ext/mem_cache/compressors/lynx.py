"""Lynx's anchor (papers/lynx.md, Algorithm 1): of each number the sign and the highest bits of its companded distance from a mean."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.layers.kernels.lynx import levels
from sglang_ext.mem_cache.compressed.layouts.block_layout import Grid, Quantized
from sglang_ext.mem_cache.compressors.contracts.quantizer import Finding, Quantizer, grouped, squeezed, stored, stored_above, stored_next
from sglang_ext.mem_cache.compressors.contracts.registry import register_quantizer


@register_quantizer("lynx", bits=(4, 2))
@dataclass(frozen=True)
class Lynx(Quantizer):
    """Keys and values by channel, in chunks of tokens: ``level[code] * sigma + mu``, of levels that are finer near the mean.

    ``mu`` is a chunk's mean and ``sigma`` its greatest distance from it; the chunk's extreme is exact but for their rounding. A copy
    is the anchor alone. What the paper sends after it, the residual, is what host memory holds of full KV where copies are shared:
    each number's index in the bin that its code, ``mu`` and ``sigma`` name (host_tier/residuals.py). The range of a page's channel
    is no part of either: it spares nothing where ``mu`` and ``sigma`` are float16.

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
        low, high = groups.amin((3, 5), keepdim=True), groups.amax((3, 5), keepdim=True)
        scale = stored_above(torch.maximum(high - zero, zero - low))
        # Distances are rounded: the bins of the first and the last code shall reach all numbers.
        scale = stored_next(scale, (zero + scale < high) | (zero - scale > low))
        codes = torch.zeros_like(groups, dtype=torch.uint8)
        for bound in self.bounds_on(numbers.device, numbers.shape[-1]):
            # The product is exact (levels.py), so that this is where the code's bin begins (bins.py), on every device.
            codes += (groups >= zero + bound * scale).view(torch.uint8)
        return Quantized(codes.view(numbers.shape), squeezed(scale), squeezed(zero))
