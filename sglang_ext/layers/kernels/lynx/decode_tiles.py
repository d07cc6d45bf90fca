"""Kernel that reads anchor streams, and residuals of 8 bits, into a pool; plain.py says the same in PyTorch."""

import triton
import triton.language as tl

from sglang_ext.layers.kernels.lynx.tiles import CHUNK, buffer, load_codes, load_scales, stream


@triton.jit
def with_sinks(page, anchor, row, token, channel, inside, channels, sinks, sinks_at):
    """A tile of a page with the anchor's exact tokens in their places; all of the page's dtype, or as patterns."""
    if row * CHUNK < sinks:
        exact = inside & (token < sinks)[:, None]
        place = (anchor + sinks_at).to(tl.pointer_type(page.dtype)) + token[:, None] * channels + channel[None, :]
        page = tl.where(exact, tl.load(place, mask=exact, other=0), page)
    return page


@triton.jit
def targets(slots, slot_stride, token, channel, tokens):
    """Offsets of a tile in the pool."""
    target = token.to(tl.int64)
    if slots is not None:
        target = tl.load(slots + token, mask=token < tokens, other=0)
    return target[:, None] * slot_stride + channel[None, :]


@triton.jit(do_not_specialize=("tokens", "sinks"))
def decode_tiles(
    anchors, residuals, outs, slots, meanings, slot_stride, tokens, channels, sinks, gamma_at, mu_at, sigma_at, sinks_at, codes_at,
    LIKE: tl.constexpr, BITS: tl.constexpr, SHORT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A row of COLUMNS chunks of a part.

    Args:
        meanings: float32, of V, or with residuals of I, as many as 7 bits count.
    """
    REST: tl.constexpr = 8 - BITS
    HALF: tl.constexpr = 1 << (BITS - 1)
    row, part, begin = tl.program_id(0), tl.program_id(2), tl.program_id(1) * COLUMNS
    token, channel = row * CHUNK + tl.arange(0, CHUNK), begin + tl.arange(0, COLUMNS)
    anchor, own = stream(anchors, part), token < tokens
    inside = own[:, None] & (channel < channels)[None, :]
    mu, sigma = load_scales(anchor, row, channel, channel < channels, channels, gamma_at, mu_at, sigma_at, SHORT)
    codes = load_codes(anchor + codes_at, token, own, begin, channels, tokens, COLUMNS, BITS)
    above = codes >= HALF
    v = codes ^ tl.where(above, HALF, HALF - 1)
    if residuals is not None:
        rest = load_codes(stream(residuals, part), token, own, begin, channels, tokens, COLUMNS, REST)
        # Of bytes that nobody encoded, too, it is one of the meanings.
        v = ((v << REST) + (1 << (REST - 1)) - rest) & 127
    side = tl.where(above, sigma[None, :], -sigma[None, :])
    page = (mu[None, :] + tl.load(meanings + v) * side).to(LIKE)
    page = with_sinks(page, anchor, row, token, channel, inside, channels, sinks, sinks_at)
    tl.store(buffer(outs, part, LIKE) + targets(slots, slot_stride, token, channel, tokens), page, mask=inside)
