"""How verify_attention.py divides its work: tile sizes, splits of a context, and buffers for partial results."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton

from sglang_ext.layers.kernels.gpu_launch import halvings


@dataclass(frozen=True)
class VerifyTile:
    """Sizes of one program's matrix products.

    Attributes:
        rows: Rows of the first product, a power of 2 of at least 16.
        more_rows: Rows of a second product over the same keys, 0 or a power of 2 of at least 16.
        tokens: Context tokens per step.
        warps: Warps of a program.
        stages: Pipeline stages of the loads of keys and values.
    """

    rows: int
    more_rows: int
    tokens: int
    warps: int
    stages: int


# The sizes of SGLang's grouped decode kernel.
EXACT = VerifyTile(rows=16, more_rows=0, tokens=32, warps=4, stages=2)


def fast_tile(rows: int, key_bytes: int) -> VerifyTile:
    """Tile sizes for ``rows`` rows per request: the fewest programs first, then the fewest padding rows.

    Args:
        rows: New tokens of a request times the query heads that share a KV head.
        key_bytes: Bytes of a key. The keys and values of three steps should take 96 KiB of shared memory. If the GPU has
            too little shared memory left beside the queries, :func:`tile_choices` has smaller sizes.
    """
    tile_choices = ((16, 0), (32, 0), (32, 16), (64, 0), (64, 16), (128, 0), (128, 16))
    first, second = min(tile_choices, key=lambda pair: (-(-rows // sum(pair)), sum(pair)))
    tokens = max(16, min(64, 16384 // triton.next_power_of_2(key_bytes)))
    return VerifyTile(first, second, tokens=tokens, warps=4 if first <= 64 else 8, stages=3)


@lru_cache
def tile_choices(blocks: VerifyTile) -> tuple[VerifyTile, ...]:
    """``blocks``, then sizes that need less and less shared memory. For :data:`EXACT`, only sizes with the same arithmetic."""
    fewer = [replace(blocks, stages=stages) for stages in range(blocks.stages, 0, -1)]
    if blocks == EXACT:
        return tuple(fewer)
    shorter = [replace(fewer[-1], tokens=tokens) for tokens in halvings(blocks.tokens)[1:]]
    least = replace((fewer + shorter)[-1], more_rows=0)
    return *fewer, *shorter, *(replace(least, rows=rows, warps=min(least.warps, 4)) for rows in halvings(blocks.rows))


@dataclass(frozen=True)
class ContextSplits:
    """Number of splits of each row's context.

    Attributes:
        max_splits: Maximum number of splits, that of the longest context.
        tile: Tokens of a split. 0 means :attr:`max_splits` splits for every length.
    """

    max_splits: int
    tile: int = 0

    def count_for(self, lengths: torch.Tensor) -> torch.Tensor:
        """Number of splits for contexts of ``lengths`` tokens: int32, same shape."""
        if self.tile:
            return ((lengths + self.tile - 1) // self.tile).to(torch.int32)
        return torch.full_like(lengths, self.max_splits, dtype=torch.int32)


@dataclass(frozen=True)
class VerifyTokens:
    """The new tokens of each request of a batch.

    Attributes:
        rows: int64 [requests], rows of the token table.
        prefixes: int64 [requests], tokens before the new ones.
        starts: int64 [requests + 1], index of each request's first new token among all new tokens.
        counts: New tokens of each request, on the host.
        ends: int64 [tokens + 1], running sum of the tokens that each new token attends to, from 0.
        parts: int32 [tokens], number of splits of each new token's context.
    """

    rows: torch.Tensor
    prefixes: torch.Tensor
    starts: torch.Tensor
    counts: Sequence[int]
    ends: torch.Tensor
    parts: torch.Tensor


def partial_numbers(query_heads: int, value_dim: int, splits: ContextSplits) -> int:
    """Number of float32 values in one token's partial results."""
    return query_heads * splits.max_splits * (value_dim + 1)


def partial_buffers(
    workspace: torch.Tensor, query_heads: int, value_dim: int, splits: ContextSplits
) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers for the partial outputs and log-sums in ``workspace``, float32 [numbers], for as many tokens as fit.

    Returns:
        float32 [tokens, query_heads, splits, value_dim], and the same shape without the last dimension.
    """
    tokens = len(workspace) // partial_numbers(query_heads, value_dim, splits)
    shape = (tokens, query_heads, splits.max_splits)
    outputs, sums = workspace[: tokens * partial_numbers(query_heads, value_dim, splits)].split(
        (tokens * query_heads * splits.max_splits * value_dim, tokens * query_heads * splits.max_splits)
    )
    return outputs.view(*shape, value_dim), sums.view(shape)


def request_groups(counts: Sequence[int], room: int) -> Iterator[tuple[int, int, int, int]]:
    """Group requests whose tokens fit in ``room`` tokens. Yields first and end request, then first and end token, of each group."""
    first = begin = end = 0
    for index, count in enumerate(counts):
        if index > first and end + count - begin > room:
            yield first, index, begin, end
            first, begin = index, end
        end += count
    if counts:
        yield first, len(counts), begin, end
