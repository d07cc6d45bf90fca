"""Scales of chunks inside kernels: mu and sigma, in float16 or in a page's steps. scales.py is the PyTorch version."""

import struct

import triton
import triton.language as tl

from sglang_ext.layers.kernels.lynx.quads import extremes, padded_tokens, load_quads
from sglang_ext.layers.kernels.lynx.tiles import (
    BIAS,
    CHUNK,
    INTEGER,
    LARGEST,
    LEAST,
    MOST,
    ROUNDING,
    SHARE,
    STEPS,
    at_address,
    covers,
    from_pattern,
    rounded_to_integer,
    rounded_up,
    slots_of,
)

# The pattern of ROUNDING times the numbers of a chunk, in the lowest 32 bits.
PATTERNS = tl.constexpr(struct.unpack("<i", struct.pack("<f", ROUNDING.value))[0] * CHUNK.value % 2**32)


@triton.jit(do_not_specialize=("tokens", "sinks"))
def page_gamma(
    sources, anchors, slots, tokens, channels, sinks, gamma_at, STRIDE: tl.constexpr, LIKE: tl.constexpr, QUADS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Compute minimum and step of a page's short scales, for QUADS quads of channels."""
    quad = tl.program_id(0) * QUADS + tl.arange(0, QUADS)
    x, anchor, there = at_address(sources, tl.program_id(1), LIKE), at_address(anchors, tl.program_id(1), tl.uint8), quad < channels // 4
    low0 = tl.full((QUADS,), LARGEST, tl.float32)
    low1, low2, low3, high0, high1, high2, high3 = low0, low0, low0, -low0, -low0, -low0, -low0
    for row in range(0, tl.cdiv(tokens, CHUNK)):
        slot = slots_of(slots, padded_tokens(row, tl.arange(0, CHUNK), tokens, sinks), PTX)
        low, high = extremes(load_quads(x, slot, quad, there[:, None], STRIDE, PTX), LIKE, PTX)
        low0, low1, low2, low3 = tl.minimum(low0, low[0]), tl.minimum(low1, low[1]), tl.minimum(low2, low[2]), tl.minimum(low3, low[3])
        high0, high1 = tl.maximum(high0, high[0]), tl.maximum(high1, high[1])
        high2, high3 = tl.maximum(high2, high[2]), tl.maximum(high3, high[3])
    gamma = (anchor + gamma_at).to(tl.pointer_type(tl.float16)) + 4 * quad
    _store_gamma(gamma, low0, high0, channels, there)
    _store_gamma(gamma + 1, low1, high1, channels, there)
    _store_gamma(gamma + 2, low2, high2, channels, there)
    _store_gamma(gamma + 3, low3, high3, channels, there)


@triton.jit
def _store_gamma(gamma, least, most, channels, there):
    origin = tl.where(least == 0.0, 0.0, least).to(tl.float16)
    start = origin.to(tl.float32)
    spread = tl.maximum(most - start, start - least)
    step = rounded_up(tl.div_rn(spread, tl.zeros_like(spread) + STEPS))
    tl.store(gamma, origin, mask=there)
    tl.store(gamma + channels, step.to(tl.int16).to(tl.float16, bitcast=True), mask=there)


@triton.jit
def _mean(x, size):
    """Means of chunks, float32 [quads]. ``size`` is the largest absolute value of each. Equals scales.py where ``size`` is finite."""
    exponent = tl.minimum(tl.maximum(size.to(tl.int32, bitcast=True) >> 23, LEAST), MOST)
    grow = ((-exponent + (2 * BIAS + INTEGER - 1)) << 23).to(tl.float32, bitcast=True)
    shrink = ((exponent - (INTEGER - 1 + SHARE)) << 23).to(tl.float32, bitcast=True)
    # The pattern of ROUNDING plus an integer is the pattern of ROUNDING, plus the integer.
    total = tl.sum((x * grow[:, None] + ROUNDING).to(tl.int32, bitcast=True), 1) - PATTERNS
    return total.to(tl.float32) * shrink


@triton.jit
def find_scales(x, low, high, row, channel, there, anchor, channels, gamma_at, mu_at, sigma_at, SHORT: tl.constexpr):
    """Compute the scales of a row's chunks, float32 [quads], and store them in the anchor. Also returns whether they cover the chunks."""
    place = row * channels + channel
    means = _mean(x, tl.maximum(tl.abs(low), tl.abs(high)))
    sound = (low >= -LARGEST) & (high <= LARGEST)
    if SHORT:
        gamma = (anchor + gamma_at).to(tl.pointer_type(tl.float16)) + channel
        origin = tl.load(gamma, mask=there, other=0).to(tl.float32)
        step = tl.load(gamma + channels, mask=there, other=0).to(tl.float32)
        steps = tl.where(step > 0, step, 1.0)
        # Rounded to nearest, ties to even. The quotient of a covered page has few bits before the point.
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
        pattern += tl.where(covers(mu, from_pattern(pattern), low, high), 0, 1)
        sigma = from_pattern(pattern)
        tl.store((anchor + mu_at).to(tl.pointer_type(tl.float16)) + place, half, mask=there)
        tl.store((anchor + sigma_at).to(tl.pointer_type(tl.int16)) + place, pattern.to(tl.int16), mask=there)
    return mu, sigma, (sound & (sigma <= LARGEST) & covers(mu, sigma, low, high)) | ~there
