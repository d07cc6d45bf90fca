"""Encodes and decodes pages in host memory, with loops that Numba compiles. Anchors are those of pytorch_codec.py, residuals are shorter.

A compact residual restores the pool's bits from an anchor. A number's code and its chunk's scales give a range that contains the number. The
range is divided into cells. A cell is as wide as the distance of adjacent numbers at the end of the range that is farther from 0. Two integers
define the number:

1. The index of its cell, a truncated binary code: the index of one of n cells has floor(log2(n)) bits, or one more.
2. Its index in the cell. A cell nearer to 0 than that end can have 2, 4, 8... numbers, and then the index has 1, 2, 3... bits. A cell next to 0
   has numbers of all smaller exponents. There, the index is exponent and mantissa.

So numbers take about as many bits as if they were equally likely in each part of a range. In exact residuals, all numbers of a range take
the same bits, though most of these numbers are near 0.

The residual stream is uint32 words: the number of words of the first part, the first part, the second part. Each part is filled from the lowest
bit, so that the loops know the place of a number's bits early. The first part has floor(log2(n)) bits of each number, the second part the
others. Numbers are ordered by row of chunks, then by channel, then by token. All dtypes are handled as patterns of float32.

Integers in loops are int64, indices uint64: Numba converts mixed integers to float64, and checks signed indices.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numba import njit

from sglang_ext.layers.kernels.lynx import pytorch_codec
from sglang_ext.layers.kernels.lynx.layout import CHUNK, PageLayout, PageTensors, bounds, levels
from sglang_ext.layers.kernels.lynx.scales import compute_scales

compiled = njit(nogil=True, cache=True, error_model="numpy")

MANTISSA = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}
"""Bits of a mantissa without its first 1."""
CODES = 16
"""Codes of an anchor of 4 bits, the only ones that have compact residuals."""
# Of float32: bits of a mantissa, bias of an exponent, and the bits of a pattern without the sign.
WIDE, BIAS, MAGNITUDE = 23, 127, 0x7FFFFFFF
# Offsets in the ranges of a chunk: what to add to the pattern of a cell's index, the first cell, floor(log2(n)), and the number of cells whose
# index has no further bit.
OFFSET, FIRST, LENGTH, SHORT = 0, CODES, 2 * CODES, 3 * CODES
# Words that the numbers of a chunk do not exceed in a part, and one that is read with the last.
SPARE = CHUNK + 1


@compiled
def _cell(magnitude: int, top: int, mantissa: int) -> int:
    """Number of cells between 0 and a number, from the pattern of its absolute value. ``top``: exponent of the range's outer end."""
    exponent = max(magnitude >> WIDE, 1)
    significand = (magnitude & 0x7FFFFF) | (np.int64(magnitude > 0x7FFFFF) << WIDE)
    return significand >> (WIDE - mantissa) >> min(top - exponent, 31)


@compiled
def _find_ranges(mu: float, sigma: float, bounds: np.ndarray, mantissa: int, ends: np.ndarray, ranges: np.ndarray) -> None:
    """Fill the ends, float32 [CODES + 1], and the ranges, int64 [4 * CODES], of a chunk's codes. Cells below 0 are -1, -2..."""
    patterns = ends.view(np.int32)
    for each in range(CODES + 1):
        ends[each] = mu + sigma * bounds[each]
    for code in range(CODES):
        low, high = np.int64(patterns[code]), np.int64(patterns[code + 1])
        # With a greater top, the numbers of a cell that is not next to 0 are normal.
        top = max(max((low & MAGNITUDE) >> WIDE, (high & MAGNITUDE) >> WIDE), mantissa + 1)
        # A range that ends at 0 includes 0 and -0.
        first = _cell(low & MAGNITUDE, top, mantissa) ^ -np.int64(low <= 0)
        last = _cell(high & MAGNITUDE, top, mantissa) ^ -np.int64((high < 0) & (high & MAGNITUDE > 0))
        # Only a damaged anchor has a range without cells.
        count = max(last - first + 1, 1)
        length = (np.int64(np.float32(count).view(np.int32)) >> WIDE) - BIAS
        ranges[OFFSET + code] = (top - mantissa - BIAS) << WIDE
        ranges[FIRST + code] = first
        ranges[LENGTH + code] = length
        ranges[SHORT + code] = (2 << length) - count


@compiled
def _put(words: np.ndarray, place: int, value: int) -> None:
    """Set the bits of an integer of at most 32 bits, from bit ``place`` on."""
    at, moved = np.uint64(place) >> np.uint64(5), np.uint64(value) << np.uint64(place & 31)
    words[at] |= np.uint32(moved & np.uint64(0xFFFFFFFF))
    words[at + np.uint64(1)] |= np.uint32(moved >> np.uint64(32))


@compiled
def _get(pairs: np.ndarray, place: int) -> int:
    """At least 32 bits from bit ``place`` on, int64. ``pairs``: each word and the next, uint64."""
    return np.int64(pairs[np.uint64(place) >> np.uint64(5)] >> np.uint64(place & 31))


