"""A compressor of one's own: keep keys of small norm (Devoto et al. 2024, arXiv 2406.11430).

    python -m sglang.launch_server ... --kv-mode verified --kv-compressor examples/key_norm.py:KeyNorm
"""

from dataclasses import dataclass

import torch

from sglang_ext.mem_cache.compressors import Always, Compressor, ContextKV, LayerKV


@dataclass(frozen=True)
class KeyNorm(Compressor):
    """Keys of small norm draw much attention; the newest tokens are always kept.

    Attributes:
        recent: newest tokens kept.
    """

    recent: int = 16

    def always(self, context: ContextKV) -> Always:
        """The newest tokens."""
        return Always(newest=self.recent)

    def scores(self, layer: LayerKV) -> torch.Tensor:
        """The negated norms, float32 [kv_heads, tokens]; infinite for the newest tokens."""
        norms = layer.keys.float().norm(dim=-1).t().contiguous()
        norms[:, max(0, norms.shape[1] - self.recent) :] = -float("inf")
        return -norms
