"""Pack blocks whose outliers are kept beside their codes (compressors/kvquant.py): a kernel that pack_blocks.py launches.

A program packs one block of one head of one layer. It turns keys back first, and finds as many outliers as are asked by bisection
of their distance from the mean; of numbers at the distance so found the first of the block are taken.
"""

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.pack_stores import ROUNDING, rounded, store_codes, store_parameters
from sglang_ext.layers.kernels.whole_blocks import cell, cosine_and_sine, other_channel
from sglang_ext.mem_cache.compressors.kvquant import SMALLEST as SMALLEST_SQUARE
from sglang_ext.mem_cache.compressors.kvquant import rounding
from sglang_ext.mem_cache.compressed.formats.packed_layout import Layout
from sglang_ext.mem_cache.compressed.formats.packing import Packing

# With so many registers suffice, but for a few numbers; not tried on a GPU: 16, which issue a quarter more instructions.
WARPS = 8
SMALLEST = tl.constexpr(SMALLEST_SQUARE)


def approximate(like: torch.Tensor) -> bool:
    """Whether angles of a pool like ``like`` may be off by 2 ** -20, as NVIDIA's GPUs find their cosines fastest."""
    return like.is_cuda and torch.version.hip is None and like.element_size() == 2


@triton.jit
def _spread(groups):
    """Squared distances from their group's mean, in its deviations; groups lie along the second and the fourth axis."""
    COUNT: tl.constexpr = groups.shape[1] * groups.shape[3]
    mean = tl.sum(tl.sum(groups, 3, keep_dims=True), 1, keep_dims=True) * (1 / COUNT)
    squares = (groups - mean) * (groups - mean)
    deviation = tl.sum(tl.sum(squares, 3, keep_dims=True), 1, keep_dims=True) * (1 / (COUNT - 1))
    return squares / tl.maximum(deviation, SMALLEST)


@triton.jit
def _chosen(distances, COUNT: tl.constexpr):
    """Which COUNT of ``distances``, of one axis, are the greatest, of equal ones the first; and which of the chosen each is."""
    # Without their signs they are ordered as their bits are; what is no number is farthest.
    bits = distances.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bit = tl.full([], 30, dtype=tl.int32)
    bound = tl.zeros_like(bit)
    found = bound
    while (bit >= 0) & (found != COUNT):
        higher = bound | (1 << bit)
        more = tl.sum((bits >= higher).to(tl.int32))
        bound, found = tl.where(more >= COUNT, higher, bound), tl.where(more >= COUNT, more, found)
        bit -= 1
    farther, equal = (bits > bound).to(tl.int32), (bits == bound).to(tl.int32)
    wanted = COUNT - tl.sum(farther)
    # Both counts of a block fit one integer.
    before = tl.cumsum(farther | (equal << 16), 0)
    equals = before >> 16
    chosen = (farther > 0) | ((equal > 0) & (equals <= wanted))
    return chosen, (before & 0xFFFF) + tl.minimum(equals, wanted) - 1


@triton.jit
def _codes(groups, chosen, levels, linear, cubic, fifth, LAST: tl.constexpr):
    """Codes of ``groups``, float32 of four axes; scales and zero points, of those that are not ``chosen``; what the codes mean.

    ``levels``: of codes; linear to fifth: of the polynomial that finds codes (compressors/kvquant.py:rounding).
    """
    least = tl.min(tl.min(tl.where(chosen, float("inf"), groups), 3, keep_dims=True), 1, keep_dims=True)
    most = tl.max(tl.max(tl.where(chosen, -float("inf"), groups), 3, keep_dims=True), 1, keep_dims=True)
    some = least <= most
    zero = rounded(tl.where(some, least, 0.0))
    scale = rounded(tl.maximum(tl.where(some, most, 0.0) - zero, 0.0))
    inverse = tl.where(scale > 0, tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)
    centred = tl.minimum(tl.maximum((groups - zero) * inverse, 0.0), 1.0) * 2 - 1
    square = centred * centred
    codes = ((square * fifth + cubic) * square + linear) * centred + LAST / 2 + ROUNDING
    codes = codes.to(tl.int32, bitcast=True) & LAST
    return codes, scale, zero, tl.load(levels + codes, mask=chosen, other=0.0) * scale + zero


