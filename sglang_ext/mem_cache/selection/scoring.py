"""How much each KV head needs each token in the next step: scores by its query, predicted or true.

One batched product serves all kinds of heads (AsyncSpade, section 4.3 and Figure 8): the query heads of a KV head are the rows of a
matrix, one where each head has its own keys (MHA), all where heads share them (MQA).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.selection.predictors import QueryPredictor


@dataclass(frozen=True)
class ScoringInputs:
    """What is known of some contexts when tokens are chosen for a step.

    Attributes:
        queries: float [requests, layers, query_heads, window, dim], the newest, oldest first, rotary embedding applied. The last is that of
            the step before; where scores are :attr:`Scoring.synchronous`, the step's own.
        positions: int64 [requests, window], of the queries, ascending; some may be missing between.
        keys: float [requests, layers, kv_heads, tokens, dim], rotary embedding applied.
        scaling: factor on query-key products before softmax.
        rotary: the embedding that was applied; None where queries are joined as they are.
        lengths: int64 [requests], tokens of each context; None where all fill ``keys``.
    """

    queries: torch.Tensor
    positions: torch.Tensor
    keys: torch.Tensor
    scaling: float
    rotary: Rotary | None = None
    lengths: torch.Tensor | None = None

    @property
    def beyond(self) -> torch.Tensor | None:
        """Which places of ``keys`` are no token's: bool [requests, 1, 1, tokens]; None for none."""
        if self.lengths is None:
            return None
        return (torch.arange(self.keys.shape[-2], device=self.keys.device) >= self.lengths[:, None])[:, None, None]


class Scoring(ABC):
    """Scores tokens for a step.

    Attributes:
        name: in tables.
        synchronous: whether it waits for the step's own query.
        permanent: whether what it does not choose is gone for all later steps.
    """

    name: ClassVar[str]
    synchronous: ClassVar[bool] = False
    permanent: ClassVar[bool] = False

    @abstractmethod
    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """float32 [requests, layers, kv_heads, tokens], more for what is read first; those of places that are no token's say nothing."""


@dataclass(frozen=True)
class PredictedScoring(Scoring):
    """By the attention of the predicted query: what AsyncSpade selects by."""

    predictor: QueryPredictor

    @property
    def name(self) -> str:
        """That of the predictor."""
        return self.predictor.name

    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """The mean over the query heads of a KV head."""
        predicted = self.predictor.predict(seen.queries, seen.positions, seen.rotary)
        return group_attention(predicted, seen.keys, seen.scaling, seen.beyond)


def group_attention(
    queries: torch.Tensor, keys: torch.Tensor, scaling: float, beyond: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of one query of each head to all tokens, mean over the query heads of a KV head.

    Args:
        queries: float32 [requests, layers, query_heads, dim].
        keys, scaling, beyond: as :class:`ScoringInputs`'s.

    Returns:
        float32 [requests, layers, kv_heads, tokens]; 0 where no token is.
    """
    logits = grouped(queries, keys) @ keys.float().transpose(-1, -2) * scaling
    if beyond is not None:
        logits = logits.masked_fill(beyond[..., None, :], float("-inf"))
    return logits.softmax(dim=-1).mean(dim=-2)


def grouped(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Queries, float [..., query_heads, dim], by KV head: float32 [..., kv_heads, query heads of each, dim].

    Args:
        keys: [..., kv_heads, tokens, dim].

    Raises:
        ValueError: query heads cannot be shared out evenly.
    """
    heads, kv_heads = queries.shape[-2], keys.shape[-3]
    if heads % kv_heads:
        raise ValueError(
            f"there are {heads} query heads; allowed: a multiple of the {kv_heads} KV heads. Pass the heads of one rank, all of them"
        )
    return queries.float().unflatten(-2, (kv_heads, heads // kv_heads))
