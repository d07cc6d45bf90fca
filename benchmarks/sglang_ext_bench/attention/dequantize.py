"""The pass that methods need whose codes attention cannot read: blocks become keys and values again, as plain tokens, in a buffer."""

import torch
import triton
import triton.language as tl

from sglang_ext.mem_cache.compressed.layouts.block_layout import BlockLayout
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing, as_bytes


@triton.jit
def _whole_blocks(
    cells, numbers, slots, out, slot_bytes, head_bytes, SLOTS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr,
    CELL: tl.constexpr, SHARING: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A block of one KV head: [TOKENS, DIM] of ``out``, [tokens, heads, DIM]."""
    block, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token, channel = tl.arange(0, TOKENS)[:, None], tl.arange(0, DIM)[None, :]
    BYTES: tl.constexpr = DIM * BITS // 8
    COUNT: tl.constexpr = TOKENS // SHARING * (DIM // CHANNELS)
    CODES: tl.constexpr = TOKENS * BYTES
    at = token * BYTES + channel % BYTES
    slot = tl.load(slots + block * SLOTS + at // CELL).to(tl.int64)
    raw = tl.load(cells + slot * slot_bytes + head * head_bytes + at % CELL).to(tl.int32)
    codes = (raw >> (channel // BYTES * BITS)) & ((1 << BITS) - 1)
    first = CODES + 2 * (token // SHARING * (DIM // CHANNELS) + channel // CHANNELS)
    slot = tl.load(slots + block * SLOTS + first // CELL).to(tl.int64)
    scale = tl.load(numbers + (slot * slot_bytes + head * head_bytes + first % CELL) // 2).to(tl.float32)
    first += 2 * COUNT
    slot = tl.load(slots + block * SLOTS + first // CELL).to(tl.int64)
    zero = tl.load(numbers + (slot * slot_bytes + head * head_bytes + first % CELL) // 2).to(tl.float32)
    meant = (codes.to(tl.float32) * scale + zero).to(out.dtype.element_ty)
    tl.store(out + ((block.to(tl.int64) * TOKENS + token) * heads + head) * DIM + channel, meant)


def dequantize(packing: Packing, buffer: torch.Tensor, layout: BlockLayout, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Write into ``out`` what blocks mean.

    Args:
        packing: how blocks lie; codes mean numbers but for scale and zero point.
        buffer: a layer's keys or values, [slots, kv_heads, dim].
        layout: of their blocks.
        slots: int64, of whole blocks.
        out: [tokens, kv_heads, dim], contiguous.
    """
    if buffer.is_cuda:
        launch(packing, buffer, layout, slots, out)
    else:
        out.copy_(packing.dequantize(packing.read(buffer, layout, slots), layout, None).transpose(0, 1))


def launch(packing: Packing, buffer: torch.Tensor, layout: BlockLayout, slots: torch.Tensor, out: torch.Tensor) -> None:
    """:func:`dequantize` by a kernel."""
    _whole_blocks[(len(slots) // packing.block_slots, buffer.shape[1])](
        as_bytes(buffer), buffer.view(torch.float16), slots, out, buffer.stride(0) * buffer.element_size(),
        buffer.stride(1) * buffer.element_size(), SLOTS=packing.block_slots, TOKENS=layout.tokens, DIM=layout.dim, BITS=layout.bits,
        CELL=layout.cell_bytes, SHARING=layout.grid.tokens, CHANNELS=layout.grid.channels,
    )  # fmt: skip