@triton.jit(do_not_specialize=("blocks",), do_not_specialize_on_alignment=("kept", "sources", "targets"))
def pack_apart(
    table, like, kept, sources, targets, levels, linear, cubic, fifth, steps, blocks, slot_stride, head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, BITS: tl.constexpr, SHARING: tl.constexpr,
    CHANNELS: tl.constexpr, OUTLIERS: tl.constexpr, SLOTS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """A block of one head; scales are shared by ``SHARING`` tokens and ``CHANNELS`` channels, PAIRS of which turn."""
    SIZE: tl.constexpr = like.dtype.element_ty.primitive_bitwidth // 8
    CELL: tl.constexpr = DIM * SIZE
    COUNT: tl.constexpr = TOKENS // SHARING * (DIM // CHANNELS)
    CODES: tl.constexpr = TOKENS * DIM * BITS // 8
    POSITIONS: tl.constexpr = CODES + 4 * COUNT
    PLACES: tl.constexpr = POSITIONS + (4 * TOKENS if PAIRS > 0 else 0)
    layer, head, block = tl.program_id(1).to(tl.int64), tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    token, channel = tl.arange(0, TOKENS), tl.arange(0, DIM)
    # Without the hint nothing is known of loaded addresses, and numbers would be read one by one.
    buffer = tl.multiple_of(tl.load(table + layer).to(tl.pointer_type(like.dtype.element_ty)), 16) + head * head_stride
    position = tl.load(kept + ((layer * HEADS + head) * blocks + block) * TOKENS + token)
    source = buffer + tl.load(sources + position)[:, None] * slot_stride
    numbers = tl.load(source + channel[None, :]).to(tl.float32)
    cells, slots, slot_bytes = buffer.to(tl.pointer_type(tl.uint8)), targets + block * SLOTS, slot_stride * SIZE
    if PAIRS > 0:
        other = tl.load(source + other_channel(channel, PAIRS, INTERLEAVED)[None, :]).to(tl.float32)
        cosine, sine = cosine_and_sine(position[:, None], tl.load(steps + channel)[None, :], FAST)
        numbers = numbers * cosine + other * sine
        store_parameters(position.to(tl.int32), cells, slots, slot_bytes, POSITIONS, CELL)
    SHAPE: tl.constexpr = (TOKENS // SHARING, SHARING, DIM // CHANNELS, CHANNELS)
    groups = tl.reshape(numbers, SHAPE)
    chosen, rank = _chosen(tl.reshape(_spread(groups), (TOKENS * DIM,)), OUTLIERS)
    codes, scale, zero, means = _codes(groups, tl.reshape(chosen, SHAPE), levels, linear, cubic, fifth, (1 << BITS) - 1)
    store_codes(tl.reshape(codes, (TOKENS, DIM)), cells, slots, slot_bytes, BITS, CELL)
    store_parameters(tl.reshape(scale, (COUNT,)).to(tl.float16), cells, slots, slot_bytes, CODES, CELL)
    store_parameters(tl.reshape(zero, (COUNT,)).to(tl.float16), cells, slots, slot_bytes, CODES + 2 * COUNT, CELL)
    number = tl.minimum(tl.maximum(rank, 0), OUTLIERS - 1) * 2
    place = tl.arange(0, TOKENS * DIM)
    at = cell(cells, slots, number, slot_bytes, CELL, PLACES, 2 * OUTLIERS)
    tl.store(at.to(tl.pointer_type(tl.int16)), place.to(tl.int16), mask=chosen)
    at = cell(cells, slots, number, slot_bytes, CELL, PLACES + 2 * OUTLIERS, 2 * OUTLIERS)
    excess = rounded(tl.reshape(groups - means, (TOKENS * DIM,)))
    tl.store(at.to(tl.pointer_type(tl.float16)), excess.to(tl.float16), mask=chosen)


def launch_apart(
    packing: Packing,
    table: torch.Tensor,
    like: torch.Tensor,
    layout: Layout,
    levels: torch.Tensor,
    kept: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """Pack keys, or values.

    Args:
        packing, sources, targets: as :meth:`Packing.write` has them.
        table: int64 [layers], addresses of the buffers of all layers.
        like: one of these buffers.
        layout: of their blocks.
        levels: float32, what codes mean.
        kept: as there, contiguous.
    """
    (layers, heads, tokens), rotary = kept.shape, packing.rotary
    blocks = tokens // layout.tokens
    # Without a rotary embedding the kernel reads no steps.
    steps = rotary.steps_on(kept.device, layout.dim) if layout.positions else levels
    pack_apart[(heads * blocks, layers)](
        table, like, kept, sources, targets, levels, *rounding(len(levels)), steps, blocks, like.stride(0), like.stride(1),
        HEADS=heads, DIM=layout.dim, TOKENS=layout.tokens, BITS=layout.bits, SHARING=layout.grid.tokens,
        CHANNELS=layout.grid.channels, OUTLIERS=layout.outliers, SLOTS=packing.block_slots,
        PAIRS=len(rotary.frequencies) if layout.positions else 0, INTERLEAVED=layout.positions and rotary.interleaved,
        FAST=approximate(like), num_warps=WARPS,
    )  # fmt: skip
