"""The query of the next step, predicted from those before it (AsyncSpade, section 4.2 and Algorithm 1; shared specs/asyncspade.md).

Rotary embedding is taken out of queries first, and put back for the next position: that matters more than how they are joined.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressed.rotary import Rotary

# Of zeros alone no system can be solved; far below the square of any query.
LEAST = 1e-12


class QueryPredictor(ABC):
    """Says what the next query will be.

    Attributes:
        name: as ``--kv-select-by`` names it.
        window: newest queries that it reads at most; it takes fewer, from 1 on.
    """

    name: ClassVar[str]
    window: int

    def predict(self, queries: torch.Tensor, positions: torch.Tensor, rotary: Rotary | None, ahead: int = 1) -> torch.Tensor:
        """The query of a position after the newest: float32 [requests, layers, query_heads, dim], rotary embedding applied.

        Args:
            queries: float [requests, layers, query_heads, window, dim], oldest first, rotary embedding applied.
            positions: int64 [requests, window], absolute positions of the queries, ascending; some may be missing between.
            rotary: the embedding that was applied; None to join queries as they are, each turned as at its own position.
            ahead: which one after the newest, from 1.

        Raises:
            ValueError: there is no query.
        """
        if queries.shape[-2] == 0:
            raise ValueError(
                "there are 0 queries in the window; the next is predicted from at least 1: record that of the newest token first"
            )
        newest, positions = queries[..., -self.window :, :].float(), positions[:, -self.window :]
        if rotary is None:
            return self.join(newest)
        plain = rotary.rotated(newest, -positions[:, None, None])
        return rotary.rotated(self.join(plain)[..., None, :], positions[:, None, None, -1:] + ahead).squeeze(-2)

    def head_bytes(self, dim: int) -> int:
        """Bytes that :meth:`predict` works in for a query head with so many channels, about: float32 copies of its window."""
        return 4 * 4 * self.window * dim

    @abstractmethod
    def join(self, queries: torch.Tensor) -> torch.Tensor:
        """The next of ``queries``, float32 [..., 1 to window, dim], oldest first: [..., dim]."""


@dataclass(frozen=True)
class CurrentQuery(QueryPredictor):
    """The next query is the newest one."""

    name: ClassVar[str] = "current"
    window: int = 1

    def predict(self, queries: torch.Tensor, positions: torch.Tensor, rotary: Rotary | None, ahead: int = 1) -> torch.Tensor:
        """Turned on from where it is: once, not back and forth."""
        if rotary is None or queries.shape[-2] == 0:
            return super().predict(queries, positions, rotary, ahead)
        return rotary.advanced(queries[..., -1, :], ahead)

    def join(self, queries: torch.Tensor) -> torch.Tensor:
        """The last."""
        return queries[..., -1, :]


@dataclass(frozen=True)
class RegressedQuery(QueryPredictor):
    """Assembled regression: how the newest query follows from those before it tells how the next one follows from it.

    For each ``k`` from 1 to :attr:`longest`, ridge regression of the newest query on its ``k`` predecessors (equation 2, with
    normalization after it: ``softmax(+G^-1 b)``, where the printed algorithm has it twice, and of the negative). The weights are applied
    to the window moved by one, which includes the newest query (equation 4; the printed slice leaves it out), and the results averaged over
    ``k`` (equation 5).

    Attributes:
        longest: predecessors of the largest window, ``W``.
        ridge: added to the diagonal of ``G``, as a share of the predecessors' mean square, so that what is predicted of larger queries
            is as much larger.
    """

    name: ClassVar[str] = "regressed"
    longest: int = 16
    ridge: float = 1e-2

    @property
    def window(self) -> int:
        """The newest and its predecessors."""
        return self.longest + 1

    def head_bytes(self, dim: int) -> int:
        """With the system, its factor, and the solutions of all windows."""
        return super().head_bytes(dim) + 4 * 6 * self.longest**2

    def join(self, queries: torch.Tensor) -> torch.Tensor:
        """The newest one where it has no predecessor."""
        if queries.shape[-2] == 1:
            return queries[..., 0, :]
        return (self.weights(queries)[..., None, :] @ queries[..., 1:, :]).squeeze(-2)

    def weights(self, queries: torch.Tensor) -> torch.Tensor:
        """Of each but the oldest of ``queries``, float32 [..., count, dim], its weight in the next: [..., count - 1], sum 1.

        Newest first, the system of a window is the first rows and columns of that of the next longer one, and so are their Cholesky
        factors L and what L^-1 makes of the right side: what a window's solution has more than that of the window before is one row
        of L^-1 times one number.
        """
        before, newest = queries[..., :-1, :].flip(-2), queries[..., -1:, :]
        count = before.shape[-2]
        gram, product = before @ before.transpose(-1, -2), before @ newest.transpose(-1, -2)
        ridge = self.ridge * gram.diagonal(dim1=-2, dim2=-1).mean(dim=-1).clamp(min=LEAST)
        gram.diagonal(dim1=-2, dim2=-1).add_(ridge[..., None])
        # The ridge keeps it solvable: whether it was is not asked, for which the host would wait.
        factor = torch.linalg.cholesky_ex(gram).L
        inverse = torch.linalg.solve_triangular(factor, torch.eye(count, device=queries.device).expand_as(gram), upper=False)
        solved = (inverse * (inverse @ product)).cumsum(dim=-2)
        beyond = torch.ones(count, count, dtype=torch.bool, device=queries.device).triu(1)
        return solved.masked_fill(beyond, float("-inf")).softmax(dim=-1).mean(dim=-2).flip(-1)


PREDICTORS: dict[str, type[QueryPredictor]] = {each.name: each for each in (CurrentQuery, RegressedQuery)}
"""By name, the default first."""


def query_predictor(name: str, flag: str = "--kv-select-by") -> QueryPredictor:
    """The predictor of that name; messages name ``flag``.

    Raises:
        OptionError: names the value and what is allowed.
    """
    if name not in PREDICTORS:
        raise OptionError(f"{flag} is {name!r}; allowed: {', '.join(PREDICTORS)}. Pass one of these.")
    return PREDICTORS[name]()
