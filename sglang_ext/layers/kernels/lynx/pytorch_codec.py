"""Encodes and decodes the streams of a page in PyTorch. The kernels write the same bytes.

An exact residual is a number's index in the bin of its code, which restores the pool's bits from an anchor.
The bin of a code contains the numbers of the pool's dtype from one bound to the next, in the order of floats, with -0 just below 0. The
rank in this order is called the ordinal: the bit pattern as an integer, with the order of negative patterns reversed. The encoder and
the decoder both compute a bin's first and last number from code and scales. An index has as many bits as the last index of its bin.
"""

import math
from collections.abc import Sequence

import torch

from sglang_ext.layers.kernels.lynx.layout import (
    BLOCK,
    CHUNK,
    CURVE,
    HEADER,
    RAW,
    UNIT,
    PageLayout,
    PageTensors,
    StreamBatch,
    bounds,
    fine_bounds,
    fine_levels,
    levels,
    max_level,
)
from sglang_ext.layers.kernels.lynx.scales import ChunkScales, EncodedScales, as_bytes, compute_scales, read


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes of 4 bits, uint8 [tokens, channels], into bytes, uint8 [tokens * channels / 2]."""
    pairs = codes.view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4


def unpack_codes(packed: torch.Tensor, tokens: int) -> torch.Tensor:
    """Unpack the codes, uint8 [tokens, channels], from bytes of :func:`pack_codes`."""
    return torch.stack([packed & 15, packed >> 4], -1).view(tokens, -1)


# Integer types of the same size, and the masks that reverse the order of negative patterns.
PATTERNS = {2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFFFFFF)}


def ordinals(numbers: torch.Tensor) -> torch.Tensor:
    """Ordinals of floats, int64."""
    kind, turn = PATTERNS[numbers.itemsize]
    patterns = numbers.view(kind).long()
    return torch.where(patterns < 0, patterns ^ turn, patterns)


def from_ordinals(ranks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The floats of ordinals."""
    kind, turn = PATTERNS[dtype.itemsize]
    return torch.where(ranks < 0, ranks ^ turn, ranks).to(kind).view(dtype)


