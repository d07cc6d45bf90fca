"""Scores of keys by the attention that queries pay to them, for several layers at once.

:func:`window_scores`: the score of a key is the mean softmax attention over a window of queries and the query heads of its KV head (SnapKV,
arXiv 2404.14469, section 4). The first pass computes each query's normalizer, in parallel chunks, and the second the means.

:func:`compute_exact_logits`: logits of queries with the pool's exact keys, and their normalizers, for token selection (select_tokens.py).
Before, :func:`rotate_queries` rotates queries (RoPE) to later positions (mem_cache/compressed/rotary.py:rotate_ahead).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.gpu_launch import buffer_pointer, halvings, launch_first_fitting, padded_size, shape_name

# Maximum rows of a query block, and maximum blocks of a program. The kernel's code is unrolled over blocks; shared memory holds them all.
LARGEST_ROWS, MOST_BLOCKS = 128, 4


@dataclass(frozen=True)
class RowTile:
    """Sizes of one program's work: rows of a product with a block of keys, a power of 2 of at least 16, and blocks of rows to add up.

    ``stages``: pipeline stages of the key loads; None for Triton's default.
    """

    rows: int
    blocks: int = 1
    stages: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Launch options."""
        return {"ROWS": self.rows} if self.stages is None else {"ROWS": self.rows, "num_stages": self.stages}


@lru_cache
def row_tile_choices(count: int) -> tuple[RowTile, ...]:
    """Ways to divide ``count`` rows over programs. The choice with the fewest partial sums is first; smaller tiles follow."""
    most = min(LARGEST_ROWS, max(16, triton.next_power_of_2(count)))
    blocks = triton.cdiv(count, most)
    together = dict.fromkeys(share for share in (blocks, 2, 1) if share <= min(blocks, MOST_BLOCKS))
    return *(RowTile(most, share) for share in together), *(RowTile(rows, stages=1) for rows in halvings(most))


# Keys per matrix product, and blocks of keys that a program reads in sequence.
BLOCK, CHUNK_BLOCKS = 64, 16
# GPUs compute powers of two.
LOG2_E = 1.4426950408889634
# Lengths change from call to call. One compiled kernel serves all lengths.
LENGTHS = ("tokens", "window")


