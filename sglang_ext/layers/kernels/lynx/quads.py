"""Register layout of a row of chunks: each thread has quads of four adjacent channels, with all their tokens.

Arrays are [quads, tokens]. A tuple of four has one array for each channel of a quad.
"""

import triton
import triton.language as tl

from sglang_ext.layers.kernels.lynx.tiles import CHUNK


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
