"""Copies a page's tokens between many buffers and one contiguous buffer, all buffers in one launch. KV transfers use it."""

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.addresses import buffer_pointer

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
