"""Baselines of query prediction with the interface of predictions: true queries, Quest, TOVA, the newest tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.mem_cache.selection.scoring import QuestScoring, Scoring, ScoringInputs
from sglang_ext_bench.baselines.tova import TovaScoring
from sglang_ext_bench.baselines.true_query import TrueQueryScoring


@dataclass(frozen=True)
class RecentScoring(Scoring):
    """Scores by position: selects the newest tokens."""

    name: ClassVar[str] = "recent"

    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """The positions."""
        shape = seen.keys.shape[:-1]
        return torch.arange(shape[-1], dtype=torch.float32, device=seen.keys.device).expand(shape)


BASELINES: tuple[Scoring, ...] = (TrueQueryScoring(), QuestScoring(), TovaScoring(), RecentScoring())
