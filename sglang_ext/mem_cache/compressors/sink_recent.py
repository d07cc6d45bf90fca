"""Attention sinks and a recent window (StreamingLLM, Xiao et al. 2024, arXiv 2309.17453)."""

from dataclasses import dataclass

import torch

from sglang_ext.mem_cache.compressors.contracts.compressor import Always, Compressor, ContextKV, LayerKV
from sglang_ext.mem_cache.compressors.contracts.registry import register


@register("sink-recent")
@dataclass(frozen=True)
class SinkRecent(Compressor):
    """Keep the first tokens, which absorb attention, and the newest ones.

    Attributes:
        sinks: Tokens kept from the start of the context.
    """

    sinks: int = 4

    def always(self, context: ContextKV) -> Always:
        """The first tokens."""
        return Always(self.sinks)

    def scores(self, layer: LayerKV) -> torch.Tensor:
        """The position, equal for all heads; infinite for the first tokens."""
        tokens, heads = layer.keys.shape[:2]
        scores = torch.arange(tokens, dtype=torch.float32, device=layer.keys.device)
        scores[: self.sinks] = float("inf")
        return scores.expand(heads, -1)
