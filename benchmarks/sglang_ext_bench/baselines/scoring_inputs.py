"""The interface of scores by which tokens are selected for one step, for several contexts."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

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
    rotary: Rotary | None = None
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
