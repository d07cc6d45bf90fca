"""Chunks inside kernels: their loads, and their scales mu and sigma, in float16 or in a page's steps. scales.py is the PyTorch version.

In registers, each thread has quads of four adjacent channels of a row of chunks, with all their tokens.
Arrays are [quads, tokens]. A tuple of four has one array for each channel of a quad.
"""

import struct

import triton
import triton.language as tl

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


@triton.jit
def padded_tokens(row, place, tokens, sinks):
    """Tokens of a row of chunks. Sinks and tokens beyond the page are replaced by other tokens (``pytorch_codec._filled``)."""
    token = row * CHUNK + place
    first, last = tl.maximum(row * CHUNK, sinks), tl.minimum(row * CHUNK + CHUNK, tokens)
    token = tl.where((token >= first) & (token < last), token, first + place % tl.maximum(last - first, 1))
    return tl.minimum(token, tokens - 1)


@triton.jit
def load_quads(x, slot, quad, mask, STRIDE: tl.constexpr, PTX: tl.constexpr):
    """Load bit patterns of numbers in slots, four int32 [quads, tokens]. With 16 bits, a word has two numbers and words are repeated.

    Masked elements are undefined.
    """
    SIZE: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 16
    # A 32-bit product widened to 64 bits, plus a thread's own address, is one instruction.
    far = slot.to(tl.int64) * (STRIDE // (4 // SIZE))
    place = (x.to(tl.pointer_type(tl.int64)) + quad * SIZE)[:, None] + far[None, :]
    words = tl.load(place, mask=mask)
    more = tl.load(place + 1, mask=mask) if SIZE == 2 else words
    a, b = _halved(words, PTX)
    c, d = _halved(more, PTX)
    return a, b, c, d


@triton.jit
def _halved(words, PTX: tl.constexpr):
    """The lower and the upper 32 bits of 64-bit words."""
    if PTX:
        return tl.inline_asm_elementwise("mov.b64 {$0, $1}, $2;", "=r,=r,l", [words], (tl.int32, tl.int32), True, 1)
    else:
        return words.to(tl.int32), (words >> 32).to(tl.int32)


@triton.jit
def numbers_of(words, LIKE: tl.constexpr):
    """The numbers of each channel, float32."""
    if LIKE == tl.float32:
        return float32_of(words[0], words[1], words[2], words[3])
    elif LIKE == tl.bfloat16:
        return float32_of(words[0] << 16, words[0] & -65536, words[1] << 16, words[1] & -65536)
    else:
        a, b = words[0].to(tl.int16).to(LIKE, bitcast=True), (words[0] >> 16).to(tl.int16).to(LIKE, bitcast=True)
        c, d = words[1].to(tl.int16).to(LIKE, bitcast=True), (words[1] >> 16).to(tl.int16).to(LIKE, bitcast=True)
        return a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)


@triton.jit
def float32_of(a, b, c, d):
    """Float32 of bit patterns."""
    return a.to(tl.float32, bitcast=True), b.to(tl.float32, bitcast=True), c.to(tl.float32, bitcast=True), d.to(tl.float32, bitcast=True)


@triton.jit
def _least_bfloat16(a, b):
    """The smaller of two numbers, for two bfloat16 in a word. NaN if one of them is NaN."""
    return tl.inline_asm_elementwise("min.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _most_bfloat16(a, b):
    return tl.inline_asm_elementwise("max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _least_float16(a, b):
    return tl.inline_asm_elementwise("min.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _most_float16(a, b):
    return tl.inline_asm_elementwise("max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def extremes(words, LIKE: tl.constexpr, PTX: tl.constexpr):
    """Minimum and maximum of chunks, float32 [quads], four of each. NaN if a chunk contains NaN."""
    if PTX and LIKE == tl.bfloat16:
        low = tl.reduce(words[0], 1, _least_bfloat16), tl.reduce(words[1], 1, _least_bfloat16), words[2], words[3]
        high = tl.reduce(words[0], 1, _most_bfloat16), tl.reduce(words[1], 1, _most_bfloat16), words[2], words[3]
        return numbers_of(low, LIKE), numbers_of(high, LIKE)
    elif PTX and LIKE == tl.float16:
        low = tl.reduce(words[0], 1, _least_float16), tl.reduce(words[1], 1, _least_float16), words[2], words[3]
        high = tl.reduce(words[0], 1, _most_float16), tl.reduce(words[1], 1, _most_float16), words[2], words[3]
        return numbers_of(low, LIKE), numbers_of(high, LIKE)
    else:
        x0, x1, x2, x3 = numbers_of(words, LIKE)
        low = least_of(x0), least_of(x1), least_of(x2), least_of(x3)
        return low, (tl.max(x0, 1), tl.max(x1, 1), tl.max(x2, 1), tl.max(x3, 1))


@triton.jit
def least_of(x):
    some = tl.sum(tl.where(x == x, 0, 1), 1)
    return tl.where(some > 0, float("nan"), tl.min(x, 1))


@triton.jit
def halves(x):
    """Even and odd tokens of [quads, tokens]."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def quarters(x):
    """Four arrays of every fourth token, which start at tokens 0, 1, 2 and 3."""
    even, odd = halves(x)
    a, c = halves(even)
    b, d = halves(odd)
    return a, b, c, d


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
