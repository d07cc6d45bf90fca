"""Select tokens by the attention of the step's own query: the upper limit for predictions of it (AsyncSpade, section 4.1).

    python -m sglang.launch_server ... --kv-mode verified --kv-compressor sglang_ext_bench.baselines.true_query:TrueQuery
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.mem_cache.compressors import LayerKV
from sglang_ext.mem_cache.compressors.step_selectors import StepSelector, attention
from sglang_ext.mem_cache.selection.scoring import group_attention
from sglang_ext_bench.baselines.scoring_inputs import Scoring, ScoringInputs


def newest_attention(seen: ScoringInputs) -> torch.Tensor:
    """Attention of the newest query, unpredicted: float32 [requests, layers, kv_heads, tokens]."""
    return seen.score(seen.queries[..., -1, :], lambda query, keys: group_attention(query, keys, seen.scaling))


@dataclass(frozen=True)
class TrueQueryScoring(Scoring):
    """Scores by the attention of the step's own query, for which each layer waits."""

    name: ClassVar[str] = "true"
    synchronous: ClassVar[bool] = True

    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """Mean attention over the query heads of a KV head."""
        return newest_attention(seen)


@dataclass(frozen=True)
class TrueQuery(StepSelector):
    """Score by the mean attention over the query heads of a KV head, computed in each layer before the step's attention, which waits.

    It reads all keys in each step, as full attention does. It only saves reads of values.
    """

    synchronous: ClassVar[bool] = True

    def query_scores(self, layer: LayerKV) -> torch.Tensor:
        """Mean attention of the newest query over the query heads of a KV head: float32 [kv_heads, tokens]."""
        return attention(layer.queries[-1:], layer.keys, layer.scaling)
