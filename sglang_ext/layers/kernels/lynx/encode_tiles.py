"""Kernels that write anchor streams, and residuals of 8 bits; plain.py says the same in PyTorch."""

import math

import triton
import triton.language as tl
from numpy.polynomial import Chebyshev, Polynomial

from sglang_ext.layers.kernels.lynx import plain
from sglang_ext.layers.kernels.lynx.levels import CURVE
from sglang_ext.layers.kernels.lynx.tiles import (
    CHUNK,
    LARGEST,
    ROUNDING,
    STEPS,
    buffer,
    covers,
    mean,
    of_pattern,
    rounded_up,
    store_codes,
    stream,
)

CLEAR = tl.constexpr(plain.CLEAR)
# Bounds that kernels are given, 2.0 beyond that of F: an estimate has 7 bits.
EDGES = 129


def _companded(size):
    return [math.log1p(CURVE * each) / math.log1p(CURVE) for each in size]


# Of I / F, off by less than a fiftieth of a step from 0 to 1. A compiler does not contract constants' products.
C0, C1, C2, C3, C4, C5 = (
    tl.constexpr(float(each)) for each in Chebyshev.interpolate(_companded, 5, (0, 1)).convert(kind=Polynomial).coef
)


@triton.jit
def load_page(x, slots, slot_stride, token, channel, tokens, channels):
    """Numbers of tokens of a page, of the pool's dtype, 0 beyond it."""
    source = token.to(tl.int64)
    if slots is not None:
        source = tl.load(slots + token, mask=token < tokens, other=0)
    inside = (token < tokens)[:, None] & (channel < channels)[None, :]
    return tl.load(x + source[:, None] * slot_stride + channel[None, :], mask=inside, other=0)


@triton.jit
def _load_filled(x, slots, slot_stride, row, channel, tokens, channels, sinks):
    """Numbers of a row of chunks, float32 [32, channels]: in place of sinks and of what is beyond the page others (plain.py)."""
    place = tl.arange(0, CHUNK)
    first, last = tl.maximum(row * CHUNK, sinks), tl.minimum(row * CHUNK + CHUNK, tokens)
    token = row * CHUNK + place
    token = tl.where((token >= first) & (token < last), token, first + place % tl.maximum(last - first, 1))
    return load_page(x, slots, slot_stride, token, channel, tokens, channels).to(tl.float32)


@triton.jit(do_not_specialize=("tokens", "sinks"))
def page_gamma(
    sources, anchors, slots, slot_stride, tokens, channels, sinks, gamma_at, LIKE: tl.constexpr, COLUMNS: tl.constexpr
):
    """Least number and step of a page's short scales, of COLUMNS channels."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    x, anchor = buffer(sources, tl.program_id(1), LIKE), stream(anchors, tl.program_id(1))
    least, most = tl.full((COLUMNS,), LARGEST, tl.float32), tl.full((COLUMNS,), -LARGEST, tl.float32)
    for row in range(0, tl.cdiv(tokens, CHUNK)):
        numbers = _load_filled(x, slots, slot_stride, row, channel, tokens, channels, sinks)
        least, most = tl.minimum(least, tl.min(numbers, 0)), tl.maximum(most, tl.max(numbers, 0))
    origin = tl.where(least == 0.0, 0.0, least).to(tl.float16)
    start = origin.to(tl.float32)
    spread = tl.maximum(most - start, start - least)
    step = rounded_up(tl.div_rn(spread, tl.full((COLUMNS,), STEPS, tl.float32)))
    gamma = (anchor + gamma_at).to(tl.pointer_type(tl.float16)) + channel
    tl.store(gamma, origin, mask=channel < channels)
    tl.store(gamma + channels, step.to(tl.int16).to(tl.float16, bitcast=True), mask=channel < channels)


@triton.jit
def _find_scales(x, row, channel, anchor, channels, gamma_at, mu_at, sigma_at, SHORT: tl.constexpr):
    """Scales of a row's chunks, float32 [channels], written into the anchor; and whether they cover the chunks."""
    inside, place = channel < channels, row * channels + channel
    low, high = tl.min(x, 0), tl.max(x, 0)
    means = mean(x, tl.maximum(tl.abs(low), tl.abs(high)))
    sound = (low >= -LARGEST) & (high <= LARGEST) & (tl.abs(means) <= 2 * LARGEST)
    if SHORT:
        gamma = (anchor + gamma_at).to(tl.pointer_type(tl.float16)) + channel
        origin = tl.load(gamma, mask=inside, other=0).to(tl.float32)
        step = tl.load(gamma + channels, mask=inside, other=0).to(tl.float32)
        steps = tl.where(step > 0, step, 1.0)
        # To the nearest, ties to even; the quotient of a page that is covered has few bits before the point.
        quotient = tl.minimum(tl.maximum(tl.div_rn(means - origin, steps), 0.0), 255.0)
        away = tl.where(step > 0, (quotient + ROUNDING) - ROUNDING, 0.0)
        mu = origin + step * away
        reach = tl.div_rn(tl.maximum(high - mu, mu - low), steps)
        far = tl.where(step > 0, tl.ceil(tl.minimum(tl.maximum(reach, 0.0), 255.0)), 0.0)
        enough = covers(mu, (step * far).to(tl.float16).to(tl.float32), low, high)
        far = tl.minimum(far + tl.where(enough, 0.0, 1.0), 255.0)
        sigma = (step * far).to(tl.float16).to(tl.float32)
        tl.store(anchor + mu_at + place, away.to(tl.int32).to(tl.uint8), mask=inside)
        tl.store(anchor + sigma_at + place, far.to(tl.int32).to(tl.uint8), mask=inside)
    else:
        half = means.to(tl.float16)
        mu = half.to(tl.float32)
        pattern = rounded_up(tl.maximum(high - mu, mu - low))
        pattern += tl.where(covers(mu, of_pattern(pattern), low, high), 0, 1)
        sigma = of_pattern(pattern)
        tl.store((anchor + mu_at).to(tl.pointer_type(tl.float16)) + place, half, mask=inside)
        tl.store((anchor + sigma_at).to(tl.pointer_type(tl.int16)) + place, pattern.to(tl.int16), mask=inside)
    sound = sound & (sigma <= LARGEST) & covers(mu, sigma, low, high)
    return mu, sigma, sound | (channel >= channels)


