"""Plain integers: each token of each KV head has its own scale and zero point."""

from dataclasses import dataclass

from sglang_ext.mem_cache.compressed.layouts.block_layout import Grid
from sglang_ext.mem_cache.compressors.contracts.quantizer import Quantizer
from sglang_ext.mem_cache.compressors.contracts.registry import register_quantizer


@register_quantizer("int4", bits=(4,))
@register_quantizer("int8", bits=(8,))
@dataclass(frozen=True)
class PlainInt(Quantizer):
    """Asymmetric integers per token and head, for keys and values alike."""

    def key_grid(self, dim: int) -> Grid:
        """One token, all channels."""
        return Grid(1, dim)

    value_grid = key_grid
