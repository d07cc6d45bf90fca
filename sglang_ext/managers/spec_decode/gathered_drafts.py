"""Drafts that wait for their verification: they stay on the device, by row of the token table."""

import torch


class GatheredDrafts:
    """The drafts of each row since its last verification.

    Attributes:
        tokens: int64 [rows, longest]; who drafts knows how many of a row's count (``RequestState.gathered``).
    """

    def __init__(self, rows: int, longest: int, device: torch.device):
        self.tokens = torch.zeros(rows, longest, dtype=torch.int64, device=device)

    def newest(self, rows: torch.Tensor, counts: torch.Tensor, bonus: torch.Tensor) -> torch.Tensor:
        """The last draft of each of ``rows``, or where it has none, its ``bonus``; all int64 [requests]."""
        last = self.tokens[rows, (counts - 1).clamp(min=0)]
        return torch.where(counts > 0, last, bonus)

    def put(self, rows: torch.Tensor, counts: torch.Tensor, drafts: torch.Tensor) -> None:
        """Keep ``drafts``, int64 [requests, drafts], behind the ``counts`` that each of ``rows`` has."""
        places = counts[:, None] + torch.arange(drafts.shape[1], device=counts.device)
        self.tokens[rows[:, None], places] = drafts

    def of(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """The first ``count`` drafts of each of ``rows``: int64 [requests, count]."""
        return self.tokens[rows, :count]
