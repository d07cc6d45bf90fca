"""How much a window of queries attends to each key, for all layers at once.

The score of a key is the mean, over the window's queries and the query heads of its KV head, of the softmax
attention that they pay to it (SnapKV, arXiv 2404.14469, section 4). Two passes over the keys: one for each
query's normalizer, in chunks side by side; one for the means. No attention matrix is written.
"""

import torch
import triton
import triton.language as tl

BLOCK = 64
CHUNK_BLOCKS = 16
LARGEST_ROWS = 128
# Lengths differ from call to call: a kernel that was compiled for one serves all.
LENGTHS = ("tokens", "window")


@triton.jit
def _logits(
    queries,
    key_table,
    slots,
    like,
    layer,
    head,
    row,
    column,
    positions,
    window,
    tokens,
    scaling,
    slot_stride,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Scaled query-key products of rows ``row`` and keys ``column``; -inf where a key is hidden."""
    dim = tl.arange(0, PADDED_DIM)
    inside = dim < DIM
    query = row // GROUP
    place = ((layer * window + query) * HEADS + head) * GROUP + row % GROUP
    q = tl.load(
        queries + place[:, None] * DIM + dim[None, :],
        mask=(row < window * GROUP)[:, None] & inside[None, :],
        other=0.0,
    )
    keys = tl.load(key_table + layer).to(tl.pointer_type(like.dtype.element_ty))
    slot = tl.load(slots + column, mask=column < tokens, other=0)
    k = tl.load(
        keys + slot[:, None] * slot_stride + head * DIM + dim[None, :],
        mask=(column < tokens)[:, None] & inside[None, :],
        other=0.0,
    )
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
    position = tl.load(positions + query, mask=query < window, other=0)
    seen = (column < tokens)[None, :] & (column[None, :] <= position[:, None])
    return tl.where(seen, logits, float("-inf"))


@triton.jit(do_not_specialize=LENGTHS)
def _normalizers(
    queries,
    key_table,
    slots,
    like,
    largest,
    total,
    positions,
    window,
    tokens,
    scaling,
    slot_stride,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK_BLOCKS: tl.constexpr,
):
    """Largest logit of each row in a chunk of keys, and the sum of exponentials below it."""
    layer, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    for block in range(CHUNK_BLOCKS):
        column = (chunk * CHUNK_BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        logits = _logits(
            queries, key_table, slots, like, layer, head, row, column, positions, window, tokens, scaling,
            slot_stride, GROUP, DIM, PADDED_DIM, HEADS,
        )
        new = tl.maximum(top, tl.max(logits, 1))
        # Rows that saw no key yet have -inf on both sides.
        base = tl.where(new == float("-inf"), 0.0, new)
        mass = mass * tl.exp(top - base) + tl.sum(tl.exp(logits - base[:, None]), 1)
        top = new
    place = (tl.program_id(0) * tl.num_programs(2) * ROWS + row) * chunks + chunk
    tl.store(largest + place, top)
    tl.store(total + place, mass)


@triton.jit(do_not_specialize=LENGTHS)
def _means(
    queries,
    key_table,
    slots,
    like,
    normalizers,
    scores,
    positions,
    window,
    tokens,
    scaling,
    slot_stride,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mean attention of all rows to a block of keys."""
    layer, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for block in range(ROW_BLOCKS):
        row = block * ROWS + tl.arange(0, ROWS)
        logits = _logits(
            queries, key_table, slots, like, layer, head, row, column, positions, window, tokens, scaling,
            slot_stride, GROUP, DIM, PADDED_DIM, HEADS,
        )
        normalizer = tl.load(normalizers + tl.program_id(0) * ROW_BLOCKS * ROWS + row)
        attention = tl.exp(logits - normalizer[:, None])
        sums += tl.sum(tl.where((row < window * GROUP)[:, None], attention, 0.0), 0)
    tl.store(
        scores + tl.program_id(0) * tokens + column, sums / (window * GROUP), mask=column < tokens
    )


def window_scores(
    queries: torch.Tensor,
    key_table: torch.Tensor,
    like: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Mean attention of the window to each key: float32 [layers, kv_heads, tokens].

    Args:
        queries: [layers, window, query_heads, head_dim], rotary embedding applied, oldest first.
        key_table: int64 [layers], addresses of the layers' key buffers.
        like: a key buffer, [slots, kv_heads, head_dim]; all have its shape, strides and dtype.
        slots: int64 [tokens], where the context's keys lie, in order.
        positions: int64 [window], of the queries, counted in ``slots``; a query sees keys up to its own position.
        scaling: factor on query-key products.
    """
    layers, window, query_heads, dim = queries.shape
    heads, tokens = like.shape[1], len(slots)
    group = query_heads // heads
    rows = min(LARGEST_ROWS, max(16, triton.next_power_of_2(window * group)))
    row_blocks = triton.cdiv(window * group, rows)
    chunks = triton.cdiv(tokens, BLOCK * CHUNK_BLOCKS)
    shape = dict(
        GROUP=group, DIM=dim, PADDED_DIM=max(16, triton.next_power_of_2(dim)), HEADS=heads,
        ROWS=rows, BLOCK=BLOCK,
    )
    common = (queries.contiguous().to(like.dtype), key_table, slots, like)
    numbers = (positions, window, tokens, scaling, like.stride(0))
    largest = torch.empty(layers * heads, row_blocks * rows, chunks, device=like.device)
    total = torch.empty_like(largest)
    _normalizers[(layers * heads, chunks, row_blocks)](
        *common, largest, total, *numbers, **shape, CHUNK_BLOCKS=CHUNK_BLOCKS
    )
    normalizers = (largest + total.log()).logsumexp(-1)
    scores = torch.empty(layers, heads, tokens, device=like.device)
    _means[(layers * heads, triton.cdiv(tokens, BLOCK))](
        *common, normalizers, scores, *numbers, **shape, ROW_BLOCKS=row_blocks
    )
    return scores