@triton.jit
def _query_rows(
    queries, layer, head, row, window, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """Rows of a KV head's queries, 0 for rows outside the window: [rows, padded dim]."""
    dim = tl.arange(0, PADDED_DIM)
    place = ((layer * window + row // GROUP) * HEADS + head) * GROUP + row % GROUP
    there = (row < window * GROUP)[:, None] & (dim < DIM)[None, :]
    return tl.load(queries + place[:, None] * DIM + dim[None, :], mask=there, other=0.0)


@triton.jit
def _logits(
    q, keys, slots, first, position, oldest, tokens, scaling, slot_stride,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Products with the keys from ``first`` on, times log2(e) and the scaling; -inf where masked. All queries see keys up to ``oldest``."""
    dim, column = tl.arange(0, PADDED_DIM), first + tl.arange(0, BLOCK)
    inside = column < tokens
    slot = tl.load(slots + column, mask=inside, other=0)
    there = inside[:, None] & (dim < DIM)[None, :]
    k = tl.load(keys + slot[:, None] * slot_stride + dim[None, :], mask=there, other=0.0)
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
    if (first + BLOCK > tokens) | (first + BLOCK - 1 > oldest):
        logits = tl.where(inside[None, :] & (column[None, :] <= position[:, None]), logits, float("-inf"))
    return logits


@triton.jit(do_not_specialize=LENGTHS)
def _normalizers(
    queries, key_table, slots, like, largest, total, positions, window, tokens, scaling, slot_stride, key_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Maximum logit of each row in a chunk of keys, and the sum of powers of two relative to it."""
    layer, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    q = _query_rows(queries, layer, head, row, window, GROUP, DIM, PADDED_DIM, HEADS)
    keys = buffer_pointer(key_table, layer, like.dtype.element_ty) + head * key_head
    # Padding rows see all keys.
    position = tl.load(positions + row // GROUP, mask=row < window * GROUP, other=tokens)
    oldest = tl.load(positions)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    begin = chunk * CHUNK_BLOCKS * BLOCK
    for first in tl.range(begin, tl.minimum(begin + CHUNK_BLOCKS * BLOCK, tokens), BLOCK):
        logits = _logits(q, keys, slots, first, position, oldest, tokens, scaling, slot_stride, DIM, PADDED_DIM, BLOCK)
        new = tl.maximum(top, tl.max(logits, 1))
        # Rows that have seen no key yet have -inf on both sides.
        base = tl.where(new == float("-inf"), 0.0, new)
        mass = mass * tl.exp2(top - base) + tl.sum(tl.exp2(logits - base[:, None]), 1)
        top = new
    place = (tl.program_id(0) * window * GROUP + row) * chunks + chunk
    tl.store(largest + place, top, mask=row < window * GROUP)
    tl.store(total + place, mass, mask=row < window * GROUP)


@triton.jit(do_not_specialize=LENGTHS)
def _means(
    queries, key_table, slots, like, normalizers, scores, positions, window, tokens, scaling, slot_stride, key_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, CHUNK_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Contribution of ROW_BLOCKS blocks of rows to the mean attention to a chunk of keys."""
    layer, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    keys = buffer_pointer(key_table, layer, like.dtype.element_ty) + head * key_head
    row = tl.program_id(2) * ROW_BLOCKS * ROWS + tl.arange(0, ROWS)
    normalizers += tl.program_id(0) * window * GROUP
    scores += (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * tokens
    q = _query_rows(queries, layer, head, row, window, GROUP, DIM, PADDED_DIM, HEADS)
    position = tl.load(positions + row // GROUP, mask=row < window * GROUP, other=tokens)
    oldest = tl.load(positions)
    # Padding rows contribute nothing.
    normalizer = tl.load(normalizers + row, mask=row < window * GROUP, other=float("inf"))
    begin = tl.program_id(1) * CHUNK_BLOCKS * BLOCK
    for first in tl.range(begin, tl.minimum(begin + CHUNK_BLOCKS * BLOCK, tokens), BLOCK):
        logits = _logits(q, keys, slots, first, position, oldest, tokens, scaling, slot_stride, DIM, PADDED_DIM, BLOCK)
        sums = tl.sum(tl.exp2(logits - normalizer[:, None]), 0)
        for block in tl.static_range(1, ROW_BLOCKS):
            more = block * ROWS + row
            other = _query_rows(queries, layer, head, more, window, GROUP, DIM, PADDED_DIM, HEADS)
            seen = tl.load(positions + more // GROUP, mask=more < window * GROUP, other=tokens)
            below = tl.load(normalizers + more, mask=more < window * GROUP, other=float("inf"))
            logits = _logits(other, keys, slots, first, seen, oldest, tokens, scaling, slot_stride, DIM, PADDED_DIM, BLOCK)
            sums += tl.sum(tl.exp2(logits - below[:, None]), 0)
        column = first + tl.arange(0, BLOCK)
        tl.store(scores + column, sums / (window * GROUP), mask=column < tokens)


def window_scores(
    queries: torch.Tensor,
    key_table: torch.Tensor,
    like: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Mean attention of the window to each key: float32 [layers, kv_heads, tokens].

    ``queries``: [layers, window, query_heads, head_dim], rotary embedding applied, oldest first. ``key_table``: int64 [layers], addresses of the
    layers' key buffers. ``like``: one of them, [slots, kv_heads, head_dim]; all have its shape, strides and dtype. ``slots``: int64 [tokens], of
    the context's keys, in order. ``positions``: int64 [window], positions of the queries in ``slots``, ascending; a query sees keys up to its own.

    Raises:
        OptionError: No tile sizes for these heads fit the GPU.
    """
    layers, window, query_heads, dim = queries.shape
    heads, tokens = like.shape[1], len(slots)
    group = query_heads // heads
    count, chunks = window * group, triton.cdiv(tokens, BLOCK * CHUNK_BLOCKS)
    shape = dict(
        GROUP=group, DIM=dim, PADDED_DIM=padded_size(dim), HEADS=heads, BLOCK=BLOCK,
        CHUNK_BLOCKS=CHUNK_BLOCKS,
    )  # fmt: skip
    common = (queries.contiguous().to(like.dtype), key_table, slots, like)
    numbers = (positions, window, tokens, scaling * LOG2_E, like.stride(0), like.stride(1))
    largest = torch.empty(layers * heads, count, chunks, device=like.device)
    total = torch.empty_like(largest)
    choices = row_tile_choices(count)

    def normalize(size: RowTile) -> None:
        grid = (layers * heads, chunks, triton.cdiv(count, size.rows))
        _normalizers[grid](*common, largest, total, *numbers, **shape, **size.options)

    def launch(kernel: Callable[[RowTile], None], *about: object) -> None:
        remedy = "pass --kv-compressor sink-recent, or --kv-mode full"
        key = (*about, choices[0], group, dim, like.dtype, like.device)
        launch_first_fitting(
            choices, kernel, key, lambda: f"scoring by the newest queries with {shape_name(dim, group, like.dtype)}", remedy
        )

    launch(normalize, "normalizers")
    # All normalizers are logs to base two.
    normalizers = ((largest + total.log2()) / LOG2_E).logsumexp(-1) * LOG2_E
    # The order of the additions depends on the choice, and is the same in each run.
    scores = None

    def mean(size: RowTile) -> None:
        nonlocal scores
        parts = triton.cdiv(count, size.rows * size.blocks)
        scores = torch.empty(parts, layers, heads, tokens, device=like.device)
        grid = (layers * heads, chunks, parts)
        _means[grid](*common, normalizers, scores, *numbers, **shape, **size.options, ROW_BLOCKS=size.blocks)

    launch(mean, "means")
    return scores[0] if len(scores) == 1 else scores.sum(0)


# Tokens whose logits a program computes; and tokens per step, where more is faster if it fits.
CHUNK = 1024
BLOCKS = ({"BLOCK": 128}, {"BLOCK": 64}, {"BLOCK": 32}, {"BLOCK": 16}, {"BLOCK": 16, "num_stages": 1})
# Rows of logits begin at, and are padded to, multiples of this: the longest block.
PITCH = tl.constexpr(128)
# Numbers of a request (SelectionContexts.numbers).
NUMBERS = tl.constexpr(4)
# GPUs compute exponentials as powers of two.
TO_POWERS = tl.constexpr(LOG2_E)
# Below all logits but finite, because a difference of infinities is NaN.
LEAST = tl.constexpr(-1e38)
# Arguments that differ from launch to launch, for which the kernel is not specialized.
VARYING = ("first_layer", "first_request", "requests", "pitches", "chunks", "table_row", "most")


@triton.jit
def load_pair(numbers, pair, first_layer, first_request, requests):
    """Return for a pair of a layer and a request: the layer, the request's numbers, its row, and its length."""
    mine = numbers + (first_request + pair % requests) * NUMBERS
    return first_layer + pair // requests, mine, tl.load(mine), tl.load(mine + 1).to(tl.int32)


@triton.jit
def update_normalizers(found, top, mass):
    """Update each row's and column's largest logit, and the sum of powers of two relative to it, with the logits ``found``."""
    new = tl.maximum(top, found)
    return new, mass * tl.exp2(top - new) + tl.exp2(found - new)


@triton.jit
def store_chunk_normalizers(tops, masses, place, mine, top, mass):
    """Store a chunk's normalizers at ``place`` for each row in ``mine``: the largest logit, and the sum, over all columns."""
    best = tl.max(top, 1)
    tl.store(tops + place, best, mask=mine)
    tl.store(masses + place, tl.sum(mass * tl.exp2(top - best[:, None]), 1), mask=mine)


@triton.jit(do_not_specialize=VARYING)
def _compute_exact_logits(
    queries, key_table, like, scalings, token_table, numbers, logits, tops, masses, first_layer, first_request, requests, pitches, chunks,
    table_row, slot_stride, key_head, HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute the logits of a KV head's queries in a chunk of a context, times log2(e), and their normalizers."""
    head, chunk, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    layer, _, at, length = load_pair(numbers, pair, first_layer, first_request, requests)
    begin = chunk * CHUNK
    if begin < length:
        LIKE: tl.constexpr = like.dtype.element_ty
        row, dim = tl.arange(0, M), tl.arange(0, PADDED_DIM)
        mine, column = row < GROUP, tl.arange(0, BLOCK)
        place = pair * HEADS + head
        q = tl.load(queries + (place * GROUP + row)[:, None] * DIM + dim[None, :], mask=mine[:, None] & (dim < DIM)[None, :], other=0.0)
        keys = buffer_pointer(key_table, layer, LIKE) + head * key_head
        table, scaling = token_table + at * table_row, tl.load(scalings + layer) * TO_POWERS
        out = logits + (place.to(tl.int64) * GROUP + row)[:, None] * (pitches.to(tl.int64) * PITCH)
        # Each column has its own, joined at the end, so that no thread waits for another.
        top = tl.full((M, BLOCK), LEAST, tl.float32)
        mass = tl.zeros((M, BLOCK), tl.float32)
        for first in tl.range(begin, tl.minimum(begin + CHUNK, length), BLOCK):
            token = first + column
            inside = token < length
            slot = tl.load(table + token, mask=inside, other=0).to(tl.int64)
            k = tl.load(keys + slot[:, None] * slot_stride + dim[None, :], mask=inside[:, None] & (dim < DIM)[None, :], other=0.0)
            found = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
            found = tl.where(inside[None, :], found, float("-inf"))
            # Whole blocks, so that stores are vectorized.
            tl.store(out + tl.multiple_of(first, BLOCK) + column[None, :], found.to(logits.dtype.element_ty), mask=mine[:, None])
            top, mass = update_normalizers(found, top, mass)
        store_chunk_normalizers(tops, masses, (place * GROUP + row) * chunks + chunk, mine, top, mass)


class LogitsRequest(NamedTuple):
    """Some layers and requests of a logits kernel, for exact and quantized keys: chunks of the longest context, pairs of a layer and a request.

    ``arguments``: scaling factors of the layers, token table, request numbers, logits, maxima and sums of each chunk; first layer, first
    request, number of requests, units of PITCH in a row of logits, chunks, and numbers in a row of the token table.
    """

    chunks: int
    pairs: int
    arguments: tuple[torch.Tensor | int, ...]


def compute_exact_logits(queries: torch.Tensor, key_table: torch.Tensor, like: torch.Tensor, asked: LogitsRequest) -> None:
    """Compute logits with exact keys, and their normalizers. Arguments as in select_tokens.py:mark_tokens."""
    heads, dim = like.shape[1:]
    group = queries.shape[2] // heads

    def launch(block: dict[str, int]) -> None:
        _compute_exact_logits[(heads, asked.chunks, asked.pairs)](
            layer_major(queries), key_table, like, *asked.arguments, like.stride(0), like.stride(1), HEADS=heads, GROUP=group, M=padded_size(group), DIM=dim, PADDED_DIM=padded_size(dim), CHUNK=CHUNK, **block,
        )  # fmt: skip

    # Sized so that several programs fit on a multiprocessor.
    choices, key = BLOCKS if like.itemsize <= 2 else BLOCKS[1:], ("choose", group, dim, like.dtype, like.device)
    remedy = "pass --kv-compressor verify-guided"
    launch_first_fitting(choices, launch, key, lambda: f"token selection with {shape_name(dim, group, like.dtype)}", remedy)


def layer_major(queries: torch.Tensor) -> torch.Tensor:
    """Return [requests, layers, ...] as [layers, requests, ...], contiguous. Does not copy if stored in that order."""
    return queries.transpose(0, 1).contiguous()


def logits_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of stored logits: float32 only for float32 keys, because logits of keys with fewer bits are not exact."""
    return torch.float32 if dtype == torch.float32 else torch.float16


# Entries that a program rotates at once.
BLOCK_ENTRIES = 1024


@triton.jit(do_not_specialize=("requests", "of_request", "of_layer", "size"))
def _rotate_queries(
    queries, cos, sin, other, out, requests, of_request, of_layer, size, DIM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Rotate the queries of a layer and request: ``size`` contiguous entries."""
    pair = tl.program_id(0).to(tl.int64)
    source = queries + pair % requests * of_request + pair // requests * of_layer
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, entry = at < size, at % DIM
    partner = at - entry + tl.load(other + entry, mask=inside, other=0)
    found = tl.load(source + at, mask=inside, other=0.0).to(tl.float32) * tl.load(cos + entry, mask=inside, other=0.0)
    found += tl.load(source + partner, mask=inside, other=0.0).to(tl.float32) * tl.load(sin + entry, mask=inside, other=0.0)
    tl.store(out + pair * size + at, found, mask=inside)


def rotate_queries(queries: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate ``queries``, float [requests, layers, query_heads, dim], contiguous for a request and layer, by a number of positions.

    Returns float32 of the same shape; those of a layer are contiguous. ``turn``: for each entry the cosine, the signed sine, and the index of
    its pair's other entry: float32, float32 and int64 [dim].
    """
    requests, layers, heads, dim = queries.shape
    out = torch.empty(layers, requests, heads, dim, device=queries.device)
    _rotate_queries[(layers * requests, triton.cdiv(heads * dim, BLOCK_ENTRIES))](
        queries, *turn, out, requests, queries.stride(0), queries.stride(1), heads * dim, DIM=dim, BLOCK=BLOCK_ENTRIES
    )
    return out.transpose(0, 1)
