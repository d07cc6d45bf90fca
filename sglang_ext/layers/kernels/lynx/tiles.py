"""Pieces of the kernels that write and read streams of pages: planes of codes, scales, bounds.

The same bits as PyTorch (scales.py, planes.py, bins.py), with or without contraction of products and sums: products that a sum follows
are exact. Nothing here depends on the order in which a reduction goes through its numbers.
"""

import triton
import triton.language as tl

from sglang_ext.layers.kernels.lynx import scales

CHUNK = tl.constexpr(32)
LARGEST, ROUNDING, BIAS = tl.constexpr(scales.LARGEST), tl.constexpr(scales.ROUNDING), tl.constexpr(scales.BIAS)
LEAST, MOST, INTEGER = tl.constexpr(scales.LEAST), tl.constexpr(scales.MOST), tl.constexpr(scales.INTEGER)
SHARE, STEPS = tl.constexpr(scales.SHARE), tl.constexpr(scales.STEPS)


@triton.jit
def stream(table, part):
    """The beginning of a stream, 16-byte aligned, uint8."""
    return tl.multiple_of(tl.load(table + part).to(tl.pointer_type(tl.uint8)), 16)


@triton.jit
def buffer(table, part, LIKE: tl.constexpr):
    """The beginning of a tensor of a pool."""
    return tl.multiple_of(tl.load(table + part).to(tl.pointer_type(LIKE)), 16)


@triton.jit
def store_plane(codes, plane, token, inside, channel, channels, LEFT: tl.constexpr, WIDTH: tl.constexpr):
    """Bits ``LEFT`` to ``LEFT + WIDTH`` of int32 [tokens, channels] codes: 8 channels a word of WIDTH bytes."""
    TOKENS: tl.constexpr = codes.shape[0]
    WORDS: tl.constexpr = codes.shape[1] // 8
    KIND: tl.constexpr = tl.int32 if WIDTH == 4 else tl.int16 if WIDTH == 2 else tl.int8
    part = (codes >> LEFT) & ((1 << WIDTH) - 1)
    shifts = tl.arange(0, 8) * WIDTH
    words = tl.sum(tl.reshape(part, (TOKENS, WORDS, 8)) << shifts[None, None, :], 2).to(KIND)
    word = channel // 8 + tl.arange(0, WORDS)
    place = plane.to(tl.pointer_type(KIND)) + token[:, None] * (channels // 8) + word[None, :]
    tl.store(place, words, mask=inside[:, None] & (word < channels // 8)[None, :])


@triton.jit
def load_plane(plane, token, inside, channel, channels, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH bits each, int32 [tokens, COLUMNS], of what :func:`store_plane` wrote."""
    TOKENS: tl.constexpr = token.shape[0]
    KIND: tl.constexpr = tl.int32 if WIDTH == 4 else tl.int16 if WIDTH == 2 else tl.int8
    word = channel // 8 + tl.arange(0, COLUMNS // 8)
    place = plane.to(tl.pointer_type(KIND)) + token[:, None] * (channels // 8) + word[None, :]
    words = tl.load(place, mask=inside[:, None] & (word < channels // 8)[None, :], other=0).to(tl.int32)
    shifts = tl.arange(0, 8) * WIDTH
    return tl.reshape((words[:, :, None] >> shifts[None, None, :]) & ((1 << WIDTH) - 1), (TOKENS, COLUMNS))


@triton.jit
def store_codes(codes, planes, token, inside, channel, channels, tokens, BITS: tl.constexpr):
    """All planes of codes of so many bits (layout.py)."""
    if BITS == 2 or BITS == 4:
        store_plane(codes, planes, token, inside, channel, channels, 0, BITS)
    else:
        HIGHEST: tl.constexpr = 2 if BITS == 3 else 4
        store_plane(codes, planes, token, inside, channel, channels, BITS - HIGHEST, HIGHEST)
        rest = planes + tokens * (channels // 8) * HIGHEST
        store_plane(codes, rest, token, inside, channel, channels, 0, BITS - HIGHEST)


@triton.jit
def load_codes(planes, token, inside, channel, channels, tokens, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """Codes, int32 [tokens, COLUMNS], 0 outside."""
    if BITS == 2 or BITS == 4:
        return load_plane(planes, token, inside, channel, channels, COLUMNS, BITS)
    else:
        HIGHEST: tl.constexpr = 2 if BITS == 3 else 4
        high = load_plane(planes, token, inside, channel, channels, COLUMNS, HIGHEST)
        rest = planes + tokens * (channels // 8) * HIGHEST
        low = load_plane(rest, token, inside, channel, channels, COLUMNS, BITS - HIGHEST)
        return (high << (BITS - HIGHEST)) | low


@triton.jit
def rounded_up(numbers):
    """The least float16 that is not less, as its pattern in int32, of float32 of at least 0; never -0."""
    nearest = tl.abs(numbers).to(tl.float16)
    pattern = nearest.to(tl.int16, bitcast=True).to(tl.int32)
    return pattern + tl.where(nearest.to(tl.float32) < numbers, 1, 0)


@triton.jit
def of_pattern(pattern):
    """The float16 of a pattern, float32."""
    return pattern.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def covers(mu, sigma, low, high):
    """Whether chunks lie within their scales."""
    return (mu + sigma >= high) & (mu - sigma <= low)


@triton.jit
def mean(x, size):
    """Of the chunks of float32 [32, channels]; ``size`` is the greatest absolute value of each."""
    exponent = tl.minimum(tl.maximum(size.to(tl.int32, bitcast=True) >> 23, LEAST), MOST)
    grow = ((-exponent + (2 * BIAS + INTEGER - 1)) << 23).to(tl.float32, bitcast=True)
    shrink = ((exponent - (INTEGER - 1 + SHARE)) << 23).to(tl.float32, bitcast=True)
    integers = (x * grow[None, :] + ROUNDING) - ROUNDING
    return tl.sum(integers, 0) * shrink


@triton.jit
def load_scales(anchor, row, channel, inside, channels, gamma_at, mu_at, sigma_at, SHORT: tl.constexpr):
    """Mu and sigma of a row's chunks, float32 [channels]."""
    place = row * channels + channel
    if SHORT:
        gamma = (anchor + gamma_at).to(tl.pointer_type(tl.float16)) + channel
        origin = tl.load(gamma, mask=inside, other=0).to(tl.float32)
        step = tl.load(gamma + channels, mask=inside, other=0).to(tl.float32)
        means = tl.load(anchor + mu_at + place, mask=inside, other=0).to(tl.float32)
        reaches = tl.load(anchor + sigma_at + place, mask=inside, other=0).to(tl.float32)
        return origin + step * means, (step * reaches).to(tl.float16).to(tl.float32)
    else:
        mu = tl.load((anchor + mu_at).to(tl.pointer_type(tl.float16)) + place, mask=inside, other=0)
        sigma = tl.load((anchor + sigma_at).to(tl.pointer_type(tl.float16)) + place, mask=inside, other=0)
        return mu.to(tl.float32), sigma.to(tl.float32)
