"""SnapKV (Li et al. 2024, arXiv 2404.14469): keep what the newest queries attend to."""

from dataclasses import dataclass

import torch

from sglang_ext.mem_cache.compressors.base import Compressor, LayerKV, register


@register("snapkv")
@dataclass(frozen=True)
class SnapKV(Compressor):
    """Score each key by the attention of an observation window, pool, keep the best per KV head.

    Scores are the window's mean attention, average-pooled over neighbouring tokens so that kept
    tokens bring their surroundings, then averaged over the query heads of a KV head. The window
    itself is always kept.

    Attributes:
        window: newest queries that observe.
        kernel: width of the average pooling, odd, in tokens.
    """

    window: int = 32
    kernel: int = 5

    def select(self, layer: LayerKV, count: int) -> torch.Tensor:
        """Top ``count`` tokens of :meth:`scores` for each KV head."""
        kept = self.scores(layer).topk(count, dim=-1).indices
        return kept.sort(dim=-1).values

    def scores(self, layer: LayerKV) -> torch.Tensor:
        """Importance of each token: float32 [kv_heads, tokens], infinite inside the window.

        Without any query, newer tokens are more important.
        """
        tokens, kv_heads, dim = layer.keys.shape
        window, query_heads = layer.queries.shape[:2]
        if window == 0:
            return torch.arange(tokens, device=layer.keys.device).float().expand(kv_heads, -1)
        queries = layer.queries.float().view(window, kv_heads, query_heads // kv_heads, dim)
        logits = torch.einsum("whgd,thd->hgwt", queries, layer.keys.float()) * layer.scaling
        positions = torch.arange(tokens, device=layer.keys.device)
        hidden = positions[None, :] > layer.query_positions[:, None]
        attention = logits.masked_fill(hidden, float("-inf")).softmax(dim=-1).mean(dim=-2)
        pooled = torch.nn.functional.avg_pool1d(
            attention, self.kernel, stride=1, padding=self.kernel // 2
        ).mean(dim=1)
        observed = positions >= layer.query_positions[:1]
        return pooled.masked_fill(observed, float("inf"))
