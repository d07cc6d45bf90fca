"""Kernels for exact residuals: count, write and read a block of 64 channels of a row. pytorch_codec.py is the PyTorch version."""

import triton
import triton.language as tl

from sglang_ext.layers.kernels.gpu_launch import buffer_pointer
from sglang_ext.layers.kernels.lynx import layout
from sglang_ext.layers.kernels.lynx.tiles import CHUNK, load_codes, load_scales, stream

BLOCK, UNIT = tl.constexpr(layout.BLOCK), tl.constexpr(8 * layout.UNIT)


@triton.jit
def _with_sinks(page, anchor, row, token, channel, inside, channels, sinks, sinks_at):
    """A tile of a page, with the anchor's exact tokens inserted. All are of the page's dtype, or bit patterns."""
    if row * CHUNK < sinks:
        exact = inside & (token < sinks)[:, None]
        place = (anchor + sinks_at).to(tl.pointer_type(page.dtype)) + token[:, None] * channels + channel[None, :]
        page = tl.where(exact, tl.load(place, mask=exact, other=0), page)
    return page


@triton.jit
def _targets(slots, slot_stride, token, channel, tokens):
    """Offsets of a tile in the pool."""
    target = token.to(tl.int64)
    if slots is not None:
        target = tl.load(slots + token, mask=token < tokens, other=0)
    return target[:, None] * slot_stride + channel[None, :]


@triton.jit
def _load_page(x, slots, slot_stride, token, channel, tokens, channels):
    """Numbers of a page's tokens, of the pool's dtype, 0 beyond the page."""
    inside = (token < tokens)[:, None] & (channel < channels)[None, :]
    return tl.load(x + _targets(slots, slot_stride, token, channel, tokens), mask=inside, other=0)


@triton.jit
def _flipped(patterns):
    """Convert patterns, sign-extended to int32, to ordinals, or ordinals to patterns. 16-bit patterns invert their lowest 15 bits."""
    return tl.where(patterns < 0, patterns ^ 0x7FFFFFFF, patterns)


@triton.jit
def _first_reaching(bound, LIKE: tl.constexpr):
    """The ordinal of the smallest number of LIKE that is not less than a float32, int32. For 0, the ordinal of -0."""
    ranks = _flipped(bound.to(tl.int32, bitcast=True))
    if LIKE == tl.bfloat16:
        # Float32 ordinals have 16 more bits than bfloat16 ordinals: 0 for positive bfloat16 numbers, and 1 for negative ones.
        ranks = tl.where(ranks < 0, ranks >> 16, (ranks + 0xFFFF) >> 16)
    if LIKE == tl.float16:
        nearest = bound.to(tl.float16)
        pattern = nearest.to(tl.int16, bitcast=True).to(tl.int32)
        ranks = tl.where(pattern < 0, pattern ^ 0x7FFF, pattern)
        ranks = tl.where(nearest == 0.0, 0, ranks)
        less = nearest.to(tl.float32) < bound
        ranks = tl.where(less, ranks + 1, tl.where(nearest == 0.0, -1, ranks))
    return tl.where(bound == 0.0, -1, ranks)


@triton.jit
def bins_of(mu, sigma, codes, bounds, LIKE: tl.constexpr, BITS: tl.constexpr):
    """First ordinal of each code's bin, int32 [tokens, channels]; last index of the bin, uint32; and bits of an index."""
    first = _first_reaching(mu[None, :] + sigma[None, :] * tl.load(bounds + codes), LIKE)
    after = mu[None, :] + sigma[None, :] * tl.load(bounds + codes + 1)
    # The last bin includes its end, because the end is a number of the chunk. 0 counts twice, as -0 and 0.
    more = tl.where(codes == (1 << BITS) - 1, tl.where(after == 0.0, 2, 1), 0)
    last = (_first_reaching(after, LIKE) + more - 1 - first).to(tl.uint32, bitcast=True)
    # Clearing the second highest bit keeps rounding from reaching the next power.
    power = (last ^ (last & (last >> 1))).to(tl.float32).to(tl.int32, bitcast=True) >> 23
    return first, last, tl.maximum(power - 126, 0)


@triton.jit
def _bins(
    anchor, bounds, row, begin, token, tokens, channels, sinks, mu_at, sigma_at, codes_at, LIKE: tl.constexpr, BITS: tl.constexpr
):
    """First ordinal of each code's bin, int32 [32, 64], and bits of an index."""
    channel, own = begin + tl.arange(0, BLOCK), token < tokens
    mu, sigma = load_scales(anchor, row, channel, channel < channels, channels, mu_at, sigma_at)
    codes = load_codes(anchor + codes_at, token, own, begin, channels, BLOCK)
    first, _, width = bins_of(mu, sigma, codes, bounds, LIKE, BITS)
    coded = (own & (token >= sinks))[:, None] & (channel < channels)[None, :]
    return first, tl.where(coded, width, 0)


@triton.jit
def to_ordinals(numbers):
    """Ordinals of numbers, int32."""
    if numbers.dtype == tl.float32:
        return _flipped(numbers.to(tl.int32, bitcast=True))
    else:
        pattern = numbers.to(tl.int16, bitcast=True).to(tl.int32)
        return tl.where(pattern < 0, pattern ^ 0x7FFF, pattern)


