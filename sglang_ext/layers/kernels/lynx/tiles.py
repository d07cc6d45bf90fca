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
def at_address(table, part, LIKE: tl.constexpr):
    """A stream or a tensor of a pool, of which no alignment is promised: threads do not share what they read, and take it in turn."""
    return tl.load(table + part).to(tl.pointer_type(LIKE))


@triton.jit
def stream(table, part):
    """The beginning of a stream, 16-byte aligned, uint8."""
    return tl.multiple_of(at_address(table, part, tl.uint8), 16)


@triton.jit
def buffer(table, part, LIKE: tl.constexpr):
    """The beginning of a tensor of a pool."""
    return tl.multiple_of(at_address(table, part, LIKE), 16)


@triton.jit
def pair_places(slots, slot_stride, token, pair, step):
    """Offsets of pairs in the pool, int64 [pairs, tokens], of tokens of the page; ``step`` from one pair to the next."""
    source = token.to(tl.int64)
    if slots is not None:
        source = tl.load(slots + token)
    return (source * slot_stride)[None, :] + (step * pair)[:, None]


@triton.jit
def load_pair(x, slots, slot_stride, token, pair, mask):
    """Even and odd channels of tokens of the page, [pairs, tokens] each of the pool's dtype, 0 where masked."""
    KIND: tl.constexpr = x.dtype.element_ty
    if KIND.primitive_bitwidth == 32:
        place = x + pair_places(slots, slot_stride, token, pair, 2)
        return tl.load(place, mask=mask, other=0), tl.load(place + 1, mask=mask, other=0)
    else:
        place = x.to(tl.pointer_type(tl.int32)) + pair_places(slots, slot_stride // 2, token, pair, 1)
        words = tl.load(place, mask=mask, other=0)
        return words.to(tl.int16).to(KIND, bitcast=True), (words >> 16).to(tl.int16).to(KIND, bitcast=True)


@triton.jit
def _store_pair_plane(even, odd, plane, token, inside, begin, channels, LEFT: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    """Bits ``LEFT`` to ``LEFT + WIDTH`` of codes, int32 [pairs, tokens]; those of 4 / WIDTH pairs are a byte."""
    MORE: tl.constexpr = 4 // WIDTH
    TOKENS: tl.constexpr = token.shape[0]
    both = ((even >> LEFT) & ((1 << WIDTH) - 1)) | (((odd >> LEFT) & ((1 << WIDTH) - 1)) << WIDTH)
    if MORE > 1:
        shifts = tl.arange(0, MORE) * (2 * WIDTH)
        both = tl.sum(tl.reshape(both, (PAIRS // MORE, MORE, TOKENS)) << shifts[None, :, None], 1)
        inside, _ = tl.broadcast(inside, even < 0)
        inside = tl.min(tl.reshape(inside.to(tl.int32), (PAIRS // MORE, MORE, TOKENS)), 1) > 0
    byte = begin // MORE + tl.arange(0, PAIRS // MORE)
    tl.store(plane + (token * (channels * WIDTH // 8))[None, :] + byte[:, None], both.to(tl.uint8), mask=inside)


@triton.jit
def store_pair_codes(even, odd, planes, token, inside, begin, channels, tokens, BITS: tl.constexpr, PAIRS: tl.constexpr):
    """All planes of codes of so many bits (layout.py); higher bits of them mean nothing."""
    if BITS == 2 or BITS == 4:
        _store_pair_plane(even, odd, planes, token, inside, begin, channels, 0, BITS, PAIRS)
    else:
        HIGHEST: tl.constexpr = 2 if BITS == 3 else 4
        _store_pair_plane(even, odd, planes, token, inside, begin, channels, BITS - HIGHEST, HIGHEST, PAIRS)
        rest = planes + tokens * (channels // 8) * HIGHEST
        _store_pair_plane(even, odd, rest, token, inside, begin, channels, 0, BITS - HIGHEST, PAIRS)


@triton.jit
def _load_pair_plane(plane, token, inside, pair, channels, WIDTH: tl.constexpr):
    """WIDTH bits of the even and of the odd channels, int32 [pairs, tokens] each."""
    MORE: tl.constexpr = 4 // WIDTH
    place = plane + (token * (channels * WIDTH // 8))[None, :] + (pair // MORE)[:, None]
    both = tl.load(place, mask=inside, other=0).to(tl.int32)
    if MORE > 1:
        both = both >> (pair % MORE * (2 * WIDTH))[:, None]
    return both & ((1 << WIDTH) - 1), (both >> WIDTH) & ((1 << WIDTH) - 1)


@triton.jit
def load_pair_codes(planes, token, inside, pair, channels, tokens, BITS: tl.constexpr):
    """Codes of the even and of the odd channels, int32 [pairs, tokens] each, 0 outside."""
    if BITS == 2 or BITS == 4:
        return _load_pair_plane(planes, token, inside, pair, channels, BITS)
    else:
        HIGHEST: tl.constexpr = 2 if BITS == 3 else 4
        even, odd = _load_pair_plane(planes, token, inside, pair, channels, HIGHEST)
        rest = planes + tokens * (channels // 8) * HIGHEST
        low, low_odd = _load_pair_plane(rest, token, inside, pair, channels, BITS - HIGHEST)
        return (even << (BITS - HIGHEST)) | low, (odd << (BITS - HIGHEST)) | low_odd


@triton.jit
def load_plane(plane, token, inside, channel, channels, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH bits each, int32 [tokens, COLUMNS], of a plane."""
    TOKENS: tl.constexpr = token.shape[0]
    KIND: tl.constexpr = tl.int32 if WIDTH == 4 else tl.int16 if WIDTH == 2 else tl.int8
    word = channel // 8 + tl.arange(0, COLUMNS // 8)
    place = plane.to(tl.pointer_type(KIND)) + token[:, None] * (channels // 8) + word[None, :]
    words = tl.load(place, mask=inside[:, None] & (word < channels // 8)[None, :], other=0).to(tl.int32)
    shifts = tl.arange(0, 8) * WIDTH
    return tl.reshape((words[:, :, None] >> shifts[None, None, :]) & ((1 << WIDTH) - 1), (TOKENS, COLUMNS))


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
def rounded_to_integer(x):
    """Of small numbers, ties to even."""
    return (x + ROUNDING) - ROUNDING


@triton.jit
def mean(x, size):
    """Of the chunks of float32 [pairs, 32]; ``size`` is the greatest absolute value of each."""
    exponent = tl.minimum(tl.maximum(size.to(tl.int32, bitcast=True) >> 23, LEAST), MOST)
    grow = ((-exponent + (2 * BIAS + INTEGER - 1)) << 23).to(tl.float32, bitcast=True)
    shrink = ((exponent - (INTEGER - 1 + SHARE)) << 23).to(tl.float32, bitcast=True)
    return tl.sum(rounded_to_integer(x * grow[:, None]), 1) * shrink


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
