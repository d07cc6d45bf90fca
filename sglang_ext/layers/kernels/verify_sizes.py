"""How verify_attention.py divides its work: blocks of a matrix product, parts of a context, and room for what the parts give."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class Blocks:
    """Sizes of a program's matrix products.

    Attributes:
        rows: rows of the first product, a power of 2 of at least 16.
        more_rows: rows of a second one over the same keys, 0 or a power of 2 of at least 16.
        tokens: tokens of the context in a step.
        warps: of a program.
        stages: of the pipeline that loads keys and values.
    """

    rows: int
    more_rows: int
    tokens: int
    warps: int
    stages: int


# Those of SGLang's grouped decode kernel.
EXACT = Blocks(rows=16, more_rows=0, tokens=32, warps=4, stages=2)


def fast_blocks(rows: int, key_bytes: int) -> Blocks:
    """Blocks for ``rows`` rows a request: fewest programs, then fewest rows that are padding.

    Args:
        rows: new tokens of a request times the query heads that share a KV head.
        key_bytes: bytes of a key; three steps' keys and values lie in shared memory, 96 KiB.
    """
    choices = ((16, 0), (32, 0), (32, 16), (64, 0), (64, 16), (128, 0), (128, 16))
    first, second = min(choices, key=lambda pair: (-(-rows // sum(pair)), sum(pair)))
    tokens = max(16, min(64, 16384 // triton.next_power_of_2(key_bytes)))
    return Blocks(first, second, tokens=tokens, warps=4 if first <= 64 else 8, stages=3)


@dataclass(frozen=True)
class Splits:
    """How many parts each row's context is split into.

    Attributes:
        most: parts at most, of the longest context.
        tile: tokens of a part, 0 for :attr:`most` parts whatever the length.
    """

    most: int
    tile: int = 0

    def of(self, lengths: torch.Tensor) -> torch.Tensor:
        """Parts of contexts of ``lengths`` tokens: int32, same shape."""
        if self.tile:
            return ((lengths + self.tile - 1) // self.tile).to(torch.int32)
        return torch.full_like(lengths, self.most, dtype=torch.int32)


@dataclass(frozen=True)
class Tokens:
    """The new tokens of each request.

    Attributes:
        rows: int64 [requests], rows of the token table.
        prefixes: int64 [requests], tokens before the new ones.
        starts: int64 [requests + 1], first of each request's new tokens among all.
        counts: new tokens of each request, on the host.
        ends: int64 [tokens + 1], running sum of the tokens that each new token attends to, from 0.
        parts: int32 [tokens], parts of each new token's context.
    """

    rows: torch.Tensor
    prefixes: torch.Tensor
    starts: torch.Tensor
    counts: Sequence[int]
    ends: torch.Tensor
    parts: torch.Tensor


def partial_numbers(query_heads: int, value_dim: int, splits: Splits) -> int:
    """float32 numbers of one token's partial results."""
    return query_heads * splits.most * (value_dim + 1)


def partial_buffers(
    workspace: torch.Tensor, query_heads: int, value_dim: int, splits: Splits
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the parts' outputs and log-sums in ``workspace``, float32 [numbers], for as many tokens as fit.

    Returns:
        float32 [tokens, query_heads, parts, value_dim], and the same without the last dimension.
    """
    tokens = len(workspace) // partial_numbers(query_heads, value_dim, splits)
    shape = (tokens, query_heads, splits.most)
    outputs, sums = workspace[: tokens * partial_numbers(query_heads, value_dim, splits)].split(
        (tokens * query_heads * splits.most * value_dim, tokens * query_heads * splits.most)
    )
    return outputs.view(*shape, value_dim), sums.view(shape)
