"""What a context's own n-grams propose: the tokens that followed the newest ones when they came before.

Prompt lookup (Saxena 2023; also SGLang's and vLLM's n-gram drafters), on the device: the newest tokens of a round are
not known to the host. See checked_drafts.py for who checks proposals.
"""

import torch

from sglang_ext.device import to_device

# Of the newest tokens, so many are compared at most; the place where most of them agree is taken.
LONGEST_MATCH = 4


class TokenHistory:
    """The tokens of each running request by position, on the device.

    Attributes:
        tokens: int32 [rows, positions]; what lies beyond a request's newest token is of no use.
    """

    def __init__(self, rows: int, positions: int, device: torch.device):
        self.tokens = torch.zeros(rows, positions, dtype=torch.int32, device=device)

    def begin(self, row: int, tokens: list[int]) -> None:
        """Take the prompt of the request that got ``row``, and its output where it goes on."""
        self.tokens[row, : len(tokens)] = to_device(tokens, self.tokens.device, torch.int32)

    def put(self, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Take ``tokens`` at ``positions``, both int64 [requests, any], of the requests in ``rows``."""
        self.tokens[rows[:, None], positions] = tokens.to(torch.int32)

    def at(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Tokens at ``positions``, int64 [requests, any]: the same shape."""
        return self.tokens[rows[:, None], positions].long()

    def propose(self, rows: torch.Tensor, newest: torch.Tensor, count: int, longest: int) -> torch.Tensor:
        """:func:`propose` for the requests in ``rows``, whose ``newest`` position is below ``longest``."""
        return propose(self.tokens[rows, :longest], newest, count)


def propose(known: torch.Tensor, newest: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` tokens after the newest of each request: int64 [requests, count].

    They are those that followed the latest of the places where most of the newest tokens, up to
    :data:`LONGEST_MATCH`, came before. Where that place is nearer than ``count``, what lies between repeats.

    Args:
        known: int [requests, positions], tokens by position.
        newest: int64 [requests], position of each request's newest token.
        count: tokens to propose.
    """
    columns = torch.arange(known.shape[1], device=known.device)
    alike = torch.ones_like(known, dtype=torch.bool)
    score = torch.where(columns < newest[:, None], columns, -1)
    for back in range(LONGEST_MATCH):
        same = known == known.gather(1, (newest - back).clamp(min=0)[:, None])
        alike[:, back:] &= same[:, : known.shape[1] - back]
        alike[:, :back] = False
        score += (alike & (score >= 0)) * known.shape[1]
    found = score.argmax(1)
    period = (newest - found).clamp(min=1)
    ahead = torch.arange(count, device=known.device) % period[:, None]
    return known.gather(1, (found + 1)[:, None] + ahead).long()
