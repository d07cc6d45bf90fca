"""The interface of scores by which tokens are selected for one step, for several contexts."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.selection.scoring import top_tokens


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
    rotary: Rotary | None = None
    lengths: torch.Tensor | None = None

    def score(self, query: torch.Tensor, scores: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Call ``scores`` with the query, [requests, layers, query_heads, dim], and the keys of each context. Places without a token score 0."""
        if self.lengths is None:
            return scores(query, self.keys)
        tokens, found = self.keys.shape[-2], []
        for i, length in enumerate(self.lengths.tolist()):
            own = scores(query[i, None], self.keys[i, None, :, :, :length])
            found.append(torch.nn.functional.pad(own, (0, tokens - length)))
        return torch.cat(found)

    def select(self, scores: torch.Tensor, count: int, sinks: int = 0, newest: int = 0) -> torch.Tensor:
        """The tokens of each context that :func:`top_tokens` selects by ``scores``: int64 [requests, layers, kv_heads, count]."""
        if self.lengths is None:
            return top_tokens(scores, count, sinks, newest)
        own = (scores[i, None, ..., :length] for i, length in enumerate(self.lengths.tolist()))
        return torch.cat([top_tokens(each, count, sinks, newest) for each in own])


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
