"""Predicts the query of the next step from earlier queries (AsyncSpade, section 4.2 and Algorithm 1; shared specs/asyncspade.md).

Rotary embedding is first removed from queries, and applied again for the next position. That matters more than how queries are joined.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressed.rotary import Rotary

# Lower bound of the ridge, since a system of zeros has no solution; far below the square of any query.
LEAST = 1e-12


class QueryPredictor(ABC):
    """Predicts the next query from at most ``window`` newest ones, and at least 1."""

    name: ClassVar[str]
    window: int

    def predict(self, queries: torch.Tensor, positions: torch.Tensor, rotary: Rotary | None, ahead: int = 1) -> torch.Tensor:
        """Predict the query of a position after the newest: float32 [requests, layers, query_heads, dim], rotary embedding applied.

        Args:
            queries: float [requests, layers, query_heads, window, dim], at least one, oldest first, rotary embedding applied.
            positions: int64 [requests, window], absolute positions of the queries, ascending, possibly with gaps.
            rotary: The rotary embedding that was applied; None to join queries as they are, each rotated to its own position.
            ahead: Distance of the predicted query from the newest, from 1.
        """
        newest, positions = queries[..., -self.window :, :].float(), positions[:, -self.window :]
        if rotary is None:
            return self.join(newest)
        plain = rotary.rotate(newest, -positions[:, None, None])
        return rotary.rotate(self.join(plain)[..., None, :], positions[:, None, None, -1:] + ahead).squeeze(-2)

    def head_bytes(self, dim: int) -> int:
        """Approximate bytes that :meth:`predict` needs per query head of ``dim`` channels: float32 copies of its window."""
        return 4 * 4 * self.window * dim

    @abstractmethod
    def join(self, queries: torch.Tensor) -> torch.Tensor:
        """Compute the next query from ``queries``, float32 [..., 1 to window, dim], oldest first: [..., dim]."""


@dataclass(frozen=True)
class CurrentQuery(QueryPredictor):
    """Predicts that the next query equals the newest one."""

    name: ClassVar[str] = "current"
    window: int = 1

    def predict(self, queries: torch.Tensor, positions: torch.Tensor, rotary: Rotary | None, ahead: int = 1) -> torch.Tensor:
        """Rotate the newest query directly to the new position, in one rotation instead of two."""
        newest = queries[..., -1, :]
        return newest.float() if rotary is None else rotary.rotate_ahead(newest, ahead)

    def join(self, queries: torch.Tensor) -> torch.Tensor:
        return queries[..., -1, :]


@dataclass(frozen=True)
class RegressedQuery(QueryPredictor):
    """Assembled regression: predicts the next query from the newest one as the newest one follows from its predecessors.

    For each ``k`` from 1 to :attr:`longest`, it fits a ridge regression of the newest query on its ``k`` predecessors (equation 2). The
    weights are normalized afterwards: ``softmax(+G^-1 b)``. The printed algorithm normalizes twice, and the negative. The weights are
    applied to the window moved by one, which includes the newest query (equation 4; the printed slice omits it). The results are averaged
    over ``k`` (equation 5).

    Attributes:
        longest: Predecessors in the largest window, ``W``.
        ridge: Added to the diagonal of ``G``, as a share of the predecessors' mean square, so that the prediction scales with the queries.
    """

    name: ClassVar[str] = "regressed"
    longest: int = 16
    ridge: float = 1e-2

    @property
    def window(self) -> int:
        return self.longest + 1

    def head_bytes(self, dim: int) -> int:
        """Bytes including the system, its factor, and the solutions of all windows."""
        return super().head_bytes(dim) + 4 * 6 * self.longest**2

    def join(self, queries: torch.Tensor) -> torch.Tensor:
        """Weighted sum of the queries; the newest one if it has no predecessor."""
        if queries.shape[-2] == 1:
            return queries[..., 0, :]
        return (self.weights(queries)[..., None, :] @ queries[..., 1:, :]).squeeze(-2)

    def weights(self, queries: torch.Tensor) -> torch.Tensor:
        """Weights of all ``queries``, float32 [..., count, dim], but the oldest, in the next query: [..., count - 1], sum 1.

        With the newest predecessor first, the system of each window is the leading block of the system of the next longer one. The same
        holds for the Cholesky factor L and for L^-1 times the right side. A window's solution therefore equals the solution of the
        previous window plus one row of L^-1 times one number.
        """
        before, newest = queries[..., :-1, :].flip(-2), queries[..., -1:, :]
        count = before.shape[-2]
        gram, product = before @ before.transpose(-1, -2), before @ newest.transpose(-1, -2)
        ridge = self.ridge * gram.diagonal(dim1=-2, dim2=-1).mean(dim=-1).clamp(min=LEAST)
        gram.diagonal(dim1=-2, dim2=-1).add_(ridge[..., None])
        # The ridge keeps the system solvable. The error code is not checked, since the host would wait for it.
        factor = torch.linalg.cholesky_ex(gram).L
        inverse = torch.linalg.solve_triangular(factor, torch.eye(count, device=queries.device).expand_as(gram), upper=False)
        solved = (inverse * (inverse @ product)).cumsum(dim=-2)
        beyond = torch.ones(count, count, dtype=torch.bool, device=queries.device).triu(1)
        return solved.masked_fill(beyond, float("-inf")).softmax(dim=-1).mean(dim=-2).flip(-1)


PREDICTORS: dict[str, type[QueryPredictor]] = {each.name: each for each in (CurrentQuery, RegressedQuery)}
"""Predictors by name, the default first."""


def query_predictor(name: str) -> QueryPredictor:
    """Create the predictor of this name.

    Raises:
        OptionError: The name is unknown. The message has the value and the allowed ones.
    """
    if name not in PREDICTORS:
        raise OptionError(f"--kv-select-by is {name!r}; allowed: {', '.join(PREDICTORS)}. Pass one of these.")
    return PREDICTORS[name]()
