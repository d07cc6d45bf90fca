"""Attention of the new tokens of each request over its paged KV, split over the context: tile sizes, kernels and launch.

The query heads that share a KV head, of several new tokens, form the rows of one matrix product. Keys and values are therefore read once
for all of them (flash decoding). The kernel splits a row's context as SGLang's Triton decode kernel does, and uses the same arithmetic.
With the same number of splits and the blocks :data:`EXACT`, each row equals a decode of that token alone, bit
for bit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.gpu_launch import halvings, launch_first_fitting, padded_size, shape_name


@dataclass(frozen=True)
class VerifyTile:
    """Sizes of one program's matrix products, of rows 0 or powers of 2 of at least 16.

    ``rows``: of the first product. ``more_rows``: of a second product over the same keys. ``tokens``: context tokens per step. ``warps``,
    ``stages``: warps of a program, and pipeline stages of the loads of keys and values.
    """

    rows: int
    more_rows: int
    tokens: int
    warps: int
    stages: int


# The sizes of SGLang's grouped decode kernel.
EXACT = VerifyTile(rows=16, more_rows=0, tokens=32, warps=4, stages=2)


def fast_tile(rows: int, key_bytes: int) -> VerifyTile:
    """Tile sizes for ``rows`` rows per request: the fewest programs first, then the fewest padding rows.

    Rows are the new tokens of a request times the query heads that share a KV head. With keys of ``key_bytes`` bytes, the keys and values of
    three steps should take 96 KiB of shared memory; :func:`tile_choices` has smaller sizes.
    """
    tile_choices = ((16, 0), (32, 0), (32, 16), (64, 0), (64, 16), (128, 0), (128, 16))
    first, second = min(tile_choices, key=lambda pair: (-(-rows // sum(pair)), sum(pair)))
    tokens = max(16, min(64, 16384 // triton.next_power_of_2(key_bytes)))
    return VerifyTile(first, second, tokens=tokens, warps=4 if first <= 64 else 8, stages=3)


@lru_cache
def tile_choices(blocks: VerifyTile) -> tuple[VerifyTile, ...]:
    """``blocks``, then sizes that need less and less shared memory. For :data:`EXACT`, only sizes with the same arithmetic."""
    fewer = [replace(blocks, stages=stages) for stages in range(blocks.stages, 0, -1)]
    if blocks == EXACT:
        return tuple(fewer)
    shorter = [replace(fewer[-1], tokens=tokens) for tokens in halvings(blocks.tokens)[1:]]
    least = replace((fewer + shorter)[-1], more_rows=0)
    return *fewer, *shorter, *(replace(least, rows=rows, warps=min(least.warps, 4)) for rows in halvings(blocks.rows))


@dataclass(frozen=True)
class ContextSplits:
    """Number of splits of each row's context.

    ``max_splits``: that of the longest context. ``tile``: tokens of a split. 0 means ``max_splits`` splits for every length.
    """

    max_splits: int
    tile: int = 0

    def count_for(self, lengths: torch.Tensor) -> torch.Tensor:
        """Number of splits for contexts of ``lengths`` tokens: int32, same shape."""
        if self.tile:
            return ((lengths + self.tile - 1) // self.tile).to(torch.int32)
        return torch.full_like(lengths, self.max_splits, dtype=torch.int32)


@dataclass(frozen=True)
class VerifyTokens:
    """The new tokens of each request of a batch.

    ``rows``, ``prefixes``: int64 [requests], rows of the token table, and tokens before the new ones. ``starts``: int64 [requests + 1], index of each
    request's first new token among all. ``counts``: new tokens of each request, on the host. ``ends``: int64 [tokens + 1], running sum of the tokens
    that each new token attends to, from 0. ``parts``: int32 [tokens], number of splits of each new token's context.
    """

    rows: torch.Tensor
    prefixes: torch.Tensor
    starts: torch.Tensor
    counts: Sequence[int]
    ends: torch.Tensor
    parts: torch.Tensor


def partial_numbers(query_heads: int, value_dim: int, splits: ContextSplits) -> int:
    """Number of float32 values in one token's partial results."""
    return query_heads * splits.max_splits * (value_dim + 1)


