"""What prediction is compared with, in the same frame: true queries, Quest, TovaScoring, the newest tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.mem_cache.selection.scoring import Scoring, ScoringInputs, group_attention, grouped


def newest_attention(seen: ScoringInputs) -> torch.Tensor:
    """Attention of the newest query as it is, as :func:`~.scoring.group_attention`'s."""
    return group_attention(seen.queries[..., -1, :], seen.keys, seen.scaling, seen.beyond)


@dataclass(frozen=True)
class TrueQueryScoring(Scoring):
    """By the attention of the step's own query: the ceiling, which has to wait for it in each layer."""

    name: ClassVar[str] = "true"
    synchronous: ClassVar[bool] = True

    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """The mean over the query heads of a KV head."""
        return newest_attention(seen)


@dataclass(frozen=True)
class QuestScoring(Scoring):
    """By page: the most that a key within the bounds of the page's keys could give the step's own query.

    Tang et al. 2024, arXiv 2406.10774.

    Attributes:
        page: tokens of a page.
    """

    page: int = 16
    name: ClassVar[str] = "quest"
    synchronous: ClassVar[bool] = True

    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """The mean bound over the query heads of a KV head; all tokens of a page have that of the page."""
        query = grouped(seen.queries[..., -1, :], seen.keys)
        # Whichever bound is larger by channel: negative entries of a query meet the least keys, the others the largest.
        low, high = (self._bounds(seen, fill) for fill in (float("inf"), float("-inf")))
        bound = query.clamp(min=0) @ high.transpose(-1, -2) + query.clamp(max=0) @ low.transpose(-1, -2)
        return bound.mean(dim=-2).repeat_interleave(self.page, dim=-1)[..., : seen.keys.shape[-2]]

    def _bounds(self, seen: ScoringInputs, fill: float) -> torch.Tensor:
        """Least keys of each page for ``fill`` of infinity, largest for its negative: float32 [..., pages, dim]; 0 without tokens."""
        keys, tokens = seen.keys.float(), seen.keys.shape[-2]
        if (beyond := seen.beyond) is not None:
            keys = keys.masked_fill(beyond[..., None], fill)
        missing = -tokens % self.page
        paged = torch.nn.functional.pad(keys, (0, 0, 0, missing), value=fill).unflatten(-2, (-1, self.page))
        found = paged.amin(dim=-2) if fill > 0 else paged.amax(dim=-2)
        return found.masked_fill(found.isinf(), 0.0)


@dataclass(frozen=True)
class TovaScoring(Scoring):
    """By the attention of the newest query, mean over all heads of a layer; what is not kept is gone.

    Oren et al. 2024, arXiv 2401.06104.
    """

    name: ClassVar[str] = "tova"
    permanent: ClassVar[bool] = True

    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """The same for all KV heads of a layer."""
        attention = newest_attention(seen)
        return attention.mean(dim=-2, keepdim=True).expand_as(attention)


@dataclass(frozen=True)
class RecentScoring(Scoring):
    """The newest tokens."""

    name: ClassVar[str] = "recent"

    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """Positions."""
        shape = seen.keys.shape[:-1]
        return torch.arange(shape[-1], dtype=torch.float32, device=seen.keys.device).expand(shape)


BASELINES: tuple[Scoring, ...] = (TrueQueryScoring(), QuestScoring(), TovaScoring(), RecentScoring())
