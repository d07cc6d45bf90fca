"""Logits of queries with the pool's exact keys, and their normalizers, for token selection (select_tokens.py).

Before, :func:`rotate_queries` rotates queries (RoPE) to later positions, for many layers and requests in one launch
(mem_cache/compressed/rotary.py:advanced).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.gpu_launch import buffer_pointer, launch_first_fitting, padded_size, shape_name
from sglang_ext.layers.kernels.window_scores import LOG2_E

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
    """Arguments of a logits kernel for some layers and requests, shared by exact and quantized keys.

    Attributes:
        tensors: Scaling factors of the layers, token table, request numbers, logits, and maxima and sums of each chunk.
        where: First layer, first request, number of requests, and units of PITCH in a row of logits.
        chunks: Chunks of the longest context.
        pairs: Pairs of a layer and a request.
        table_row: Numbers in a row of the token table.
    """

    tensors: tuple[torch.Tensor, ...]
    where: tuple[int, int, int, int]
    chunks: int
    pairs: int
    table_row: int


def compute_exact_logits(queries: torch.Tensor, key_table: torch.Tensor, like: torch.Tensor, asked: LogitsRequest) -> None:
    """Compute logits with exact keys, and their normalizers. Arguments as in :func:`mark_tokens`."""
    heads, dim = like.shape[1:]
    group = queries.shape[2] // heads

    def launch(block: dict[str, int]) -> None:
        _compute_exact_logits[(heads, asked.chunks, asked.pairs)](
            layer_major(queries), key_table, like, *asked.tensors, *asked.where, asked.chunks, asked.table_row, like.stride(0),
            like.stride(1), HEADS=heads, GROUP=group, M=padded_size(group), DIM=dim, PADDED_DIM=padded_size(dim), CHUNK=CHUNK, **block,
        )  # fmt: skip

    def what() -> str:
        return f"token selection with {shape_name(dim, group, like.dtype)}"

    key = ("choose", group, dim, like.dtype, like.device)
    # Sized so that several programs fit on a multiprocessor.
    launch_first_fitting(BLOCKS if like.itemsize <= 2 else BLOCKS[1:], launch, key, what, "pass --kv-compressor verify-guided")


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
    """Rotate queries by a number of positions. Returns float32, shaped like ``queries``; those of a layer are contiguous.

    Args:
        queries: float [requests, layers, query_heads, dim]; those of a request and layer are contiguous.
        turn: For each entry the cosine, the signed sine, and the index of its pair's other entry: float32, float32 and int64 [dim].
    """
    requests, layers, heads, dim = queries.shape
    out = torch.empty(layers, requests, heads, dim, device=queries.device)
    _rotate_queries[(layers * requests, triton.cdiv(heads * dim, BLOCK_ENTRIES))](
        queries, *turn, out, requests, queries.stride(0), queries.stride(1), heads * dim, DIM=dim, BLOCK=BLOCK_ENTRIES
    )
    return out.transpose(0, 1)
