"""Parts that the Lynx kernels share: planes of codes, scales, and bounds.

They give the same bits as PyTorch (scales.py, pytorch_codec.py), whether or not the compiler fuses products and sums. A product that is
followed by a sum is exact. No result depends on the order of a reduction.
"""

import triton
import triton.language as tl

from sglang_ext.layers.kernels.gpu_launch import buffer_pointer
from sglang_ext.layers.kernels.lynx import scales

CHUNK = tl.constexpr(32)
LARGEST, ROUNDING, BIAS = tl.constexpr(scales.LARGEST), tl.constexpr(scales.ROUNDING), tl.constexpr(scales.BIAS)
LEAST, MOST, INTEGER = tl.constexpr(scales.LEAST), tl.constexpr(scales.MOST), tl.constexpr(scales.INTEGER)
SHARE, STEPS = tl.constexpr(scales.SHARE), tl.constexpr(scales.STEPS)


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
def store_plane(
    even, odd, plane, row, k, begin, inside, inside_next, CHANNELS: tl.constexpr, LEFT: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """Store bits ``LEFT`` to ``LEFT + WIDTH`` of bytes in a plane of codes.

    Args:
        even, odd: int32 [quads, tokens]. ``even`` has the bytes of the first and third channel of a quad, ``odd`` those of the others. Each
            int32 holds two adjacent tokens. The first token of each pair is every fourth one of a row of chunks, from token ``k`` on.
        begin: The first quad.
        inside, inside_next: Masks of the stores, of the first and of the second token.
    """
    MASK: tl.constexpr = (1 << WIDTH) - 1
    # The codes of two adjacent channels share a byte. With 4 bits, one code is already in position, and the other is shifted beside it.
    if LEFT == 4:
        both = _nibbles(even >> 4, odd, PTX)
    elif WIDTH == 4 and LEFT == 0:
        both = _nibbles(even, odd << 4, PTX)
    else:
        both = ((even >> LEFT) & (MASK * 0x01010101)) | (((odd >> LEFT) & (MASK * 0x01010101)) << WIDTH)
        if WIDTH < 4:
            both = both | (both >> (8 - 2 * WIDTH))
    _store_tokens(both, plane, row, k, begin, inside, CHANNELS, WIDTH)
    _store_tokens(both >> 16, plane, row, k + 1, begin, inside_next, CHANNELS, WIDTH)


@triton.jit
def _store_tokens(quads, plane, row, k, begin, inside, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """Store the lowest ``4 * WIDTH`` bits, a quad's codes, of every fourth token."""
    TOKENS: tl.constexpr = quads.shape[1]
    KIND: tl.constexpr = tl.int16 if WIDTH == 4 else tl.uint8
    if WIDTH == 1:
        PAIRS: tl.constexpr = quads.shape[0] // 2
        shifts = tl.arange(0, 2) * 4
        quads = tl.sum(tl.reshape(quads & 15, (PAIRS, 2, TOKENS)) << shifts[None, :, None], 1)
        if inside is not None:
            inside, _ = tl.broadcast(inside, tl.zeros((2 * PAIRS, TOKENS), tl.int1))
            inside = tl.min(tl.reshape(inside.to(tl.int32), (PAIRS, 2, TOKENS)), 1) > 0
    STRIDE: tl.constexpr = CHANNELS * WIDTH // KIND.primitive_bitwidth
    own = plane.to(tl.pointer_type(KIND)) + begin * (4 * WIDTH) // KIND.primitive_bitwidth + (row * CHUNK + k) * STRIDE
    place = (own + tl.arange(0, quads.shape[0]))[:, None] + (tl.arange(0, TOKENS) * (4 * STRIDE))[None, :]
    tl.store(place, quads.to(KIND), mask=inside)


@triton.jit
def _load_pair_plane(plane, token, inside, pair, channels, WIDTH: tl.constexpr):
    """Load WIDTH bits of the even and of the odd channels, int32 [pairs, tokens] each."""
    MORE: tl.constexpr = 4 // WIDTH
    place = plane + (token * (channels * WIDTH // 8))[None, :] + (pair // MORE)[:, None]
    both = tl.load(place, mask=inside, other=0).to(tl.int32)
    if MORE > 1:
        both = both >> (pair % MORE * (2 * WIDTH))[:, None]
    return both & ((1 << WIDTH) - 1), (both >> WIDTH) & ((1 << WIDTH) - 1)


@triton.jit
def load_pair_codes(planes, token, inside, pair, channels, tokens, BITS: tl.constexpr):
    """Load the codes of the even and of the odd channels, int32 [pairs, tokens] each, 0 outside."""
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
    """Load WIDTH bits per channel from a plane, int32 [tokens, COLUMNS]."""
    TOKENS: tl.constexpr = token.shape[0]
    KIND: tl.constexpr = tl.int32 if WIDTH == 4 else tl.int16 if WIDTH == 2 else tl.int8
    word = channel // 8 + tl.arange(0, COLUMNS // 8)
    place = plane.to(tl.pointer_type(KIND)) + token[:, None] * (channels // 8) + word[None, :]
    words = tl.load(place, mask=inside[:, None] & (word < channels // 8)[None, :], other=0).to(tl.int32)
    shifts = tl.arange(0, 8) * WIDTH
    return tl.reshape((words[:, :, None] >> shifts[None, None, :]) & ((1 << WIDTH) - 1), (TOKENS, COLUMNS))


@triton.jit
def load_codes(planes, token, inside, channel, channels, tokens, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """Load codes, int32 [tokens, COLUMNS], 0 outside."""
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
def rounded_to_integer(x):
    """Round small numbers to integers, ties to even."""
    return (x + ROUNDING) - ROUNDING


@triton.jit
def load_scales(anchor, row, channel, inside, channels, gamma_at, mu_at, sigma_at, SHORT: tl.constexpr):
    """Load mu and sigma of a row's chunks, float32 [channels]."""
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
