"""Blocks made whole, inside Triton kernels: codes by levels, outliers beside them, keys with rotary embedding at their positions.

A tile holds channels in pairs: the first channels of the pairs, and the second ones in another tile. Keys are paired as rotary
embedding turns them together, and the channels that it leaves alone with one another; values by halves of the head.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from sglang_ext.mem_cache.compressors.odd_polynomial import odd_polynomial
from sglang_ext.mem_cache.compressors.quantizer import Quantizer

# A float32 whose lowest bits are a small integer, and that integer more.
MAGIC_BITS, MAGIC = tl.constexpr(0x4B000000), tl.constexpr(8388608.0)
# Of steps of a turn, those of a circle in radians.
RADIANS = tl.constexpr(6.283185307179586 / 2**32)
# Largest difference between levels and the polynomial through them, of their range; a step between float16 is 5e-4 of a number.
LEVEL_ERROR = 1e-5


@lru_cache(maxsize=None)
def polynomial(packs: Quantizer, dim: int) -> tuple[float, float, float, float]:
    """What codes mean, as ``a + u * (b + u ** 2 * (c + u ** 2 * d))`` of twice a code's distance ``u`` from the middle one.

    A few products are faster than a table, which each number would read.

    Raises:
        ValueError: the levels are not so, as they are not symmetrical.
    """
    last = 2**packs.bits - 1
    levels = packs.levels(dim)
    if levels is None:
        return last / 2, 0.5, 0.0, 0.0
    levels, middle = levels.double(), float(levels[0] + levels[-1]) / 2
    codes = torch.arange(-last, last + 1, 2, dtype=torch.float64) / last
    found = odd_polynomial(codes, levels - middle, LEVEL_ERROR * float(levels[-1] - levels[0]))
    return middle, *(part / last ** (2 * power + 1) for power, part in enumerate(found))


@triton.jit
def cell(pointer, slots, index, slot_step, CELL: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Where number ``FIRST + index``, ``index`` below COUNT, of what lies in the cells of ``slots`` is; CELL numbers in each."""
    if FIRST // CELL == (FIRST + COUNT - 1) // CELL:
        return pointer + tl.load(slots + FIRST // CELL).to(tl.int64) * slot_step + (FIRST % CELL + index)
    else:
        return pointer + tl.load(slots + (FIRST + index) // CELL).to(tl.int64) * slot_step + (FIRST + index) % CELL


@triton.jit
def at_most(index, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """What pads COUNT numbers to PADDED is read as the last one."""
    return index if COUNT == PADDED else tl.minimum(index, COUNT - 1)


@triton.jit
def first_channel(pair, DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Of each pair of ``DIM`` channels, of which the first ``2 * PAIRS`` turn."""
    if INTERLEAVED:
        return tl.where(pair < PAIRS, 2 * pair, PAIRS + pair)
    else:
        return pair if 2 * PAIRS == DIM else tl.where(pair < PAIRS, pair, PAIRS + pair)


@triton.jit
def second_channel(pair, DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """As :func:`first_channel`."""
    if INTERLEAVED:
        return tl.where(pair < PAIRS, 2 * pair + 1, DIM // 2 + pair)
    else:
        return DIM // 2 + pair if 2 * PAIRS == DIM else tl.where(pair < PAIRS, PAIRS + pair, DIM // 2 + pair)


@triton.jit
def other_channel(channel, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The one that a channel turns with; itself, where it does not turn."""
    other = channel ^ 1 if INTERLEAVED else tl.where(channel < PAIRS, channel + PAIRS, channel - PAIRS)
    return tl.where(channel < 2 * PAIRS, other, channel)


@triton.jit
def cosine_and_sine(position, steps, FAST: tl.constexpr):
    """Of the angles at which ``position`` times ``steps`` of a turn are; both int32, broadcast."""
    # What overflows are whole turns.
    angle = (position.to(tl.int64) * steps).to(tl.int32).to(tl.float32) * RADIANS
    if FAST:
        cosine = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1)
        sine = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1)
        return cosine, sine
    else:
        return tl.cos(angle), tl.sin(angle)


@triton.jit
def _pair_of(numbers, slots, index, slot_numbers, CELL: tl.constexpr, COUNT: tl.constexpr):
    """Scales and zero points of groups ``index``, of COUNT: float32."""
    scale = tl.load(cell(numbers, slots, index, slot_numbers, CELL, 0, COUNT))
    zero = tl.load(cell(numbers, slots, index, slot_numbers, CELL, COUNT, COUNT))
    return scale.to(tl.float32), zero.to(tl.float32)


@triton.jit
def scales_and_zeros(
    numbers, slots, token, channel, slot_numbers, CELL: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    SHARING: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Of a tile of a block's tokens and channels: float32 of two axes, of size 1 where a tile has one number along it.

    Args:
        numbers: the head's first cell, as float16.
        slots: of the block's cells after those of codes.
        slot_numbers: numbers from one slot to the next, CELL of them in a cell.
        SHARING, CHANNELS: tokens and channels that share a scale.
        GROUP: of channels, in which all of the tile are; -1 where they are in several.
    """
    COUNT: tl.constexpr = TOKENS // SHARING * (DIM // CHANNELS)
    # What scales a tile is loaded without the tile's other axis, or Triton would arrange the tile by it.
    if SHARING == TOKENS and GROUP < 0:
        scale, zero = _pair_of(numbers, slots, channel // CHANNELS, slot_numbers, CELL, COUNT)
        return scale[None, :], zero[None, :]
    elif GROUP >= 0:
        index = token // SHARING * (DIM // CHANNELS) + GROUP
        scale, zero = _pair_of(numbers, slots, index, slot_numbers, CELL, COUNT)
        return scale[:, None], zero[:, None]
    else:
        index = (token // SHARING * (DIM // CHANNELS))[:, None] + (channel // CHANNELS)[None, :]
        return _pair_of(numbers, slots, index, slot_numbers, CELL, COUNT)


@triton.jit
def meant(raw, channel, scale, zero, middle, linear, cubic, fifth, BITS: tl.constexpr, PART: tl.constexpr):
    """What the codes of ``channel`` in ``raw``, the bytes that hold them, mean: float32; middle to fifth: a polynomial's."""
    LAST: tl.constexpr = (1 << BITS) - 1
    twice = ((raw.to(tl.int32) << 1) >> (channel // PART * BITS)[None, :]) & (2 * LAST)
    far = (twice | MAGIC_BITS).to(tl.float32, bitcast=True) - (MAGIC + LAST)
    square = far * far
    return far * (linear + square * (cubic + square * fifth)) * scale + (zero + middle * scale)


@triton.jit
def outliers(
    places, numbers, slots, slot_numbers, CELL: tl.constexpr, FIRST: tl.constexpr, DIM: tl.constexpr, COUNT: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Of each outlier of a block its token, its channel, and what its code lacks; of those that pad them -1, some channel, and 0.

    Args:
        places, numbers: the head's first cell, as int16 and as float16.
        slots, slot_numbers, CELL: as :func:`scales_and_zeros` has them.
        FIRST: numbers of the block before the places.
    """
    number = tl.arange(0, PADDED)
    index = at_most(number, COUNT, PADDED)
    place = tl.load(cell(places, slots, index, slot_numbers, CELL, FIRST, COUNT)).to(tl.int32)
    excess = tl.load(cell(numbers, slots, index, slot_numbers, CELL, FIRST + COUNT, COUNT)).to(tl.float32)
    there = number < COUNT
    return tl.where(there, place // DIM, -1), place % DIM, tl.where(there, excess, 0.0)
