"""Checksums of KV pages, all layers in one launch. ``mem_cache/host_tier/tier.py`` defines the sum."""

import torch
import triton
import triton.language as tl

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
