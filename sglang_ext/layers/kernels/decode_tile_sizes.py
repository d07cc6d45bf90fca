"""Tile sizes of decode kernels over rows of two kinds (flash_decoding.py): first those preferred, then those that take less room."""

from dataclasses import dataclass
from functools import lru_cache

import triton

from sglang_ext.layers.kernels.gpu_launch import halvings

# Queries that share a KV head and are read together by programs of four warps, at most: registers suffice for so many.
MOST_ROWS = 64


@dataclass(frozen=True)
class DecodeTile:
    """Sizes of a program's work.

    Attributes:
        rows: queries of a KV head, a power of 2.
        tokens: of a step, a power of 2.
        stages: of the pipeline that loads a step's.
    """

    rows: int
    tokens: int
    stages: int


@lru_cache
def tile_choices(group: int, most_rows: int, tokens: int, stages: int, fewest_rows: int = 16) -> tuple[DecodeTile, ...]:
    """Choices for ``group`` queries that share a KV head.

    Args:
        group: queries.
        most_rows: of a program.
        tokens, stages: those preferred.
        fewest_rows: of a matrix product, which fewer are filled up to.
    """
    rows = min(most_rows, max(fewest_rows, triton.next_power_of_2(group)))
    fewer = [DecodeTile(rows, tokens, stage) for stage in range(stages, 0, -1)]
    smaller = [DecodeTile(less, tokens, 1) for less in halvings(rows, fewest_rows)[1:]]
    return *fewer, *smaller, *(DecodeTile(min(rows, fewest_rows), less, 1) for less in halvings(tokens)[1:])
