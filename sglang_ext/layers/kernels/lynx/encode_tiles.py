"""Kernels that write anchor streams and 8-bit residuals. pytorch_codec.py is the PyTorch version.

A thread has a quad of four adjacent channels of a row of chunks in registers, with all 32 tokens. Means and extremes therefore need no
other thread, and the thread's codes are whole bytes. Arrays are [quads, tokens]. A tuple of four has one array for each channel of a quad.

A number's bin is looked up in a table (:func:`cells`). The range from -sigma to sigma is divided evenly into cells, each with at most one
bound between bins. That bound decides the bin. Cells do not cross mu.

The results for four numbers are one int32 word, with a byte each: the code in the upper bits, the rest (residual) in the lower bits. Before
that, bytes are inverted: bins of greater numbers have smaller bytes. If the bound is not reached, the byte is increased by one.
"""

import struct

import triton
import triton.language as tl

from sglang_ext.layers.kernels.lynx import pytorch_codec
from sglang_ext.layers.kernels.lynx.layout import fine_bounds, level_step, max_level
from sglang_ext.layers.kernels.lynx.tiles import (
    CHUNK,
    at_address,
    extremes,
    find_scales,
    float32_of,
    load_quads,
    numbers_of,
    padded_tokens,
    quarters,
    slots_of,
    store_plane,
)

