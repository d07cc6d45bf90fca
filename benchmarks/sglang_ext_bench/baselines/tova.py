"""TOVA: select tokens by the attention of the newest query, equally in all heads of a layer. Oren et al. 2024, arXiv 2401.06104.

    python -m sglang.launch_server ... --kv-mode verified --kv-compressor sglang_ext_bench.baselines.tova:Tova
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.mem_cache.compressors.step_selectors import StepSelector
from sglang_ext.mem_cache.selection.scoring import Scoring, ScoringInputs
from sglang_ext_bench.baselines.true_query import newest_attention


@dataclass(frozen=True)
class TovaScoring(Scoring):
    """Scores by the attention of the newest query, mean over all heads of a layer."""

    name: ClassVar[str] = "tova"

    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """Mean attention, equal for all KV heads of a layer."""
        attention = newest_attention(seen)
        return attention.mean(dim=-2, keepdim=True).expand_as(attention)


@dataclass(frozen=True)
class Tova(StepSelector):
    """Score tokens by the previous step's attention, averaged over a layer's query heads. All its KV heads read the same tokens.

    In the paper a token that is not selected is lost for all later steps. Here it stays in full KV, and can be selected again.
    """

    scoring: ClassVar[TovaScoring] = TovaScoring()
