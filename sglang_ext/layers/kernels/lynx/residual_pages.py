"""Kernels that write pages to host memory as residuals and anchors, or whole, and read them back.

mem_cache/host_tier/page_copies.py defines the layout of a page's host memory, its frame. Most programs handle 64 channels of a chunk's
32 tokens, of one buffer of one page. If a page's size marks it as whole, its numbers are copied unchanged. Data in host memory may
be corrupted. The kernels therefore never read outside the page's host memory.
"""

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.gpu_launch import buffer_pointer
from sglang_ext.layers.kernels.lynx import layout as streams
from sglang_ext.layers.kernels.lynx.exact_tiles import BLOCK, UNIT, bins_of, from_ordinals, index_places, or_bits, read_bits, to_ordinals
from sglang_ext.layers.kernels.lynx.layout import PageLayout, bounds
from sglang_ext.layers.kernels.lynx.tiles import CHUNK
from sglang_ext.layers.kernels.lynx.triton_codec import LIKE, device_table
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing


@triton.jit
def _buffer(key_table, value_table, LAYERS: tl.constexpr, LIKE: tl.constexpr):
    """Number and pointer of the program's buffer. Keys of all layers come before values."""
    number = tl.program_id(1)
    table = key_table + number
    if number >= LAYERS:
        table = value_table + number - LAYERS
    return number, buffer_pointer(table, 0, LIKE)


@triton.jit
def _tile(BLOCKS: tl.constexpr):
    """Index of the program's row of chunks, and its 64 channels."""
    return tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _slot(blocks, which, inline, mask):
    """Slots of a page's blocks, by index in the page. For an anchor ``inline`` in the host memory, the indices themselves."""
    return tl.where(inline > 0, which.to(tl.int64), tl.load(blocks + which, mask=mask & (inline == 0), other=0))


