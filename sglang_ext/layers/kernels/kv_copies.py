"""Copies, checksums and extremes of KV, all layers in one launch.

Kept tokens are copied to slots of compressed KV (:func:`gather_kept`), to the cells of ragged heads (:func:`scatter_cells`), or pointed to
(:func:`write_pointers`). For KV transfers, a page's tokens are copied between many buffers and one (:func:`gather_rows`,
:func:`scatter_rows`). mem_cache/host_tier/tier.py defines the checksum of a page, and quest_pages.py selects pages by extremes.
"""

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.gpu_launch import buffer_pointer

# Tokens that a program copies at a time.
BLOCK = 32


@triton.jit
def _copy_tokens(table, like, layer, read, written, inside, DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Copy numbers of one layer's buffer from the offsets ``read`` to the offsets ``written``."""
    dim = tl.arange(0, PADDED_DIM)
    mask = inside[:, None] & (dim < DIM)[None, :]
    buffer = buffer_pointer(table, layer, like.dtype.element_ty)
    tl.store(buffer + (written[:, None] + dim[None, :]), tl.load(buffer + (read[:, None] + dim[None, :]), mask=mask), mask=mask)


@triton.jit(do_not_specialize=("count",))
def _gather_kept(
    key_table, value_table, keys, values, kept, sources, targets, count, key_slot, key_head, value_slot, value_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    layer, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    token = tl.load(kept + tl.program_id(0) * count + place, mask=inside, other=0)
    source = tl.load(sources + token, mask=inside, other=0)
    target = tl.load(targets + place, mask=inside, other=0)
    read, written = source * key_slot + head * key_head, target * key_slot + head * key_head
    _copy_tokens(key_table, keys, layer, read, written, inside, DIM, PADDED_DIM)
    read, written = source * value_slot + head * value_head, target * value_slot + head * value_head
    _copy_tokens(value_table, values, layer, read, written, inside, VALUE_DIM, PADDED_VALUE_DIM)


def gather_kept(
    key_table: torch.Tensor,
    value_table: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kept: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """Copy each head's ``j``-th kept token to slot ``targets[j]``, in each layer.

    ``key_table``, ``value_table``: int64 [layers], addresses of the layers' buffers. ``keys``, ``values``: one layer's buffers, [slots, kv_heads,
    dim of a key or of a value]; all have their shape, strides and dtype. ``kept``: int64 [layers, kv_heads, count], indices into ``sources``, int64
    [tokens], slots of the context's tokens. ``targets``: int64 [count], slots of the compressed KV. None of them is a source.
    """
    layers, heads, count = kept.shape
    dim, value_dim = keys.shape[2], values.shape[2]
    _gather_kept[(layers * heads, triton.cdiv(count, BLOCK))](
        key_table, value_table, keys, values, kept.contiguous(), sources, targets, count, keys.stride(0), keys.stride(1),
        values.stride(0), values.stride(1), HEADS=heads, DIM=dim, VALUE_DIM=value_dim, PADDED_DIM=triton.next_power_of_2(dim),
        PADDED_VALUE_DIM=triton.next_power_of_2(value_dim), BLOCK=BLOCK,
    )  # fmt: skip


# Programs per head.
PROGRAMS = 16


@triton.jit
def _copy_cells(table, like, layer, into, read, written, inside, DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Copy numbers from the offsets ``read`` of one layer's buffer to the offsets ``written`` of the buffers of layers ``into``."""
    dim = tl.arange(0, PADDED_DIM)
    mask = inside[:, None] & (dim < DIM)[None, :]
    # The hints tell the compiler that loaded addresses are aligned. Without them it would copy cells number by number.
    source = buffer_pointer(table, layer, like.dtype.element_ty)
    target = tl.load(table + into, mask=inside, other=0).to(tl.pointer_type(like.dtype.element_ty))
    target = tl.multiple_of(target, 16) + written
    found = tl.load(source + read[:, None] + dim[None, :], mask=mask)
    tl.store(target[:, None] + dim[None, :], found, mask=mask)


@triton.jit(do_not_specialize=("copied",))
def scatter_kept(
    key_table, value_table, keys, values, kept, bounds, sources, targets, copied, key_slot, key_head, value_slot, value_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a share of the cells of one head of one layer. Only the device knows the number of cells."""
    head = tl.program_id(0)
    layer, column = head // HEADS, head % HEADS
    first, last = tl.load(bounds + head), tl.load(bounds + head + 1)
    for start in tl.range(first + tl.program_id(1) * BLOCK, last, PROGRAMS * BLOCK):
        cell = start + tl.arange(0, BLOCK)
        inside = cell < last
        token = tl.load(kept + cell, mask=inside, other=0)
        source = tl.load(sources + token, mask=inside, other=0)
        into, within = cell // (copied * HEADS), cell % (copied * HEADS)
        target = tl.load(targets + within // HEADS, mask=inside, other=0)
        read, written = source * key_slot + column * key_head, target * key_slot + within % HEADS * key_head
        _copy_cells(key_table, keys, layer, into, read, written, inside, DIM, PADDED_DIM)
        read, written = source * value_slot + column * value_head, target * value_slot + within % HEADS * value_head
        _copy_cells(value_table, values, layer, into, read, written, inside, VALUE_DIM, PADDED_VALUE_DIM)


def scatter_cells(
    key_table: torch.Tensor,
    value_table: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kept: torch.Tensor,
    bounds: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """Fill the cells of the compressed KV with the kept tokens of each head. Arguments as in :func:`gather_kept`, except ``kept``: int64 [cells].

    They are head after head. ``bounds``: int32 [layers * kv_heads + 1], first cell of each head, and the end of the last. ``kept`` fills all
    cells of ``targets``.
    """
    heads, dim, value_dim = keys.shape[1], keys.shape[2], values.shape[2]
    scatter_kept[(len(bounds) - 1, PROGRAMS)](
        key_table, value_table, keys, values, kept, bounds, sources, targets, len(targets), keys.stride(0), keys.stride(1),
        values.stride(0), values.stride(1), HEADS=heads, DIM=dim, VALUE_DIM=value_dim,
        PADDED_DIM=triton.next_power_of_2(dim), PADDED_VALUE_DIM=triton.next_power_of_2(value_dim), PROGRAMS=PROGRAMS,
        BLOCK=BLOCK,
    )  # fmt: skip


# Pointers that a program writes.
POINTERS = 128


@triton.jit(do_not_specialize=("count",))
def write_kept_pointers(
    key_table, kept, sources, targets, count, slot_stride, head_stride, HEADS: tl.constexpr, PER_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a block of one head's pointers."""
    layer, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    token = tl.load(kept + tl.program_id(0).to(tl.int64) * count + place, mask=inside, other=0)
    source = tl.load(sources + token, mask=inside, other=0)
    target = tl.load(targets + place // PER_SLOT, mask=inside, other=0)
    cells = tl.load(key_table + layer).to(tl.pointer_type(tl.int32))
    tl.store(cells + target * slot_stride + head * head_stride + place % PER_SLOT, source.to(tl.int32), mask=inside)


def write_pointers(
    key_table: torch.Tensor, like: torch.Tensor, kept: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """Point the ``j``-th pointer of ``targets`` to the ``j``-th kept token of each layer and head. Arguments as in :func:`gather_kept`."""
    layers, heads, count = kept.shape
    cells = like.view(torch.int32)
    write_kept_pointers[(layers * heads, triton.cdiv(count, POINTERS))](
        key_table, kept.contiguous(), sources, targets, count, cells.stride(0), cells.stride(1),
        HEADS=heads, PER_SLOT=cells.shape[2], BLOCK=POINTERS,
    )  # fmt: skip


# Words of 8 bytes that a program copies, and its warps.
COPIED_WORDS, WARPS = 1024, 4
WORD = 8


@triton.jit(do_not_specialize=("tokens",))
def _copy_rows(table, slots, rows, tokens, slot_words, row_words, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, GATHERS: tl.constexpr):
    """Copy some tokens of one buffer out of their slots, or into them."""
    part, token = tl.program_id(2).to(tl.int64), tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < row_words)[None, :]
    slot = tl.load(slots + token, mask=token < tokens, other=0)
    buffer = buffer_pointer(table, part, tl.int64)
    far = buffer + (slot * slot_words)[:, None] + column[None, :]
    near = rows + ((part * tokens + token) * row_words)[:, None] + column[None, :]
    if GATHERS:
        tl.store(near, tl.load(far, mask=inside), mask=inside)
    else:
        tl.store(far, tl.load(near, mask=inside), mask=inside)


def gather_rows(table: torch.Tensor, like: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Copy tokens of all buffers into ``out``, contiguous [parts, tokens, channels], 8-byte aligned. Does not wait for the device.

    ``table``: int64 [parts], addresses of the buffers, 16-byte aligned. ``like``: one of the buffers, [slots, channels], with contiguous
    channels; all have its shape, strides and dtype. ``slots``: int64 [tokens].

    Raises:
        ValueError: The size of a token is not a multiple of 8 bytes.
    """
    _launch(table, like, slots, out, gathers=True)


def scatter_rows(table: torch.Tensor, like: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy ``rows`` into slots of all buffers, each written once. Arguments and exceptions are those of :func:`gather_rows`."""
    _launch(table, like, slots, rows, gathers=False)


def has_whole_words(like: torch.Tensor) -> bool:
    """Whether these kernels accept such buffers: a token's size and the slot stride are multiples of 8 bytes."""
    return all(count * like.itemsize % WORD == 0 for count in (like.shape[1], like.stride(0)))


def _launch(table: torch.Tensor, like: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, gathers: bool) -> None:
    if not has_whole_words(like):
        size = like.shape[1] * like.itemsize
        raise ValueError(
            f"tokens of {size} bytes, {like.stride(0) * like.itemsize} apart: kernels copy words of {WORD} bytes; index the buffers instead"
        )
    if len(slots) == 0:
        return
    width = like.shape[1] * like.itemsize // WORD
    columns = min(COPIED_WORDS, triton.next_power_of_2(width))
    tokens = COPIED_WORDS // columns
    _copy_rows[(triton.cdiv(len(slots), tokens), triton.cdiv(width, columns), len(table))](
        table, slots, rows.view(torch.int64), len(slots), like.stride(0) * like.itemsize // WORD, width, COLUMNS=columns, TOKENS=tokens,
        GATHERS=gathers, num_warps=WARPS,
    )  # fmt: skip


# Words that a program reads at a time, and columns of a page's words or keys.
TILE = 2048
MOST_COLUMNS = 512


@triton.jit
def _page_checksum(
    key_table,
    value_table,
    like,
    slots,
    token_weights,
    column_weights,
    sums,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    page, layer = tl.program_id(0), tl.program_id(1)
    total = tl.zeros((TOKENS,), tl.int64)
    for first_token in range(0, PAGE, TOKENS):
        token = first_token + tl.arange(0, TOKENS)
        slot = tl.load(slots + page * PAGE + token, mask=token < PAGE, other=0)
        for table in tl.static_range(2):
            address = tl.load((key_table if table == 0 else value_table) + layer)
            buffer = address.to(tl.pointer_type(like.dtype.element_ty))
            of_token = tl.zeros((TOKENS,), tl.int64)
            for first_column in range(0, WORDS, COLUMNS):
                column = first_column + tl.arange(0, COLUMNS)
                inside = (token < PAGE)[:, None] & (column < WORDS)[None, :]
                word = tl.load(buffer + slot[:, None] * WORDS + column[None, :], mask=inside, other=0)
                weight = tl.load(column_weights + column, mask=column < WORDS, other=0)
                of_token += tl.sum(word.to(tl.int64) * weight[None, :], 1)
            place = (layer * 2 + table) * PAGE + token
            total += of_token * tl.load(token_weights + place, mask=token < PAGE, other=0)
    # Integers: the sum does not depend on the order of the layers.
    tl.atomic_add(sums + page, tl.sum(total, 0), sem="relaxed")


def page_checksum(
    key_table: torch.Tensor,
    value_table: torch.Tensor,
    words: torch.Tensor,
    slots: torch.Tensor,
    token_weights: torch.Tensor,
    column_weights: torch.Tensor,
) -> torch.Tensor:
    """Checksum of each page over all layers, keys and values: int64 [pages].

    ``key_table``, ``value_table``: int64 [layers], addresses of the layers' buffers. ``words``: a key buffer viewed as integers, [slots, words]; all
    buffers have its shape and dtype, and are contiguous. ``slots``: int64 [pages * page_size], of the pages' tokens, in order. ``token_weights``,
    ``column_weights``: int64 [layers, 2, page_size], weights of keys and of values, and int64 [words].
    """
    layers, _, page_size = token_weights.shape
    columns = min(MOST_COLUMNS, triton.next_power_of_2(words.shape[1]))
    tokens = min(TILE // columns, triton.next_power_of_2(page_size))
    sums = torch.zeros(len(slots) // page_size, dtype=torch.int64, device=words.device)
    _page_checksum[(len(sums), layers)](
        key_table, value_table, words, slots, token_weights, column_weights, sums,
        PAGE=page_size, WORDS=words.shape[1], TOKENS=tokens, COLUMNS=columns,
    )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots"])
def _bound_pages(
    key_table, like, slots, extremes, count, pages, slot_stride, head_stride, HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute some columns of the extremes of a slot's page in a layer. Of adjacent slots in one page, only the last computes them."""
    token, layer = tl.program_id(0), tl.program_id(1)
    page = tl.load(slots + token).to(tl.int64) // PAGE
    last = token + 1 >= count
    if last | (tl.load(slots + token + tl.where(last, 0, 1)).to(tl.int64) // PAGE != page):
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        head, channel, inside = column // DIM, column % DIM, column < HEADS * DIM
        # Otherwise the compiler does not vectorize the loads: buffers begin at multiples of 16 bytes.
        keys = buffer_pointer(key_table, layer, like.dtype.element_ty)
        mine = keys + page * PAGE * slot_stride + tl.arange(0, PAGE)[:, None] * slot_stride + (head * head_stride + channel)[None, :]
        numbers = tl.load(mine, mask=inside[None, :], other=0.0).to(tl.float32)
        target = extremes + (layer.to(tl.int64) * pages + page) * (HEADS * 2 * DIM) + head * (2 * DIM) + channel
        tl.store(target, tl.min(numbers, 0).to(extremes.dtype.element_ty), mask=inside)
        tl.store(target + DIM, tl.max(numbers, 0).to(extremes.dtype.element_ty), mask=inside)


def bound_pages(key_table: torch.Tensor, like: torch.Tensor, slots: torch.Tensor, extremes: torch.Tensor, page: int) -> None:
    """Update the extremes of the pages of ``slots``, int64 [tokens], at least one, in all layers, from their keys. Does not wait for the device.

    ``key_table``: int64 [layers], addresses of the layers' key buffers. ``like``: one of them, [slots, kv_heads, dim]; all have its shape, strides
    and dtype. ``extremes``: [layers, pages, kv_heads, 2, dim], dtype of the keys: minimum and maximum of each channel. ``page``: its tokens.
    """
    layers, pages, heads, _, dim = extremes.shape
    columns = min(MOST_COLUMNS, triton.next_power_of_2(heads * dim))
    _bound_pages[(len(slots), layers, triton.cdiv(heads * dim, columns))](
        key_table, like, slots, extremes, len(slots), pages, like.stride(0), like.stride(1), HEADS=heads, DIM=dim,
        PAGE=page, COLUMNS=columns,
    )  # fmt: skip
