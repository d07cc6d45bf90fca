"""Scores by predicted queries, and baselines with the same interface: true queries, Quest, TOVA, the newest tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.mem_cache.compressors.step_selectors import Quest
from sglang_ext.mem_cache.selection.predictors import QueryPredictor
from sglang_ext.mem_cache.selection.scoring import group_attention, page_scores
from sglang_ext_bench.baselines.scoring_inputs import Scoring, ScoringInputs
from sglang_ext_bench.baselines.tova import TovaScoring
from sglang_ext_bench.baselines.true_query import TrueQueryScoring


@dataclass(frozen=True)
class PredictedScoring(Scoring):
    """Scores by the attention of the predicted query, as AsyncSpade does."""

    predictor: QueryPredictor

    @property
    def name(self) -> str:
        """Name of the predictor."""
        return self.predictor.name

    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """Mean attention over the query heads of a KV head."""
        predicted = self.predictor.predict(seen.queries, seen.positions, seen.rotary)
        return seen.score(predicted, lambda query, keys: group_attention(query, keys, seen.scaling))


@dataclass(frozen=True)
class QuestScoring(Scoring):
    """Scores pages by the step's own query, as Quest does."""

    page: int = Quest.page
    name: ClassVar[str] = "quest"
    synchronous: ClassVar[bool] = True

    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """The bounds of the pages."""
        return seen.score(seen.queries[..., -1, :], lambda query, keys: page_scores(query, keys, self.page))


@dataclass(frozen=True)
class RecentScoring(Scoring):
    """Scores by position: selects the newest tokens."""

    name: ClassVar[str] = "recent"

    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """The positions."""
        shape = seen.keys.shape[:-1]
        return torch.arange(shape[-1], dtype=torch.float32, device=seen.keys.device).expand(shape)


BASELINES: tuple[Scoring, ...] = (TrueQueryScoring(), QuestScoring(), TovaScoring(), RecentScoring())


def overlap(chosen: torch.Tensor, others: torch.Tensor, tokens: int) -> torch.Tensor:
    """Share of ``chosen`` that is also in ``others``, by head (equation 1 of AsyncSpade): float32 [...].

    Args:
        chosen, others: int64 [..., count], distinct positions below ``tokens``.
        tokens: Tokens of the context.
    """
    among = torch.zeros(*others.shape[:-1], tokens, dtype=torch.bool, device=others.device).scatter_(-1, others, True)
    return among.gather(-1, chosen).float().mean(dim=-1)
