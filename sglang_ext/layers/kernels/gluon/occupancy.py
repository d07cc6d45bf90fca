"""Number of splits per row, chosen so that a GPU's multiprocessors are busy to the end."""

from functools import cache

# Programs of one warp per multiprocessor: two in each of its four partitions, which have 16,384 registers.
RESIDENT = 8
MOST_PARTS = 128
# One of this many splits of a row reads exact tokens, because a context's exact tokens are few compared to its blocks.
PARTS_TO_AN_EXACT_ONE = 16
# Fixed cost of a split relative to the time of a whole row, by bits of a code. Measured on an H100 with 8 and 16 requests of 32,768 tokens.
# With 2 bits, time is mostly computation, which needs all multiprocessors. With more bits it is reading, which a second wave only delays.
OVERHEAD = {2: 0.005, 4: 0.03, 8: 0.03}


@cache
def choose_splits(rows: int, room: int, bits: int) -> tuple[int, int]:
    """Numbers of splits of each row's blocks, and of its exact tokens, with the shortest total time.

    All splits take the same time. The total depends on the number of waves and the duration of a split.

    Args:
        rows: Rows of the batch, times KV heads.
        room: Programs that run at the same time.
        bits: Bits of a code.
    """

    def time(parts: int) -> float:
        return -(-rows * parts // room) * (1 / (parts - _exact(parts)) + OVERHEAD[bits])

    best = min(range(2, MOST_PARTS + 1), key=time)
    return best - _exact(best), _exact(best)


def _exact(parts: int) -> int:
    return max(1, parts // PARTS_TO_AN_EXACT_ONE)
