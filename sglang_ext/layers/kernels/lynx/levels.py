"""What an anchor's codes mean: levels of numbers in [-1, 1] that are finer near 0 (Lynx, Algorithm 1).

A number ``y`` is companded to ``I = F * ln(1 + a |y|) / ln(1 + a)``. An anchor of b bits is its sign and ``V``, the highest b - 1 bits
of I, rounded; the residual takes it from ``V`` to I. With ``F`` the greatest multiple of V's step the extreme of a chunk is exact in the
anchor alone. ``V = 0`` with a sign means a quarter of a step, not 0.
"""

import math
from functools import lru_cache

# a of the companding; 1 to 4 are as good.
CURVE = 2.0


def step(bits: int) -> int:
    """How many values of I share a V, where anchor and residual have 8 bits together."""
    return 2 ** (8 - bits)


def greatest(bits: int) -> int:
    """F: the I of the extremes, 112 for an anchor of 4 bits."""
    return step(bits) * (2 ** (bits - 1) - 1)


def expanded(companded: float, bits: int) -> float:
    """The number in [-1, 1] that a signed I stands for."""
    size = math.expm1(abs(companded) / greatest(bits) * math.log1p(CURVE)) / CURVE
    return math.copysign(size, companded)


@lru_cache(maxsize=None)
def levels(bits: int) -> tuple[float, ...]:
    """What an anchor's codes 0 to ``2 ** bits - 1`` mean, ascending; code ``2 ** (bits - 1)`` is the least positive one."""
    steps = [step(bits) / 4, *(step(bits) * v for v in range(1, 2 ** (bits - 1)))]
    return tuple(expanded(each, bits) for each in [*(-each for each in reversed(steps)), *steps])


@lru_cache(maxsize=None)
def bounds(bits: int) -> tuple[float, ...]:
    """Least numbers of the codes 1 to ``2 ** bits - 1``: a code is the count of bounds that its number reaches."""
    half = [step(bits) * (v - 0.5) for v in range(1, 2 ** (bits - 1))]
    return tuple(expanded(each, bits) for each in [*(-each for each in reversed(half)), 0.0, *half])
