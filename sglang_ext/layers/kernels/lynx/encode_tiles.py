"""Kernels that write anchor streams, and residuals of 8 bits; plain.py says the same in PyTorch."""

import math

import triton
import triton.language as tl

from sglang_ext.layers.kernels.lynx.levels import CURVE as CURVATURE
from sglang_ext.layers.kernels.lynx.plain import CLEAR as CLEARLY
from sglang_ext.layers.kernels.lynx.tiles import (
    CHUNK,
    LARGEST,
    STEPS,
    buffer,
    covers,
    extremes,
    mean,
    of_pattern,
    rounded_up,
    store_codes,
    stream,
)

CURVE, CLEAR, OCTAVES = tl.constexpr(CURVATURE), tl.constexpr(CLEARLY), tl.constexpr(math.log2(1 + CURVATURE))


@triton.jit
def load_page(x, slots, slot_stride, token, channel, tokens, channels):
    """Numbers of a page, of the pool's dtype, 0 beyond it; and where there are some."""
    source = token.to(tl.int64)
    if slots is not None:
        source = tl.load(slots + token, mask=token < tokens, other=0)
    inside = (token < tokens)[:, None] & (channel < channels)[None, :]
    return tl.load(x + source[:, None] * slot_stride + channel[None, :], mask=inside, other=0), inside


@triton.jit(do_not_specialize=("tokens", "sinks"))
def page_gamma(
    sources, anchors, slots, slot_stride, tokens, channels, sinks, gamma_at, LIKE: tl.constexpr, COLUMNS: tl.constexpr
):
    """Least number and step of a page's short scales, of COLUMNS channels."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    x, anchor = buffer(sources, tl.program_id(1), LIKE), stream(anchors, tl.program_id(1))
    least, most = tl.full((COLUMNS,), LARGEST, tl.float32), tl.full((COLUMNS,), -LARGEST, tl.float32)
    for first in range(0, tokens, CHUNK):
        token = first + tl.arange(0, CHUNK)
        numbers, inside = load_page(x, slots, slot_stride, token, channel, tokens, channels)
        low, high = extremes(numbers.to(tl.float32), inside & (token >= sinks)[:, None])
        least, most = tl.minimum(least, low), tl.maximum(most, high)
    empty = sinks >= tokens
    origin = tl.where(empty, 0.0, least).to(tl.float16)
    start = origin.to(tl.float32)
    spread = tl.where(empty, 0.0, tl.maximum(most - start, start - least))
    step = rounded_up(tl.div_rn(spread, tl.full((COLUMNS,), STEPS, tl.float32)))
    gamma = (anchor + gamma_at).to(tl.pointer_type(tl.float16)) + channel
    tl.store(gamma, origin, mask=channel < channels)
    tl.store(gamma + channels, step.to(tl.int16).to(tl.float16, bitcast=True), mask=channel < channels)


@triton.jit
def _find_scales(x, coded, row, channel, anchor, tokens, channels, sinks, gamma_at, mu_at, sigma_at, SHORT: tl.constexpr):
    """Scales of a row's chunks, float32 [channels], written into the anchor; and whether they cover the chunks."""
    inside, place = channel < channels, row * channels + channel
    first, last = tl.maximum(row * CHUNK, sinks), tl.minimum(row * CHUNK + CHUNK, tokens)
    some = last > first
    low, high = extremes(x, coded)
    low, high = tl.where(some, low, 0.0), tl.where(some, high, 0.0)
    count = tl.zeros_like(low) + tl.maximum(last - first, 1)
    means = mean(x, count, tl.maximum(tl.abs(low), tl.abs(high)))
    sound = (low >= -LARGEST) & (high <= LARGEST) & (tl.abs(means) <= 2 * LARGEST)
    if SHORT:
        gamma = (anchor + gamma_at).to(tl.pointer_type(tl.float16)) + channel
        origin = tl.load(gamma, mask=inside, other=0).to(tl.float32)
        step = tl.load(gamma + channels, mask=inside, other=0).to(tl.float32)
        steps = tl.where(step > 0, step, 1.0)
        # To the nearest, ties to even; the quotient of a page that is covered has few bits before the point.
        quotient = tl.minimum(tl.maximum(tl.div_rn(means - origin, steps), 0.0), 255.0)
        away = tl.where(step > 0, (quotient + 12582912.0) - 12582912.0, 0.0)
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
    """Whether numbers reach the bound of ``i`` on their side of mu; no bound is beyond that of F."""
    bound = tl.load(edges + i) * sigma
    return ((x >= mu + bound) & above) | ((x < mu - bound) & (above == 0))


@triton.jit
def _magnitudes(x, mu, sigma, edges, GREATEST: tl.constexpr):
    """I without its sign, int32 [32, channels], and whether that is positive."""
    above = x >= mu[None, :]
    grow = tl.where(sigma > 0, 1.0 / tl.where(sigma > 0, sigma, 1.0), 0.0)
    estimate = tl.log2(tl.abs(x - mu[None, :]) * (grow[None, :] * CURVE) + 1.0) * (GREATEST / OCTAVES)
    found = tl.minimum(tl.maximum(estimate, 0.0), GREATEST - 1.0).to(tl.int32)
    # What is no number has no whole part either.
    found = tl.minimum(tl.maximum(found, 0), GREATEST - 1)
    found += tl.where(_reached(x, mu[None, :], sigma[None, :], edges, found + 1, above), 1, 0)
    unclear = sigma <= tl.abs(mu) * CLEAR
    if tl.max(tl.where(unclear, 1, 0), 0) > 0:
        searched = tl.zeros_like(found)
        for power in tl.static_range(7):
            more = searched + (64 >> power)
            reached = _reached(x, mu[None, :], sigma[None, :], edges, tl.minimum(more, GREATEST), above)
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
    HALF: tl.constexpr = 1 << (BITS - 1)
    row, part, begin = tl.program_id(0), tl.program_id(2), tl.program_id(1) * COLUMNS
    token, channel = row * CHUNK + tl.arange(0, CHUNK), begin + tl.arange(0, COLUMNS)
    anchor, own = stream(anchors, part), token < tokens
    numbers, inside = load_page(buffer(sources, part, LIKE), slots, slot_stride, token, channel, tokens, channels)
    if row * CHUNK < sinks:
        place = (anchor + sinks_at).to(tl.pointer_type(LIKE)) + token[:, None] * channels + channel[None, :]
        tl.store(place, numbers, mask=inside & (token < sinks)[:, None])
    coded = inside & (token >= sinks)[:, None]
    x = tl.where(coded, numbers.to(tl.float32), 0.0)
    mu, sigma, sound = _find_scales(
        x, coded, row, channel, anchor, tokens, channels, sinks, gamma_at, mu_at, sigma_at, SHORT
    )
    tl.store(anchor, tl.full((), 1, tl.uint8), mask=tl.min(tl.where(sound, 1, 0), 0) == 0)
    i, above = _magnitudes(x, mu, sigma, edges, GREATEST)
    v = (i + ((1 << (REST - 1)) - 1)) >> REST
    codes = tl.where(coded, tl.where(above, v + HALF, -v + (HALF - 1)), 0)
    store_codes(codes, anchor + codes_at, token, own, begin, channels, tokens, BITS)
    if residuals is not None:
        rest = tl.where(coded, (v << REST) - i + (1 << (REST - 1)), 0)
        store_codes(rest, stream(residuals, part), token, own, begin, channels, tokens, REST)
