"""Lynx's anchor (papers/lynx.md, Algorithm 1): each number's sign and the highest bits of its companded distance from a mean."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.mem_cache.compressed.layouts.block_layout import Grid, Quantized
from sglang_ext.mem_cache.compressors.contracts.quantizer import Finding, Quantizer, grouped, round_to_float16, squeezed, stored_above, stored_next
from sglang_ext.mem_cache.compressors.contracts.registry import register_quantizer


@register_quantizer("lynx", bits=(4, 2))
@dataclass(frozen=True)
class Lynx(Quantizer):
    """Keys and values by channel, in chunks of tokens: ``level[code] * sigma + mu``, with levels that are finer near the mean.

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
        """A chunk of tokens, one channel."""
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
        scale = stored_next(scale, (zero + scale < high) | (zero - scale > low))
        codes = torch.zeros_like(groups, dtype=torch.uint8)
        for bound in self.bounds_on(numbers.device, numbers.shape[-1]):
            # The product is exact (layers/kernels/lynx/layout.py), so that the code's bin begins exactly here on every device.
            codes += (groups >= zero + bound * scale).view(torch.uint8)
        return Quantized(codes.view(numbers.shape), squeezed(scale), squeezed(zero))
