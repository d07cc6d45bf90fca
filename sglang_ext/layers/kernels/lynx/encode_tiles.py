"""Kernels that write anchor streams, and residuals of 8 bits; plain.py says the same in PyTorch.

A program has PAIRS pairs of channels of a row of chunks, numbers as [pairs, 32 tokens] of the even channels and of the odd ones: a
thread has both channels of its pair, and all tokens, so that means and extremes ask no other thread, and a byte of codes is one's own.
"""

import math

import triton
import triton.language as tl
from numpy.polynomial import Polynomial

from sglang_ext.layers.kernels.lynx import plain
from sglang_ext.layers.kernels.lynx.levels import CURVE, fine_bounds, greatest
from sglang_ext.layers.kernels.lynx.tiles import (
    CHUNK,
    LARGEST,
    STEPS,
    at_address,
    covers,
    load_pair,
    mean,
    of_pattern,
    rounded_to_integer,
    rounded_up,
    store_pair_codes,
)

CLEAR = tl.constexpr(plain.CLEAR)
# Of I and its sign as one number n from -F to F; one of n is ZERO.
COUNT, ZERO = 256, tl.constexpr(128)
# Added to a small float32 leaves 2 * (ZERO + n) in its lowest 9 bits, halves rounded.
HALVES = tl.constexpr(1.5 * 2**22 + ZERO.value)
# No number of a chunk is so many sigmas from its mean.
BEYOND = 2.0
# Of I / F, off by a tenth of a step at most from 0 to 1, and 0 at 0; a quarter would do.
_SIZES = [(1 + math.cos(math.pi * (k + 0.5) / 64)) / 2 for k in range(64)]
_SLOPES = [math.log1p(CURVE * size) / math.log1p(CURVE) / size for size in _SIZES]
C1, C2, C3, C4 = (tl.constexpr(float(each)) for each in Polynomial.fit(_SIZES, _SLOPES, 3, w=_SIZES).convert().coef)


def edges(bits: int) -> tuple[float, ...]:
    """Least numbers of n + 1 in sigmas from mu, by n + ZERO: a bin begins where the next of less size ends."""
    most, of = greatest(bits), fine_bounds(bits)
    positive = of[1:] + (BEYOND,) * (COUNT - ZERO.value - most)
    negative = [-of[i] for i in range(most, 0, -1)]
    return (*(-BEYOND,) * (ZERO.value - most), *negative, *positive)


@triton.jit
def _filled(row, place, tokens, sinks):
    """Tokens of a row of chunks: in the places of sinks, and of what is beyond the page, others (plain.py)."""
    token = row * CHUNK + place
    first, last = tl.maximum(row * CHUNK, sinks), tl.minimum(row * CHUNK + CHUNK, tokens)
    token = tl.where((token >= first) & (token < last), token, first + place % tl.maximum(last - first, 1))
    return tl.minimum(token, tokens - 1)


@triton.jit
def _load_filled(x, slots, slot_stride, row, pair, there, tokens, sinks):
    """Their numbers, float32 [pairs, 32] twice."""
    place = tl.arange(0, CHUNK)
    token = row * CHUNK + place
    if (row * CHUNK < sinks) | (row * CHUNK + CHUNK > tokens):
        token = _filled(row, place, tokens, sinks)
    even, odd = load_pair(x, slots, slot_stride, token, pair, there[:, None])
    return even.to(tl.float32), odd.to(tl.float32)