def partial_buffers(
    workspace: torch.Tensor, query_heads: int, value_dim: int, splits: ContextSplits
) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers for the partial results of as many tokens as fit in ``workspace``, float32 [numbers].

    Returns outputs, float32 [tokens, query_heads, splits, value_dim], and log-sums, the same shape without the last dimension.
    """
    tokens = len(workspace) // partial_numbers(query_heads, value_dim, splits)
    shape = (tokens, query_heads, splits.max_splits)
    outputs, sums = workspace[: tokens * partial_numbers(query_heads, value_dim, splits)].split(
        (tokens * query_heads * splits.max_splits * value_dim, tokens * query_heads * splits.max_splits)
    )
    return outputs.view(*shape, value_dim), sums.view(shape)


def request_groups(counts: Sequence[int], room: int) -> Iterator[tuple[int, int, int, int]]:
    """Group requests whose tokens fit in ``room`` tokens. Yields first and end request, then first and end token, of each group."""
    first = begin = end = 0
    for index, count in enumerate(counts):
        if index > first and end + count - begin > room:
            yield first, index, begin, end
            first, begin = index, end
        end += count
    if counts:
        yield first, len(counts), begin, end


@triton.jit
def _rows(first_row, count, prefix, split, fixed_splits, SPLIT_TILE: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr):
    """Token and head of each of ``M`` rows, and the range of the context that each row reads in this split."""
    row = first_row + tl.arange(0, M)
    token, head = row // GROUP, row % GROUP
    length = prefix + token + 1
    splits = tl.cdiv(length, SPLIT_TILE) if SPLIT_TILE > 0 else fixed_splits
    # Splits begin at multiples of 32, as in SGLang's decode kernel.
    per_split = tl.cdiv(tl.cdiv(length, splits), 32) * 32
    begin = per_split * split
    end = tl.minimum(begin + per_split, length)
    end = tl.where(token < count, end, 0)
    return token, head, begin, end


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _attend(q, k, v, places, begin, end, scaling, best, total, acc, CAP: tl.constexpr):
    """One step of online softmax."""
    qk = tl.dot(q, k)
    qk *= scaling
    if CAP > 0:
        qk = CAP * _tanh(qk / CAP)
    seen = (places[None, :] >= begin[:, None]) & (places[None, :] < end[:, None])
    qk = tl.where(seen, qk, float("-inf"))
    new_best = tl.maximum(tl.max(qk, 1), best)
    # A row that has seen no token yet has no maximum.
    finite = tl.where(new_best == float("-inf"), 0.0, new_best)
    rescale = tl.exp(best - finite)
    p = tl.exp(qk - finite[:, None])
    acc *= rescale[:, None]
    acc += tl.dot(p.to(v.dtype), v)
    total = total * rescale + tl.sum(p, 1)
    return new_best, total, acc


@triton.jit
def _store(
    partial, lse, start, head0, token, head, begin, end, split, best, total, acc,
    partial_token, partial_head, partial_split, VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr,
):
    dim = tl.arange(0, PADDED_VALUE_DIM)
    place = (start + token) * partial_token + (head0 + head) * partial_head + split * partial_split
    mine = begin < end
    tl.store(
        partial + place[:, None] + dim[None, :], acc / total[:, None], mask=mine[:, None] & (dim < VALUE_DIM)[None, :]
    )
    tl.store(lse + place // VALUE_DIM, best + tl.log(total), mask=mine)


@triton.jit(do_not_specialize=("fixed_splits", "first_request"))
def _verify_attention(
    queries, keys, values, partial, lse, token_table, rows, prefixes, starts, fixed_splits, scaling,
    query_token, query_head, key_slot, key_head, value_slot, value_head, table_row,
    partial_token, partial_head, partial_split, first_request,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr, ROW_BLOCKS: tl.constexpr, M: tl.constexpr, MORE: tl.constexpr,
    N: tl.constexpr, SPLIT_TILE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    # Programs that read the same keys are adjacent, so that the keys are in the cache.
    block, split = tl.program_id(0) % ROW_BLOCKS, tl.program_id(0) // ROW_BLOCKS
    kv_head = tl.program_id(1)
    request = first_request + tl.program_id(2)
    start = tl.load(starts + request).to(tl.int64)
    origin = tl.load(starts + first_request).to(tl.int64)
    count = tl.load(starts + request + 1) - start
    prefix = tl.load(prefixes + request)
    table = token_table + tl.load(rows + request) * table_row
    head0 = kv_head * GROUP
    dim, value_dim = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_VALUE_DIM)

    row0 = block * (M + MORE)
    token, head, begin, end = _rows(row0, count, prefix, split, fixed_splits, SPLIT_TILE, GROUP, M)
    lowest, highest = tl.min(tl.where(begin < end, begin, 1 << 30)), tl.max(end)
    if MORE > 0:
        token2, head2, begin2, end2 = _rows(row0 + M, count, prefix, split, fixed_splits, SPLIT_TILE, GROUP, MORE)
        lowest = tl.minimum(lowest, tl.min(tl.where(begin2 < end2, begin2, 1 << 30)))
        highest = tl.maximum(highest, tl.max(end2))
    if lowest < highest:
        at = queries + (start + token) * query_token + (head0 + head) * query_head
        q = tl.load(at[:, None] + dim[None, :], mask=(token < count)[:, None] & (dim < KEY_DIM)[None, :], other=0.0)
        q = q.to(keys.dtype.element_ty)
        best = tl.zeros([M], dtype=tl.float32) - float("inf")
        total = tl.zeros([M], dtype=tl.float32)
        acc = tl.zeros([M, PADDED_VALUE_DIM], dtype=tl.float32)
        if MORE > 0:
            at = queries + (start + token2) * query_token + (head0 + head2) * query_head
            q2 = tl.load(at[:, None] + dim[None, :], mask=(token2 < count)[:, None] & (dim < KEY_DIM)[None, :], other=0.0)
            q2 = q2.to(keys.dtype.element_ty)
            best2 = tl.zeros([MORE], dtype=tl.float32) - float("inf")
            total2 = tl.zeros([MORE], dtype=tl.float32)
            acc2 = tl.zeros([MORE, PADDED_VALUE_DIM], dtype=tl.float32)
        for first in tl.range(lowest, highest, N):
            places = first + tl.arange(0, N)
            slot = tl.load(table + places, mask=places < highest, other=0).to(tl.int64)
            inside = places < highest
            k = tl.load(
                keys + slot[None, :] * key_slot + kv_head * key_head + dim[:, None],
                mask=inside[None, :] & (dim < KEY_DIM)[:, None], other=0.0,
            )  # fmt: skip
            v = tl.load(
                values + slot[:, None] * value_slot + kv_head * value_head + value_dim[None, :],
                mask=inside[:, None] & (value_dim < VALUE_DIM)[None, :], other=0.0,
            )  # fmt: skip
            best, total, acc = _attend(q, k, v, places, begin, end, scaling, best, total, acc, CAP)
            if MORE > 0:
                best2, total2, acc2 = _attend(q2, k, v, places, begin2, end2, scaling, best2, total2, acc2, CAP)
        # Partial results are indexed from the first request of this launch.
        _store(
            partial, lse, start - origin, head0, token, head, begin, end, split, best, total, acc,
            partial_token, partial_head, partial_split, VALUE_DIM, PADDED_VALUE_DIM,
        )  # fmt: skip
        if MORE > 0:
            _store(
                partial, lse, start - origin, head0, token2, head2, begin2, end2, split, best2, total2, acc2,
                partial_token, partial_head, partial_split, VALUE_DIM, PADDED_VALUE_DIM,
            )  # fmt: skip


def verify_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    token_table: torch.Tensor,
    tokens: VerifyTokens,
    splits: ContextSplits,
    blocks: VerifyTile,
    buffers: tuple[torch.Tensor, torch.Tensor],
    scaling: float,
    cap: float = 0.0,
) -> None:
    """Write causal attention of the new tokens over their requests' rows of the table into ``out``, [tokens, query_heads, value_dim].

    ``queries``: [tokens, query_heads, key_dim]. ``keys``, ``values``: the pool's buffers, [slots, kv_heads, key_dim or value_dim], which contain the
    new tokens. ``token_table``: int32 [rows, width], slots of each request's tokens. ``blocks``: sizes of the matrix products; smaller ones are
    used if the GPU has too little shared memory. :data:`EXACT` has the arithmetic of SGLang's decode kernel. ``buffers``: from
    :func:`partial_buffers`; requests that do not fit at the same time are computed group by group. ``cap``: bound of the tanh (logit cap), or 0.

    Raises:
        OptionError: No tile sizes for these heads fit the GPU.
    """
    from sglang.kernels.ops.attention.decode_attention import _decode_softmax_reducev_fwd

    partial, lse = buffers
    group, most = queries.shape[1] // keys.shape[1], splits.max_splits
    fitting, dim = tile_choices(blocks), keys.shape[2]
    key = ("verify", blocks, dim, values.shape[2], group, bool(splits.tile), cap, keys.dtype, keys.device)
    remedy = "leave --enable-deterministic-inference out" if blocks == EXACT else "use --attention-backend flashinfer"

    def what() -> str:
        return f"verification with {shape_name(dim, group, keys.dtype)}"

    for first, last, begin, end in request_groups(tokens.counts, len(partial)):

        def launch(tile: VerifyTile) -> None:
            row_blocks = triton.cdiv(max(tokens.counts[first:last]) * group, tile.rows + tile.more_rows)
            _verify_attention[(row_blocks * most, keys.shape[1], last - first)](
                queries, keys, values, partial, lse, token_table, tokens.rows, tokens.prefixes, tokens.starts, most, scaling,
                queries.stride(0), queries.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
                token_table.stride(0), partial.stride(0), partial.stride(1), partial.stride(2), first,
                GROUP=group, KEY_DIM=dim, VALUE_DIM=values.shape[2], PADDED_DIM=padded_size(dim),
                PADDED_VALUE_DIM=padded_size(values.shape[2]), ROW_BLOCKS=row_blocks, M=tile.rows, MORE=tile.more_rows,
                N=tile.tokens, SPLIT_TILE=splits.tile, CAP=cap, num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip

        launch_first_fitting(fitting, launch, key, what, remedy)
        ends, parts = tokens.ends[begin : end + 1], tokens.parts[begin:end]
        _decode_softmax_reducev_fwd(partial, lse, queries[begin:end], out[begin:end], 1.0, values, ends, parts, most)
