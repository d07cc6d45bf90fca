"""Tile sizes of the decode kernels (flash_decoding.py), in order of preference. Later choices need less shared memory."""

from dataclasses import dataclass
from functools import lru_cache

import triton

from sglang_ext.layers.kernels.gpu_launch import halvings

# Maximum number of query rows of a program of four warps. Registers suffice for this many.
MOST_ROWS = 64


@dataclass(frozen=True)
class DecodeTile:
    """Sizes of one program's work.

    Attributes:
        rows: Queries of a KV head, a power of 2.
        tokens: Tokens per step, a power of 2.
        stages: Pipeline stages of the loads.
    """

    rows: int
    tokens: int
    stages: int


@lru_cache
def tile_choices(group: int, most_rows: int, tokens: int, stages: int, fewest_rows: int = 16) -> tuple[DecodeTile, ...]:
    """Tile sizes for ``group`` queries that share a KV head, in order of preference.

    Args:
        group: Queries that share a KV head.
        most_rows: Maximum rows of a program.
        tokens, stages: The preferred values.
        fewest_rows: Minimum rows of a matrix product. Fewer queries are padded to this number.
    """
    rows = min(most_rows, max(fewest_rows, triton.next_power_of_2(group)))
    fewer = [DecodeTile(rows, tokens, stage) for stage in range(stages, 0, -1)]
    smaller = [DecodeTile(less, tokens, 1) for less in halvings(rows, fewest_rows)[1:]]
    return *fewer, *smaller, *(DecodeTile(min(rows, fewest_rows), less, 1) for less in halvings(tokens)[1:])