@triton.jit(do_not_specialize=("tokens", "sinks"))
def page_gamma(
    sources, anchors, slots, slot_stride, tokens, channels, sinks, gamma_at, LIKE: tl.constexpr, PAIRS: tl.constexpr
):
    """Least number and step of a page's short scales, of PAIRS pairs of channels."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    x, anchor, there = at_address(sources, tl.program_id(1), LIKE), at_address(anchors, tl.program_id(1), tl.uint8), pair < channels // 2
    low, high = tl.full((PAIRS, CHUNK), LARGEST, tl.float32), tl.full((PAIRS, CHUNK), -LARGEST, tl.float32)
    low_odd, high_odd = low, high
    for row in range(0, tl.cdiv(tokens, CHUNK)):
        even, odd = _load_filled(x, slots, slot_stride, row, pair, there, tokens, sinks)
        low, high, low_odd, high_odd = tl.minimum(low, even), tl.maximum(high, even), tl.minimum(low_odd, odd), tl.maximum(high_odd, odd)
    gamma = (anchor + gamma_at).to(tl.pointer_type(tl.float16)) + 2 * pair
    _store_gamma(gamma, tl.min(low, 1), tl.max(high, 1), channels, there)
    _store_gamma(gamma + 1, tl.min(low_odd, 1), tl.max(high_odd, 1), channels, there)


@triton.jit
def _store_gamma(gamma, least, most, channels, there):
    origin = tl.where(least == 0.0, 0.0, least).to(tl.float16)
    start = origin.to(tl.float32)
    spread = tl.maximum(most - start, start - least)
    step = rounded_up(tl.div_rn(spread, tl.zeros_like(spread) + STEPS))
    tl.store(gamma, origin, mask=there)
    tl.store(gamma + channels, step.to(tl.int16).to(tl.float16, bitcast=True), mask=there)


@triton.jit
def _find_scales(x, row, channel, there, anchor, channels, gamma_at, mu_at, sigma_at, SHORT: tl.constexpr):
    """Scales of a row's chunks, float32 [pairs], written into the anchor; and whether they cover the chunks."""
    place = row * channels + channel
    low, high = tl.min(x, 1), tl.max(x, 1)
    means = mean(x, tl.maximum(tl.abs(low), tl.abs(high)))
    sound = (low >= -LARGEST) & (high <= LARGEST) & (tl.abs(means) <= 2 * LARGEST)
    if SHORT:
        gamma = (anchor + gamma_at).to(tl.pointer_type(tl.float16)) + channel
        origin = tl.load(gamma, mask=there, other=0).to(tl.float32)
        step = tl.load(gamma + channels, mask=there, other=0).to(tl.float32)
        steps = tl.where(step > 0, step, 1.0)
        # To the nearest, ties to even; the quotient of a page that is covered has few bits before the point.
        quotient = tl.minimum(tl.maximum(tl.div_rn(means - origin, steps), 0.0), 255.0)
        away = tl.where(step > 0, rounded_to_integer(quotient), 0.0)
        mu = origin + step * away
        reach = tl.div_rn(tl.maximum(high - mu, mu - low), steps)
        far = tl.where(step > 0, tl.ceil(tl.minimum(tl.maximum(reach, 0.0), 255.0)), 0.0)
        enough = covers(mu, (step * far).to(tl.float16).to(tl.float32), low, high)
        far = tl.minimum(far + tl.where(enough, 0.0, 1.0), 255.0)
        sigma = (step * far).to(tl.float16).to(tl.float32)
        tl.store(anchor + mu_at + place, away.to(tl.int32).to(tl.uint8), mask=there)
        tl.store(anchor + sigma_at + place, far.to(tl.int32).to(tl.uint8), mask=there)
    else:
        half = means.to(tl.float16)
        mu = half.to(tl.float32)
        pattern = rounded_up(tl.maximum(high - mu, mu - low))
        pattern += tl.where(covers(mu, of_pattern(pattern), low, high), 0, 1)
        sigma = of_pattern(pattern)
        tl.store((anchor + mu_at).to(tl.pointer_type(tl.float16)) + place, half, mask=there)
        tl.store((anchor + sigma_at).to(tl.pointer_type(tl.int16)) + place, pattern.to(tl.int16), mask=there)
    return mu, sigma, (sound & (sigma <= LARGEST) & covers(mu, sigma, low, high)) | ~there


@triton.jit
def _reached(x, mu, sigma, bounds, place):
    return x >= mu[:, None] + tl.load(bounds + place) * sigma[:, None]


@triton.jit
def _estimated(x, mu, sigma, bounds, GREATEST: tl.constexpr):
    """n + ZERO, int32 [pairs, 32]: an estimate is this or one less."""
    grow = 1.0 / sigma
    y = x * grow[:, None] + (-mu * grow)[:, None]
    size = tl.abs(y)
    scaled = ((size * (C4 * GREATEST) + C3 * GREATEST) * size + C2 * GREATEST) * size + C1 * GREATEST
    least = ((y * scaled + HALVES).to(tl.int32, bitcast=True) & 0x1FE) >> 1
    return least + tl.where(_reached(x, mu, sigma, bounds, least), 1, 0)


@triton.jit
def _searched(x, mu, sigma, bounds, GREATEST: tl.constexpr):
    """The same where an estimate may be off by more."""
    found = tl.zeros_like(x).to(tl.int32)
    power = ZERO
    while power > 0:
        more = found + power
        reached = _reached(x, mu, sigma, bounds, more - 1)
        found = tl.where(reached & (more <= ZERO + GREATEST), more, found)
        power = power >> 1
    return found


@triton.jit
def _split(n, above, BITS: tl.constexpr):
    """A code, and what takes it to n, from n + ZERO and whether numbers are not below mu; higher bits mean nothing."""
    REST: tl.constexpr = 8 - BITS
    # Code and rest together, of numbers below mu; above, where rests run the other way, codes go on.
    both = n + tl.where(above, (1 << (REST - 1)) - 1, -(1 << (REST - 1)))
    return both >> REST, both ^ tl.where(above, (1 << REST) - 1, 0)


