"""How verify_attention.py divides its work: blocks of a matrix product, parts of a context, and room for what the parts give."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton

from sglang_ext.layers.kernels.gpu_launch import halvings


@dataclass(frozen=True)
class VerifyTile:
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
EXACT = VerifyTile(rows=16, more_rows=0, tokens=32, warps=4, stages=2)


def fast_tile(rows: int, key_bytes: int) -> VerifyTile:
    """Blocks for ``rows`` rows a request: fewest programs, then fewest rows that are padding.

    Args:
        rows: new tokens of a request times the query heads that share a KV head.
        key_bytes: bytes of a key; three steps' keys and values are to take 96 KiB of shared memory. Where the GPU has too
            little beside the queries, :func:`tile_choices` has smaller ones.
    """
    tile_choices = ((16, 0), (32, 0), (32, 16), (64, 0), (64, 16), (128, 0), (128, 16))
    first, second = min(tile_choices, key=lambda pair: (-(-rows // sum(pair)), sum(pair)))
    tokens = max(16, min(64, 16384 // triton.next_power_of_2(key_bytes)))
    return VerifyTile(first, second, tokens=tokens, warps=4 if first <= 64 else 8, stages=3)


@lru_cache
def tile_choices(blocks: VerifyTile) -> tuple[VerifyTile, ...]:
    """``blocks``, and what takes less and less shared memory; of :data:`EXACT` what has the same arithmetic."""
    fewer = [replace(blocks, stages=stages) for stages in range(blocks.stages, 0, -1)]
    if blocks == EXACT:
        return tuple(fewer)
    shorter = [replace(fewer[-1], tokens=tokens) for tokens in halvings(blocks.tokens)[1:]]
    least = replace((fewer + shorter)[-1], more_rows=0)
    return *fewer, *shorter, *(replace(least, rows=rows, warps=min(least.warps, 4)) for rows in halvings(blocks.rows))


@dataclass(frozen=True)
class ContextSplits:
    """How many parts each row's context is split into.

    Attributes:
        max_splits: parts at most, of the longest context.
        tile: tokens of a part, 0 for :attr:`max_splits` parts whatever the length.
    """

    max_splits: int
    tile: int = 0

    def count_for(self, lengths: torch.Tensor) -> torch.Tensor:
        """Parts of contexts of ``lengths`` tokens: int32, same shape."""
        if self.tile:
            return ((lengths + self.tile - 1) // self.tile).to(torch.int32)
        return torch.full_like(lengths, self.max_splits, dtype=torch.int32)


@dataclass(frozen=True)
class VerifyTokens:
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


def partial_numbers(query_heads: int, value_dim: int, splits: ContextSplits) -> int:
    """float32 numbers of one token's partial results."""
    return query_heads * splits.max_splits * (value_dim + 1)


def partial_buffers(
    workspace: torch.Tensor, query_heads: int, value_dim: int, splits: ContextSplits
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the parts' outputs and log-sums in ``workspace``, float32 [numbers], for as many tokens as fit.

    Returns:
        float32 [tokens, query_heads, parts, value_dim], and the same without the last dimension.
    """
    tokens = len(workspace) // partial_numbers(query_heads, value_dim, splits)
    shape = (tokens, query_heads, splits.max_splits)
    outputs, sums = workspace[: tokens * partial_numbers(query_heads, value_dim, splits)].split(
        (tokens * query_heads * splits.max_splits * value_dim, tokens * query_heads * splits.max_splits)
    )
    return outputs.view(*shape, value_dim), sums.view(shape)


def request_groups(counts: Sequence[int], room: int) -> Iterator[tuple[int, int, int, int]]:
    """Requests whose tokens fit together: first, one past the last, and the same of their tokens."""
    first = begin = end = 0
    for index, count in enumerate(counts):
        if index > first and end + count - begin > room:
            yield first, index, begin, end
            first, begin = index, end
        end += count
    if counts:
        yield first, len(counts), begin, end
