"""Kernel that decodes anchor streams, with or without 8-bit residuals, into a pool. pytorch_codec.py is the PyTorch version.

If codes have 4 bits and numbers 16, a thread has quads of channels as in encode_tiles.py. Otherwise it has pairs of channels, whose codes
share a byte.
"""

import triton
import triton.language as tl

from sglang_ext.layers.kernels.lynx.tiles import CHUNK, at_address, load_pair_codes, load_scales, pair_places, slots_of


@triton.jit
def _load_meant(codes, rests, meanings, token, inside, pair, channels, tokens, BITS: tl.constexpr):
    """Values of the codes of even and odd channels, float32 [pairs, 32] each, in sigmas from mu."""
    REST: tl.constexpr = 8 - BITS
    even, odd = load_pair_codes(codes, token, inside, pair, channels, tokens, BITS)
    if rests is not None:
        rest, rest_odd = load_pair_codes(rests, token, inside, pair, channels, tokens, REST)
        even, odd = (even << REST) | rest, (odd << REST) | rest_odd
    return tl.load(meanings + even), tl.load(meanings + odd)


@triton.jit
def _word(a, b, LIKE: tl.constexpr, PTX: tl.constexpr):
    """Pack two float32 numbers as two of LIKE in int32."""
    if PTX and LIKE == tl.bfloat16:
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], tl.int32, True, 1)
    elif PTX:
        return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], tl.int32, True, 1)
    else:
        low, high = a.to(LIKE).to(tl.int16, bitcast=True).to(tl.int32), b.to(LIKE).to(tl.int16, bitcast=True).to(tl.int32)
        return (low & 65535) | (high << 16)


