"""Kernel that reads anchor streams, and residuals of 8 bits, into a pool; plain.py says the same in PyTorch.

Numbers as in encode_tiles.py: a thread has pairs of channels, of which a byte has the codes.
"""

import triton
import triton.language as tl

from sglang_ext.layers.kernels.lynx.tiles import CHUNK, at_address, load_pair_codes, load_scales, pair_places


@triton.jit
def _load_meant(codes, rests, meanings, token, inside, pair, channels, tokens, BITS: tl.constexpr):
    """What the codes of even and odd channels mean, float32 [pairs, 32] each, in sigmas from mu."""
    REST: tl.constexpr = 8 - BITS
    even, odd = load_pair_codes(codes, token, inside, pair, channels, tokens, BITS)
    if rests is not None:
        rest, rest_odd = load_pair_codes(rests, token, inside, pair, channels, tokens, REST)
        even, odd = (even << REST) | rest, (odd << REST) | rest_odd
    return tl.load(meanings + even), tl.load(meanings + odd)


@triton.jit(do_not_specialize=("tokens", "sinks"))
def decode_tiles(
    anchors, residuals, outs, slots, meanings, slot_stride, tokens, channels, sinks, gamma_at, mu_at, sigma_at, sinks_at, codes_at,
    LIKE: tl.constexpr, BITS: tl.constexpr, SHORT: tl.constexpr, PAIRS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """A row of chunks of PAIRS pairs of channels of a part.

    Args:
        meanings: float32, in sigmas from mu, of codes, or with residuals of codes and rests, which follow codes as lower bits.
    """
    row, part, pair = tl.program_id(0), tl.program_id(2), tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    anchor, out, there = at_address(anchors, part, tl.uint8), at_address(outs, part, LIKE), pair < channels // 2
    rests = residuals if residuals is None else at_address(residuals, part, tl.uint8)
    mu, sigma = load_scales(anchor, row, 2 * pair, there, channels, gamma_at, mu_at, sigma_at, SHORT)
    mu_odd, sigma_odd = load_scales(anchor, row, 2 * pair + 1, there, channels, gamma_at, mu_at, sigma_at, SHORT)
    # Of a whole row only channels ask whether they are there.
    whole = (row * CHUNK >= sinks) & (row * CHUNK + CHUNK <= tokens)
    for place in range(0, CHUNK, FEW):
        token = row * CHUNK + place + tl.arange(0, FEW)
        if whole:
            even, odd = _load_meant(anchor + codes_at, rests, meanings, token, there[:, None], pair, channels, tokens, BITS)
            target = out + pair_places(slots, slot_stride, token, pair, 2)
            tl.store(target, (mu[:, None] + even * sigma[:, None]).to(LIKE), mask=there[:, None])
            tl.store(target + 1, (mu_odd[:, None] + odd * sigma_odd[:, None]).to(LIKE), mask=there[:, None])
        else:
            inside = (token < tokens)[None, :] & there[:, None]
            even, odd = _load_meant(anchor + codes_at, rests, meanings, token, inside, pair, channels, tokens, BITS)
            target = out + pair_places(slots, slot_stride, tl.minimum(token, tokens - 1), pair, 2)
            coded, exact = inside & (token >= sinks)[None, :], inside & (token < sinks)[None, :]
            tl.store(target, (mu[:, None] + even * sigma[:, None]).to(LIKE), mask=coded)
            tl.store(target + 1, (mu_odd[:, None] + odd * sigma_odd[:, None]).to(LIKE), mask=coded)
            source = (anchor + sinks_at).to(tl.pointer_type(LIKE)) + (token * channels)[None, :] + 2 * pair[:, None]
            tl.store(target, tl.load(source, mask=exact, other=0), mask=exact)
            tl.store(target + 1, tl.load(source + 1, mask=exact, other=0), mask=exact)
