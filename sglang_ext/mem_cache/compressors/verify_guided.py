"""Keep the tokens that the newest verified tokens attend to, selected again after each verification.

The idea is that of SparseSpec's PillarAttn (Zhao et al. 2025, arXiv 2512.01278) and of Vegas (Yue et al. 2026, arXiv 2602.07223).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.mem_cache.compressors.contracts.compressor import Always, Compressor, ContextKV, LayerKV
from sglang_ext.mem_cache.compressors.contracts.registry import register
from sglang_ext.mem_cache.compressors.snapkv import window_attention, window_attention_all


@register("verify-guided")
@dataclass(frozen=True)
class VerifyGuided(Compressor):
    """Score each key, of prompt and output alike, by the mean attention of the last verified tokens' queries.

    A verification reads full KV anyway, and new tokens attend to many of the tokens that the previous ones attended to. The mean is over
    the window and the query heads of a KV head. Scores are not pooled over neighbours as SnapKV's are: the needs of the next few tokens
    are known better than those of a whole output. The newest tokens are always kept.

    Attributes:
        window: Number of newest queries that are used.
        recent: Newest tokens kept.
    """

    window: int = 32
    recent: int = 32
    each_round: ClassVar[bool] = True
    points: ClassVar[bool] = True

    def always(self, context: ContextKV) -> Always:
        """The newest tokens."""
        return Always(newest=self.recent)

    def scores_all(self, context: ContextKV) -> torch.Tensor:
        """:meth:`scores` of each layer; on a GPU by one kernel over all layers."""
        attention = window_attention_all(context)
        return super().scores_all(context) if attention is None else self._with_recent(attention)

    def scores(self, layer: LayerKV) -> torch.Tensor:
        """Importance of each token: float32 [kv_heads, tokens], infinite for the newest.

        Without any query, newer tokens have higher scores.
        """
        return self._with_recent(window_attention(layer))

    def _with_recent(self, attention: torch.Tensor) -> torch.Tensor:
        newest = torch.arange(attention.shape[-1], device=attention.device) >= attention.shape[-1] - self.recent
        return attention.masked_fill(newest, float("inf"))
