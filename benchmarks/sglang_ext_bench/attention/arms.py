"""Steps of one token a request, by the ways to attend that are compared: each is a call, what it moves, and what its outputs should be."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_ext.layers.attention.compressed.decode_backend import split_counts
from sglang_ext.layers.attention.compressed.packed import PackedDecode, packed_attention
from sglang_ext.layers.kernels.flash_decoding import SplitOutputs
from sglang_ext.layers.kernels.gluon import occupancy
from sglang_ext.layers.kernels.hack.integer_decode import launch_integers
from sglang_ext.layers.kernels.packed.launches import PackedAttentionCall
from sglang_ext.layers.kernels.packed.packed_decode import (
    max_resident_programs,
    packed_decode,
)
from sglang_ext_bench.attention.dequantize import dequantize
from sglang_ext_bench.attention.setting import Copies, Full, Shape, exactly

# Of FlashInfer, on the device.
WORKSPACE_BYTES = 256 << 20
# Queries that share a KV head from which FlashInfer's tensor cores decode faster, as SGLang has it.
TENSOR_CORE_GROUP = 4
FULL, HACK = "full", "hack"


@dataclass(frozen=True)
class Arm:
    """A way to attend.

    Attributes:
        name: in the table.
        run: gives the outputs, [tokens, heads, dim]; the same each time.
        bytes: that it reads and writes of KV.
        expected: what some of the outputs would be with the numbers that its KV means, without an error of its own.
    """

    name: str
    run: Callable[[], torch.Tensor]
    bytes: int
    expected: Callable[[], torch.Tensor]


def steps(full: Full, bits: int, partition: int) -> Iterator[Arm]:
    """One token of each request. The first arm is what others are compared with."""
    shape, on_gpu = full.shape, full.keys.is_cuda
    size = full.slots.numel() * shape.token_bytes(full.keys.element_size())
    yield Arm(FULL, decoder(shape, full.queries, full.keys, full.values, full.slots), size, partial(_first, full, full.first))
    if on_gpu:
        halves = [pool.to(torch.float8_e4m3fn) for pool in (full.keys, full.values)]

        def meaning() -> tuple[torch.Tensor, torch.Tensor]:
            rows = (pool.view(torch.uint8)[full.slots[0]].view(pool.dtype) for pool in halves)
            return tuple(row.transpose(0, 1).double() for row in rows)

        yield Arm("fp8", decoder(shape, full.queries, *halves, full.slots), size // 2, partial(_first, full, meaning))
        del halves
    kivi = Copies.of(full, "kivi", bits, None)
    yield Arm(f"fused {bits}", _fused(kivi), kivi.read_bytes, partial(_first, full, kivi.first))
    yield _dequantized(kivi, bits)
    del kivi
    copies = Copies.of(full, HACK, bits, partition)
    yield Arm(HACK, _fused(copies), copies.read_bytes, partial(_first, full, copies.first))
    if on_gpu:
        yield Arm("hack, Triton", _switched(copies), copies.read_bytes, partial(_first, full, copies.first))
        yield Arm("hack, SE off", _switched(copies, stored_sums=False), copies.read_bytes, partial(_first, full, copies.first))
        yield Arm("hack, RQE off", _switched(copies, exact_tail=False), copies.read_bytes, partial(_first, full, copies.first))


def _first(full: Full, meaning: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The first request's outputs in float64."""
    return exactly(full.queries[:1], *meaning(), full.shape.scaling)


def decoder(
    shape: Shape, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Attention over tokens as they are: FlashInfer's, and on a CPU PyTorch's."""
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
    """PyTorch's attention of the newest tokens, [count, heads, dim], which are one or all."""
    given = (part.transpose(0, 1)[None] for part in (queries, keys, values))
    found = scaled_dot_product_attention(*given, is_causal=len(queries) > 1, scale=scaling, enable_gqa=True)
    return found[0].transpose(0, 1)


def _rows(copies: Copies) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The table, rows, lengths and packed slots of all requests, as kernels take them."""
    batch, width = copies.table.shape
    rows = torch.arange(batch, device=copies.table.device)
    return copies.table, rows, torch.full_like(rows, width), torch.full_like(rows, copies.packed, dtype=torch.int32)


def _splits(copies: Copies) -> tuple[int, int]:
    shape, batch = copies.full.shape, len(copies.table)
    room = max_resident_programs(copies.packing, copies.keys, copies.values, shape.heads // shape.kv_heads)
    return _triton_splits(copies) if room is None else occupancy.choose_splits(batch * shape.kv_heads, room, copies.packing.keys.bits)


def _triton_splits(copies: Copies) -> tuple[int, int]:
    return split_counts(len(copies.table) * copies.full.shape.kv_heads, PackedDecode.busy)


def _fused(copies: Copies) -> Callable[[], torch.Tensor]:
    """Attention that reads blocks."""
    shape, queries = copies.full.shape, copies.full.queries
    pools = copies.keys, copies.values
    if not copies.keys.is_cuda:
        rows = copies.table.long()

        def each() -> torch.Tensor:
            given = zip(queries.split(1), rows)
            return torch.cat([packed_attention(copies.packing, q, *pools, row, copies.packed, shape.scaling) for q, row in given])

        return each
    given, splits = _rows(copies), _splits(copies)
    return lambda: packed_decode(copies.packing, queries, *pools, *given, shape.scaling, splits)


def _switched(copies: Copies, **switches: bool) -> Callable[[], torch.Tensor]:
    """HACK's Triton kernel, with a part of it off."""
    table, *rows = _rows(copies)
    shape, queries, splits = copies.full.shape, copies.full.queries, _triton_splits(copies)

    def run() -> torch.Tensor:
        parts = SplitOutputs(queries, shape.dim, splits)
        given = (table, table.stride(0), *rows), shape.scaling, parts
        launch_integers(PackedAttentionCall(copies.packing, queries, queries, copies.keys, copies.values, *given), **switches)
        return parts.merged_output()

    return run


def _dequantized(copies: Copies, bits: int) -> Arm:
    """Blocks are made whole, in a buffer beside the pool, where attention over plain tokens reads them."""
    shape, (batch, _) = copies.full.shape, copies.table.shape
    packing, packed = copies.packing, copies.packed
    tokens = packed // packing.block_slots * packing.block_tokens
    exact = copies.table[:, packed:].long()
    slots = copies.table[:, :packed].long().flatten()
    buffers = []
    for pool in (copies.keys, copies.values):
        # All requests' blocks, then their exact tokens, which are there.
        buffer = pool.new_empty(batch * (tokens + exact.shape[1]), *pool.shape[1:])
        buffer[batch * tokens :] = pool[exact.flatten()]
        buffers.append(buffer)
    places = torch.arange(len(buffers[0]), device=shape.device)
    row = torch.cat([places[: batch * tokens].view(batch, -1), places[batch * tokens :].view(batch, -1)], 1)
    attend_ = decoder(shape, copies.full.queries, *buffers, row)

    def run() -> torch.Tensor:
        for pool, layout, buffer in zip((copies.keys, copies.values), (packing.keys, packing.values), buffers):
            dequantize(packing, pool, layout, slots, buffer[: batch * tokens])
        return attend_()

    size = 2 * batch * tokens * shape.token_bytes(copies.keys.element_size())
    return Arm(f"dequantized {bits}, then full", run, copies.read_bytes + size, partial(_first, copies.full, copies.first))