@triton.jit
def from_ordinals(ranks, LIKE: tl.constexpr):
    """Numbers of LIKE from ordinals."""
    if LIKE == tl.float32:
        return _flipped(ranks).to(tl.float32, bitcast=True)
    else:
        return tl.where(ranks < 0, ranks ^ 0x7FFF, ranks).to(tl.int16).to(LIKE, bitcast=True)


@triton.jit
def index_places(width):
    """First bits of the indices in their block, int32 [32, 64]."""
    of_token = tl.sum(width, 1)
    return (tl.cumsum(of_token, 0) - of_token)[:, None] + tl.cumsum(width, 1) - width


@triton.jit
def or_bits(target, index, width, TOGETHER: tl.constexpr):
    """OR a block's indices, uint32 [32, 64], into zeros. TOGETHER adjacent indices, at most 64 bits, are first packed into one word."""
    place = tl.reshape(index_places(width), (CHUNK, BLOCK // TOGETHER, TOGETHER))
    start = tl.min(place, 2)
    index = tl.reshape(index.to(tl.uint64), (CHUNK, BLOCK // TOGETHER, TOGETHER))
    # A shift by 64 occurs only for indices of 0 bits.
    shift = tl.minimum(place - start[:, :, None], 63).to(tl.uint64)
    word = tl.sum(index << shift, 2)
    at = target + start // UNIT
    shift = (start % UNIT).to(tl.uint64)
    tl.atomic_or(at, word << shift, mask=word != 0, sem="relaxed")
    spilled = (word >> 1) >> (63 - shift)
    tl.atomic_or(at + 1, spilled, mask=spilled != 0, sem="relaxed")


@triton.jit
def read_bits(source, begin, place, width, words):
    """Read indices, int32, of ``width`` bits at ``place`` after ``begin`` 8-byte units, from a stream of ``words`` 32-bit words."""
    at = begin * 2 + place // 32
    shift = (place % 32).to(tl.uint64)
    low = tl.load(source + at, mask=(width > 0) & (at < words), other=0).to(tl.uint64)
    high = tl.load(source + at + 1, mask=(place % 32 + width > 32) & (at + 1 < words), other=0).to(tl.uint64)
    one = tl.full(width.shape, 1, tl.uint64)
    index = ((low | (high << 32)) >> shift) & ((one << width.to(tl.uint64)) - 1)
    return index.to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=("tokens", "sinks"))
def count_units(
    anchors, bounds, units, tokens, channels, sinks, scales_at, mu_at, sigma_at, codes_at, LIKE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Count the units of each block, int32 [parts, rows, blocks]."""
    row, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = row * CHUNK + tl.arange(0, CHUNK)
    _, width = _bins(
        stream(anchors, part), bounds, row, block * BLOCK, token, tokens, channels, sinks, mu_at, sigma_at, codes_at, LIKE,
        BITS,
    )  # fmt: skip
    place = (part * tl.num_programs(0) + row) * tl.num_programs(1) + block
    tl.store(units + place, (tl.sum(tl.sum(width, 1), 0) + UNIT - 1) // UNIT)


@triton.jit(do_not_specialize=("tokens", "sinks"))
def write_exact(
    sources, anchors, residuals, slots, bounds, slot_stride, tokens, channels, sinks, scales_at, mu_at, sigma_at, codes_at, bits_at,
    LIKE: tl.constexpr, BITS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Write the indices of a block, ORed into zeros."""
    row, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token, channel = row * CHUNK + tl.arange(0, CHUNK), block * BLOCK + tl.arange(0, BLOCK)
    first, width = _bins(
        stream(anchors, part), bounds, row, block * BLOCK, token, tokens, channels, sinks, mu_at, sigma_at, codes_at, LIKE,
        BITS,
    )  # fmt: skip
    numbers = _load_page(buffer_pointer(sources, part, LIKE), slots, slot_stride, token, channel, tokens, channels)
    ranks = to_ordinals(numbers)
    index = tl.where(width > 0, ranks - first, 0).to(tl.uint32, bitcast=True)
    residual = stream(residuals, part)
    begin = tl.load(residual.to(tl.pointer_type(tl.int32)) + row * tl.num_programs(1) + block).to(tl.int64)
    or_bits((residual + bits_at).to(tl.pointer_type(tl.uint64)) + begin, index, width, TOGETHER)


@triton.jit(do_not_specialize=("tokens", "sinks"))
def read_exact(
    anchors, residuals, outs, slots, bounds, slot_stride, tokens, channels, sinks, scales_at, mu_at, sigma_at, sinks_at, codes_at,
    bits_at, LIKE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Decode the numbers of a block into a pool."""
    row, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token, channel = row * CHUNK + tl.arange(0, CHUNK), block * BLOCK + tl.arange(0, BLOCK)
    anchor, residual = stream(anchors, part), stream(residuals, part)
    first, width = _bins(
        anchor, bounds, row, block * BLOCK, token, tokens, channels, sinks, mu_at, sigma_at, codes_at, LIKE, BITS
    )
    begin = tl.load(residual.to(tl.pointer_type(tl.int32)) + row * tl.num_programs(1) + block).to(tl.int64)
    index = read_bits((residual + bits_at).to(tl.pointer_type(tl.uint32)), begin, index_places(width), width, 1 << 62)
    page = from_ordinals(first + index, LIKE)
    inside = (token < tokens)[:, None] & (channel < channels)[None, :]
    page = _with_sinks(page, anchor, row, token, channel, inside, channels, sinks, sinks_at)
    tl.store(buffer_pointer(outs, part, LIKE) + _targets(slots, slot_stride, token, channel, tokens), page, mask=inside)
