"""Parts that the Lynx kernels share: planes of codes, and chunks with their scales mu and sigma.

They give the same bits as PyTorch (scales.py, pytorch_codec.py), whether or not the compiler fuses products and sums. A product that is
followed by a sum is exact. No result depends on the order of a reduction.

When pages are encoded, each thread has quads of four adjacent channels of a row of chunks in registers, with all their tokens. Arrays are
[quads, tokens]. A tuple of four has one array for each channel of a quad.
"""

import struct

import triton
import triton.language as tl

from sglang_ext.layers.kernels.gpu_launch import buffer_pointer
from sglang_ext.layers.kernels.lynx import scales

CHUNK = tl.constexpr(32)
LARGEST, ROUNDING, BIAS = tl.constexpr(scales.LARGEST), tl.constexpr(scales.ROUNDING), tl.constexpr(scales.BIAS)
LEAST, MOST, INTEGER = tl.constexpr(scales.LEAST), tl.constexpr(scales.MOST), tl.constexpr(scales.INTEGER)
SHARE = tl.constexpr(scales.SHARE)


@triton.jit
def at_address(table, part, LIKE: tl.constexpr):
    """Pointer to a stream or a pool tensor without an alignment hint. Without it, threads do not share their loads, and read in turn."""
    return tl.load(table + part).to(tl.pointer_type(LIKE))


@triton.jit
def stream(table, part):
    """Pointer to the beginning of a stream, 16-byte aligned, uint8."""
    return buffer_pointer(table, part, tl.uint8)


@triton.jit
def slots_of(slots, token, PTX: tl.constexpr):
    """Slots of the page's tokens, int32."""
    if slots is None:
        return token
    elif PTX:
        # Hidden from the compiler, which would otherwise multiply all 64 bits.
        return tl.inline_asm_elementwise("cvt.u32.u64 $0, $1;", "=r,l", [tl.load(slots + token)], tl.int32, True, 1)
    else:
        return tl.load(slots + token).to(tl.int32)


@triton.jit
def pair_places(slots, slot_stride, token, pair, step):
    """Offsets in the pool of pairs, int64 [pairs, tokens], for tokens of the page. ``step`` is the distance between pairs."""
    source = token.to(tl.int64)
    if slots is not None:
        source = tl.load(slots + token)
    return (source * slot_stride)[None, :] + (step * pair)[:, None]


@triton.jit
def _nibbles(low, high, PTX: tl.constexpr):
    """Combine the lower four bits of each byte of ``low`` with the upper four bits of ``high``."""
    if PTX:
        return tl.inline_asm_elementwise("lop3.b32 $0, $1, $2, 0x0F0F0F0F, 0xE4;", "=r,r,r", [low, high], tl.int32, True, 1)
    else:
        return (low & 0x0F0F0F0F) | (high & ~0x0F0F0F0F)


@triton.jit
def store_plane(even, odd, plane, row, k, begin, inside, inside_next, CHANNELS: tl.constexpr, LEFT: tl.constexpr, PTX: tl.constexpr):
    """Store the upper (``LEFT`` 4) or lower (0) four bits of bytes in a plane of codes, from quad ``begin`` on.

    ``even``, ``odd``: int32 [quads, tokens], bytes of the first and third channel of a quad, and of the others, of two adjacent tokens each. The
    first is every fourth one of a row of chunks, from token ``k`` on. ``inside``, ``inside_next``: masks, of the first and the second token.
    """
    # The codes of two adjacent channels share a byte. One code is already in position, and the other is shifted beside it.
    if LEFT == 4:
        both = _nibbles(even >> 4, odd, PTX)
    else:
        both = _nibbles(even, odd << 4, PTX)
    _store_tokens(both, plane, row, k, begin, inside, CHANNELS)
    _store_tokens(both >> 16, plane, row, k + 1, begin, inside_next, CHANNELS)


@triton.jit
def _store_tokens(quads, plane, row, k, begin, inside, CHANNELS: tl.constexpr):
    """Store the lowest 16 bits, a quad's codes, of every fourth token."""
    STRIDE: tl.constexpr = CHANNELS // 4
    own = plane.to(tl.pointer_type(tl.int16)) + begin + (row * CHUNK + k) * STRIDE
    place = (own + tl.arange(0, quads.shape[0]))[:, None] + (tl.arange(0, quads.shape[1]) * (4 * STRIDE))[None, :]
    tl.store(place, quads.to(tl.int16), mask=inside)


