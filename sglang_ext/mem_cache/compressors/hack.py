"""HACK (Zhang et al. 2025, arXiv 2502.03589): codes that are multiplied as integers, with the sums that such products need."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.mem_cache.compressed.layouts.block_layout import Grid, Quantized
from sglang_ext.mem_cache.compressors.contracts.quantizer import Finding, Quantizer, grouped, squeezed, stored_above, stored_below
from sglang_ext.mem_cache.compressors.contracts.registry import register_quantizer

# The smallest float16.
SMALLEST = 2.0**-24


@register_quantizer("hack", bits=(4, 2), partitions=(64, 32, 128))
@dataclass(frozen=True)
class Hack(Quantizer):
    """Asymmetric integers in partitions: of channels of one token's keys, and of tokens of one channel's values.

    Partitions are along the inner dimension of attention's products. A partition's product is therefore one of integers, which scales,
    zero points and sums of codes complete (equation 4; layers/kernels/packed/integer_attention.py). Tokens that do not fill a partition of values
    stay exact until they do (requantization elimination).

    Attributes:
        partition: Numbers that share a scale: 32, 64 or 128. The head dimension is a multiple of it.
        block: Tokens that are packed together, whole partitions. It follows from ``partition``.
    """

    partition: int = 64
    finding: ClassVar[Finding | None] = "stochastic"
    sums: ClassVar[bool] = True
    stochastic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", max(self.block, self.partition))

    def key_grid(self, dim: int) -> Grid:
        """One token, a partition of channels."""
        return Grid(1, self.partition)

    def value_grid(self, dim: int) -> Grid:
        """A partition of tokens, one channel."""
        return Grid(self.partition, 1)

    def quantize(self, numbers: torch.Tensor, grid: Grid, noise: torch.Tensor | None = None) -> Quantized:
        """Compute codes, scales, zero points and the sums of each partition's codes.

        The smallest number of a partition is rounded down to float16, and its scale up. Each number is then between two codes, and the
        expected value of its stochastic rounding is the number itself.

        Args:
            numbers: float32 [heads, blocks, tokens, dim].
            grid: The partitions.
            noise: Shaped as ``numbers``, uniform over [0, 1), added to steps before truncation. None rounds to the nearest code.
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
