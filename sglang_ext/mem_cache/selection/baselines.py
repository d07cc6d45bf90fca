"""Baselines of query prediction, with the same interface: true queries, Quest, TOVA, the newest tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.mem_cache.selection.scoring import Scoring, ScoringInputs, group_attention, grouped


def newest_attention(seen: ScoringInputs) -> torch.Tensor:
    """Attention of the newest query, unpredicted, shaped as :func:`~.scoring.group_attention`'s."""
    return group_attention(seen.queries[..., -1, :], seen.keys, seen.scaling, seen.beyond)


@dataclass(frozen=True)
class TrueQueryScoring(Scoring):
    """Scores by the attention of the step's own query: the upper limit, which must wait for that query in each layer."""

    name: ClassVar[str] = "true"
    synchronous: ClassVar[bool] = True

    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """Mean attention over the query heads of a KV head."""
        return newest_attention(seen)


@dataclass(frozen=True)
class QuestScoring(Scoring):
    """Scores by page: the upper bound of the product of the page's keys with the step's own query.

    Tang et al. 2024, arXiv 2406.10774.

    Attributes:
        page: Tokens of a page.
    """

    page: int = 16
    name: ClassVar[str] = "quest"
    synchronous: ClassVar[bool] = True

    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """Mean bound over the query heads of a KV head. All tokens of a page have the page's bound."""
        query = grouped(seen.queries[..., -1, :], seen.keys)
        # The larger bound per channel: negative entries of a query are multiplied with the smallest keys, others with the largest.
        low, high = (self._bounds(seen, fill) for fill in (float("inf"), float("-inf")))
        bound = query.clamp(min=0) @ high.transpose(-1, -2) + query.clamp(max=0) @ low.transpose(-1, -2)
        return bound.mean(dim=-2).repeat_interleave(self.page, dim=-1)[..., : seen.keys.shape[-2]]

    def _bounds(self, seen: ScoringInputs, fill: float) -> torch.Tensor:
        """Smallest keys of each page if ``fill`` is infinity, largest if it is -infinity: float32 [..., pages, dim]; 0 without tokens."""
        keys, tokens = seen.keys.float(), seen.keys.shape[-2]
        if (beyond := seen.beyond) is not None:
            keys = keys.masked_fill(beyond[..., None], fill)
        missing = -tokens % self.page
        paged = torch.nn.functional.pad(keys, (0, 0, 0, missing), value=fill).unflatten(-2, (-1, self.page))
        found = paged.amin(dim=-2) if fill > 0 else paged.amax(dim=-2)
        return found.masked_fill(found.isinf(), 0.0)


@dataclass(frozen=True)
class TovaScoring(Scoring):
    """Scores by the attention of the newest query, mean over all heads of a layer. Tokens that are not kept are lost.

    Oren et al. 2024, arXiv 2401.06104.
    """

    name: ClassVar[str] = "tova"
    permanent: ClassVar[bool] = True

    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """Mean attention, equal for all KV heads of a layer."""
        attention = newest_attention(seen)
        return attention.mean(dim=-2, keepdim=True).expand_as(attention)


@dataclass(frozen=True)
class RecentScoring(Scoring):
    """Scores by position: selects the newest tokens."""

    name: ClassVar[str] = "recent"

    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """The positions."""
        shape = seen.keys.shape[:-1]
        return torch.arange(shape[-1], dtype=torch.float32, device=seen.keys.device).expand(shape)


BASELINES: tuple[Scoring, ...] = (TrueQueryScoring(), QuestScoring(), TovaScoring(), RecentScoring())