@compiled
def _mask(bits: int) -> int:
    """The integer whose lowest ``bits`` bits are 1."""
    return (np.int64(1) << bits) - 1


@compiled
def _encode(
    numbers: np.ndarray, mu: np.ndarray, sigma: np.ndarray, bounds: np.ndarray, sinks: int, mantissa: int, codes: np.ndarray, words: np.ndarray,
) -> tuple[int, int]:  # fmt: skip
    """Fill codes, uint8 [tokens, channels / 2], and the parts of a residual, uint32 [2, words]. All are 0 before.

    ``numbers``: float32 [tokens, channels]. ``mu``, ``sigma``: float32 [rows, channels]. Returns the bits of each part; -1 if the words do
    not suffice.
    """
    tokens, channels = numbers.shape
    ends, ranges = np.empty(CODES + 1, np.float32), np.empty(4 * CODES, np.int64)
    x, found = np.zeros(CHUNK, np.float32), np.empty(CHUNK, np.int32)
    patterns, one, two = x.view(np.int32), np.int64(0), np.int64(0)
    for row in range(len(mu)):
        begin, end = max(row * CHUNK, sinks), min((row + 1) * CHUNK, tokens)
        for channel in range(channels):
            if max(one, two) >> 5 > words.shape[1] - SPARE:
                return -1, -1
            _find_ranges(mu[row, channel], sigma[row, channel], bounds, mantissa, ends, ranges)
            for token in range(begin, end):
                x[token - begin] = numbers[token, channel]
            found[:] = 0
            for each in range(1, CODES):
                for place in range(CHUNK):
                    found[place] += x[place] >= ends[each]
            for token in range(begin, end):
                code, pattern = np.uint64(found[token - begin]), np.int64(patterns[token - begin])
                codes[token, channel >> 1] |= found[token - begin] << 4 * (channel & 1)
                magnitude = pattern & MAGNITUDE
                cell = _cell(magnitude, (ranges[OFFSET + code] >> WIDE) + mantissa + BIAS, mantissa)
                index = (cell ^ (pattern >> 63)) - ranges[FIRST + code]
                more = np.int64(index >= ranges[SHORT + code])
                index += ranges[SHORT + code] * more
                bits = mantissa + BIAS - (np.int64(np.float32(cell).view(np.int32)) >> WIDE) if cell > 0 else mantissa + 8
                _put(words[0], one, index >> more)
                _put(words[1], two, (magnitude >> (WIDE - mantissa) & _mask(bits)) << more | (index & more))
                one += ranges[LENGTH + code]
                two += bits + more
    return one, two


@compiled
def _decode(
    codes: np.ndarray, mu: np.ndarray, sigma: np.ndarray, bounds: np.ndarray, sinks: int, mantissa: int, words: np.ndarray, first_words: int,
    numbers: np.ndarray, unused: int,
) -> bool:  # fmt: skip
    """Fill the patterns of the tokens after the sinks, integers [tokens, channels]. Returns whether the residual has the right size.

    ``codes``: uint8 [tokens, channels / 2]. ``mu``, ``sigma``: float32 [rows, channels]. ``words``: both parts, uint32. ``first_words``: words
    of the first part, at most those of both. ``unused``: lowest bits of float32 that the patterns lack.
    """
    tokens, channels = numbers.shape
    ends, ranges = np.empty(CODES + 1, np.float32), np.empty(4 * CODES, np.int64)
    pairs = np.zeros(len(words) + SPARE, np.uint64)
    for each in range(len(words)):
        pairs[each] = words[each]
    for each in range(len(words)):
        pairs[each] |= pairs[each + 1] << np.uint64(32)
    one, two = np.int64(0), np.int64(32) * first_words
    for row in range(len(mu)):
        begin, end = max(row * CHUNK, sinks), min((row + 1) * CHUNK, tokens)
        for channel in range(channels):
            if max(one, two) > 32 * len(words):
                return False
            _find_ranges(mu[row, channel], sigma[row, channel], bounds, mantissa, ends, ranges)
            byte, shift = np.uint64(channel >> 1), 4 * (channel & 1)
            for token in range(begin, end):
                code = np.uint64(codes[np.uint64(token), byte] >> shift & 15)
                length, short = ranges[LENGTH + code], ranges[SHORT + code]
                index, rest = _get(pairs, one) & _mask(length), _get(pairs, two)
                more = np.int64(index >= short)
                cell = ranges[FIRST + code] + (index << more) + (rest & more) - short * more
                rest >>= more
                sign = cell >> 63
                cell ^= sign
                if cell == 0:
                    bits = np.int64(mantissa + 8)
                    pattern = (rest & _mask(bits)) << (WIDE - mantissa)
                else:
                    pattern = np.int64(np.float32(cell).view(np.int32))
                    bits = mantissa + BIAS - (pattern >> WIDE)
                    pattern += ranges[OFFSET + code] + ((rest & _mask(bits)) << (WIDE - mantissa))
                numbers[np.uint64(token), np.uint64(channel)] = (pattern | sign << 31) >> unused
                one += length
                two += bits + more
    return (one + 31) >> 5 == first_words and (two + 31) >> 5 == len(words)