def first_reaching(bound: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The ordinal of the smallest number of ``dtype`` that is not less than a float32, int64. For 0, the ordinal of -0."""
    nearest = bound.to(dtype)
    ranks = torch.where(nearest == 0, 0, ordinals(nearest))
    less = nearest.float() < bound
    return torch.where(less, ranks + 1, torch.where(nearest == 0, -1, ranks))


def bins(codes: torch.Tensor, scales: ChunkScales, bits: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """First ordinal and last index of each code's bin, int64 [rows, 32, channels], as ``codes``."""
    # Computed per chunk, because a chunk has fewer bounds than numbers.
    ends = scales.mu[:, None] + scales.sigma[:, None] * torch.tensor(bounds(bits), device=codes.device)[:, None]
    reached = first_reaching(ends, dtype)
    last = reached[:, 1:] - 1
    # The last bin includes its end, because the end is a number of the chunk. 0 counts twice, as -0 and 0.
    last[:, -1] += torch.where(ends[:, -1] == 0, 2, 1)
    first = reached.gather(1, codes)
    return first, last.gather(1, codes) - first


def widths(last: torch.Tensor) -> torch.Tensor:
    """Bits of an index, int64, if the last index of its bin is ``last``, from 0 to 2 ** 32 - 1."""
    # Clearing the second highest bit keeps rounding from reaching the next power.
    power = (last & ~(last >> 1)).float().view(torch.int32) >> 23
    return (power.long() - 126).clamp(min=0)


def positions(width: torch.Tensor, layout: PageLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """First bits of the indices, int64 [rows, 32, channels], and starts of the blocks, int64 [rows * blocks + 1], in units."""
    rows, blocks, channels = layout.rows, layout.blocks, layout.channels
    filled = torch.nn.functional.pad(width, (0, blocks * BLOCK - channels))
    inside = filled.view(rows, CHUNK, blocks, BLOCK).transpose(1, 2).reshape(rows * blocks, CHUNK * BLOCK)
    ends = inside.cumsum(1)
    units = (ends[:, -1] + 8 * UNIT - 1) // (8 * UNIT)
    starts = torch.nn.functional.pad(units.cumsum(0), (1, 0))
    found = starts[:-1, None] * 8 * UNIT + ends - inside
    return found.view(rows, blocks, CHUNK, BLOCK).transpose(1, 2).reshape(rows, CHUNK, -1)[..., :channels], starts


def encode_indices(index: torch.Tensor, last: torch.Tensor, coded: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """The exact residual stream, uint8 [bytes], of indices in bins and last indices, int64 [rows, 32, channels]; ``coded``: bool [rows, 32, 1]."""
    width = widths(last) * coded
    place, starts = positions(width, layout)
    held, place = (index * (width > 0)).flatten(), place.flatten()
    moved = held << (place & 31)
    # One extra word absorbs additions of 0 after the last word.
    words = torch.zeros(2 * int(starts[-1]) + 1, dtype=torch.int64, device=index.device)
    words.index_add_(0, place >> 5, moved & 0xFFFFFFFF).index_add_(0, ((place >> 5) + 1).clamp(max=len(words) - 1), moved >> 32)
    heads = torch.zeros(layout.index_bytes // 4, dtype=torch.int64, device=index.device)
    heads[: len(starts) - 1] = starts[:-1]
    return as_bytes(torch.cat([heads, words[:-1]]).to(torch.int32))


def decode_indices(residual: torch.Tensor, last: torch.Tensor, coded: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Decode the indices, int64 [rows, 32, channels], of :func:`encode_indices`. Raises ValueError if the size is not what codes and scales imply."""
    width = widths(last) * coded
    place, starts = positions(width, layout)
    expected = layout.index_bytes + UNIT * int(starts[-1])
    if len(residual) != expected:
        raise ValueError(
            f"an exact residual of {len(residual)} bytes does not fit its anchor, which needs {expected}: pass the anchor's own residual"
        )
    words = residual[layout.index_bytes :].clone().view(torch.int32).long() & 0xFFFFFFFF
    words = torch.nn.functional.pad(words, (0, 2))
    low, high = words[place >> 5], words[(place >> 5) + 1]
    shift = place & 31
    # The highest of the 64 bits may act as a sign bit. It is shifted out or masked.
    return (high << 32 | low) >> shift & (1 << width) - 1


# If sigma is above this share of mu, float32 separates adjacent bounds, and an estimate of I is off by at most one.
CLEAR = 2.0**-11


def _coded(layout: PageLayout, device: torch.device) -> torch.Tensor:
    """Tokens whose codes have a meaning, bool [rows, 32, 1]."""
    token = torch.arange(layout.rows * CHUNK, device=device)
    return ((token >= layout.sinks) & (token < layout.tokens)).view(layout.rows, CHUNK, 1)


def filled(x: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """A page's chunks, float32 [rows, 32, channels]; other tokens replace sinks and padding, so that mean and extremes need no mask."""
    coded = _coded(layout, x.device)
    count = coded.sum(1)
    if coded.all():
        return x.float().view(layout.rows, CHUNK, -1)
    place = torch.arange(CHUNK, device=x.device)[None, :, None]
    begin = torch.arange(layout.rows, device=x.device)[:, None, None] * CHUNK
    first = begin.clamp(min=layout.sinks)
    other = (first + place % count[:, None].clamp(min=1)).clamp(max=layout.tokens - 1)
    return x[torch.where(coded, begin + place, other).flatten()].float().view(layout.rows, CHUNK, -1)


def _chunks(x: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Reshape [tokens, ...] to [rows, 32, ...], padded with zeros."""
    missing = layout.rows * CHUNK - layout.tokens
    x = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
    return x.view(layout.rows, CHUNK, -1)


def magnitudes(x: torch.Tensor, scales: ChunkScales, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """I, int32 [rows, 32, channels]: the number of bounds that a number reaches on its side of mu. And whether its sign is positive."""
    mu, sigma = scales.mu[:, None], scales.sigma[:, None]
    most, table = max_level(bits), torch.tensor(fine_bounds(bits), device=x.device)
    above = x >= mu
    estimate = (x - mu).abs_().mul_(torch.where(sigma > 0, CURVE / sigma, 0.0)).add_(1).log2_().mul_(most / math.log2(1 + CURVE))
    found = estimate.nan_to_num_(0).clamp_(0, most - 1).to(torch.int32)
    found += _reached(x, mu, sigma, table, found + 1, above)
    unclear = (scales.sigma <= scales.mu.abs() * CLEAR).nonzero(as_tuple=True)
    if len(unclear[0]):
        row, channel = unclear
        x, mu, sigma, above_there = (
            x[row, :, channel], scales.mu[row, channel, None], scales.sigma[row, channel, None], above[row, :, channel],
        )  # fmt: skip
        there = torch.zeros_like(x, dtype=torch.int32)
        for power in reversed(range(most.bit_length())):
            more = there + (1 << power)
            there = torch.where((more <= most) & _reached(x, mu, sigma, table, more.clamp(max=most), above_there), more, there)
        found[row, :, channel] = there
    return found, above


def _reached(
    x: torch.Tensor, mu: torch.Tensor, sigma: torch.Tensor, table: torch.Tensor, i: torch.Tensor, above: torch.Tensor
) -> torch.Tensor:
    """Whether numbers reach the bound of ``i`` on their side, bool."""
    bound = table[i] * torch.where(above, sigma, -sigma)
    return (x >= mu + bound) == above


def encode_anchors(x: torch.Tensor, layout: PageLayout, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchor streams of adjacent pages, uint8 [parts, coded_bytes], and the residual streams of the 8-bit reference, uint8 [parts, int8_bytes].

    Scales are per channel, so several tensors are one page ``x``, [tokens, parts * channels]. A raw page's scales and codes have no meaning.
    """
    numbers = filled(x, layout)
    found = compute_scales(numbers)
    i, above = magnitudes(numbers, found.scales, layout.bits)
    v = i + 7 >> 4
    codes, rest = (
        each.to(torch.uint8).view(-1, x.shape[1])[: layout.tokens]
        for each in (torch.where(above, 8 + v, 7 - v), (v << 4) - i + 8)
    )
    codes, rest = (_split_parts(pack_codes(each), layout.tokens, parts) for each in (codes, rest))
    return pack_anchors(x, found, codes, layout), rest


def pack_anchors(x: torch.Tensor, found: EncodedScales, codes: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Anchor streams, uint8 [parts, coded_bytes], from the scales of ``x``, [tokens, parts * channels], and packed codes, uint8 [parts, bytes]."""
    parts = len(codes)
    anchor = torch.zeros(parts, layout.coded_bytes, dtype=torch.uint8, device=x.device)
    anchor[:, 0] = torch.where(found.covered.view(parts, -1).all(1), 0, RAW)
    rows = {"mu": layout.rows, "sigma": layout.rows, "sinks": layout.sinks}
    stored = found.stored | {"sinks": as_bytes(x[: layout.sinks])}
    stored = {name: _split_parts(each, rows[name], parts) for name, each in stored.items() if len(each)}
    stored["codes"] = codes
    for name, (offset, size) in layout.parts.items():
        if size:
            anchor[:, offset : offset + size] = stored[name]
    return anchor


def _split_parts(content: torch.Tensor, rows: int, parts: int) -> torch.Tensor:
    """The bytes of each part, uint8 [parts, bytes], from the bytes of rows that hold the parts side by side."""
    return content.view(rows, parts, -1).transpose(0, 1).reshape(parts, -1)


def read_anchor(anchor: torch.Tensor, layout: PageLayout) -> tuple[torch.Tensor, ChunkScales, torch.Tensor]:
    """Codes, uint8 [tokens, channels]; scales; and sinks, [sinks, channels]."""
    parts = {name: anchor[offset : offset + size].clone() for name, (offset, size) in layout.parts.items()}
    codes = unpack_codes(parts["codes"], layout.tokens)
    sinks = parts["sinks"].view(layout.dtype).view(layout.sinks, layout.channels)
    return codes, read(parts, layout.rows), sinks


def decode_coded(anchor: torch.Tensor, residual: torch.Tensor | None, layout: PageLayout) -> torch.Tensor:
    """Decode a coded anchor, with its residual if there is one: [tokens, channels] of the layout's dtype."""
    codes, scales, sinks = read_anchor(anchor, layout)
    coded, chunks = _coded(layout, anchor.device), _chunks(codes, layout).long()
    if residual is not None and layout.reference == "exact":
        first, last = bins(chunks, scales, layout.bits, layout.dtype)
        page = from_ordinals(first + decode_indices(residual, last, coded, layout), layout.dtype)
    else:
        if residual is None:
            meant = torch.tensor(levels(layout.bits), device=anchor.device)[chunks]
        else:
            rest = _chunks(unpack_codes(residual, layout.tokens), layout).long()
            above = chunks >= 8
            v = torch.where(above, chunks - 8, 7 - chunks)
            i = ((v << 4) + 8 - rest).clamp(0, max_level(layout.bits))
            meant = torch.tensor(fine_levels(layout.bits), device=anchor.device)[i]
            meant = torch.where(above, meant, -meant)
        page = (scales.mu[:, None] + scales.sigma[:, None] * meant).to(layout.dtype)
    page = page.view(-1, layout.channels)[: layout.tokens]
    page[: layout.sinks] = sinks
    return page


def anchors(parts: PageTensors, layout: PageLayout, slots: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Anchor streams, uint8 [parts, coded_bytes]. If the reference is 8-bit, also the residuals, uint8 [parts, int8_bytes]."""
    pages = [part if slots is None else part[slots] for part in parts.tensors]
    found, rest = encode_anchors(torch.cat(pages, 1), layout, len(pages))
    return found, rest if layout.reference == "int8" else None


def write_streams(
    parts: PageTensors, layout: PageLayout, slots: torch.Tensor | None, anchors_at: StreamBatch, rest_at: StreamBatch | None
) -> None:
    """Write the streams of :func:`anchors` into existing memory. ``rest_at``: memory of the 8-bit residuals, or None for no residuals."""
    pages = [part if slots is None else part[slots] for part in parts.tensors]
    found, rest = encode_anchors(torch.cat(pages, 1), layout, len(pages))
    anchors_at.rows.copy_(found)
    if rest_at is not None:
        rest_at.rows.copy_(rest)


def exact_residuals(
    parts: PageTensors, found: Sequence[torch.Tensor], layout: PageLayout, slots: torch.Tensor | None
) -> list[torch.Tensor]:
    """Exact residual streams, uint8 [bytes] each, of parts and their coded anchors."""
    streams = []
    for part, anchor in zip(parts.tensors, found, strict=True):
        page = part if slots is None else part[slots]
        codes, scales, _ = read_anchor(anchor, layout)
        first, last = bins(_chunks(codes, layout).long(), scales, layout.bits, layout.dtype)
        index = ordinals(_chunks(page, layout).contiguous()) - first
        streams.append(encode_indices(index, last, _coded(layout, page.device), layout))
    return streams


def decode(
    found: Sequence[torch.Tensor] | StreamBatch,
    residuals: Sequence[torch.Tensor] | StreamBatch | None,
    layout: PageLayout,
    outs: PageTensors,
    slots: torch.Tensor | None,
) -> None:
    """Decode pages of coded anchors into ``outs``."""
    found, residuals = (part.rows if isinstance(part, StreamBatch) else part for part in (found, residuals))
    for part, out in enumerate(outs.tensors):
        page = decode_coded(found[part], None if residuals is None else residuals[part], layout)
        out[slice(None) if slots is None else slots] = page


def raw(x: torch.Tensor) -> torch.Tensor:
    """The anchor stream of a raw page, uint8 [raw_bytes]."""
    header = torch.zeros(HEADER, dtype=torch.uint8, device=x.device)
    header[0] = RAW
    return torch.cat([header, as_bytes(x)])
