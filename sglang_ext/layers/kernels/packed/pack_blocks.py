"""Packs the kept tokens of each KV head into the blocks of compressed KV (block_layout.py): one launch for keys, one for values.

A program packs blocks of one head of one layer. Codes, scales and zero points equal those of the PyTorch code
(mem_cache/compressors/) within rounding. A number halfway between two codes may get the other code.
Stochastic rounding (integer_quantizers.py) gives the same bytes, because no two operations are fused into one that rounds once.
"""

from typing import Protocol

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.gpu_launch import buffer_pointer, dtype_name, launch_first_fitting
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts import block_layout
from sglang_ext.mem_cache.compressed.layouts.block_layout import BlockLayout
from sglang_ext.mem_cache.compressors.quantizer import Quantizer

# Supported channels of a head, tokens of a stochastically rounded block and of other blocks, and dtypes of a pool.
DIMS, DRAWN_TOKENS, TOKENS, DTYPES = (64, 128), (64, 128), (64,), (torch.bfloat16, torch.float16, torch.float32)
# Blocks that a program packs in sequence. Programs that rotate read the rotation once for all of their blocks.
BLOCKS, ROTATED_BLOCKS = 1, 8
# Warps for pools of 16 bits and of 32 bits, so that registers suffice. With one stage of loads, two programs that rotate 16-bit
# numbers fit on a multiprocessor.
WARPS, WIDE_WARPS, STAGES = 4, 8, 1
# Channels that are rotated at a time if shared memory cannot hold the whole rotation.
ROTATED_PART = 32
# The smallest positive float16.
SMALLEST = tl.constexpr(2.0**-24)
# The largest float16. Adding ROUNDING to a small float32 rounds it to an integer, ties to even, which the lowest bits of the sum hold.
LARGEST, ROUNDING = tl.constexpr(65504.0), tl.constexpr(1.5 * 2**23)
# Constants of the noise (mem_cache/compressed/layouts/block_layout.py).
LANE_STEP, CHANNEL_STEP = tl.constexpr(block_layout.LANE_STEP), tl.constexpr(block_layout.CHANNEL_STEP)
SHIFT_0, SHIFT_1, SHIFT_2 = map(tl.constexpr, block_layout.SHIFTS)
FACTOR_0, FACTOR_1 = map(tl.constexpr, block_layout.FACTORS)
NOISE_SHIFT, NOISE_UNIT = tl.constexpr(32 - block_layout.NOISE_BITS), tl.constexpr(2.0**-block_layout.NOISE_BITS)


@triton.jit
def _rounded(parameter):
    """Scales and zero points as kernels read them back: rounded to float16, finite."""
    return tl.minimum(tl.maximum(parameter, -LARGEST), LARGEST).to(tl.float16).to(tl.float32)


