"""Keep what the newest verified tokens attend to, chosen anew after each verification: the idea of SparseSpec's PillarAttn
(Zhao et al. 2025, arXiv 2512.01278) and of Vegas (Yue et al. 2026, arXiv 2602.07223)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.mem_cache.compressors.contracts.compressor import Always, Compressor, ContextKV, LayerKV
from sglang_ext.mem_cache.compressors.contracts.registry import register
from sglang_ext.mem_cache.compressors.snapkv import window_attention, window_attention_all


@register("verify-guided")
@dataclass(frozen=True)
class VerifyGuided(Compressor):
    """Score each key, of prompt and answer alike, by the mean attention of the last verified tokens' queries.

    A verification reads full KV anyway, and coming tokens attend to much that those before them did. The mean is over the
    window and the query heads of a KV head. Scores are not smoothed over neighbours as SnapKV's are: what the next few tokens
    need is known better than what all of an answer may need. The newest tokens are always kept.

    Attributes:
        window: newest queries that count.
        recent: newest tokens kept.
    """

    window: int = 32
    recent: int = 32
    each_round: ClassVar[bool] = True
    points: ClassVar[bool] = True

    def always(self, context: ContextKV) -> Always:
        """The newest tokens."""
        return Always(newest=self.recent)

    def scores_all(self, context: ContextKV) -> torch.Tensor:
        """As :meth:`scores` in each layer; on a GPU by a kernel over all layers at once."""
        attention = window_attention_all(context)
        return super().scores_all(context) if attention is None else self._with_recent(attention)

    def scores(self, layer: LayerKV) -> torch.Tensor:
        """Importance of each token: float32 [kv_heads, tokens], infinite for the newest.

        Without any query, newer tokens are more important.
        """
        return self._with_recent(window_attention(layer))

    def _with_recent(self, attention: torch.Tensor) -> torch.Tensor:
        newest = torch.arange(attention.shape[-1], device=attention.device) >= attention.shape[-1] - self.recent
        return attention.masked_fill(newest, float("inf"))
