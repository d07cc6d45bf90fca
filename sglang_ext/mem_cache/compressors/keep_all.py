"""Every token is kept: what a quantizer selects that is not told to drop any."""

from dataclasses import dataclass

import torch

from sglang_ext.mem_cache.compressors.base import Compressor, ContextKV, LayerKV


@dataclass(frozen=True)
class KeepAll(Compressor):
    """All tokens are alike; with a budget of 1 none is dropped."""

    keeps_all: bool = True

    def scores(self, layer: LayerKV) -> torch.Tensor:
        """Zero for all."""
        tokens, heads = layer.keys.shape[:2]
        return layer.keys.new_zeros(heads, tokens, dtype=torch.float32)

    def scores_all(self, context: ContextKV) -> torch.Tensor:
        """The same in all layers, without a look at the KV."""
        keys = context.buffers.keys
        return keys[0].new_zeros(len(keys), keys[0].shape[1], len(context.slots), dtype=torch.float32)
