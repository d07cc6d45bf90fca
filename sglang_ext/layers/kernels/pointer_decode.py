"""Decode attention over rows that begin with pointers into full KV (pointers.py), split over the context (flash decoding).

Programs of a request's first splits read the tokens to which a head's pointers lead, each as many steps of them; those of the others
the steps that are left over, and the tokens after them. The kernel that joins them is flash_decoding.py's.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_ext.layers.kernels.gpu_launch import pdl_options, launch_first_fitting, shape_name
from sglang_ext.layers.kernels.flash_decoding import SplitOutputs, exact_split, head_and_rows, scaled_queries, store_split, token_step
from sglang_ext.layers.kernels.decode_tile_sizes import MOST_ROWS, DecodeTile, tile_choices
from sglang_ext.layers.kernels.system_memory import load_acquired_count
from sglang_ext.mem_cache.compressed.layouts.pointers import PointerLayout, as_pointers

# Tokens in a step, and steps that are loaded ahead.
TOKENS, STAGES = 32, 3
# How often a program asks whether its pointers are chosen, before it waits until the kernel that chooses has ended: some milliseconds.
POLLS = tl.constexpr(1 << 13)


@triton.jit
def _holder(table, place, width, PER_SLOT: tl.constexpr):
    """The copy's slots that hold pointers at places, of a row of so many slots; whether there are so many pointers is not known yet."""
    return tl.load(table + place // PER_SLOT, mask=place // PER_SLOT < width, other=0)


@triton.jit
def _pointed(pointers, holder, place, last, pointer_slot, PER_SLOT: tl.constexpr):
    """Where these lead."""
    return tl.load(pointers + holder.to(tl.int64) * pointer_slot + place % PER_SLOT, mask=place < last, other=0)


@triton.jit
def _await_chosen(arrived):
    """Wait until a head's pointers are chosen by the kernel before this one, which may not have ended."""
    polls, left = 0, load_acquired_count(arrived)
    while (left != 0) & (polls < POLLS):
        polls, left = polls + 1, load_acquired_count(arrived)
    if left != 0:
        gdc_wait()


@triton.jit
def _pointed_part(
    queries, keys, values, pointers, arrived, table, width, first, last, count, best, total, acc, scaling, row, key_slot, value_slot,
    pointer_slot, PARTS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr, PER_SLOT: tl.constexpr, N: tl.constexpr, LIKE: tl.constexpr,
    AWAITS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Softmax over what was seen before, and the tokens to which a head's pointers lead, ``count`` in all: N from ``first`` on, and of each
    PARTS steps after them again so many, before ``last``; buffers begin at the head's cells."""
    dim, value_dim = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_VALUE_DIM)
    BY: tl.constexpr = PARTS * N
    place = first + tl.arange(0, N)
    holder, next_holder = _holder(table, place, width, PER_SLOT), _holder(table, place + BY, width, PER_SLOT)
    if AWAITS:
        _await_chosen(arrived)
    slot, holder = _pointed(pointers, holder, place, count, pointer_slot, PER_SLOT), next_holder
    if WAITS:
        gdc_wait()
    q = scaled_queries(queries, row, dim, scaling, GROUP, DIM, LIKE)
    for start in tl.range(first, last, BY):
        place = start + tl.arange(0, N)
        # Read a step ahead, and what leads there two, so that keys and values of several steps may be on their way.
        next_slot = _pointed(pointers, holder, place + BY, count, pointer_slot, PER_SLOT)
        holder = _holder(table, place + 2 * BY, width, PER_SLOT)
        best, total, acc = token_step(
            q, keys, values, slot.to(tl.int64), place < count, dim, value_dim, best, total, acc, key_slot, value_slot, DIM, VALUE_DIM, LIKE
        )  # fmt: skip
        slot = next_slot
    return best, total, acc


@triton.jit
def pointer_splits(
    queries, keys, values, pointers, arrived, token_table, table_row, width, rows, lengths, counts, partial, lse, scaling, key_slot,
    key_head, value_slot, value_head, pointer_slot, pointer_head, HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr,
    PER_SLOT: tl.constexpr, PACKED: tl.constexpr, SPLITS: tl.constexpr, N: tl.constexpr, AWAITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One split of a request's KV head: the first PACKED read what its pointers lead to, the others what is left of it and follows it.
    Where it is launched ``EARLY`` it waits until what comes before has ended before it reads queries, keys and values, but looks first where
    pointers lead; or where it ``AWAITS`` them for its head's pointers alone."""
    WAITS: tl.constexpr = EARLY and not AWAITS
    if WAITS:
        # What joins the parts takes its places as soon as all programs here have theirs.
        gdc_launch_dependents()
    request = tl.program_id(2)
    # Processors get programs in turn: splits that read little are other ones from head to head, or some processors would have most of them.
    split = (tl.program_id(0) + tl.program_id(1) + request * tl.num_programs(1)) % SPLITS
    kv_head, row = head_and_rows(GROUP, M)
    at = tl.load(rows + request)
    table, count = token_table + at * table_row, tl.load(counts + at)
    value_dim = tl.arange(0, PADDED_VALUE_DIM)
    LIKE: tl.constexpr = keys.dtype.element_ty
    head0 = request * HEADS * GROUP + kv_head * GROUP
    mine, my_keys, my_values = queries + head0 * DIM, keys + kv_head * key_head, values + kv_head * value_head
    my_pointers, steps = pointers + kv_head * pointer_head, tl.cdiv(count, N)
    if AWAITS:
        arrived += at * HEADS + kv_head
    left = steps % PACKED
    # The end of what the first parts share: all, where there are too few steps, or too many would be left over for the others.
    shared = tl.where((steps < PACKED) | (left > SPLITS - PACKED), steps, steps - left) * N
    if split < PACKED:
        best = tl.zeros([M], dtype=tl.float32) - float("inf")
        total = tl.zeros([M], dtype=tl.float32)
        acc = tl.zeros([M, PADDED_VALUE_DIM], dtype=tl.float32)
        # Where a part begins its count does not say: what leads there is on its way with the count.
        best, total, acc = _pointed_part(
            mine, my_keys, my_values, my_pointers, arrived, table, width, split * N, shared, count, best, total, acc, scaling, row,
            key_slot, value_slot, pointer_slot, PACKED, GROUP, M, DIM, VALUE_DIM, PADDED_DIM, PADDED_VALUE_DIM, PER_SLOT, N, LIKE, AWAITS,
            WAITS,
        )  # fmt: skip
    else:
        if WAITS:
            gdc_wait()
        best, total, acc = exact_split(
            mine, my_keys, my_values, table, tl.cdiv(count, PER_SLOT), tl.load(lengths + request).to(tl.int32), split - PACKED,
            scaling, row, key_slot, value_slot, SPLITS - PACKED, GROUP, M, DIM, VALUE_DIM, PADDED_DIM, PADDED_VALUE_DIM, N, LIKE,
        )  # fmt: skip
        first = shared + (split - PACKED) * N
        if first < count:
            best, total, acc = _pointed_part(
                mine, my_keys, my_values, my_pointers, arrived, table, width, first, count, count, best, total, acc, scaling, row,
                key_slot, value_slot, pointer_slot, SPLITS - PACKED, GROUP, M, DIM, VALUE_DIM, PADDED_DIM, PADDED_VALUE_DIM, PER_SLOT, N,
                LIKE, AWAITS, False,
            )  # fmt: skip
    place = (head0 + row) * SPLITS + split
    store_split(partial, lse, place, value_dim, value_dim < VALUE_DIM, best, total, acc, row, GROUP, VALUE_DIM)
    if AWAITS:
        # What comes after this kernel must find that the one before has ended, too: programs that are launched last ask.
        if request == tl.num_programs(2) - 1:
            gdc_wait()


def pointer_decode(
    begins: PointerLayout,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    token_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
    splits: tuple[int, int] = (16, 4),
    arrived: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one token of each request over its row of the table: [requests, heads, dim of a value].

    Reads nothing of the device on the host, and ``begins`` where it always lies: CUDA graphs may capture it. Raises OptionError
    where no tiles of such heads fit the GPU.

    On GPUs from Hopper on it is launched while the kernel before it ends, which may write queries, and keys and values of new tokens, but
    none of ``begins``, pointers, table and rows: where these lead is looked up meanwhile. Nor may those before that one, back to one that
    was not launched early itself, or lets what comes after begin only once it has waited.

    Args:
        begins: which rows begin with pointers.
        queries: [requests, heads, dim], in the dtype of the buffers.
        keys, values: a layer's buffers, [slots, kv_heads, dim].
        token_table: int32 [rows, width]; a row leads to the slots that hold its pointers, then to those of the tokens after them.
        rows: int64 [requests], rows of the table.
        lengths: int64 [requests], slots of each row.
        scaling: factor on query-key products.
        splits: parts of what a head keeps, and of the tokens after it, that are read at the same time.
        arrived: int32 [rows of the table, kv_heads], where the kernel that was launched right before chooses where pointers lead: 0 once
            those of a head do, which are all that is waited for, where the GPU can, so that what is launched in between, or no choice at
            all, would be overtaken; None where none was launched right before: then all is waited for, but for what is looked up.
    """
    requests, heads, dim = queries.shape
    kv_heads, cells, parts = keys.shape[1], as_pointers(keys), SplitOutputs(queries, values.shape[2], splits)
    group, queries, early = heads // kv_heads, queries.contiguous(), pdl_options(keys)

    def launch(tile: DecodeTile) -> None:
        pointer_splits[(parts.num_splits, kv_heads * triton.cdiv(group, tile.rows), requests)](
            queries, keys, values, cells, arrived, token_table, token_table.stride(0), token_table.shape[1], rows, lengths, begins.counts,
            parts.partial, parts.lse, scaling, keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), cells.stride(0),
            cells.stride(1), HEADS=kv_heads, GROUP=group, M=tile.rows, DIM=dim, PADDED_DIM=triton.next_power_of_2(dim),
            PER_SLOT=begins.layout.per_slot, SPLITS=parts.num_splits, N=tile.tokens, AWAITS=arrived is not None and early["EARLY"],
            num_stages=tile.stages, **parts.shape, **early,
        )  # fmt: skip

    def what() -> str:
        return f"attention over pointers with {shape_name(dim, group, keys.dtype)}"

    key = ("pointers", dim, values.shape[2], group, keys.dtype, keys.device)
    launch_first_fitting(tile_choices(group, MOST_ROWS, TOKENS, STAGES), launch, key, what, "pass --kv-compressor snapkv")
    return parts.merged_output()
