"""Copies and checksums of KV pages, all layers in one launch.

KV transfers copy a page's tokens between many buffers and one contiguous buffer. ``mem_cache/host_tier/tier.py`` defines the checksum.
"""

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.gpu_launch import buffer_pointer

# Words of 8 bytes that a program copies, and its warps.
BLOCK, WARPS = 1024, 4
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
    """Copy tokens of all buffers into ``out``. Does not wait for the device.

    Args:
        table: int64 [parts], addresses of the buffers, 16-byte aligned.
        like: One of the buffers, [slots, channels], with contiguous channels. All have its shape, strides and dtype.
        slots: int64 [tokens].
        out: Contiguous, [parts, tokens, channels], 8-byte aligned.

    Raises:
        ValueError: The size of a token is not a multiple of 8 bytes.
    """
    _launch(table, like, slots, out, gathers=True)


def scatter_rows(table: torch.Tensor, like: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy ``rows`` into slots of all buffers. Each slot is written once. Arguments are those of :func:`gather_rows`.

    Raises:
        ValueError: As in :func:`gather_rows`.
    """
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
    columns = min(BLOCK, triton.next_power_of_2(width))
    tokens = BLOCK // columns
    _copy_rows[(triton.cdiv(len(slots), tokens), triton.cdiv(width, columns), len(table))](
        table, slots, rows.view(torch.int64), len(slots), like.stride(0) * like.itemsize // WORD, width, COLUMNS=columns, TOKENS=tokens,
        GATHERS=gathers, num_warps=WARPS,
    )  # fmt: skip


# Words that a program reads at a time.
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

    Args:
        key_table, value_table: int64 [layers], addresses of the layers' buffers.
        words: A key buffer viewed as integers, [slots, words]. All buffers have its shape and dtype, and are contiguous.
        slots: int64 [pages * page_size], slots of the pages' tokens, in order.
        token_weights: int64 [layers, 2, page_size], weights of keys and of values.
        column_weights: int64 [words].
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
