"""The compared variants of decode attention: a call, the bytes that it moves, and its expected outputs.

Some methods have codes that attention cannot read. For them, :func:`dequantize` writes the blocks to a buffer of full keys and values.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch.nn.functional import scaled_dot_product_attention

from sglang_ext.layers.attention.decode_backend import split_counts
from sglang_ext.layers.attention.packed import PackedDecode, packed_attention
from sglang_ext.layers.kernels.packed.packed_decode import PackedAttentionCall, choose_splits, launch_integers, max_resident_programs, packed_decode
from sglang_ext.mem_cache.compressed.layouts.block_layout import BlockLayout, as_bytes
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext_bench.attention.setting import AttentionShape, FullKV, QuantizedKV, exactly

WORKSPACE_BYTES = 256 << 20
"""Bytes of FlashInfer's workspace on the device."""
TENSOR_CORE_GROUP = 4
"""Least query heads of a KV head for which FlashInfer's tensor cores decode faster. SGLang uses the same limit."""
FULL, HACK = "full", "hack"


@dataclass(frozen=True)
class AttentionVariant:
    """One variant of attention.

    Attributes:
        name: Name in the table.
        run: Computes the outputs, [tokens, heads, dim]. Each call returns the same outputs.
        bytes: Bytes of KV that a call reads and writes.
        expected: Computes some of the outputs in float64, with the numbers that the variant's KV represents.
    """

    name: str
    run: Callable[[], torch.Tensor]
    bytes: int
    expected: Callable[[], torch.Tensor]


