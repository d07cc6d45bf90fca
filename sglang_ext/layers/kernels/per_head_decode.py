"""Decode attention over rows in which each KV head keeps its own tokens, split over the context (flash decoding).

The programs of a request's first splits read a head's kept tokens, those of the others the tokens after the compressed KV. Ragged heads
(:func:`ragged_decode`) store tokens. Pointers into full KV (:func:`pointer_decode`) are read in equal numbers of steps, and the remaining
steps by the other splits. flash_decoding.py's kernel combines the splits.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_ext.layers.kernels.flash_decoding import (
    MOST_ROWS,
    DecodeTile,
    RowSplits,
    exact_split,
    head_and_rows,
    scaled_queries,
    softmax_step,
    store_split,
    tile_choices,
    token_step,
)
from sglang_ext.layers.kernels.gpu_launch import load_acquired_count, pdl_options, pointer_at
from sglang_ext.mem_cache.compressed.layouts.pointers import PointerLayout, as_pointers
from sglang_ext.mem_cache.compressed.layouts.ragged_heads import RaggedHeadLayout

# Tokens in a step, and steps of ragged heads and of pointers that are loaded ahead; tuned on an H200.
TOKENS, RAGGED_STAGES, POINTER_STAGES = 32, 2, 3


@triton.jit
def _buffers(table, layer, over, narrow, LAYERS: tl.constexpr):
    """Load addresses of the buffers ``over`` layers after ``layer``. A step spans at most two layers unless compressed KV is ``narrow``."""
    next_layer = tl.minimum(layer + 1, LAYERS - 1)
    found = tl.where(over > 0, tl.load(table + next_layer), tl.load(table + layer))
    if narrow:
        found = tl.load(table + tl.minimum(layer + over, LAYERS - 1))
    return found


@triton.jit
def _cells_part(
    queries, key_table, value_table, table, first, last, copied, scaling, row, key_slot, key_head, value_slot, value_head,
    LAYERS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr, N: tl.constexpr, LIKE: tl.constexpr,
):  # fmt: skip
    """Softmax over the cells [first, last) of a compressed KV of ``copied`` slots, which are consecutive: the layer is divided for only once.

    A step spans at most two layers, unless a layer has fewer cells than a step.
    """
    dim, value_dim = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_VALUE_DIM)
    q = scaled_queries(queries, row, dim, scaling, GROUP, DIM, LIKE)
    best = tl.zeros([M], dtype=tl.float32) - float("inf")
    total = tl.zeros([M], dtype=tl.float32)
    acc = tl.zeros([M, PADDED_VALUE_DIM], dtype=tl.float32)
    cells = tl.maximum(copied * HEADS, 1)
    narrow = cells < N
    layer, begin = first // cells, first % cells
    for start in tl.range(first, last, N):
        place = tl.arange(0, N)
        inside = start + place < last
        within = begin + place
        over = (within >= cells).to(tl.int32)
        if narrow:
            over = within // cells
        within -= over * cells
        slot = tl.load(table + within // HEADS, mask=inside, other=0).to(tl.int64)
        # Without the hint the compiler knows nothing of a loaded address, and loads keys number by number.
        keys = pointer_at(_buffers(key_table, layer, over, narrow, LAYERS), LIKE)
        values = pointer_at(_buffers(value_table, layer, over, narrow, LAYERS), LIKE)
        at = keys + slot * key_slot + within % HEADS * key_head
        k = tl.load(at[None, :] + dim[:, None], mask=inside[None, :] & (dim < DIM)[:, None], other=0.0)
        qk = tl.where(inside[None, :], tl.dot(q, k), float("-inf"))
        best, rescale, p, total = softmax_step(qk, best, total, 1)
        at = values + slot * value_slot + within % HEADS * value_head
        v = tl.load(at[:, None] + value_dim[None, :], mask=inside[:, None] & (value_dim < VALUE_DIM)[None, :], other=0.0)
        acc = acc * rescale[:, None] + tl.dot(p.to(LIKE), v)
        begin += N
        layer, begin = layer + begin // cells, begin % cells
    return best, total, acc


@triton.jit(do_not_specialize=("first_head",))
def _splits(
    queries, keys, values, key_table, value_table, token_table, table_row, rows, lengths, bounds, bounds_row, first_head,
    partial, lse, scaling, key_slot, key_head, value_slot, value_head, ALL_HEADS: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr, PACKED: tl.constexpr, SPLITS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    split, request = tl.program_id(0), tl.program_id(2)
    kv_head, row = head_and_rows(GROUP, M)
    table_at = tl.load(rows + request)
    table, bounds = token_table + table_at * table_row, bounds + table_at * bounds_row
    copied, length = tl.load(bounds + ALL_HEADS) // ALL_HEADS, tl.load(lengths + request).to(tl.int32)
    value_dim = tl.arange(0, PADDED_VALUE_DIM)
    LIKE: tl.constexpr = keys.dtype.element_ty
    head0 = request * HEADS * GROUP + kv_head * GROUP
    if split < PACKED:
        begin, end = tl.load(bounds + first_head + kv_head), tl.load(bounds + first_head + kv_head + 1)
        each = tl.cdiv(end - begin, PACKED)
        first = begin + each * split
        best, total, acc = _cells_part(
            queries + head0 * DIM, key_table, value_table, table, first, tl.minimum(first + each, end), copied, scaling, row,
            key_slot, key_head, value_slot, value_head, ALL_HEADS // HEADS, HEADS, GROUP, M, DIM, VALUE_DIM, PADDED_DIM,
            PADDED_VALUE_DIM, N, LIKE,
        )  # fmt: skip
    else:
        best, total, acc = exact_split(
            queries + head0 * DIM, keys + kv_head * key_head, values + kv_head * value_head, table, copied, length,
            split - PACKED, scaling, row, key_slot, value_slot, SPLITS - PACKED, GROUP, M, DIM, VALUE_DIM, PADDED_DIM,
            PADDED_VALUE_DIM, N, LIKE,
        )  # fmt: skip
    place = (head0 + row) * SPLITS + split
    store_split(partial, lse, place, value_dim, value_dim < VALUE_DIM, best, total, acc, row, GROUP, VALUE_DIM)


def ragged_decode(
    cells: RaggedHeadLayout,
    layer: int,
    queries: torch.Tensor,
    token_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
    splits: tuple[int, int] = (28, 4),
) -> torch.Tensor:
    """Attention of one token of each request over its row of the table: [requests, heads, dim of a value].

    Reads no device memory on the host, and ``cells`` always at the same addresses, so CUDA graphs may capture it. ``cells``: which rows begin with
    compressed KV, and the contents of its cells, which may be those of other layers. ``layer``: index in its buffers. ``queries``: [requests,
    heads, dim], in their dtype. ``token_table``: int32 [rows, width]; a row has the slots of its compressed KV, then those of the tokens after
    it. ``rows``, ``lengths``: int64 [requests], rows of the table, and slots of each. ``splits``: of a head's kept tokens, and of the others.

    Raises:
        OptionError: No tiles of such heads fit the GPU.
    """
    keys, values = cells.buffers.keys[layer], cells.buffers.values[layer]
    parts = RowSplits(queries.contiguous(), keys, values, splits)

    def launch(tile: DecodeTile) -> None:
        _splits[parts.grid(tile.rows)](
            parts.queries, keys, values, cells.buffers.key_table, cells.buffers.value_table, token_table, token_table.stride(0), rows,
            lengths, cells.bounds, cells.bounds.stride(0), layer * keys.shape[1], parts.partial, parts.lse, scaling, *parts.strides,
            ALL_HEADS=cells.bounds.shape[1] - 1, SPLITS=parts.num_splits, N=tile.tokens, **parts.constants(tile),
        )  # fmt: skip

    choices = tile_choices(parts.group, MOST_ROWS, TOKENS, RAGGED_STAGES)
    parts.launch("cells", choices, launch, lambda: "attention over heads of different budgets", "pass --kv-head-budgets equal")
    return parts.merged_output()


# Polls for selected pointers before a program waits for the end of the selection kernel: some milliseconds.
POLLS = tl.constexpr(1 << 13)


@triton.jit
def _holder(table, place, width, PER_SLOT: tl.constexpr):
    """Load the slots of compressed KV that hold the pointers at ``place``, within the row's ``width``: their number is not known yet."""
    return tl.load(table + place // PER_SLOT, mask=place // PER_SLOT < width, other=0)


@triton.jit
def _pointed(pointers, holder, place, last, pointer_slot, PER_SLOT: tl.constexpr):
    """Load the slots that the pointers point to."""
    return tl.load(pointers + holder.to(tl.int64) * pointer_slot + place % PER_SLOT, mask=place < last, other=0)


@triton.jit
def _await_chosen(arrived):
    """Wait until the previous kernel, which may still run, has written a head's pointers."""
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
    """Update the softmax with N of a head's ``count`` pointed-to tokens from ``first`` on, and after every PARTS steps, before ``last``."""
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
        # Token slots are loaded one step ahead, and pointer slots two, so that keys and values of several steps load at the same time.
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
    """Attend to one split of a request's KV head. The first PACKED splits read tokens by pointers, the others the remaining ones and the
    tokens after them.

    If launched ``EARLY``, the kernel waits for the end of the previous kernel before it reads queries, keys and values. It reads pointers
    before that wait. With ``AWAITS`` it waits only for its head's pointers.
    """
    WAITS: tl.constexpr = EARLY and not AWAITS
    if WAITS:
        # The combining kernel takes its place on the GPU as soon as all programs of this one run.
        gdc_launch_dependents()
    request = tl.program_id(2)
    # Programs are assigned to multiprocessors round-robin. Splits that read little differ from head to head, so that no multiprocessor
    # gets most of them.
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
    # End of the tokens of the first splits. It is the end of all tokens if there are too few steps, or if too many steps would remain for
    # the others.
    shared = tl.where((steps < PACKED) | (left > SPLITS - PACKED), steps, steps - left) * N
    if split < PACKED:
        best = tl.zeros([M], dtype=tl.float32) - float("inf")
        total = tl.zeros([M], dtype=tl.float32)
        acc = tl.zeros([M, PADDED_VALUE_DIM], dtype=tl.float32)
        # The start of a split does not depend on the count, so its pointers load together with the count.
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
        # The next kernel requires that the previous one has ended, too. The programs that are launched last wait for it.
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

    Reads no device memory on the host, and ``begins`` always at the same addresses, so CUDA graphs may capture it.

    On GPUs from Hopper on, it is launched before the previous kernel has ended (programmatic dependent launch). The previous kernel may
    write queries, and keys and values of new tokens. It must not write ``begins``, pointers, table or rows, because these are read before
    it ends. The same applies to earlier kernels, back to the last one that was not launched early, or that lets its successor begin only
    after its own wait.

    ``begins``: which rows begin with pointers. ``keys``, ``values``: a layer's buffers, [slots, kv_heads, dim]. A row of ``token_table``, int32
    [rows, width], has the slots that hold its pointers, then those of later tokens. Others: as in :func:`ragged_decode`. ``arrived``: int32
    [rows of the table, kv_heads], of a selection kernel launched directly before this one; 0 once a head's pointers are written. If the GPU
    supports it, this kernel waits only for these. So no kernel may be launched in between, and a selection must have been launched. None: it
    waits for the end of the previous kernel, except for the early reads above.

    Raises:
        OptionError: No tiles of such heads fit the GPU.
    """
    cells, parts, early = as_pointers(keys), RowSplits(queries.contiguous(), keys, values, splits), pdl_options(keys)

    def launch(tile: DecodeTile) -> None:
        pointer_splits[parts.grid(tile.rows)](
            parts.queries, keys, values, cells, arrived, token_table, token_table.stride(0), token_table.shape[1], rows, lengths,
            begins.counts, parts.partial, parts.lse, scaling, *parts.strides, *cells.stride()[:2], PER_SLOT=begins.layout.per_slot,
            SPLITS=parts.num_splits, N=tile.tokens, AWAITS=arrived is not None and early["EARLY"], **parts.constants(tile), **early,
        )  # fmt: skip

    choices = tile_choices(parts.group, MOST_ROWS, TOKENS, POINTER_STAGES)
    parts.launch("pointers", choices, launch, lambda: "attention over pointers", "pass --kv-compressor snapkv")
    return parts.merged_output()
