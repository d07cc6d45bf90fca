"""Logits of queries with keys as the pool has them, for choosing tokens (select_tokens.py), and what normalizes them."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.addresses import buffer_pointer
from sglang_ext.layers.kernels.gpu_launch import launch_first_fitting, padded_size, shape_name
from sglang_ext.layers.kernels.window_scores import LOG2_E

# Tokens whose logits a program leaves; of these, keys that are multiplied at once, the more the better where they fit.
CHUNK = 1024
BLOCKS = ({"BLOCK": 128}, {"BLOCK": 64}, {"BLOCK": 32}, {"BLOCK": 16}, {"BLOCK": 16, "num_stages": 1})
# Logits of a query head begin at multiples of so many, and end at one: the longest block.
PITCH = tl.constexpr(128)
# Numbers of a request (Contexts.numbers).
NUMBERS = tl.constexpr(4)
# Exponentials are powers of two on a GPU.
TO_POWERS = tl.constexpr(LOG2_E)
# Below all logits, and a number: of infinities no difference can be taken.
LEAST = tl.constexpr(-1e38)
# What differs from launch to launch: a kernel that was compiled for one serves all.
VARYING = ("first_layer", "first_request", "requests", "pitches", "chunks", "table_row", "most")


@triton.jit
def load_pair(numbers, pair, first_layer, first_request, requests):
    """Of a pair of a layer and a request in a launch: the layer, the numbers of the request, and its row and length."""
    mine = numbers + (first_request + pair % requests) * NUMBERS
    return first_layer + pair // requests, mine, tl.load(mine), tl.load(mine + 1).to(tl.int32)


@triton.jit
def update_normalizers(found, top, mass):
    """Of each row and column of a block: the largest logit with those ``found``, and the sum of powers of two below it."""
    new = tl.maximum(top, found)
    return new, mass * tl.exp2(top - new) + tl.exp2(found - new)


@triton.jit
def store_chunk_normalizers(tops, masses, place, mine, top, mass):
    """Store what normalizes a chunk, at ``place`` for each row that is ``mine``: of what the columns have, their largest and their sum."""
    best = tl.max(top, 1)
    tl.store(tops + place, best, mask=mine)
    tl.store(masses + place, tl.sum(mass * tl.exp2(top - best[:, None]), 1), mask=mine)


@triton.jit(do_not_specialize=VARYING)
def _compute_exact_logits(
    queries, key_table, like, scalings, token_table, numbers, logits, tops, masses, first_layer, first_request, requests, pitches, chunks,
    table_row, slot_stride, key_head, HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Logits of a KV head's queries in a chunk of a context, times log2(e); the largest of each, and the sum of powers of two below it."""
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
        # Of each column its own, which are joined at the end: meanwhile no thread waits for another.
        top = tl.full((M, BLOCK), LEAST, tl.float32)
        mass = tl.zeros((M, BLOCK), tl.float32)
        for first in tl.range(begin, tl.minimum(begin + CHUNK, length), BLOCK):
            token = first + column
            inside = token < length
            slot = tl.load(table + token, mask=inside, other=0).to(tl.int64)
            k = tl.load(keys + slot[:, None] * slot_stride + dim[None, :], mask=inside[:, None] & (dim < DIM)[None, :], other=0.0)
            found = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
            found = tl.where(inside[None, :], found, float("-inf"))
            # Whole blocks, which are stored by vectors.
            tl.store(out + tl.multiple_of(first, BLOCK) + column[None, :], found.to(logits.dtype.element_ty), mask=mine[:, None])
            top, mass = update_normalizers(found, top, mass)
        store_chunk_normalizers(tops, masses, (place * GROUP + row) * chunks + chunk, mine, top, mass)


class LogitsRequest(NamedTuple):
    """What logits are asked for, of some layers and requests: for who multiplies queries with keys that are no numbers.

    Attributes:
        tensors: factors of the layers, token table, numbers of the requests, logits, and of each chunk maxima and masses.
        where: the first layer and request, how many requests, and units of PITCH in a row of logits.
        chunks: of the longest context.
        pairs: of a layer and a request.
        table_row: numbers in a row of the token table.
    """

    tensors: tuple[torch.Tensor, ...]
    where: tuple[int, int, int, int]
    chunks: int
    pairs: int
    table_row: int


def compute_exact_logits(queries: torch.Tensor, key_table: torch.Tensor, like: torch.Tensor, asked: LogitsRequest) -> None:
    """Logits with keys as they are, and what normalizes them; arguments as :func:`mark_tokens`'s."""
    heads, dim = like.shape[1:]
    group = queries.shape[2] // heads

    def launch(block: dict[str, int]) -> None:
        _compute_exact_logits[(heads, asked.chunks, asked.pairs)](
            layer_major(queries), key_table, like, *asked.tensors, *asked.where, asked.chunks, asked.table_row, like.stride(0),
            like.stride(1), HEADS=heads, GROUP=group, M=padded_size(group), DIM=dim, PADDED_DIM=padded_size(dim), CHUNK=CHUNK, **block,
        )  # fmt: skip

    def what() -> str:
        return f"choosing tokens with {shape_name(dim, group, like.dtype)}"

    key = ("choose", group, dim, like.dtype, like.device)
    # Several programs shall fit on a processor.
    launch_first_fitting(BLOCKS if like.itemsize <= 2 else BLOCKS[1:], launch, key, what, "pass --kv-compressor verify-guided")


def layer_major(queries: torch.Tensor) -> torch.Tensor:
    """Of each layer those of all requests, contiguous; ``queries`` are [requests, layers, ...], and may lie so."""
    return queries.transpose(0, 1).contiguous()


def logits_dtype(dtype: torch.dtype) -> torch.dtype:
    """As which logits are left: keys of fewer bits have no exact ones."""
    return torch.float32 if dtype == torch.float32 else torch.float16