@triton.jit
def _store_codes(codes, head_bytes, slots, slot_bytes, BITS: tl.constexpr, CELL: tl.constexpr):
    """Store codes, int32 [tokens, dim], as packed bytes in a head's cells of ``slots``."""
    TOKENS: tl.constexpr = codes.shape[0]
    PARTS: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = codes.shape[1] // PARTS
    shifts = tl.arange(0, PARTS) * BITS
    packed = tl.sum(tl.reshape(codes, (TOKENS, PARTS, BYTES)) << shifts[None, :, None], 1)
    token, column = tl.arange(0, TOKENS), tl.arange(0, BYTES)
    cell = head_bytes + tl.load(slots + token * BYTES // CELL) * slot_bytes + token * BYTES % CELL
    tl.store(cell[:, None] + column[None, :], packed.to(tl.uint8))


@triton.jit
def _store_parameters(parameters, head_bytes, slots, slot_bytes, FIRST: tl.constexpr, CELL: tl.constexpr):
    """Store parameters, of one axis, in a head's cells, from byte ``FIRST`` on."""
    byte = FIRST + parameters.dtype.primitive_bitwidth // 8 * tl.arange(0, parameters.shape[0])
    cell = head_bytes + tl.load(slots + byte // CELL) * slot_bytes + byte % CELL
    tl.store(cell.to(tl.pointer_type(parameters.dtype)), parameters)


@triton.jit
def _quantize_evenly(groups, LAST: tl.constexpr):
    """Quantize ``groups``, float32 with four axes, that share scales along axes 1 and 3. Returns codes, scales and zero points."""
    zero = _rounded(tl.min(tl.min(groups, 3, keep_dims=True), 1, keep_dims=True))
    most = tl.max(tl.max(groups, 3, keep_dims=True), 1, keep_dims=True)
    scale = _rounded((most - zero) * (1.0 / LAST))
    # One division per group, not per number. If the scale is 0, all codes dequantize to the same number.
    steps = (groups - zero) * (1.0 / tl.maximum(scale, SMALLEST))
    steps = tl.minimum(tl.maximum(steps, 0.0), LAST * 1.0) + ROUNDING
    return steps.to(tl.int32, bitcast=True) & LAST, scale, zero


@triton.jit
def _quantize_by_levels(groups, bounds, LAST: tl.constexpr):
    """As :func:`_quantize_evenly`, for codes that index levels. ``bounds`` separate the levels of a unit vector; scales are lengths."""
    norm = tl.sqrt_rn(tl.sum(tl.sum(groups * groups, 3, keep_dims=True), 1, keep_dims=True))
    length = tl.maximum(norm, 1e-30)
    # Counts are in float32: two instructions per number and level. Integers need three.
    codes = tl.zeros_like(groups) + ROUNDING
    for level in tl.static_range(LAST):
        codes += tl.where(groups > tl.load(bounds + level) * length, 1.0, 0.0)
    return codes.to(tl.int32, bitcast=True) & LAST, _rounded(norm), tl.zeros_like(norm)


@triton.jit
def _quantize_centred(groups, bounds, LAST: tl.constexpr):
    """As :func:`_quantize_evenly`, for codes that count the ``bounds`` that (number - mean) / (maximum distance) reaches."""
    zero = _rounded(tl.sum(tl.sum(groups, 3, keep_dims=True), 1, keep_dims=True) / (groups.shape[1] * groups.shape[3]))
    low = tl.min(tl.min(groups, 3, keep_dims=True), 1, keep_dims=True)
    high = tl.max(tl.max(groups, 3, keep_dims=True), 1, keep_dims=True)
    scale = _above(tl.maximum(high - zero, zero - low))
    scale = _next(scale, (zero + scale < high) | (zero - scale > low))
    codes = tl.zeros_like(groups) + ROUNDING
    for code in tl.static_range(LAST):
        # The product is exact: fused with the sum or not, the code's bin begins here (lynx/pytorch_codec.py).
        codes += tl.where(groups >= tl.load(bounds + code) * scale + zero, 1.0, 0.0)
    return codes.to(tl.int32, bitcast=True) & LAST, scale, zero


@triton.jit
def _hash(numbers):
    """Hash of uint32, as in block_layout.py."""
    numbers = (numbers ^ (numbers >> SHIFT_0)) * FACTOR_0
    numbers = (numbers ^ (numbers >> SHIFT_1)) * FACTOR_1
    return numbers ^ (numbers >> SHIFT_2)


@triton.jit
def token_noise(seeds, lane, DIM: tl.constexpr):
    """Rounding noise for tokens with these ``seeds``, int32, in a ``lane``: float32 [tokens, dim], equal to that of block_layout.py."""
    of_tokens = _hash(seeds.to(tl.uint32, bitcast=True) + (lane + 1).to(tl.uint32) * LANE_STEP)
    channels = tl.arange(0, DIM).to(tl.uint32) * CHANNEL_STEP
    return (_hash(of_tokens[:, None] + channels[None, :]) >> NOISE_SHIFT).to(tl.float32) * NOISE_UNIT


@triton.jit
def _above(sizes):
    """Round ``sizes``, at least 0, up to float16, finite. The bits of the next float16 are the next greater integer."""
    sizes = tl.minimum(sizes, LARGEST)
    near = sizes.to(tl.float16)
    less = (near.to(tl.float32) < sizes).to(tl.int16)
    return (near.to(tl.int16, bitcast=True) + less).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _next(sizes, where):
    """Move results of :func:`_above` to the next float16 where ``where`` is set, finite."""
    more = (where & (sizes < LARGEST)).to(tl.int16)
    return (sizes.to(tl.float16).to(tl.int16, bitcast=True) + more).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _below(numbers):
    """Round down to float16, finite."""
    numbers = tl.minimum(tl.maximum(numbers, -LARGEST), LARGEST)
    near = numbers.to(tl.float16)
    more = (near.to(tl.float32) > numbers).to(tl.int16)
    bits = near.to(tl.int16, bitcast=True) + tl.where(numbers < 0, more, -more)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def quantize_stochastic(groups, noise, LAST: tl.constexpr):
    """As :func:`_quantize_evenly`, where ``noise``, shaped like ``groups``, selects the lower or the upper of the two nearest codes."""
    zero = _below(tl.min(tl.min(groups, 3, keep_dims=True), 1, keep_dims=True))
    span = tl.max(tl.max(groups, 3, keep_dims=True), 1, keep_dims=True) - zero
    scale = _above(tl.maximum(span, 0.0) * (1.0 / LAST))
    steps = (groups - zero) * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.maximum(scale, SMALLEST)) + noise
    return tl.minimum(tl.maximum(steps, 0.0), LAST * 1.0).to(tl.int32), scale, zero


@triton.jit
def _split_rotation(rotation, DIM: tl.constexpr, LIKE: tl.constexpr):
    """The rotation, float32 [dim, dim], as a sum of two LIKE tensors. The error is below 2 ** -17 (float16 scales: 2 ** -11)."""
    channel = tl.arange(0, DIM)
    whole = tl.load(rotation + channel[:, None] * DIM + channel[None, :])
    first = whole.to(LIKE)
    return first, (whole - first.to(tl.float32)).to(LIKE)


@triton.jit
def _rotated(numbers, first, second):
    """``numbers``, of the pool's dtype, times the rotation from :func:`_split_rotation`: float32."""
    if numbers.dtype == tl.float32:
        return tl.dot(numbers, first, input_precision="tf32x3")
    else:
        return tl.dot(numbers, first, tl.dot(numbers, second))


@triton.jit
def _rotated_by_parts(buffer, source, slot_stride, rotation, DIM: tl.constexpr, PART: tl.constexpr):
    """Numbers of the tokens in ``source`` times the rotation, PART channels at a time: float32 [tokens, dim]."""
    channel, part = tl.arange(0, DIM), tl.arange(0, PART)
    found = tl.zeros((source.shape[0], DIM), tl.float32)
    for first in tl.static_range(0, DIM, PART):
        numbers = tl.load(buffer + source[:, None] * slot_stride + (first + part)[None, :])
        turning = tl.load(rotation + (first + part)[:, None] * DIM + channel[None, :])
        found = tl.dot(numbers.to(tl.float32), turning, found, input_precision="tf32x3")
    return found


@triton.jit(do_not_specialize=("blocks", "lane"), do_not_specialize_on_alignment=("kept", "sources", "targets", "seeds"))
def pack_tiles(
    table, like, kept, sources, targets, rotation, bounds, seeds, layers, lane, blocks, slot_stride, head_stride, HEADS: tl.constexpr,
    DIM: tl.constexpr, TOKENS: tl.constexpr, BITS: tl.constexpr, SHARING: tl.constexpr, CHANNELS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCKS: tl.constexpr, PART: tl.constexpr, FINDING: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Pack ``BLOCKS`` blocks of one head, whose scales are shared by ``SHARING`` tokens and ``CHANNELS`` channels. SUMS: store sums of codes, too.

    ``layers``: the layers' numbers in the model; ``lane``: noise lane of layer 0. Below DIM, PART channels are rotated at a time, in each block.
    """
    SIZE: tl.constexpr = like.dtype.element_ty.primitive_bitwidth // 8
    CELL: tl.constexpr = DIM * SIZE
    COUNT: tl.constexpr = TOKENS // SHARING * (DIM // CHANNELS)
    CODES: tl.constexpr = TOKENS * DIM * BITS // 8
    layer, head = tl.program_id(1).to(tl.int64), tl.program_id(0) % HEADS
    first = tl.program_id(0) // HEADS * BLOCKS
    token, channel = tl.arange(0, TOKENS), tl.arange(0, DIM)
    # The hint tells the compiler that loaded addresses are aligned. Without it, it would read numbers one by one.
    buffer = buffer_pointer(table, layer, like.dtype.element_ty) + head * head_stride
    if rotation is not None and PART == DIM:
        turning = _split_rotation(rotation, DIM, like.dtype.element_ty)
    for block in tl.range(first, tl.minimum(first + BLOCKS, blocks)):
        place = ((layer * HEADS + head) * blocks + block) * TOKENS + token
        chosen = tl.load(kept + place)
        source = tl.load(sources + chosen)
        if rotation is not None and PART < DIM:
            numbers = _rotated_by_parts(buffer, source, slot_stride, rotation, DIM, PART)
        else:
            numbers = tl.load(buffer + source[:, None] * slot_stride + channel[None, :])
            if rotation is not None:
                numbers = _rotated(numbers, turning[0], turning[1])
        groups = tl.reshape(numbers.to(tl.float32), (TOKENS // SHARING, SHARING, DIM // CHANNELS, CHANNELS))
        if FINDING == "evenly":
            codes, scale, zero = _quantize_evenly(groups, (1 << BITS) - 1)
        elif FINDING == "levels":
            codes, scale, zero = _quantize_by_levels(groups, bounds, (1 << BITS) - 1)
        elif FINDING == "centred":
            codes, scale, zero = _quantize_centred(groups, bounds, (1 << BITS) - 1)
        else:
            noise = tl.full((TOKENS, DIM), 0.5, tl.float32)
            if seeds is not None:
                noise = token_noise(tl.load(seeds + chosen), (tl.load(layers + layer) << 13) + lane + 2 * head, DIM)
            codes, scale, zero = quantize_stochastic(groups, tl.reshape(noise, groups.shape), (1 << BITS) - 1)
        cells, slots = buffer.to(tl.pointer_type(tl.uint8)), targets + block * SLOTS
        _store_codes(tl.reshape(codes, (TOKENS, DIM)), cells, slots, slot_stride * SIZE, BITS, CELL)
        _store_parameters(tl.reshape(scale, (COUNT,)).to(tl.float16), cells, slots, slot_stride * SIZE, CODES, CELL)
        _store_parameters(tl.reshape(zero, (COUNT,)).to(tl.float16), cells, slots, slot_stride * SIZE, CODES + 2 * COUNT, CELL)
        if SUMS:
            sums = tl.reshape(tl.sum(tl.sum(codes, 3, keep_dims=True), 1, keep_dims=True), (COUNT,)).to(tl.int16)
            _store_parameters(sums, cells, slots, slot_stride * SIZE, CODES + 4 * COUNT, CELL)


class PackedBlocks(Protocol):
    """How the cells of a pool store the blocks of a quantizer: what kernels read of ``Packing``
    (mem_cache/compressed/layouts/quantized_blocks.py)."""

    @property
    def quantizer(self) -> Quantizer: ...
    @property
    def keys(self) -> BlockLayout: ...
    @property
    def values(self) -> BlockLayout: ...
    @property
    def block_slots(self) -> int: ...

    def rotations(self, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]: ...


def can_pack(packing: PackedBlocks, buffers: KVBuffers) -> bool:
    """Whether the kernels support this packing and these buffers. PyTorch supports all."""
    layouts, pools = (packing.keys, packing.values), (buffers.keys[0], buffers.values[0])
    finding = packing.quantizer.finding
    tokens = DRAWN_TOKENS if finding == "stochastic" else TOKENS
    fits = all(layout.plain and layout.dim in DIMS and layout.tokens in tokens for layout in layouts)
    return finding is not None and fits and all(pool.dtype in DTYPES for pool in pools)


def pack_blocks(
    packing: PackedBlocks,
    buffers: KVBuffers,
    kept: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    seeds: torch.Tensor | None = None,
) -> None:
    """Do what :meth:`Packing.write` does, with its arguments, if :func:`can_pack` holds. Does not wait for the device.

    Unused bytes of cells keep their content. PyTorch writes zeros there. All layers of ``buffers`` have the same shape, strides and dtype. None
    of ``targets`` is a source.
    """
    kept, device = kept.contiguous(), kept.device
    layers, heads, tokens = kept.shape
    finding, tables = packing.quantizer.finding, (buffers.key_table, buffers.value_table)
    kinds = zip(tables, (buffers.keys[0], buffers.values[0]), (packing.keys, packing.values), packing.rotations(device), strict=True)
    for is_value, (table, like, layout, rotation) in enumerate(kinds):
        rotation = None if rotation is None else rotation.contiguous()
        drawn = seeds, buffers.layer_table, block_layout.lane(0, buffers.first_head, bool(is_value))
        blocks, share = tokens // layout.tokens, BLOCKS if rotation is None else ROTATED_BLOCKS
        bounds, warps = packing.quantizer.bounds_on(device, layout.dim), WARPS if like.element_size() * layout.tokens <= 128 else WIDE_WARPS

        def launch(part: int) -> None:
            pack_tiles[(heads * triton.cdiv(blocks, share), layers)](
                table, like, kept, sources, targets, rotation, bounds, *drawn, blocks, like.stride(0), like.stride(1), HEADS=heads,
                DIM=layout.dim, TOKENS=layout.tokens, BITS=layout.bits, SHARING=layout.grid.tokens, CHANNELS=layout.grid.channels,
                SLOTS=packing.block_slots, BLOCKS=share, PART=part, FINDING=finding, SUMS=layout.sums, num_warps=warps,
                num_stages=STAGES, enable_fp_fusion=finding != "stochastic",
            )  # fmt: skip

        def what() -> str:
            return f"packing KV of {layout.dim} channels a head in {dtype_name(like.dtype)}"

        key = ("pack", layout, rotation is None, finding, like.dtype, like.device)
        parts = (layout.dim,) if rotation is None else (layout.dim, ROTATED_PART)
        launch_first_fitting(parts, launch, key, what, "pass --kv-compressor kivi")