def steps(full: FullKV, bits: int, partition: int) -> Iterator[AttentionVariant]:
    """Yield the variants of a decode step of one token per request. The others are compared with the first one.

    Args:
        full: The full KV.
        bits: Bits of a code.
        partition: Numbers with a common scale in HACK.
    """
    shape, on_gpu = full.shape, full.keys.is_cuda
    size = full.slots.numel() * shape.token_bytes(full.keys.element_size())
    yield AttentionVariant(FULL, decoder(shape, full.queries, full.keys, full.values, full.slots), size, partial(_first, full, full.first_request))
    if on_gpu:
        fp8_pools = [pool.to(torch.float8_e4m3fn) for pool in (full.keys, full.values)]

        def dequantized_fp8() -> tuple[torch.Tensor, torch.Tensor]:
            rows = (pool.view(torch.uint8)[full.slots[0]].view(pool.dtype) for pool in fp8_pools)
            return tuple(row.transpose(0, 1).double() for row in rows)

        yield AttentionVariant("fp8", decoder(shape, full.queries, *fp8_pools, full.slots), size // 2, partial(_first, full, dequantized_fp8))
        del fp8_pools
    kivi = QuantizedKV.from_full(full, "kivi", bits, None)
    yield AttentionVariant(f"fused {bits}", _fused(kivi), kivi.read_bytes, partial(_first, full, kivi.first_request))
    yield _dequantized(kivi, bits)
    del kivi
    hack = QuantizedKV.from_full(full, HACK, bits, partition)
    yield AttentionVariant(HACK, _fused(hack), hack.read_bytes, partial(_first, full, hack.first_request))
    if on_gpu:
        yield AttentionVariant("hack, Triton", _by_triton(hack), hack.read_bytes, partial(_first, full, hack.first_request))


def _first(full: FullKV, first_request: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The outputs of the first request in float64, with its keys and values from ``first_request``."""
    return exactly(full.queries[:1], *first_request(), full.shape.scaling)


def decoder(
    shape: AttentionShape, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Return a call of decode attention over full KV: FlashInfer on a GPU, PyTorch on a CPU."""
    batch, context = slots.shape
    if not keys.is_cuda:
        return lambda: torch.cat([sdpa(queries[i : i + 1], keys[slots[i]], values[slots[i]], shape.scaling) for i in range(batch)])
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    grouped = shape.heads // shape.kv_heads >= TENSOR_CORE_GROUP or keys.element_size() == 1
    space = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=grouped)
    starts = torch.arange(0, (batch + 1) * context, context, dtype=torch.int32, device=shape.device)
    last = torch.ones(batch, dtype=torch.int32, device=shape.device)
    wrapper.plan(
        starts, slots.flatten().int(), last, shape.heads, shape.kv_heads, shape.dim, 1, q_data_type=queries.dtype, kv_data_type=keys.dtype
    )
    paged = keys.unsqueeze(1), values.unsqueeze(1)
    return lambda: wrapper.run(queries, paged)


def sdpa(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """Compute PyTorch's attention of the newest token or of all tokens. Queries and outputs are [count, heads, dim]."""
    inputs = (part.transpose(0, 1)[None] for part in (queries, keys, values))
    found = scaled_dot_product_attention(*inputs, is_causal=len(queries) > 1, scale=scaling, enable_gqa=True)
    return found[0].transpose(0, 1)


def _rows(kv: QuantizedKV) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The table, rows, lengths and slots of blocks of all requests, as arguments of kernels."""
    batch, width = kv.table.shape
    rows = torch.arange(batch, device=kv.table.device)
    return kv.table, rows, torch.full_like(rows, width), torch.full_like(rows, kv.packed, dtype=torch.int32)


def _splits(kv: QuantizedKV) -> tuple[int, int]:
    shape, batch = kv.full.shape, len(kv.table)
    programs = max_resident_programs(kv.packing, kv.keys, shape.heads // shape.kv_heads)
    return _triton_splits(kv) if programs is None else choose_splits(batch * shape.kv_heads, programs, kv.packing.keys.bits)


def _triton_splits(kv: QuantizedKV) -> tuple[int, int]:
    return split_counts(len(kv.table) * kv.full.shape.kv_heads, PackedDecode.min_parts)


def _fused(kv: QuantizedKV) -> Callable[[], torch.Tensor]:
    """Return a call of attention that reads quantized blocks."""
    shape, queries = kv.full.shape, kv.full.queries
    pools = kv.keys, kv.values
    if not kv.keys.is_cuda:
        rows = kv.table.long()

        def run() -> torch.Tensor:
            requests = zip(queries.split(1), rows)
            return torch.cat([packed_attention(kv.packing, q, *pools, row, kv.packed, shape.scaling) for q, row in requests])

        return run
    batch, splits = _rows(kv), _splits(kv)
    return lambda: packed_decode(kv.packing, queries, *pools, *batch, shape.scaling, splits)


def _by_triton(kv: QuantizedKV) -> Callable[[], torch.Tensor]:
    """Return a call of HACK's Triton kernel."""
    table, *rows = _rows(kv)
    shape, queries, splits = kv.full.shape, kv.full.queries, _triton_splits(kv)

    def run() -> torch.Tensor:
        batch = (table, table.stride(0), *rows), shape.scaling
        call = PackedAttentionCall(queries, kv.keys, kv.values, splits, kv.packing, queries, *batch)
        launch_integers(call)
        return call.merged_output()

    return run


def _dequantized(kv: QuantizedKV, bits: int) -> AttentionVariant:
    """The variant that dequantizes blocks to a buffer in each call, and then runs attention over full KV."""
    shape, (batch, _) = kv.full.shape, kv.table.shape
    packing, packed = kv.packing, kv.packed
    tokens = packed // packing.block_slots * packing.block_tokens
    exact = kv.table[:, packed:].long()
    slots = kv.table[:, :packed].long().flatten()
    buffers = []
    for pool in (kv.keys, kv.values):
        # The tokens of all requests' blocks, then their exact tokens, which are written once.
        buffer = pool.new_empty(batch * (tokens + exact.shape[1]), *pool.shape[1:])
        buffer[batch * tokens :] = pool[exact.flatten()]
        buffers.append(buffer)
    buffer_slots = torch.arange(len(buffers[0]), device=shape.device)
    row = torch.cat([buffer_slots[: batch * tokens].view(batch, -1), buffer_slots[batch * tokens :].view(batch, -1)], 1)
    attend = decoder(shape, kv.full.queries, *buffers, row)

    def run() -> torch.Tensor:
        for pool, layout, buffer in zip((kv.keys, kv.values), (packing.keys, packing.values), buffers):
            dequantize(packing, pool, layout, slots, buffer[: batch * tokens])
        return attend()

    size = 2 * batch * tokens * shape.token_bytes(kv.keys.element_size())
    return AttentionVariant(f"dequantized {bits}, then full", run, kv.read_bytes + size, partial(_first, kv.full, kv.first_request))


@triton.jit
def _dequantize_blocks(
    cells, numbers, slots, out, slot_bytes, head_bytes, SLOTS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr,
    CELL: tl.constexpr, SHARING: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Dequantize a block of one KV head to [TOKENS, DIM] of ``out``, which is [tokens, heads, DIM]."""
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
    number = (codes.to(tl.float32) * scale + zero).to(out.dtype.element_ty)
    tl.store(out + ((block.to(tl.int64) * TOKENS + token) * heads + head) * DIM + channel, number)


def dequantize(packing: Packing, buffer: torch.Tensor, layout: BlockLayout, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Dequantize blocks of one layer.

    Args:
        packing: Layout and quantizer of the blocks. Numbers are codes times a scale plus a zero point.
        buffer: Keys or values of the layer, [slots, kv_heads, dim].
        layout: Layout of the keys' or values' blocks.
        slots: Slots of whole blocks, int64.
        out: Output, contiguous [tokens, kv_heads, dim].
    """
    if buffer.is_cuda:
        launch_dequantize(packing, buffer, layout, slots, out)
    else:
        out.copy_(packing.dequantize(packing.read(buffer, layout, slots), layout, None).transpose(0, 1))


def launch_dequantize(packing: Packing, buffer: torch.Tensor, layout: BlockLayout, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Dequantize blocks with the kernel. Arguments as for :func:`dequantize`."""
    _dequantize_blocks[(len(slots) // packing.block_slots, buffer.shape[1])](
        as_bytes(buffer), buffer.view(torch.float16), slots, out, buffer.stride(0) * buffer.element_size(),
        buffer.stride(1) * buffer.element_size(), SLOTS=packing.block_slots, TOKENS=layout.tokens, DIM=layout.dim, BITS=layout.bits,
        CELL=layout.cell_bytes, SHARING=layout.grid.tokens, CHANNELS=layout.grid.channels,
    )  # fmt: skip