@triton.jit
def load_pair_codes(plane, token, inside, pair, channels):
    """Load the codes of the even and of the odd channels, int32 [pairs, tokens] each, 0 outside."""
    place = plane + (token * (channels // 2))[None, :] + pair[:, None]
    both = tl.load(place, mask=inside, other=0).to(tl.int32)
    return both & 15, (both >> 4) & 15


@triton.jit
def load_codes(plane, token, inside, channel, channels, COLUMNS: tl.constexpr):
    """Load codes, int32 [tokens, COLUMNS], 0 outside."""
    TOKENS: tl.constexpr = token.shape[0]
    word = channel // 8 + tl.arange(0, COLUMNS // 8)
    place = plane.to(tl.pointer_type(tl.int32)) + token[:, None] * (channels // 8) + word[None, :]
    words = tl.load(place, mask=inside[:, None] & (word < channels // 8)[None, :], other=0)
    shifts = tl.arange(0, 8) * 4
    return tl.reshape((words[:, :, None] >> shifts[None, None, :]) & 15, (TOKENS, COLUMNS))


@triton.jit
def rounded_up(numbers):
    """Round float32 of at least 0 up to float16. Returns the pattern in int32; never -0."""
    nearest = tl.abs(numbers).to(tl.float16)
    pattern = nearest.to(tl.int16, bitcast=True).to(tl.int32)
    return pattern + tl.where(nearest.to(tl.float32) < numbers, 1, 0)


@triton.jit
def from_pattern(pattern):
    """The float16 of a pattern, as float32."""
    return pattern.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def covers(mu, sigma, low, high):
    """Whether all numbers of a chunk are within its scales."""
    return (mu + sigma >= high) & (mu - sigma <= low)


@triton.jit
def load_scales(anchor, row, channel, inside, channels, mu_at, sigma_at):
    """Load mu and sigma of a row's chunks, float32 [channels]."""
    place = row * channels + channel
    mu = tl.load((anchor + mu_at).to(tl.pointer_type(tl.float16)) + place, mask=inside, other=0)
    sigma = tl.load((anchor + sigma_at).to(tl.pointer_type(tl.float16)) + place, mask=inside, other=0)
    return mu.to(tl.float32), sigma.to(tl.float32)


@triton.jit
def padded_tokens(row, place, tokens, sinks):
    """Tokens of a row of chunks. Sinks and tokens beyond the page are replaced by other tokens (``pytorch_codec.filled``)."""
    token = row * CHUNK + place
    first, last = tl.maximum(row * CHUNK, sinks), tl.minimum(row * CHUNK + CHUNK, tokens)
    token = tl.where((token >= first) & (token < last), token, first + place % tl.maximum(last - first, 1))
    return tl.minimum(token, tokens - 1)


@triton.jit
def load_quads(x, slot, quad, mask, STRIDE: tl.constexpr, PTX: tl.constexpr):
    """Load bit patterns of numbers in slots, four int32 [quads, tokens], undefined if masked. With 16 bits, a word has two numbers."""
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
def find_scales(x, low, high, row, channel, there, anchor, channels, mu_at, sigma_at):
    """Compute the scales of a row's chunks, float32 [quads], and store them in the anchor. Also returns whether they cover the chunks."""
    place = row * channels + channel
    means = _mean(x, tl.maximum(tl.abs(low), tl.abs(high)))
    sound = (low >= -LARGEST) & (high <= LARGEST)
    half = means.to(tl.float16)
    mu = half.to(tl.float32)
    pattern = rounded_up(tl.maximum(high - mu, mu - low))
    pattern += tl.where(covers(mu, from_pattern(pattern), low, high), 0, 1)
    sigma = from_pattern(pattern)
    tl.store((anchor + mu_at).to(tl.pointer_type(tl.float16)) + place, half, mask=there)
    tl.store((anchor + sigma_at).to(tl.pointer_type(tl.int16)) + place, pattern.to(tl.int16), mask=there)
    return mu, sigma, (sound & (sigma <= LARGEST) & covers(mu, sigma, low, high)) | ~there
