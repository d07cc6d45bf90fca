"""KIVI (Liu et al. 2024, arXiv 2402.02750): quantize keys by channel, values by token."""

from dataclasses import dataclass
from math import gcd

from sglang_ext.mem_cache.compressed.layouts.block_layout import Grid
from sglang_ext.mem_cache.compressors.contracts.quantizer import Quantizer
from sglang_ext.mem_cache.compressors.contracts.registry import register_quantizer


@register_quantizer("kivi", bits=(4, 2))
@dataclass(frozen=True)
class Kivi(Quantizer):
    """Keys share a scale over neighbouring tokens of a channel, values over neighbouring channels of a token.

    The reason is that keys have channels of large numbers, and values have none. The newest tokens stay exact.

    Attributes:
        group: Tokens of keys, and channels of values, that share a scale.
    """

    recent: int = 128
    group: int = 32

    def key_grid(self, dim: int) -> Grid:
        """A group of tokens, one channel."""
        return Grid(self.group, 1)

    def value_grid(self, dim: int) -> Grid:
        """One token, a group of channels."""
        return Grid(1, gcd(self.group, dim))
