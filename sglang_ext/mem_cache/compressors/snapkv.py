"""SnapKV (Li et al. 2024, arXiv 2404.14469): keep what the newest queries attend to."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.mem_cache.compressors.always import Always
from sglang_ext.mem_cache.compressors.base import Compressor, ContextKV, LayerKV, register


@register("snapkv")
@dataclass(frozen=True)
class SnapKV(Compressor):
    """Score each key by the attention of an observation window, pool, keep the best per KV head.

    Scores are the window's mean attention, average-pooled over neighbouring tokens so that kept
    tokens bring their surroundings, then averaged over the query heads of a KV head. The window
    itself, the newest tokens, is always kept.

    Attributes:
        window: newest queries that observe.
        kernel: width of the average pooling, odd, in tokens.
    """

    window: int = 32
    kernel: int = 5
    comparable: ClassVar[bool] = True

    def always(self, context: ContextKV) -> Always:
        """The window."""
        return Always(newest=context.queries.shape[1])

    def scores_all(self, context: ContextKV) -> torch.Tensor:
        """As :meth:`scores` in each layer; on a GPU by a kernel over all layers at once."""
        buffers, window = context.buffers, context.queries.shape[1]
        if not buffers.on_gpu or window == 0 or len(set(buffers.scaling)) > 1:
            return super().scores_all(context)
        from sglang_ext.layers.kernels.window_scores import window_scores

        attention = window_scores(
            context.queries,
            buffers.key_table,
            buffers.keys[0],
            context.slots,
            context.query_positions,
            buffers.scaling[0],
        )
        return self.pooled(attention, window)

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
        return self.pooled(attention.mean(dim=1), window)

    def pooled(self, attention: torch.Tensor, window: int) -> torch.Tensor:
        """Scores from the mean attention, [..., tokens], of so many queries."""
        tokens = attention.shape[-1]
        observed = torch.arange(tokens, device=attention.device) >= tokens - window
        # What the window attends to in itself is no reason to keep what lies before it.
        flat = attention.masked_fill(observed, 0.0).reshape(-1, 1, tokens)
        pooled = torch.nn.functional.avg_pool1d(flat, self.kernel, stride=1, padding=self.kernel // 2)
        return pooled.view_as(attention).masked_fill(observed, float("inf"))
