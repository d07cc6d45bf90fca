"""Writes rows into compressed KV: rows of a cache rank's reply, and the newest rows when the compressed KV is refreshed."""

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.addresses import buffer_pointer
from sglang_ext.layers.kernels.compressed.gather_kept import _copy_tokens
from sglang_ext.layers.kernels.exchange_kernels import COMMIT_NUMBERS

NUMBERS = tl.constexpr(COMMIT_NUMBERS)
# Index of applied rows among the counters (exchange_kernels.py:COUNTERS).
ROWS_COUNTER = tl.constexpr(4)
# Rows that a program copies at once.
COMMITTED = 16


@triton.jit(do_not_specialize=("fresh",))
def _commit_rows(
    counts, moves, row_keys, row_values, hits, numbers, records, counters, key_table, value_table, targets, fresh, slot_stride,
    head_stride, HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Apply some moves of a pair if a reply has arrived. Moves outside the compressed KV or its context are skipped."""
    pair, request, pairs = tl.program_id(0), tl.program_id(2), tl.num_programs(0)
    if tl.load(hits + request) != 0:
        KIND: tl.constexpr = row_keys.dtype.element_ty
        mine = numbers + request * NUMBERS
        lane, covered, keep, first = tl.load(mine), tl.load(mine + 3), tl.load(mine + 4), tl.load(mine + 5)
        of_pair = lane * pairs + pair
        index, dim = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
        inside = index < tl.minimum(tl.load(counts + of_pair), fresh)
        move = moves + (of_pair * fresh + index) * 2
        place, token = tl.load(move, mask=inside, other=-1), tl.load(move + 1, mask=inside, other=-1)
        inside &= (place >= 0) & (place < keep) & (token >= 0) & (token < covered)
        slot = tl.load(targets + first + place, mask=inside, other=0)
        read, seen = ((of_pair * fresh + index) * DIM)[:, None] + dim[None, :], inside[:, None] & (dim < DIM)[None, :]
        write = (slot * slot_stride + pair % HEADS * head_stride)[:, None] + dim[None, :]
        tl.store(buffer_pointer(key_table, pair // HEADS, KIND) + write, tl.load(row_keys + read, mask=seen), mask=seen)
        tl.store(buffer_pointer(value_table, pair // HEADS, KIND) + write, tl.load(row_values + read, mask=seen), mask=seen)
        record = tl.load(records + request).to(tl.pointer_type(tl.int32))
        tl.store(record + pair * keep + place, token, mask=inside)
        tl.atomic_add(counters + ROWS_COUNTER, tl.sum(inside.to(tl.int64)))


@triton.jit(do_not_specialize=("count",))
def _move_newest(
    key_table, value_table, keys, values, places, sources, targets, count, slot_stride, head_stride, HEADS: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy rows of some tokens to a head's indices in the compressed KV."""
    layer, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    index = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = index < count
    source = tl.load(sources + index, mask=inside, other=0)
    place = tl.load(places + tl.program_id(0).to(tl.int64) * count + index, mask=inside, other=0)
    target = tl.load(targets + place, mask=inside, other=0)
    read, written = source * slot_stride + head * head_stride, target * slot_stride + head * head_stride
    _copy_tokens(key_table, keys, layer, read, written, inside, DIM, PADDED_DIM)
    _copy_tokens(value_table, values, layer, read, written, inside, DIM, PADDED_DIM)


def commit_rows(
    arrived: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], hits: torch.Tensor, numbers: torch.Tensor,
    records: torch.Tensor, counters: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], like: torch.Tensor, targets: torch.Tensor,
) -> None:  # fmt: skip
    """Write received rows to the compressed KV of each request whose reply has arrived. The others stay unchanged.

    Args:
        arrived: Regions of the exchange buffer, by lane: counts, moves, keys and values (exchange_buffer.py:ExchangeLayout).
        hits: Result of exchange_kernels.py:wait_for_selections.
        numbers: int64 [requests, :data:`COMMIT_NUMBERS`].
        records: int64 [requests], addresses of int32 [layers, kv_heads, keep], the positions that each compressed KV holds; updated.
        counters: int64 counters, of which the one of applied rows is incremented.
        tables: int64 [layers] each, addresses of the layers' key and value buffers.
        like: A key buffer, [slots, kv_heads, dim]; all have its shape, strides and dtype.
        targets: int64, slots of the compressed KV of all requests, concatenated.
    """
    heads, dim = like.shape[1:]
    fresh = arrived[1].shape[2]
    _commit_rows[(len(tables[0]) * heads, triton.cdiv(fresh, COMMITTED), len(numbers))](
        *arrived, hits, numbers, records, counters, *tables, targets, fresh, like.stride(0), like.stride(1),
        HEADS=heads, DIM=dim, PADDED_DIM=triton.next_power_of_2(dim), ROWS=COMMITTED,
    )  # fmt: skip


def move_newest(
    tables: tuple[torch.Tensor, torch.Tensor], keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor, sources: torch.Tensor,
    targets: torch.Tensor,
) -> None:  # fmt: skip
    """Copy rows of tokens to indices of a compressed KV, which differ from head to head.

    Args:
        tables: int64 [layers] each, addresses of the layers' key and value buffers.
        keys, values: A layer's buffers, [slots, kv_heads, dim]; all have their shape, strides and dtype.
        places: int64 [layers, kv_heads, count], target indices.
        sources: int64 [count], slots of the tokens.
        targets: int64, slots of the compressed KV.
    """
    layers, heads, count = places.shape
    dim = keys.shape[2]
    _move_newest[(layers * heads, triton.cdiv(count, COMMITTED))](
        *tables, keys, values, places.contiguous(), sources, targets, count, keys.stride(0), keys.stride(1),
        HEADS=heads, DIM=dim, PADDED_DIM=triton.next_power_of_2(dim), ROWS=COMMITTED,
    )  # fmt: skip
