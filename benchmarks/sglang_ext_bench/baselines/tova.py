"""TOVA: select tokens by the attention of the newest query, equally in all heads of a layer. Oren et al. 2024, arXiv 2401.06104.

    python -m sglang.launch_server ... --kv-mode verified --kv-compressor sglang_ext_bench.baselines.tova:Tova
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.mem_cache.compressors import LayerKV
from sglang_ext.mem_cache.compressors.step_selectors import StepSelector, attention
from sglang_ext_bench.baselines.scoring_inputs import Scoring, ScoringInputs
from sglang_ext_bench.baselines.true_query import newest_attention


@dataclass(frozen=True)
class TovaScoring(Scoring):
    """Scores by the attention of the newest query, mean over all heads of a layer."""

    name: ClassVar[str] = "tova"

    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """Mean attention, equal for all KV heads of a layer."""
        found = newest_attention(seen)
        return found.mean(dim=-2, keepdim=True).expand_as(found)


@dataclass(frozen=True)
class Tova(StepSelector):
    """Score tokens by the previous step's attention, averaged over a layer's query heads. All its KV heads read the same tokens.

    In the paper a token that is not selected is lost for all later steps. Here it stays in full KV, and can be selected again.
    """

    def query_scores(self, layer: LayerKV) -> torch.Tensor:
        """Mean attention of the newest query, equal for all KV heads: float32 [kv_heads, tokens]."""
        found = attention(layer.queries[-1:], layer.keys, layer.scaling)
        return found.mean(dim=0, keepdim=True).expand_as(found)
