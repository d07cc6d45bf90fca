"""Scores of how much each KV head needs each token in the next step, by the step's predicted query, or by its own.

One batched product serves all attention types (AsyncSpade, section 4.3 and Figure 8). The query heads of a KV head are the rows of a
matrix. It has one row if each head has its own keys (MHA), and all rows if heads share keys (MQA).

:func:`top_tokens` selects the tokens with the highest scores, and always the first and the newest.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressed.rotary import Rotary


@dataclass(frozen=True)
class ScoringInputs:
    """Input of a selection for one step, for several contexts.

    Attributes:
        queries: float [requests, layers, query_heads, window, dim], the newest, oldest first, rotary embedding applied. The last one is of
            the previous step; with :attr:`Scoring.synchronous`, of the step itself.
        positions: int64 [requests, window], positions of the queries, ascending, possibly with gaps.
        keys: float [requests, layers, kv_heads, tokens, dim], rotary embedding applied.
        scaling: Factor on query-key products before softmax.
        rotary: The rotary embedding that was applied; None if queries are joined as they are.
        lengths: int64 [requests], tokens of each context; None if all contexts fill ``keys``.
    """

    queries: torch.Tensor
    positions: torch.Tensor
    keys: torch.Tensor
    scaling: float
    rotary: "Rotary | None" = None
    lengths: torch.Tensor | None = None

    @property
    def beyond(self) -> torch.Tensor | None:
        """Mask of the places of ``keys`` without a token: bool [requests, 1, 1, tokens]; None if all have one."""
        if self.lengths is None:
            return None
        return (torch.arange(self.keys.shape[-2], device=self.keys.device) >= self.lengths[:, None])[:, None, None]


class Scoring(ABC):
    """Scores tokens for a step.

    Attributes:
        name: Name in tables.
        synchronous: Whether it waits for the step's own query.
    """

    name: ClassVar[str]
    synchronous: ClassVar[bool] = False

    @abstractmethod
    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """Scores, float32 [requests, layers, kv_heads, tokens]; higher ones are read first. Places without a token have any score."""


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


def group_attention(
    queries: torch.Tensor, keys: torch.Tensor, scaling: float, beyond: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of one query per head to all tokens, mean over the query heads of a KV head.

    Args:
        queries: float32 [requests, layers, query_heads, dim].
        keys, scaling, beyond: As in :class:`ScoringInputs`.

    Returns:
        float32 [requests, layers, kv_heads, tokens]; 0 for places without a token.
    """
    logits = grouped(queries, keys) @ keys.float().transpose(-1, -2) * scaling
    if beyond is not None:
        logits = logits.masked_fill(beyond[..., None, :], float("-inf"))
    return logits.softmax(dim=-1).mean(dim=-2)


def grouped(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Group queries, float [..., query_heads, dim], by KV head: float32 [..., kv_heads, query heads per KV head, dim].

    Args:
        queries: The queries.
        keys: [..., kv_heads, tokens, dim].

    Raises:
        ValueError: The number of query heads is not a multiple of the number of KV heads.
    """
    heads, kv_heads = queries.shape[-2], keys.shape[-3]
    if heads % kv_heads:
        raise ValueError(
            f"there are {heads} query heads; allowed: a multiple of the {kv_heads} KV heads. Pass the heads of one rank, all of them"
        )
    return queries.float().unflatten(-2, (kv_heads, heads // kv_heads))


def mark_always(scores: torch.Tensor, sinks: int, newest: int, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """Set the scores of each context's first and newest tokens to infinity, and of places without a token to minus infinity.

    Args:
        scores: float32 [requests, ..., tokens].
        sinks, newest: Number of first and of newest tokens.
        lengths: int64 [requests], tokens of each context; None if all have as many as there are scores.
    """
    tokens = scores.shape[-1]
    places = torch.arange(tokens, device=scores.device)
    if lengths is None:
        return scores.masked_fill((places < sinks) | (places >= tokens - newest), float("inf"))
    ends = lengths.view(-1, *(1,) * (scores.dim() - 1))
    marked = scores.masked_fill((places < sinks) | (places >= ends - newest), float("inf"))
    return marked.masked_fill(places >= ends, float("-inf"))


def top_tokens(scores: torch.Tensor, count: int, sinks: int, newest: int, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """Positions that each KV head reads: int64 [requests, layers, kv_heads, count], ascending.

    Args:
        scores: float32 [requests, layers, kv_heads, tokens].
        count: Tokens that a head reads.
        sinks, newest: First and newest tokens that all heads read, up to ``count``.
        lengths: As in :func:`mark_always`. The host does not read it, so that callers must handle contexts shorter than ``count``.

    Raises:
        ValueError: ``count`` is below 1 or above the number of tokens.
    """
    tokens = scores.shape[-1]
    if not 1 <= count <= tokens:
        raise ValueError(
            f"{count} tokens are to be selected; allowed: 1 to the {tokens} of the context. Select fewer, or read the context whole"
        )
    return mark_always(scores, sinks, newest, lengths).topk(count, dim=-1).indices.sort(dim=-1).values
