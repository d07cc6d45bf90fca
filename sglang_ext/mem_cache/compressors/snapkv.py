"""SnapKV (Li et al. 2024, arXiv 2404.14469): keep the tokens that the newest queries attend to."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.mem_cache.compressors.contracts.compressor import Always, Compressor, ContextKV, LayerKV
from sglang_ext.mem_cache.compressors.contracts.registry import register


@register("snapkv")
@dataclass(frozen=True)
class SnapKV(Compressor):
    """Score each key by the attention of an observation window, pool the scores, and keep the highest per KV head.

    Scores are the window's mean attention, average-pooled over neighbouring tokens so that kept tokens include their surroundings, then
    averaged over the query heads of a KV head. The window itself, the newest tokens, is always kept.

    Attributes:
        window: Newest queries, which form the observation window.
        kernel: Width of the average pooling, odd, in tokens.
    """

    window: int = 32
    kernel: int = 5
    comparable: ClassVar[bool] = True

    def always(self, context: ContextKV) -> Always:
        """The window."""
        return Always(newest=context.queries.shape[1])

    def scores_all(self, context: ContextKV) -> torch.Tensor:
        """:meth:`scores` of each layer; on a GPU by one kernel over all layers."""
        attention = window_attention_all(context)
        return super().scores_all(context) if attention is None else self.pooled(attention, context.queries.shape[1])

    def scores(self, layer: LayerKV) -> torch.Tensor:
        """Importance of each token: float32 [kv_heads, tokens], infinite inside the window.

        Without any query, newer tokens have higher scores.
        """
        attention, window = window_attention(layer), len(layer.queries)
        return self.pooled(attention, window) if window else attention

    def pooled(self, attention: torch.Tensor, window: int) -> torch.Tensor:
        """Scores from the mean attention, [..., tokens], of ``window`` queries."""
        tokens = attention.shape[-1]
        observed = torch.arange(tokens, device=attention.device) >= tokens - window
        # The window's attention to itself is excluded: it must not raise the scores of tokens just before it.
        flat = attention.masked_fill(observed, 0.0).reshape(-1, 1, tokens)
        pooled = torch.nn.functional.avg_pool1d(flat, self.kernel, stride=1, padding=self.kernel // 2)
        return pooled.view_as(attention).masked_fill(observed, float("inf"))


def window_attention(layer: LayerKV) -> torch.Tensor:
    """Mean attention of a layer's newest queries to each token, over the queries and the query heads of a KV head.

    Returns:
        float32 [kv_heads, tokens]; the tokens' positions if there is no query.
    """
    tokens, kv_heads, dim = layer.keys.shape
    window, query_heads = layer.queries.shape[:2]
    positions = torch.arange(tokens, device=layer.keys.device)
    if window == 0:
        return positions.float().expand(kv_heads, -1)
    queries = layer.queries.float().view(window, kv_heads, query_heads // kv_heads, dim)
    logits = torch.einsum("whgd,thd->hgwt", queries, layer.keys.float()) * layer.scaling
    hidden = positions[None, :] > layer.query_positions[:, None]
    return logits.masked_fill(hidden, float("-inf")).softmax(dim=-1).mean(dim=-2).mean(dim=1)


def window_attention_all(context: ContextKV) -> torch.Tensor | None:
    """:func:`window_attention` of all layers at once, on a GPU: float32 [layers, kv_heads, tokens]; None if no kernel supports it."""
    buffers = context.buffers
    if not buffers.on_gpu or context.queries.shape[1] == 0 or len(set(buffers.scaling)) > 1:
        return None
    from sglang_ext.layers.kernels.key_scores import window_scores

    place = buffers.key_table, buffers.keys[0], context.slots
    return window_scores(context.queries, *place, context.query_positions, buffers.scaling[0])