CLEAR = tl.constexpr(pytorch_codec.CLEAR)
# I with its sign is one number n from -F to F. It has the index n + ZERO.
COUNT, ZERO = 256, tl.constexpr(128)
# More sigmas from the mean than any number of a chunk.
BEYOND = 2.0
# Number of cells, and cells per sigma. Numbers beyond sigma by rounding errors are in the outermost cells.
CELLS, REACH = tl.constexpr(512), tl.constexpr(255)
# Adding DOWN to a small float32, rounded down, leaves the index of its cell above the lowest two bits.
DOWN = tl.constexpr(1.5 * 2**21 + CELLS.value // 2)


def edges(bits: int) -> tuple[float, ...]:
    """Lower bounds of n + 1 in sigmas from mu, by n + ZERO. Below mu, a bin begins where the next bin towards mu ends."""
    most, lower = max_level(bits), fine_bounds(bits)
    positive = lower[1:] + (BEYOND,) * (COUNT - ZERO.value - most)
    negative = [-lower[i] for i in range(most, 0, -1)]
    return (*(-BEYOND,) * (ZERO.value - most), *negative, *positive)


def cells(bits: int) -> tuple[float, ...]:
    """The nearest bound of each cell, in sigmas from mu. The lowest 8 bits, which are 0 in bounds, hold the byte for a reached bound."""
    most, lower, half = max_level(bits), fine_bounds(bits), level_step(bits) // 2

    def cell(place: int) -> float:
        middle = abs(place + 0.5) / REACH.value
        i = min(range(1, most + 1), key=lambda i: abs(lower[i] - middle))
        bound, byte = (lower[i], 128 - half - i) if place >= 0 else (-lower[i], 126 + half + i)
        (pattern,) = struct.unpack("<I", struct.pack("<f", bound))
        return struct.unpack("<f", struct.pack("<I", pattern | byte))[0]

    return tuple(cell(place - CELLS.value // 2) for place in range(CELLS.value))


@triton.jit
def _cell(x, mu, grow, PTX: tl.constexpr):
    """Index of a number's cell, int32 [quads, tokens]. The product is rounded down, so that numbers below mu stay below it."""
    d = x - mu[:, None]
    grow, d = tl.broadcast(grow[:, None], d)
    if PTX:
        down = tl.inline_asm_elementwise("fma.rm.f32 $0, $1, $2, $3;", "=f,f,f,f", [d, grow, tl.zeros_like(d) + DOWN], tl.float32, True, 1)
        return (down.to(tl.int32, bitcast=True) >> 2) & (CELLS - 1)
    else:
        down = tl.floor(d.to(tl.float64) * grow.to(tl.float64))
        return tl.minimum(tl.maximum(down.to(tl.int32) + CELLS // 2, 0), CELLS - 1)


@triton.jit
def _byte(x, mu, sigma, found):
    """A number's byte, with undefined bits above it, int32 [quads, tokens], from its cell's table entry."""
    pattern = found.to(tl.int32, bitcast=True)
    bound = (pattern & -256).to(tl.float32, bitcast=True)
    # The difference is never -0 if a number equals the bound: a sum that cancels is 0, and so is the sum of 0 and -0.
    off = x + (-mu[:, None] - bound * sigma[:, None])
    return pattern + (off.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)


@triton.jit
def _looked_up(x, mu, sigma, grow, table, PTX: tl.constexpr):
    """Look up the bytes of the numbers of quads."""
    cell = tl.join(
        tl.join(_cell(x[0], mu[0], grow[0], PTX), _cell(x[1], mu[1], grow[1], PTX)),
        tl.join(_cell(x[2], mu[2], grow[2], PTX), _cell(x[3], mu[3], grow[3], PTX)),
    )
    found = tl.reshape(tl.gather(table, tl.reshape(cell, (cell.numel,)), 0), cell.shape)
    even, odd = tl.split(found)
    f0, f1 = tl.split(even)
    f2, f3 = tl.split(odd)
    b0, b1 = _byte(x[0], mu[0], sigma[0], f0), _byte(x[1], mu[1], sigma[1], f1)
    b2, b3 = _byte(x[2], mu[2], sigma[2], f2), _byte(x[3], mu[3], sigma[3], f3)
    return _pairs(b0, b1, b2, b3, PTX)


@triton.jit
def _pairs(a, b, c, d, PTX: tl.constexpr):
    """Pack the lowest bytes of the even channels, and those of the odd channels, into the lowest two bytes of int32."""
    if PTX:
        even = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x40;", "=r,r,r", [a, c], tl.int32, True, 1)
        odd = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x40;", "=r,r,r", [b, d], tl.int32, True, 1)
        return even, odd
    else:
        return (a & 255) | ((c & 255) << 8), (b & 255) | ((d & 255) << 8)


@triton.jit
def _searched_byte(x, mu, sigma, bounds, GREATEST: tl.constexpr):
    """As :func:`_byte`, by a search that works for any number."""
    found = tl.zeros_like(x).to(tl.int32)
    power = ZERO
    while power > 0:
        more = found + power
        reached = x >= mu[:, None] + tl.load(bounds + more - 1) * sigma[:, None]
        found = tl.where(reached & (more <= ZERO + GREATEST), more, found)
        power = power >> 1
    return ~(found + tl.where(x >= mu[:, None], 7, -8))


@triton.jit
def _searched(x, mu, sigma, bounds, GREATEST: tl.constexpr, PTX: tl.constexpr):
    return _pairs(
        _searched_byte(x[0], mu[0], sigma[0], bounds, GREATEST), _searched_byte(x[1], mu[1], sigma[1], bounds, GREATEST),
        _searched_byte(x[2], mu[2], sigma[2], bounds, GREATEST), _searched_byte(x[3], mu[3], sigma[3], bounds, GREATEST), PTX,
    )  # fmt: skip


@triton.jit
def _split(first, second, PTX: tl.constexpr):
    """Pack codes and rests of a token's channels and of another token's, a byte each. Inverts all bits but the rests above mu."""
    if PTX:
        word = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [first, second], tl.int32, True, 1)
        below = tl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0xba98;", "=r,r", [word], tl.int32, True, 1)
    else:
        word = (first & 65535) | (second << 16)
        below = ((word >> 7) & 0x01010101) * 255
    return word ^ (below | ~0x0F0F0F0F)


@triton.jit
def _hidden(word, ASSEMBLY: tl.constexpr):
    return tl.inline_asm_elementwise(ASSEMBLY, "=r,r", [word], tl.int32, True, 1)


@triton.jit
def _some_channels(words, k, MOVE: tl.constexpr, LIKE: tl.constexpr, PTX: tl.constexpr):
    """Numbers of every fourth token from token ``k`` on, as ``numbers_of``. A MOVE of its own keeps a branch from reusing earlier results."""
    if PTX and LIKE == tl.bfloat16:
        a, c = quarters(words[0]), quarters(words[1])
        first, second = _hidden(a[k], MOVE), _hidden(c[k], MOVE)
        x0, x1 = _hidden(first, "prmt.b32 $0, $1, 0, 0x1044;"), _hidden(first, "prmt.b32 $0, $1, 0, 0x3244;")
        x2, x3 = _hidden(second, "prmt.b32 $0, $1, 0, 0x1044;"), _hidden(second, "prmt.b32 $0, $1, 0, 0x3244;")
        return float32_of(x0, x1, x2, x3)
    else:
        a, b, c, d = quarters(words[0]), quarters(words[1]), quarters(words[2]), quarters(words[3])
        return numbers_of((a[k], b[k], c[k], d[k]), LIKE)


@triton.jit
def _scales_of(
    words, row, quad, there, anchor, mu_at, sigma_at, CHANNELS: tl.constexpr, LIKE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Mu and sigma of a row's chunks, float32 [quads], four of each, and whether all are clear. Marks the anchor raw if not covered."""
    low, high = extremes(words, LIKE, PTX)
    x = numbers_of(words, LIKE)
    mu, sigma, sound = find_scales(x[0], low[0], high[0], row, 4 * quad, there, anchor, CHANNELS, mu_at, sigma_at)
    mu1, sigma1, sound1 = find_scales(x[1], low[1], high[1], row, 4 * quad + 1, there, anchor, CHANNELS, mu_at, sigma_at)
    mu2, sigma2, sound2 = find_scales(x[2], low[2], high[2], row, 4 * quad + 2, there, anchor, CHANNELS, mu_at, sigma_at)
    mu3, sigma3, sound3 = find_scales(x[3], low[3], high[3], row, 4 * quad + 3, there, anchor, CHANNELS, mu_at, sigma_at)
    sound = sound & sound1 & sound2 & sound3
    tl.store(anchor, tl.full((), 1, tl.uint8), mask=tl.min(tl.where(sound, 1, 0), 0) == 0)
    clear = (sigma > tl.abs(mu) * CLEAR) & (sigma1 > tl.abs(mu1) * CLEAR)
    clear &= (sigma2 > tl.abs(mu2) * CLEAR) & (sigma3 > tl.abs(mu3) * CLEAR)
    return (mu, mu1, mu2, mu3), (sigma, sigma1, sigma2, sigma3), tl.min(tl.where(clear | ~there, 1, 0), 0) > 0


@triton.jit
def _store_looked_up(
    words, mu, sigma, table, codes, rests, row, begin, there, CHANNELS: tl.constexpr, LIKE: tl.constexpr, PTX: tl.constexpr
):
    """Store codes and rests of a complete row of chunks with clear scales."""
    MOVE: tl.constexpr = "mov.b32 $0, $1;"
    reach = tl.zeros_like(sigma[0]) + REACH
    grow, cells = (reach / sigma[0], reach / sigma[1], reach / sigma[2], reach / sigma[3]), tl.load(table + tl.arange(0, CELLS))
    for k in tl.static_range(0, 4, 2):
        even, odd = _looked_up(_some_channels(words, k, MOVE, LIKE, PTX), mu, sigma, grow, cells, PTX)
        even_next, odd_next = _looked_up(_some_channels(words, k + 1, MOVE, LIKE, PTX), mu, sigma, grow, cells, PTX)
        even, odd = _split(even, even_next, PTX), _split(odd, odd_next, PTX)
        _store(even, odd, codes, rests, row, k, begin, there, there, CHANNELS, PTX)


@triton.jit
def _store_searched(
    words, mu, sigma, bounds, codes, rests, row, begin, there, tokens, CHANNELS: tl.constexpr, LIKE: tl.constexpr,
    GREATEST: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Store codes and rests of any row."""
    MOVE: tl.constexpr = "mov.s32 $0, $1;"
    for k in tl.static_range(0, 4, 2):
        token = row * CHUNK + k + 4 * tl.arange(0, CHUNK // 4)
        even, odd = _searched(_some_channels(words, k, MOVE, LIKE, PTX), mu, sigma, bounds, GREATEST, PTX)
        even_next, odd_next = _searched(_some_channels(words, k + 1, MOVE, LIKE, PTX), mu, sigma, bounds, GREATEST, PTX)
        even, odd = _split(even, even_next, PTX), _split(odd, odd_next, PTX)
        inside, inside_next = (token < tokens)[None, :] & there[:, None], (token + 1 < tokens)[None, :] & there[:, None]
        _store(even, odd, codes, rests, row, k, begin, inside, inside_next, CHANNELS, PTX)


@triton.jit
def _store_sinks(source, slots, row, quad, there, tokens, sinks, target, STRIDE: tl.constexpr, CHANNELS: tl.constexpr, PTX: tl.constexpr):
    """Store the sinks of a row of chunks, unchanged."""
    SIZE: tl.constexpr = source.dtype.element_ty.primitive_bitwidth // 8
    for place in range(0, CHUNK, 4):
        token = row * CHUNK + place + tl.arange(0, 4)
        exact = (token < sinks)[None, :] & there[:, None]
        words = load_quads(source, slots_of(slots, tl.minimum(token, tokens - 1), PTX), quad, exact, STRIDE, PTX)
        own = target.to(tl.pointer_type(tl.int32)) + (token * (CHANNELS * SIZE // 4))[None, :] + SIZE * quad[:, None]
        for k in tl.static_range(SIZE):
            tl.store(own + k, words[k], mask=exact)


@triton.jit(do_not_specialize=("tokens", "sinks"))
def encode_tiles(
    sources, anchors, residuals, slots, bounds, table, tokens, sinks, scales_at, mu_at, sigma_at, sinks_at, codes_at,
    CHANNELS: tl.constexpr, STRIDE: tl.constexpr, LIKE: tl.constexpr, GREATEST: tl.constexpr, QUADS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Encode one row of chunks of QUADS quads of channels of a part: the anchor, and the 8-bit residual unless ``residuals`` is None.

    An anchor's first byte must be 0. It becomes 1 if scales do not cover a chunk. STRIDE: elements from one token to the next.
    """
    row, part, begin = tl.program_id(0), tl.program_id(2), tl.program_id(1) * QUADS
    quad = begin + tl.arange(0, QUADS)
    source, anchor, there = at_address(sources, part, LIKE), at_address(anchors, part, tl.uint8), quad < CHANNELS // 4
    codes, rests = anchor + codes_at, residuals if residuals is None else at_address(residuals, part, tl.uint8)
    own = None if CHANNELS % (4 * QUADS) == 0 else there[:, None]
    whole = (row * CHUNK >= sinks) & (row * CHUNK + CHUNK <= tokens)
    if whole:
        a, b, c, d = load_quads(source, slots_of(slots, row * CHUNK + tl.arange(0, CHUNK), PTX), quad, own, STRIDE, PTX)
    else:
        _store_sinks(source, slots, row, quad, there, tokens, sinks, anchor + sinks_at, STRIDE, CHANNELS, PTX)
        a, b, c, d = load_quads(
            source, slots_of(slots, padded_tokens(row, tl.arange(0, CHUNK), tokens, sinks), PTX), quad, own, STRIDE, PTX
        )
    words = a, b, c, d
    mu, sigma, clear = _scales_of(words, row, quad, there, anchor, mu_at, sigma_at, CHANNELS, LIKE, PTX)
    if whole & clear:
        _store_looked_up(words, mu, sigma, table, codes, rests, row, begin, own, CHANNELS, LIKE, PTX)
    else:
        _store_searched(words, mu, sigma, bounds, codes, rests, row, begin, there, tokens, CHANNELS, LIKE, GREATEST, PTX)


@triton.jit
def _store(even, odd, codes, rests, row, k, begin, inside, inside_next, CHANNELS: tl.constexpr, PTX: tl.constexpr):
    """Store the planes of codes and rests (layout.py), for every fourth token of a row of chunks from token ``k`` on, and the next one."""
    store_plane(even, odd, codes, row, k, begin, inside, inside_next, CHANNELS, 4, PTX)
    if rests is not None:
        store_plane(even, odd, rests, row, k, begin, inside, inside_next, CHANNELS, 0, PTX)