@triton.jit
def _store_quads(
    codes, rests, out, slots, meanings, mu, sigma, row, quad, inside, CHANNELS: tl.constexpr, STRIDE: tl.constexpr, LIKE: tl.constexpr,
    FEW: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Decode a complete row of chunks without sinks, for codes of 4 bits and numbers of 16 bits.

    A thread has quads of four adjacent channels: 16 bits of each plane per token, lowest channels first. Arrays are [quads, tokens].

    Args:
        mu, sigma: float32 [quads], four of each.
    """
    COUNT: tl.constexpr = 16 if rests is None else 256
    table, four = tl.load(meanings + tl.arange(0, COUNT)), CHANNELS // 8
    for place in range(0, CHUNK, FEW):
        few = tl.arange(0, FEW)
        # The bits of 4 quads are 8 bytes.
        at = (quad + (row * CHUNK + place) * (2 * four))[:, None] + (few * (2 * four))[None, :]
        code = tl.load(codes.to(tl.pointer_type(tl.int16)) + at, mask=inside).to(tl.int32)
        if rests is None:
            c0, c1, c2, c3 = code & 15, (code >> 4) & 15, (code >> 8) & 15, (code >> 12) & 15
        else:
            rest = tl.load(rests.to(tl.pointer_type(tl.int16)) + at, mask=inside).to(tl.int32)
            even, odd = ((code & 0x0F0F) << 4) | (rest & 0x0F0F), (code & 0xF0F0) | ((rest >> 4) & 0x0F0F)
            c0, c1, c2, c3 = even & 255, odd & 255, even >> 8, odd >> 8
        both = tl.join(tl.join(c0, c1), tl.join(c2, c3))
        lower, upper = tl.split(tl.reshape(tl.gather(table, tl.reshape(both, (both.numel,)), 0), both.shape))
        # Split undoes the last join first, so it gives the first and the second pair.
        m0, m1 = tl.split(lower)
        m2, m3 = tl.split(upper)
        low = _word(mu[0][:, None] + m0 * sigma[0][:, None], mu[1][:, None] + m1 * sigma[1][:, None], LIKE, PTX)
        high = _word(mu[2][:, None] + m2 * sigma[2][:, None], mu[3][:, None] + m3 * sigma[3][:, None], LIKE, PTX)
        words = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
        far = slots_of(slots, row * CHUNK + place + few, PTX).to(tl.int64) * (STRIDE // 4)
        tl.store((out.to(tl.pointer_type(tl.int64)) + quad)[:, None] + far[None, :], words, mask=inside)


@triton.jit(do_not_specialize=("tokens", "sinks"))
def decode_tiles(
    anchors, residuals, outs, slots, meanings, tokens, sinks, gamma_at, mu_at, sigma_at, sinks_at, codes_at, CHANNELS: tl.constexpr,
    STRIDE: tl.constexpr, LIKE: tl.constexpr, BITS: tl.constexpr, SHORT: tl.constexpr, PAIRS: tl.constexpr, FEW: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Decode one row of chunks of PAIRS pairs of channels of a part.

    Args:
        meanings: float32, levels of codes in sigmas from mu. With residuals, the index has the code's bits, then the rest's.
    """
    row, part, pair = tl.program_id(0), tl.program_id(2), tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    anchor, out, there = at_address(anchors, part, tl.uint8), at_address(outs, part, LIKE), pair < CHANNELS // 2
    rests = residuals if residuals is None else at_address(residuals, part, tl.uint8)
    QUADS: tl.constexpr = BITS == 4 and LIKE != tl.float32
    if QUADS and (row * CHUNK >= sinks) & (row * CHUNK + CHUNK <= tokens):
        quad = tl.program_id(1) * (PAIRS // 2) + tl.arange(0, PAIRS // 2)
        inside = quad < CHANNELS // 4
        mu0, sigma0 = load_scales(anchor, row, 4 * quad, inside, CHANNELS, gamma_at, mu_at, sigma_at, SHORT)
        mu1, sigma1 = load_scales(anchor, row, 4 * quad + 1, inside, CHANNELS, gamma_at, mu_at, sigma_at, SHORT)
        mu2, sigma2 = load_scales(anchor, row, 4 * quad + 2, inside, CHANNELS, gamma_at, mu_at, sigma_at, SHORT)
        mu3, sigma3 = load_scales(anchor, row, 4 * quad + 3, inside, CHANNELS, gamma_at, mu_at, sigma_at, SHORT)
        own = None if CHANNELS % (2 * PAIRS) == 0 else inside[:, None]
        mu, sigma = (mu0, mu1, mu2, mu3), (sigma0, sigma1, sigma2, sigma3)
        _store_quads(anchor + codes_at, rests, out, slots, meanings, mu, sigma, row, quad, own, CHANNELS, STRIDE, LIKE, FEW, PTX)
    else:
        mu_even, sigma_even = load_scales(anchor, row, 2 * pair, there, CHANNELS, gamma_at, mu_at, sigma_at, SHORT)
        mu_odd, sigma_odd = load_scales(anchor, row, 2 * pair + 1, there, CHANNELS, gamma_at, mu_at, sigma_at, SHORT)
        for place in range(0, CHUNK, FEW // 2):
            token = row * CHUNK + place + tl.arange(0, FEW // 2)
            inside = (token < tokens)[None, :] & there[:, None]
            even, odd = _load_meant(anchor + codes_at, rests, meanings, token, inside, pair, CHANNELS, tokens, BITS)
            target = out + pair_places(slots, STRIDE, tl.minimum(token, tokens - 1), pair, 2)
            coded, exact = inside & (token >= sinks)[None, :], inside & (token < sinks)[None, :]
            tl.store(target, (mu_even[:, None] + even * sigma_even[:, None]).to(LIKE), mask=coded)
            tl.store(target + 1, (mu_odd[:, None] + odd * sigma_odd[:, None]).to(LIKE), mask=coded)
            source = (anchor + sinks_at).to(tl.pointer_type(LIKE)) + (token * CHANNELS)[None, :] + 2 * pair[:, None]
            tl.store(target, tl.load(source, mask=exact, other=0), mask=exact)
            tl.store(target + 1, tl.load(source + 1, mask=exact, other=0), mask=exact)