@triton.jit
def _block_bins(
    cells, blocks, inline, table, row, channel, CHANNELS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr,
    SLOTS: tl.constexpr, LIKE: tl.constexpr,
):  # fmt: skip
    """First ordinal of each number's bin, int32 [32, 64], last index of the bin, uint32, and bits of an index, from a page's packed blocks."""
    SIZE: tl.constexpr = LIKE.primitive_bitwidth // 8
    CELL: tl.constexpr = DIM * SIZE
    PART: tl.constexpr = DIM * BITS // 8
    CODES: tl.constexpr = TOKENS * PART
    GROUPS: tl.constexpr = TOKENS // CHUNK
    inside = channel < CHANNELS
    own, begin = channel % DIM, row * CHUNK // TOKENS * SLOTS
    cells += channel // DIM * CELL
    token = row * CHUNK % TOKENS + tl.arange(0, CHUNK)
    byte = token * PART
    slot = _slot(blocks, begin + byte // CELL, inline, byte >= 0)
    place = slot[:, None] * (CHANNELS * SIZE) + (byte % CELL)[:, None] + (own % PART)[None, :]
    raw = tl.load(cells[None, :] + place, mask=inside[None, :], other=0).to(tl.int32)
    codes = (raw >> (own // PART * BITS)[None, :]) & ((1 << BITS) - 1)
    at = CODES + 2 * (row * CHUNK % TOKENS // CHUNK * DIM + own)
    sigma = _parameter(cells, blocks, begin, inline, at, inside, CHANNELS * SIZE, CELL)
    mu = _parameter(cells, blocks, begin, inline, at + 2 * GROUPS * DIM, inside, CHANNELS * SIZE, CELL)
    first, last, width = bins_of(mu, sigma, codes, table, LIKE, BITS)
    return first, last, tl.where(inside[None, :], width, 0)


@triton.jit
def _parameter(cells, blocks, begin, inline, at, inside, slot_bytes, CELL: tl.constexpr):
    """Float16 numbers ``at`` bytes after the beginning of a block, as float32."""
    place = cells + _slot(blocks, begin + at // CELL, inline, inside) * slot_bytes + at % CELL
    return tl.load(place.to(tl.pointer_type(tl.float16)), mask=inside, other=0).to(tl.float32)


@triton.jit
def _targets(slots, page, row, channel, CHANNELS: tl.constexpr, PAGE: tl.constexpr):
    """Offsets of a tile in the pool."""
    token = row * CHUNK + tl.arange(0, CHUNK)
    slot = tl.load(slots + page.to(tl.int64) * PAGE + token)
    return slot[:, None] * CHANNELS + channel[None, :]


@triton.jit
def _whole(rooms, page, number, row, channel, room_bytes, CHANNELS: tl.constexpr, PAGE: tl.constexpr, LIKE: tl.constexpr):
    """Pointers to a tile in the host memory of a whole page."""
    room = tl.multiple_of((rooms + page.to(tl.int64) * room_bytes).to(tl.pointer_type(LIKE)), 8)
    token = number * PAGE + row * CHUNK + tl.arange(0, CHUNK)
    return room + token[:, None] * CHANNELS + channel[None, :]


@triton.jit(do_not_specialize_on_alignment=("slots", "blocks"))
def count_bits(
    key_table, value_table, slots, blocks, table, units, outside, LAYERS: tl.constexpr, CHANNELS: tl.constexpr, DIM: tl.constexpr,
    BITS: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr, PAGE: tl.constexpr, BLOCKS: tl.constexpr, LIKE: tl.constexpr,
):  # fmt: skip
    """Count each tile's units, int32 [pages, buffers, rows, blocks], and mark pages with numbers outside their bins, int32 [pages]."""
    page = tl.program_id(2)
    if tl.load(blocks + page.to(tl.int64) * (PAGE // TOKENS * SLOTS)) < 0:
        return
    number, pool = _buffer(key_table, value_table, LAYERS, LIKE)
    row, channel = _tile(BLOCKS)
    own = blocks + page.to(tl.int64) * (PAGE // TOKENS * SLOTS)
    cells = pool.to(tl.pointer_type(tl.uint8))
    first, last, width = _block_bins(cells, own, 0, table, row, channel, CHANNELS, DIM, BITS, TOKENS, SLOTS, LIKE)
    numbers = tl.load(pool + _targets(slots, page, row, channel, CHANNELS, PAGE), mask=(channel < CHANNELS)[None, :], other=0)
    index = (to_ordinals(numbers) - first).to(tl.uint32, bitcast=True)
    # Scales that are NaN give invalid bins.
    wrong = ((index > last) | (width > LIKE.primitive_bitwidth)) & (channel < CHANNELS)[None, :]
    if tl.sum(tl.sum(wrong.to(tl.int32), 1), 0) > 0:
        tl.store(outside + page, 1)
    place = (page.to(tl.int64) * tl.num_programs(1) + number) * tl.num_programs(0) + tl.program_id(0)
    tl.store(units + place, (tl.sum(tl.sum(width, 1), 0) + UNIT - 1) // UNIT)


@triton.jit(do_not_specialize_on_alignment=("slots", "blocks"))
def write_rooms(
    key_table, value_table, slots, blocks, table, heads, sizes, rooms, room_bytes, bits_at, LAYERS: tl.constexpr, CHANNELS: tl.constexpr,
    DIM: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr, PAGE: tl.constexpr, BLOCKS: tl.constexpr,
    LIKE: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Write pages to host memory. The residuals' bits are ORed into zeros. ``heads``: int32, first unit of each tile's bits."""
    page = tl.program_id(2)
    number, pool = _buffer(key_table, value_table, LAYERS, LIKE)
    row, channel = _tile(BLOCKS)
    inside = (channel < CHANNELS)[None, :]
    numbers = tl.load(pool + _targets(slots, page, row, channel, CHANNELS, PAGE), mask=inside, other=0)
    if tl.load(sizes + page) == 0:
        tl.store(_whole(rooms, page, number, row, channel, room_bytes, CHANNELS, PAGE, LIKE), numbers, mask=inside)
    else:
        own = blocks + page.to(tl.int64) * (PAGE // TOKENS * SLOTS)
        cells = pool.to(tl.pointer_type(tl.uint8))
        first, last, width = _block_bins(cells, own, 0, table, row, channel, CHANNELS, DIM, BITS, TOKENS, SLOTS, LIKE)
        index = tl.where(width > 0, to_ordinals(numbers) - first, 0).to(tl.uint32, bitcast=True)
        tile = number * tl.num_programs(0) + tl.program_id(0)
        begin = tl.load(heads + page.to(tl.int64) * tl.num_programs(1) * tl.num_programs(0) + tile)
        room = tl.multiple_of(rooms + page.to(tl.int64) * room_bytes, 8)
        tl.store(room.to(tl.pointer_type(tl.int32)) + tile, begin)
        or_bits((room + bits_at).to(tl.pointer_type(tl.uint64)) + begin, index, width, TOGETHER)


@triton.jit(do_not_specialize_on_alignment=("blocks",))
def write_anchors(
    key_table, value_table, blocks, sizes, rooms, room_bytes, LAYERS: tl.constexpr, ROW: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Write the content of the blocks' slots, ROW words of 64 bits each, after the residuals."""
    which, page = tl.program_id(0), tl.program_id(2)
    size = tl.load(sizes + page)
    if size > 0:
        number, pool = _buffer(key_table, value_table, LAYERS, tl.int64)
        word = tl.arange(0, WORDS)
        slot = tl.load(blocks + page.to(tl.int64) * tl.num_programs(0) + which)
        room = tl.multiple_of(rooms + page.to(tl.int64) * room_bytes + size, 8).to(tl.pointer_type(tl.int64))
        place = (number * tl.num_programs(0) + which) * ROW + word
        tl.store(room + place, tl.load(pool + slot * ROW + word, mask=word < ROW), mask=word < ROW)


@triton.jit(do_not_specialize_on_alignment=("slots", "blocks"))
def read_rooms(
    key_table, value_table, slots, blocks, table, sizes, rooms, room_bytes, bits_at, LAYERS: tl.constexpr, CHANNELS: tl.constexpr,
    DIM: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr, PAGE: tl.constexpr, BLOCKS: tl.constexpr,
    LIKE: tl.constexpr,
):  # fmt: skip
    """Read the pages that ``write_rooms`` wrote into the pool."""
    COUNT: tl.constexpr = PAGE // TOKENS * SLOTS
    ROW: tl.constexpr = CHANNELS * LIKE.primitive_bitwidth // 8
    page = tl.program_id(2)
    number, pool = _buffer(key_table, value_table, LAYERS, LIKE)
    row, channel = _tile(BLOCKS)
    inside = (channel < CHANNELS)[None, :]
    target = pool + _targets(slots, page, row, channel, CHANNELS, PAGE)
    size = tl.load(sizes + page)
    if size == 0:
        tl.store(target, tl.load(_whole(rooms, page, number, row, channel, room_bytes, CHANNELS, PAGE, LIKE), mask=inside), mask=inside)
    else:
        room = tl.multiple_of(rooms + page.to(tl.int64) * room_bytes, 8)
        own, inline = slots, 1
        if blocks is not None:
            own = blocks + page.to(tl.int64) * COUNT
            inline = (tl.load(own) < 0).to(tl.int32)
        # The anchor's address depends on a size that the host may have changed. It is limited to the page's memory.
        begin = tl.minimum(tl.maximum(size, 0), room_bytes - 2 * LAYERS * COUNT * ROW)
        behind = (room + begin + number * COUNT * ROW).to(tl.int64, bitcast=True)
        cells = tl.where(inline > 0, behind, pool.to(tl.int64, bitcast=True)).to(tl.pointer_type(tl.uint8), bitcast=True)
        cells = tl.multiple_of(cells, 2)
        first, last, width = _block_bins(cells, own, inline, table, row, channel, CHANNELS, DIM, BITS, TOKENS, SLOTS, LIKE)
        tile = number * tl.num_programs(0) + tl.program_id(0)
        begin = tl.load(room.to(tl.pointer_type(tl.int32)) + tile).to(tl.uint32, bitcast=True).to(tl.int64)
        words = (room_bytes - bits_at) // 4
        index = read_bits((room + bits_at).to(tl.pointer_type(tl.uint32)), begin, index_places(width), width, words)
        tl.store(target, from_ordinals(first + index, LIKE), mask=inside)


def write_pages(
    buffers: KVBuffers,
    layout: PageLayout,
    packing: Packing,
    slots: torch.Tensor,
    blocks: torch.Tensor | None,
    rooms: torch.Tensor,
    sizes: torch.Tensor,
) -> None:
    """Implements ``ResidualPages.write``. ``layout`` covers all tokens of a page."""
    shape, grid, device = _shape(buffers, layout, packing, slots, sizes)
    page_bytes = rooms.shape[1]
    units = heads = torch.zeros(len(sizes), layout.rows * layout.blocks, dtype=torch.int32, device=device)
    bounds_of = device_table(bounds, layout.bits, device)
    tables = buffers.key_table, buffers.value_table, slots
    if blocks is None:
        sizes.zero_()
    else:
        outside = torch.zeros(len(sizes), dtype=torch.int32, device=device)
        count_bits[grid](*tables, blocks, bounds_of, units, outside, **shape)
        ends = units.cumsum(1)
        found = layout.index_bytes + streams.UNIT * ends[:, -1]
        coded = (blocks[:, 0] >= 0) & (outside == 0) & (found + blocks.shape[1] * buffers.bytes_per_slot < page_bytes)
        sizes.copy_(torch.where(coded, found, 0))
        heads = (ends - units).int()
        # Bits are ORed into zeros, and zeros pad the offsets.
        rooms.zero_()
    write_rooms[grid](
        *tables, slots if blocks is None else blocks, bounds_of, heads, sizes, rooms, page_bytes, layout.index_bytes, **shape,
        TOGETHER=8 // layout.dtype.itemsize,
    )  # fmt: skip
    if blocks is not None:
        row = layout.channels * layout.dtype.itemsize // 8
        write_anchors[(blocks.shape[1], *grid[1:])](
            buffers.key_table, buffers.value_table, blocks, sizes, rooms, page_bytes, LAYERS=shape["LAYERS"], ROW=row,
            WORDS=triton.next_power_of_2(row),
        )  # fmt: skip


def read_pages(
    buffers: KVBuffers,
    layout: PageLayout,
    packing: Packing,
    rooms: torch.Tensor,
    sizes: torch.Tensor,
    slots: torch.Tensor,
    blocks: torch.Tensor | None,
) -> None:
    """Implements ``ResidualPages.read``."""
    shape, grid, device = _shape(buffers, layout, packing, slots, sizes)
    read_rooms[grid](
        buffers.key_table, buffers.value_table, slots, blocks, device_table(bounds, layout.bits, device), sizes, rooms, rooms.shape[1],
        layout.index_bytes, **shape,
    )  # fmt: skip


def _shape(
    buffers: KVBuffers, layout: PageLayout, packing: Packing, slots: torch.Tensor, sizes: torch.Tensor
) -> tuple[dict, tuple[int, int, int], torch.device]:
    """Compile-time constants of the kernels, their grid, and the device."""
    layers, page_size = len(buffers.keys), len(slots) // len(sizes)
    grid = page_size // streams.CHUNK * layout.blocks, 2 * layers, len(sizes)
    shape = {
        "LAYERS": layers, "CHANNELS": layout.channels, "DIM": packing.keys.dim, "BITS": layout.bits, "TOKENS": packing.block_tokens,
        "SLOTS": packing.block_slots, "PAGE": page_size, "BLOCKS": layout.blocks, "LIKE": LIKE[layout.dtype],
    }  # fmt: skip
    return shape, grid, slots.device