@triton.jit
def _reached(x, mu, sigma, edges, i, above):
    """Whether numbers reach the bound of ``i`` on their side of mu; sigma has the side's sign."""
    return (x >= mu + tl.load(edges + i) * sigma) == above


@triton.jit
def _magnitudes(x, mu, sigma, own, edges, GREATEST: tl.constexpr):
    """I without its sign, int32 [32, channels], and whether that is positive."""
    above = x >= mu[None, :]
    side = tl.where(above, sigma[None, :], -sigma[None, :])
    size = tl.abs(x - mu[None, :]) * tl.where(sigma > 0, 1.0 / sigma, 0.0)[None, :]
    estimate = (((size * (C5 * GREATEST) + C4 * GREATEST) * size + C3 * GREATEST) * size + C2 * GREATEST) * size + C1 * GREATEST
    # Rounded so that the right one is this or the next: 0 is not below -0.47.
    estimate = estimate * size + (C0 * GREATEST - 0.45)
    found = (estimate + ROUNDING).to(tl.int32, bitcast=True) & 127
    found += tl.where(_reached(x, mu[None, :], side, edges, found + 1, above), 1, 0)
    unclear = own & (sigma <= tl.abs(mu) * CLEAR)
    if tl.max(tl.where(unclear, 1, 0), 0) > 0:
        searched = tl.zeros_like(found)
        for power in tl.static_range(7):
            more = searched + (64 >> power)
            reached = _reached(x, mu[None, :], side, edges, more, above)
            searched = tl.where(reached & (more <= GREATEST), more, searched)
        found = tl.where(unclear[None, :], searched, found)
    return found, above


@triton.jit(do_not_specialize=("tokens", "sinks"))
def encode_tiles(
    sources, anchors, residuals, slots, edges, slot_stride, tokens, channels, sinks, gamma_at, mu_at, sigma_at, sinks_at, codes_at,
    LIKE: tl.constexpr, BITS: tl.constexpr, GREATEST: tl.constexpr, SHORT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A row of COLUMNS chunks of a part: anchor, and without ``residuals=None`` the residual of 8 bits.

    The first byte of an anchor stream, 0 before, becomes 1 where scales do not cover a chunk.
    """
    REST: tl.constexpr = 8 - BITS
    row, part, begin = tl.program_id(0), tl.program_id(2), tl.program_id(1) * COLUMNS
    token, channel = row * CHUNK + tl.arange(0, CHUNK), begin + tl.arange(0, COLUMNS)
    source, anchor, inside = buffer(sources, part, LIKE), stream(anchors, part), token < tokens
    if row * CHUNK < sinks:
        exact = load_page(source, slots, slot_stride, token, channel, tokens, channels)
        place = (anchor + sinks_at).to(tl.pointer_type(LIKE)) + token[:, None] * channels + channel[None, :]
        tl.store(place, exact, mask=(token < sinks)[:, None] & (channel < channels)[None, :])
    x = _load_filled(source, slots, slot_stride, row, channel, tokens, channels, sinks)
    mu, sigma, sound = _find_scales(x, row, channel, anchor, channels, gamma_at, mu_at, sigma_at, SHORT)
    tl.store(anchor, tl.full((), 1, tl.uint8), mask=tl.min(tl.where(sound, 1, 0), 0) == 0)
    i, above = _magnitudes(x, mu, sigma, channel < channels, edges, GREATEST)
    v = (i + ((1 << (REST - 1)) - 1)) >> REST
    # The highest bit says above; below it the others are turned around.
    codes = v ^ tl.where(above, 1 << (BITS - 1), (1 << (BITS - 1)) - 1)
    store_codes(codes, anchor + codes_at, token, inside, begin, channels, tokens, BITS)
    if residuals is not None:
        rest = (v << REST) - i + (1 << (REST - 1))
        store_codes(rest, stream(residuals, part), token, inside, begin, channels, tokens, REST)