@triton.jit
def _store_few(
    x, y, mu, sigma, mu_odd, sigma_odd, bounds, codes, rests, token, inside, begin, channels, tokens, BITS: tl.constexpr,
    GREATEST: tl.constexpr, PAIRS: tl.constexpr, SEARCHED: tl.constexpr,
):  # fmt: skip
    """Codes of even and odd channels, and with ``rests`` what is left of n; SEARCHED where an estimate may be off."""
    if SEARCHED:
        n, n_odd = _searched(x, mu, sigma, bounds, GREATEST), _searched(y, mu_odd, sigma_odd, bounds, GREATEST)
    else:
        n, n_odd = _estimated(x, mu, sigma, bounds, GREATEST), _estimated(y, mu_odd, sigma_odd, bounds, GREATEST)
    code, rest = _split(n, x >= mu[:, None], BITS)
    code_odd, rest_odd = _split(n_odd, y >= mu_odd[:, None], BITS)
    store_pair_codes(code, code_odd, codes, token, inside, begin, channels, tokens, BITS, PAIRS)
    if rests is not None:
        store_pair_codes(rest, rest_odd, rests, token, inside, begin, channels, tokens, 8 - BITS, PAIRS)


@triton.jit(do_not_specialize=("tokens", "sinks"))
def encode_tiles(
    sources, anchors, residuals, slots, bounds, slot_stride, tokens, channels, sinks, gamma_at, mu_at, sigma_at, sinks_at, codes_at,
    LIKE: tl.constexpr, BITS: tl.constexpr, GREATEST: tl.constexpr, SHORT: tl.constexpr, PAIRS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """A row of chunks of PAIRS pairs of channels of a part: anchor, and without ``residuals=None`` the residual of 8 bits.

    The first byte of an anchor stream, 0 before, becomes 1 where scales do not cover a chunk.
    """
    row, part, begin = tl.program_id(0), tl.program_id(2), tl.program_id(1) * PAIRS
    token, pair = row * CHUNK + tl.arange(0, CHUNK), begin + tl.arange(0, PAIRS)
    source, anchor, there = at_address(sources, part, LIKE), at_address(anchors, part, tl.uint8), pair < channels // 2
    if row * CHUNK < sinks:
        exact = (token < sinks)[None, :] & there[:, None]
        even, odd = load_pair(source, slots, slot_stride, tl.minimum(token, tokens - 1), pair, exact)
        place = (anchor + sinks_at).to(tl.pointer_type(LIKE)) + (token * channels)[None, :] + 2 * pair[:, None]
        tl.store(place, even, mask=exact)
        tl.store(place + 1, odd, mask=exact)
    x, y = _load_filled(source, slots, slot_stride, row, pair, there, tokens, sinks)
    mu, sigma, sound = _find_scales(x, row, 2 * pair, there, anchor, channels, gamma_at, mu_at, sigma_at, SHORT)
    mu_odd, sigma_odd, sound_odd = _find_scales(y, row, 2 * pair + 1, there, anchor, channels, gamma_at, mu_at, sigma_at, SHORT)
    tl.store(anchor, tl.full((), 1, tl.uint8), mask=tl.min(tl.where(sound & sound_odd, 1, 0), 0) == 0)
    rests = residuals if residuals is None else at_address(residuals, part, tl.uint8)
    clear = (sigma > tl.abs(mu) * CLEAR) & (sigma_odd > tl.abs(mu_odd) * CLEAR) | ~there
    # Read again, of the cache, a few tokens at a time: registers that a chunk does not take hold more programs.
    if (tl.min(tl.where(clear, 1, 0), 0) > 0) & (row * CHUNK >= sinks) & (row * CHUNK + CHUNK <= tokens):
        for place in range(0, CHUNK, FEW):
            few = row * CHUNK + place + tl.arange(0, FEW)
            even, odd = load_pair(source, slots, slot_stride, few, pair, there[:, None])
            _store_few(
                even.to(tl.float32), odd.to(tl.float32), mu, sigma, mu_odd, sigma_odd, bounds, anchor + codes_at, rests, few,
                there[:, None], begin, channels, tokens, BITS, GREATEST, PAIRS, SEARCHED=False,
            )  # fmt: skip
    else:
        for place in range(0, CHUNK, FEW):
            few = place + tl.arange(0, FEW)
            even, odd = load_pair(source, slots, slot_stride, _filled(row, few, tokens, sinks), pair, there[:, None])
            _store_few(
                even.to(tl.float32), odd.to(tl.float32), mu, sigma, mu_odd, sigma_odd, bounds, anchor + codes_at, rests,
                row * CHUNK + few, (row * CHUNK + few < tokens)[None, :] & there[:, None], begin, channels, tokens, BITS, GREATEST,
                PAIRS, SEARCHED=True,
            )  # fmt: skip
