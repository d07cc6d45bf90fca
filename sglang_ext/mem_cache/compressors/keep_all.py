"""Every token is kept: what a quantizer selects that is not told to drop any."""

from dataclasses import dataclass

import torch

from sglang_ext.mem_cache.compressors.base import Compressor, LayerKV


@dataclass(frozen=True)
class KeepAll(Compressor):
    """All tokens are alike; with a budget of 1 none is dropped."""

    keeps_all: bool = True

    def scores(self, layer: LayerKV) -> torch.Tensor:
        """Zero for all."""
        tokens, heads = layer.keys.shape[:2]
        return layer.keys.new_zeros(heads, tokens, dtype=torch.float32)
