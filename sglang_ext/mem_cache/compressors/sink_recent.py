"""Attention sinks and a recent window (StreamingLLM, Xiao et al. 2024, arXiv 2309.17453)."""

from dataclasses import dataclass

import torch

from sglang_ext.mem_cache.compressors.base import Compressor, LayerKV, register


@register("sink-recent")
@dataclass(frozen=True)
class SinkRecent(Compressor):
    """Keep the first tokens, which soak up attention, and the newest ones.

    Attributes:
        sinks: tokens kept from the start of the context.
    """

    sinks: int = 4

    def select(self, layer: LayerKV, count: int) -> torch.Tensor:
        """Same positions for all heads: ``[0, sinks)`` and the last ``count - sinks``."""
        tokens, heads = layer.keys.shape[:2]
        sinks = min(self.sinks, count)
        first = torch.arange(sinks, device=layer.keys.device)
        last = torch.arange(tokens - (count - sinks), tokens, device=layer.keys.device)
        return torch.cat([first, last]).expand(heads, -1)
