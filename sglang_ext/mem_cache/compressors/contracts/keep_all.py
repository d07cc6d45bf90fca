"""Every token is kept: what a quantizer selects that is not told to drop any."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_ext.mem_cache.compressors.contracts.compressor import Compressor, ContextKV, LayerKV, Part


@dataclass(frozen=True)
class KeepAll(Compressor):
    """All tokens are alike; with a budget of 1 none is dropped."""

    keeps_all: bool = True

    def scores(self, layer: LayerKV) -> torch.Tensor:
        """Zero for all."""
        tokens, heads = layer.keys.shape[:2]
        return layer.keys.new_zeros(heads, tokens, dtype=torch.float32)

    def select(self, context: ContextKV, parts: Sequence[Part]) -> list[torch.Tensor]:
        """The first of each part, without a look at the KV; with a budget of 1 a part's count is all of them."""
        keys = context.buffers.keys
        starts = torch.zeros(len(keys), keys[0].shape[1], 1, dtype=torch.int64, device=keys[0].device)
        return [starts + torch.arange(part.start, part.start + part.count, device=starts.device) for part in parts]
