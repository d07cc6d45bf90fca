"""Values of codes: levels in [-1, 1], denser near 0 (Lynx, Algorithm 1), and the bounds between them.

A number ``y`` is companded to ``I = round(F * ln(1 + a |y|) / ln(1 + a))``, which has 8 bits with its sign. An anchor of b bits is
the sign and ``V = (I + 2 ** (r - 1) - 1) >> r``, the highest b - 1 bits of I, rounded. The residual, of r = 8 - b bits, restores I from V.
``F`` is the greatest multiple of V's step, so that the anchor alone represents the extreme of a chunk exactly. ``V = 0`` with a sign
means a quarter of a step, not 0.

Levels and bounds have 13 significant bits, so that their products with a float16 are exact in float32. Therefore a product and a sum
round the same on every device, whether the compiler fuses them into one instruction or not.
"""

import math
from functools import lru_cache

# Bits of anchor and residual together.
BITS = 8
# Bits of an anchor.
ANCHORS = (2, 3, 4)
# Parameter a of the companding. All values from 1 to 4 are equally good.
CURVE = 2.0
# Significant bits of a level: the 24 of float32 less the 11 of float16.
SIGNIFICANT = 13


def level_step(bits: int) -> int:
    """Number of values of I that share one V, for an anchor of ``bits``."""
    return 2 ** (BITS - bits)


def max_level(bits: int) -> int:
    """F: the I of the extremes, 112 for an anchor of 4 bits."""
    return level_step(bits) * (2 ** (bits - 1) - 1)


def expand_level(companded: float, bits: int) -> float:
    """The number in [0, 1] that corresponds to an I, rounded to 13 significant bits."""
    size = math.expm1(companded / max_level(bits) * math.log1p(CURVE)) / CURVE
    mantissa, exponent = math.frexp(size)
    return math.ldexp(round(mantissa * 2**SIGNIFICANT), exponent - SIGNIFICANT)


@lru_cache(maxsize=None)
def fine_levels(bits: int) -> tuple[float, ...]:
    """Levels of I, from 0 to F."""
    return tuple(expand_level(i, bits) for i in range(max_level(bits) + 1))


@lru_cache(maxsize=None)
def fine_bounds(bits: int) -> tuple[float, ...]:
    """Lower bounds of I, from 0 to F. The bound of 0 is 0."""
    return (0.0, *(expand_level(i - 0.5, bits) for i in range(1, max_level(bits) + 1)))


@lru_cache(maxsize=None)
def levels(bits: int) -> tuple[float, ...]:
    """Levels of an anchor's codes 0 to ``2 ** bits - 1``, ascending. Code ``2 ** (bits - 1)`` is the smallest positive one."""
    size = level_step(bits)
    steps = [expand_level(size / 4, bits), *(expand_level(size * v, bits) for v in range(1, 2 ** (bits - 1)))]
    return (*(-each for each in reversed(steps)), *steps)


@lru_cache(maxsize=None)
def bounds(bits: int) -> tuple[float, ...]:
    """Lower bounds of an anchor's codes, and the end of the last: ``2 ** bits + 1`` numbers from -1 to 1."""
    size = level_step(bits)
    ends = [*(fine_bounds(bits)[size * v - size // 2 + 1] for v in range(1, 2 ** (bits - 1))), 1.0]
    return (*(-each for each in reversed(ends)), 0.0, *ends)
