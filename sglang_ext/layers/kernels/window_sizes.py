"""How window_scores.py divides its queries: rows of a matrix product, and blocks of them in a program."""

from dataclasses import dataclass
from functools import lru_cache

import triton

from sglang_ext.layers.kernels.fitting import halves

# Rows of queries at once; blocks of them in one program, whose code has each, and whose shared memory holds them all.
LARGEST_ROWS, MOST_BLOCKS = 128, 4


@dataclass(frozen=True)
class Rows:
    """Sizes of a program's work.

    Attributes:
        rows: of a matrix product with a block of keys, a power of 2 of at least 16.
        blocks: of so many rows, whose means a program adds up.
        stages: of the pipeline that loads keys; None for Triton's own number.
    """

    rows: int
    blocks: int = 1
    stages: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Of a launch."""
        return {"ROWS": self.rows} if self.stages is None else {"ROWS": self.rows, "num_stages": self.stages}


@lru_cache
def row_choices(count: int) -> tuple[Rows, ...]:
    """How programs may share ``count`` rows: those with the fewest partial sums first, then those with smaller tiles."""
    most = min(LARGEST_ROWS, max(16, triton.next_power_of_2(count)))
    blocks = triton.cdiv(count, most)
    together = dict.fromkeys(share for share in (blocks, 2, 1) if share <= min(blocks, MOST_BLOCKS))
    return *(Rows(most, share) for share in together), *(Rows(rows, stages=1) for rows in halves(most))