@compiled
def _decode_codes(codes: np.ndarray, mu: np.ndarray, sigma: np.ndarray, levels: np.ndarray, numbers: np.ndarray) -> None:
    """Fill the numbers of codes, float32 [tokens, channels]."""
    tokens, channels = numbers.shape
    found = np.empty((channels, CODES), np.float32)
    for row in range(len(mu)):
        for channel in range(channels):
            for code in range(CODES):
                found[channel, code] = mu[row, channel] + sigma[row, channel] * levels[code]
        for token in range(row * CHUNK, min((row + 1) * CHUNK, tokens)):
            for byte in range(channels // 2):
                both = codes[token, byte]
                numbers[token, 2 * byte] = found[2 * byte, both & 15]
                numbers[token, 2 * byte + 1] = found[2 * byte + 1, both >> 4]


def encode(parts: PageTensors, layout: PageLayout, slots: torch.Tensor | None) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """Anchor and residual of each part, uint8 [bytes] each. None for a part that is raw."""
    pages = [part if slots is None else part[slots] for part in parts.tensors]
    x, count = torch.cat(pages, 1), len(pages)
    found = compute_scales(pytorch_codec.filled(x, layout))
    numbers, limits = torch.stack(pages).float().numpy(), np.array(bounds(layout.bits), np.float32)
    mu, sigma = (each.view(layout.rows, count, -1).transpose(0, 1).contiguous().numpy() for each in found.scales)
    codes = np.zeros((count, layout.tokens, layout.channels // 2), np.uint8)
    most = layout.most_compact_bytes // 4
    residuals: list[torch.Tensor | None] = []
    for part, covered in enumerate(found.covered.view(count, -1).all(1).tolist()):
        residuals.append(None)
        if covered:
            words = np.zeros((2, most + SPARE), np.uint32)
            bits = _encode(numbers[part], mu[part], sigma[part], limits, layout.sinks, MANTISSA[layout.dtype], codes[part], words)
            first, second = ((each + 31) // 32 for each in bits)
            if bits[0] >= 0 and 1 + first + second <= most:
                stream = np.concatenate([np.array([first], np.uint32), words[0, :first], words[1, :second]])
                residuals[part] = torch.from_numpy(stream.view(np.uint8))
    anchors = pytorch_codec.pack_anchors(x, found, torch.from_numpy(codes).view(count, -1), layout)
    return [None if residual is None else (anchor, residual) for anchor, residual in zip(anchors, residuals, strict=True)]


def decode(
    found: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor] | None, layout: PageLayout, outs: PageTensors, slots: torch.Tensor | None
) -> None:
    """Decode pages of coded anchors into ``outs``. Raises ValueError if a residual is not its anchor's."""
    parts = {name: torch.stack([each[offset : offset + size] for each in found]) for name, (offset, size) in layout.parts.items()}
    mu, sigma = (parts[name].view(torch.float16).view(-1, layout.rows, layout.channels).float().numpy() for name in ("mu", "sigma"))
    sinks = parts["sinks"].flatten().view(layout.dtype).view(len(found), layout.sinks, layout.channels)
    codes = parts["codes"].view(len(found), layout.tokens, -1).numpy()
    # Patterns of bfloat16 are the upper halves of those of float32. PyTorch converts float16.
    short = residuals is not None and layout.dtype == torch.bfloat16
    numbers = torch.zeros(layout.tokens, layout.channels, dtype=layout.dtype if short else torch.float32)
    patterns = numbers.view(torch.int16 if short else torch.int32).numpy()
    table = np.array(levels(layout.bits) if residuals is None else bounds(layout.bits), np.float32)
    for part, out in enumerate(outs.tensors):
        if residuals is None:
            _decode_codes(codes[part], mu[part], sigma[part], table, numbers.numpy())
        else:
            words, mantissa = _words(residuals[part]), MANTISSA[layout.dtype]
            first = int(words[0])
            if first >= len(words) or not _decode(
                codes[part], mu[part], sigma[part], table, layout.sinks, mantissa, words[1:], first, patterns, 16 if short else 0
            ):
                raise ValueError(f"a compact residual of {len(residuals[part])} bytes does not fit its anchor: pass the anchor's own residual")
        page = numbers.to(layout.dtype)
        page[: layout.sinks] = sinks[part]
        out[slice(None) if slots is None else slots] = page


def _words(residual: torch.Tensor) -> np.ndarray:
    """The words of a residual, uint32. Raises ValueError if it has not whole words."""
    if len(residual) < 4 or len(residual) % 4:
        raise ValueError(f"a compact residual of {len(residual)} bytes: it has 4 or more, and a multiple of 4")
    return (residual.clone() if residual.data_ptr() % 4 else residual).numpy().view(np.uint32)
