"""Into how many parts rows are cut, so that a GPU's multiprocessors are busy to the end."""

from functools import cache

# Programs of one warp that fit a multiprocessor: two in each of its four parts, whose registers are 16,384.
RESIDENT = 8
MOST_PARTS = 128
# Of this many parts of a row one reads exact tokens: those of a context's end are few beside its blocks.
PARTS_TO_AN_EXACT_ONE = 16
# By bits of a code, what a part takes besides reading, over what a whole row takes: found on an H100, 8 and 16 requests of 32,768 tokens.
# Of 2 bits most is computing, which wants all multiprocessors busy; of more it is reading, which a second turn of programs only delays.
OVERHEAD = {2: 0.005, 4: 0.03, 8: 0.03}


@cache
def choose_splits(rows: int, room: int, bits: int) -> tuple[int, int]:
    """Parts of each row's blocks, and of its exact tokens, with which all are read soonest.

    Parts take equally long, so what counts is how many follow each other, and how long one is.

    Args:
        rows: of the batch, KV heads counted.
        room: programs that run at once.
        bits: of a code.
    """

    def time(parts: int) -> float:
        return -(-rows * parts // room) * (1 / (parts - _exact(parts)) + OVERHEAD[bits])

    best = min(range(2, MOST_PARTS + 1), key=time)
    return best - _exact(best), _exact(best)


def _exact(parts: int) -> int:
    return max(1, parts // PARTS_TO_AN_EXACT_ONE)
