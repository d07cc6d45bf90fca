"""Launches the kernels that encode and decode all parts of a page. They give the same bytes as pytorch_codec.py.

This module has the kernel that decodes anchor streams, with or without 8-bit residuals, into a pool.
If numbers have 16 bits, a thread has quads of channels as in encode_tiles.py. Otherwise it has pairs of channels, whose codes share a byte.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.lynx.encode_tiles import cells, edges, encode_tiles
from sglang_ext.layers.kernels.lynx.exact_tiles import count_units, read_exact, write_exact
from sglang_ext.layers.kernels.lynx.layout import (
    ALIGNMENT,
    BITS,
    BLOCK,
    HEADER,
    UNIT,
    PageLayout,
    PageTensors,
    StreamBatch,
    addresses,
    bounds,
    fine_levels,
    level_step,
    levels,
    max_level,
)
from sglang_ext.layers.kernels.lynx.tiles import CHUNK, at_address, load_pair_codes, load_scales, pair_places, slots_of


@triton.jit
def _load_meant(codes, rests, meanings, token, inside, pair, channels):
    """Values of the codes of even and odd channels, float32 [pairs, 32] each, in sigmas from mu."""
    even, odd = load_pair_codes(codes, token, inside, pair, channels)
    if rests is not None:
        rest, rest_odd = load_pair_codes(rests, token, inside, pair, channels)
        even, odd = (even << 4) | rest, (odd << 4) | rest_odd
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
    """Decode a complete row of chunks without sinks, numbers of 16 bits: [quads, tokens]. ``mu``, ``sigma``: four of each."""
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
    anchors, residuals, outs, slots, meanings, tokens, sinks, scales_at, mu_at, sigma_at, sinks_at, codes_at, CHANNELS: tl.constexpr,
    STRIDE: tl.constexpr, LIKE: tl.constexpr, PAIRS: tl.constexpr, FEW: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Decode one row of chunks of PAIRS pairs of channels of a part. ``meanings``: float32, levels by a code's bits, then the rest's."""
    row, part, pair = tl.program_id(0), tl.program_id(2), tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    anchor, out, there = at_address(anchors, part, tl.uint8), at_address(outs, part, LIKE), pair < CHANNELS // 2
    rests = residuals if residuals is None else at_address(residuals, part, tl.uint8)
    QUADS: tl.constexpr = LIKE != tl.float32
    if QUADS and (row * CHUNK >= sinks) & (row * CHUNK + CHUNK <= tokens):
        quad = tl.program_id(1) * (PAIRS // 2) + tl.arange(0, PAIRS // 2)
        inside = quad < CHANNELS // 4
        mu0, sigma0 = load_scales(anchor, row, 4 * quad, inside, CHANNELS, mu_at, sigma_at)
        mu1, sigma1 = load_scales(anchor, row, 4 * quad + 1, inside, CHANNELS, mu_at, sigma_at)
        mu2, sigma2 = load_scales(anchor, row, 4 * quad + 2, inside, CHANNELS, mu_at, sigma_at)
        mu3, sigma3 = load_scales(anchor, row, 4 * quad + 3, inside, CHANNELS, mu_at, sigma_at)
        own = None if CHANNELS % (2 * PAIRS) == 0 else inside[:, None]
        mu, sigma = (mu0, mu1, mu2, mu3), (sigma0, sigma1, sigma2, sigma3)
        _store_quads(anchor + codes_at, rests, out, slots, meanings, mu, sigma, row, quad, own, CHANNELS, STRIDE, LIKE, FEW, PTX)
    else:
        mu_even, sigma_even = load_scales(anchor, row, 2 * pair, there, CHANNELS, mu_at, sigma_at)
        mu_odd, sigma_odd = load_scales(anchor, row, 2 * pair + 1, there, CHANNELS, mu_at, sigma_at)
        for place in range(0, CHUNK, FEW // 2):
            token = row * CHUNK + place + tl.arange(0, FEW // 2)
            inside = (token < tokens)[None, :] & there[:, None]
            even, odd = _load_meant(anchor + codes_at, rests, meanings, token, inside, pair, CHANNELS)
            target = out + pair_places(slots, STRIDE, tl.minimum(token, tokens - 1), pair, 2)
            coded, exact = inside & (token >= sinks)[None, :], inside & (token < sinks)[None, :]
            tl.store(target, (mu_even[:, None] + even * sigma_even[:, None]).to(LIKE), mask=coded)
            tl.store(target + 1, (mu_odd[:, None] + odd * sigma_odd[:, None]).to(LIKE), mask=coded)
            source = (anchor + sinks_at).to(tl.pointer_type(LIKE)) + (token * CHANNELS)[None, :] + 2 * pair[:, None]
            tl.store(target, tl.load(source, mask=exact, other=0), mask=exact)
            tl.store(target + 1, tl.load(source + 1, mask=exact, other=0), mask=exact)


LIKE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# Quads of channels of an encoding program, one per thread, and registers per thread for bfloat16. More registers allow fewer programs.
QUADS, REGISTERS = 64, 144
# Pairs of channels of a decoding program, two per thread, and tokens of a chunk that are decoded at a time. Fewer need fewer registers.
PAIRS, FEW = 128, 8
# Whether kernels use NVIDIA instructions.
PTX = torch.version.hip is None and not triton.knobs.runtime.interpret


def anchors(parts: PageTensors, layout: PageLayout, slots: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As ``pytorch_codec.anchors``."""
    count, device = len(parts.tensors), parts.tensors[0].device
    found = StreamBatch.empty(count, layout.coded_bytes, device)
    found.rows[:, :HEADER] = 0
    rest = StreamBatch.empty(count, layout.int8_bytes, device) if layout.reference == "int8" else None
    write_streams(parts, layout, slots, found, rest)
    return found.rows, None if rest is None else rest.rows


def write_streams(
    parts: PageTensors, layout: PageLayout, slots: torch.Tensor | None, anchors_at: StreamBatch, rest_at: StreamBatch | None
) -> None:
    """As ``pytorch_codec.write_streams``. The first byte of each anchor must be 0."""
    device, warps = parts.tensors[0].device, QUADS // 32
    encode_tiles[_grid(layout, len(parts.tensors), 4 * QUADS)](
        parts.table, anchors_at.addresses, None if rest_at is None else rest_at.addresses, slots, device_table(edges, layout.bits, device),
        device_table(cells, layout.bits, device), layout.tokens, layout.sinks, *_offsets(layout), CHANNELS=layout.channels,
        STRIDE=_slot_stride(parts), LIKE=LIKE[layout.dtype], GREATEST=max_level(layout.bits), QUADS=QUADS, PTX=PTX,
        num_warps=warps, maxnreg=REGISTERS if layout.dtype == torch.bfloat16 else None,
    )  # fmt: skip


def exact_residuals(
    parts: PageTensors, found: Sequence[torch.Tensor], layout: PageLayout, slots: torch.Tensor | None
) -> list[torch.Tensor]:
    """As ``pytorch_codec.exact_residuals``. Waits for the device, which counts the bits."""
    count, device, streams = len(parts.tensors), parts.tensors[0].device, addresses(found)
    grid = _grid(layout, count, BLOCK)
    page, (*scales, _, codes_at) = (layout.tokens, layout.channels, layout.sinks), _offsets(layout)
    ends_of_bins, kinds = device_table(bounds, layout.bits, device), {"LIKE": LIKE[layout.dtype], "BITS": layout.bits}
    units = torch.zeros(count, layout.rows * layout.blocks, dtype=torch.int32, device=device)
    count_units[grid](streams, ends_of_bins, units, *page, *scales, codes_at, **kinds)
    ends = units.cumsum(1)
    sizes = [layout.index_bytes + UNIT * units for units in ends[:, -1].tolist()]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + triton.cdiv(size, ALIGNMENT) * ALIGNMENT)
    memory = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
    residuals = [memory[start : start + size] for start, size in zip(starts[:-1], sizes, strict=True)]
    heads = torch.tensor(starts[:-1], device=device)[:, None] // 4 + torch.arange(units.shape[1], device=device)
    memory.view(torch.int32)[heads] = (ends - units).int()
    write_exact[grid](
        parts.table, streams, addresses(residuals), slots, ends_of_bins, parts.tensors[0].stride(0), *page, *scales, codes_at,
        layout.index_bytes, **kinds, TOGETHER=8 // layout.dtype.itemsize,
    )  # fmt: skip
    return residuals


def decode(
    found: Sequence[torch.Tensor] | StreamBatch,
    residuals: Sequence[torch.Tensor] | StreamBatch | None,
    layout: PageLayout,
    outs: PageTensors,
    slots: torch.Tensor | None,
) -> None:
    """As ``pytorch_codec.decode``."""
    # Aligned copies must exist until the kernel is launched.
    found, residuals = _aligned(found), None if residuals is None else _aligned(residuals)
    streams, rest = _addresses(found), None if residuals is None else _addresses(residuals)
    page, device, count = (layout.tokens, layout.channels, layout.sinks), outs.tensors[0].device, len(outs.tensors)
    if rest is not None and layout.reference == "exact":
        read_exact[_grid(layout, count, BLOCK)](
            streams, rest, outs.table, slots, device_table(bounds, layout.bits, device), outs.tensors[0].stride(0), *page,
            *_offsets(layout), layout.index_bytes, LIKE=LIKE[layout.dtype], BITS=layout.bits,
        )  # fmt: skip
        return
    meanings = device_table(levels if rest is None else _both_levels, layout.bits, device)
    decode_tiles[_grid(layout, count, 2 * PAIRS)](
        streams, rest, outs.table, slots, meanings, layout.tokens, layout.sinks, *_offsets(layout), CHANNELS=layout.channels,
        STRIDE=_slot_stride(outs), LIKE=LIKE[layout.dtype], PAIRS=PAIRS, FEW=FEW, PTX=PTX, num_warps=PAIRS // 64,
    )  # fmt: skip


def _both_levels(bits: int) -> tuple[float, ...]:
    """Levels of codes with their 8-bit residuals. The index has the code's bits, then the residual's."""
    half, size, found = 2 ** (bits - 1), level_step(bits), fine_levels(bits)

    def level(code: int, rest: int) -> float:
        v = code - half if code >= half else half - 1 - code
        meant = found[min(max(v * size + size // 2 - rest, 0), max_level(bits))]
        return meant if code >= half else -meant

    return tuple(level(*divmod(both, size)) for both in range(2**BITS))


@lru_cache(maxsize=None)
def device_table(numbers: Callable[[int], tuple[float, ...]], bits: int, device: torch.device) -> torch.Tensor:
    """Levels or bounds on a device, float32."""
    return torch.tensor(numbers(bits), device=device)


def _aligned(streams: Sequence[torch.Tensor] | StreamBatch) -> Sequence[torch.Tensor] | StreamBatch:
    """The streams, or aligned copies of streams that are not aligned."""
    if isinstance(streams, StreamBatch):
        return streams
    return [stream.clone() if stream.data_ptr() % ALIGNMENT else stream for stream in streams]


def _addresses(streams: Sequence[torch.Tensor] | StreamBatch) -> torch.Tensor:
    """Addresses of aligned streams, int64 [parts]."""
    return streams.addresses if isinstance(streams, StreamBatch) else addresses(streams)


def _slot_stride(parts: PageTensors) -> int:
    """Elements from one token to the next. Raises ValueError if four channels are not one word."""
    stride = parts.tensors[0].stride(0)
    if stride % 4:
        raise ValueError(f"tokens {stride} elements apart: kernels read four channels at once; pass a contiguous copy")
    return stride


def _grid(layout: PageLayout, parts: int, columns: int) -> tuple[int, int, int]:
    return layout.rows, triton.cdiv(layout.channels, columns), parts


def _offsets(layout: PageLayout) -> tuple[int, ...]:
    """Offsets of the header's end, mu, sigma, sinks and codes. Kernels do not read the first; without it their compiled code would change."""
    return HEADER, *(layout.parts[name][0] for name in ("mu", "sigma", "sinks", "codes"))
