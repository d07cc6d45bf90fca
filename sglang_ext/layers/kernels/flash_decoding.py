"""Shared parts of the decode kernels: tile sizes, online softmax, attention over exact tokens, and the merge of splits.

A request's row holds compressed tokens first, then exact tokens. The kernels split a row over programs (flash decoding). The first splits
read the compressed KV, and the other splits read the exact tokens. :func:`merge_splits` merges all splits by log-sum-exp. It can keep
the two kinds apart, because the output of compressed tokens may have to be rotated back.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_ext.layers.kernels.gpu_launch import halvings, launch_first_fitting, pdl_options, shape_name

# Maximum number of query rows of a program of four warps. Registers suffice for this many.
MOST_ROWS = 64


@dataclass(frozen=True)
class DecodeTile:
    """Sizes of one program's work: queries of a KV head and tokens per step, powers of 2, and pipeline stages of the loads."""

    rows: int
    tokens: int
    stages: int


@lru_cache
def tile_choices(group: int, most_rows: int, tokens: int, stages: int, fewest_rows: int = 16) -> tuple[DecodeTile, ...]:
    """Tile sizes for ``group`` queries that share a KV head, in order of preference; ``tokens`` and ``stages`` are the preferred values.

    ``fewest_rows`` is the minimum of a matrix product: fewer queries are padded to this number.
    """
    rows = min(most_rows, max(fewest_rows, triton.next_power_of_2(group)))
    fewer = [DecodeTile(rows, tokens, stage) for stage in range(stages, 0, -1)]
    smaller = [DecodeTile(less, tokens, 1) for less in halvings(rows, fewest_rows)[1:]]
    return *fewer, *smaller, *(DecodeTile(min(rows, fewest_rows), less, 1) for less in halvings(tokens)[1:])


# Float32 numbers of partial results that one warp merges, and the maximum number of warps.
JOINED, MOST_WARPS = 2048, 4


@triton.jit
def softmax_step(qk, best, total, AXIS: tl.constexpr):
    """One step of online softmax over ``AXIS`` of two axes: the new maximum, the factor for older sums, the weights, and the total."""
    new_best = tl.maximum(tl.max(qk, AXIS), best)
    # A row that has seen no token yet has no maximum.
    finite = tl.where(new_best == float("-inf"), 0.0, new_best)
    rescale, p = tl.exp(best - finite), tl.exp(qk - tl.expand_dims(finite, AXIS))
    return new_best, rescale, p, total * rescale + tl.sum(p, AXIS)


@triton.jit
def head_and_rows(GROUP: tl.constexpr, M: tl.constexpr):
    """A program's KV head, and its rows among the queries of that head. A head with more than M rows has several adjacent programs."""
    BLOCKS: tl.constexpr = (GROUP + M - 1) // M
    return tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS * M + tl.arange(0, M)


@triton.jit
def scaled_queries(queries, row, dim, scaling, GROUP: tl.constexpr, DIM: tl.constexpr, LIKE: tl.constexpr):
    """Scaled queries that share a KV head, with padding rows set to 0: LIKE [rows, channels]."""
    q = tl.load(queries + row[:, None] * DIM + dim[None, :], mask=(row < GROUP)[:, None] & (dim < DIM)[None, :], other=0.0)
    return (q.to(tl.float32) * scaling).to(LIKE)


@triton.jit
def token_step(
    q, keys, values, slot, inside, dim, value_dim, best, total, acc, key_slot, value_slot, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, LIKE: tl.constexpr,
):  # fmt: skip
    """One step of online softmax over the slots that are ``inside``. ``keys`` and ``values`` point to the head's first cells."""
    seen = inside[:, None] & (dim < DIM)[None, :]
    k = tl.load(keys + (slot * key_slot)[:, None] + dim[None, :], mask=seen, other=0.0)
    qk = tl.where(inside[None, :], tl.dot(q, tl.trans(k)), float("-inf"))
    best, rescale, p, total = softmax_step(qk, best, total, 1)
    seen = inside[:, None] & (value_dim < VALUE_DIM)[None, :]
    v = tl.load(values + (slot * value_slot)[:, None] + value_dim[None, :], mask=seen, other=0.0)
    return best, total, acc * rescale[:, None] + tl.dot(p.to(LIKE), v)


@triton.jit
def exact_split(
    queries, keys, values, table, begin, end, part, scaling, row, key_slot, value_slot, PARTS: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr, N: tl.constexpr, LIKE: tl.constexpr,
):  # fmt: skip
    """Softmax over split ``part`` of PARTS of the tokens [begin, end) of a row. ``keys`` and ``values`` point to the head's first cells."""
    each = tl.cdiv(end - begin, PARTS)
    first = begin + each * part
    last = tl.minimum(first + each, end)
    dim, value_dim = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_VALUE_DIM)
    q = scaled_queries(queries, row, dim, scaling, GROUP, DIM, LIKE)
    best = tl.zeros([M], dtype=tl.float32) - float("inf")
    total = tl.zeros([M], dtype=tl.float32)
    acc = tl.zeros([M, PADDED_VALUE_DIM], dtype=tl.float32)
    for start in tl.range(first, last, N):
        place = start + tl.arange(0, N)
        inside = place < last
        slot = tl.load(table + place, mask=inside, other=0).to(tl.int64)
        best, total, acc = token_step(
            q, keys, values, slot, inside, dim, value_dim, best, total, acc, key_slot, value_slot, DIM, VALUE_DIM, LIKE
        )  # fmt: skip
    return best, total, acc


@triton.jit
def store_split(partial, lse, place, channel, there, best, total, acc, row, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Store the result of one split: the weighted mean of the values, and the log of the sum of weights."""
    mine = row < GROUP
    some = tl.where(total > 0, total, 1.0)
    mask = (mine & (total > 0))[:, None] & there[None, :]
    tl.store(partial + place[:, None] * VALUE_DIM + channel[None, :], acc / some[:, None], mask=mask)
    tl.store(lse + place, best + tl.log(some), mask=mine)


@triton.jit
def merge_splits(
    partial, lse, far, near, VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr, PACKED: tl.constexpr,
    SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr, APART: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one head of one request. ``near`` gets the result over exact tokens if ``APART``; otherwise ``far`` gets both."""
    if EARLY:
        # The next kernel starts early too, and must wait for this one itself.
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, PADDED_SPLITS), tl.arange(0, PADDED_VALUE_DIM)
    sums = tl.load(lse + head * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    # A row without tokens has no maximum. Its output is 0.
    best = tl.max(sums, 0)
    weights = tl.exp(sums - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(weights, 0)
    weights /= tl.where(total > 0, total, 1.0)
    there = (weights > 0)[:, None] & (dim < VALUE_DIM)[None, :]
    found = tl.load(partial + (head * SPLITS + split[:, None]) * VALUE_DIM + dim[None, :], mask=there, other=0.0)
    found *= weights[:, None]
    inside = dim < VALUE_DIM
    if APART:
        tl.store(far + head * VALUE_DIM + dim, tl.sum(tl.where((split < PACKED)[:, None], found, 0.0), 0), mask=inside)
        tl.store(near + head * VALUE_DIM + dim, tl.sum(tl.where((split >= PACKED)[:, None], found, 0.0), 0), mask=inside)
    else:
        tl.store(far + head * VALUE_DIM + dim, tl.sum(found, 0), mask=inside)


@dataclass(frozen=True)
class RowSplits:
    """The splits of a batch's rows: what their kernels have in common, buffers for partial results, and the merge.

    Attributes:
        queries: [requests, heads, dim], contiguous.
        keys, values: A layer's buffers, [slots, kv_heads, dim].
        splits: Number of splits of a row's compressed tokens, and of its exact tokens.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    splits: tuple[int, int]

    @property
    def group(self) -> int:
        """Queries that share a KV head."""
        return self.queries.shape[1] // self.keys.shape[1]

    @property
    def num_splits(self) -> int:
        """Splits of a row, of both kinds."""
        return sum(self.splits)

    @property
    def strides(self) -> tuple[int, ...]:
        """Numbers from a slot, and from a head, to the next: of keys, then of values."""
        return *self.keys.stride()[:2], *self.values.stride()[:2]

    def grid(self, rows: int) -> tuple[int, int, int]:
        """Grid for programs of ``rows`` queries of a KV head."""
        return self.num_splits, self.keys.shape[1] * triton.cdiv(self.group, rows), len(self.queries)

    @property
    def value_shape(self) -> dict[str, int]:
        """Constants of values for all kernels, also for the merge."""
        dim = self.values.shape[2]
        return {"VALUE_DIM": dim, "PADDED_VALUE_DIM": triton.next_power_of_2(dim), "PACKED": self.splits[0]}

    def constants(self, tile: DecodeTile) -> dict[str, int]:
        """Constants and options for the Triton kernels that store partial results."""
        dim = self.queries.shape[2]
        shape = {"HEADS": self.keys.shape[1], "GROUP": self.group, "DIM": dim, "PADDED_DIM": triton.next_power_of_2(dim)}
        return {"M": tile.rows, "num_stages": tile.stages, **shape, **self.value_shape}

    def launch(
        self, name: Hashable, choices: Sequence[DecodeTile], with_tile: Callable[[DecodeTile], None], work: Callable[[], str], remedy: str
    ) -> None:
        """Launch a kernel with the first of ``choices`` that fits the GPU; ``name`` is of the kernel and its further constants.

        Raises:
            OptionError: No choice fits. It names ``work``, the shape, and ``remedy``.
        """
        keys, dim = self.keys, self.queries.shape[2]
        key = (name, dim, self.values.shape[2], self.group, keys.dtype, keys.device)
        launch_first_fitting(choices, with_tile, key, lambda: f"{work()} with {shape_name(dim, self.group, keys.dtype)}", remedy)

    @cached_property
    def partial(self) -> torch.Tensor:
        """Weighted means of the values: float32 [requests * heads * splits, value_dim]."""
        return torch.empty(self.queries.shape[:2].numel() * self.num_splits, self.values.shape[2], device=self.queries.device)

    @cached_property
    def lse(self) -> torch.Tensor:
        """Logs of the sums of weights: float32 [requests * heads, splits]."""
        return torch.empty(self.queries.shape[:2].numel(), self.num_splits, device=self.queries.device)

    def separate_outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Contributions of the compressed tokens, and of the exact tokens, to the outputs: float32 [requests, heads, value_dim] each."""
        far, near = torch.empty(2, *self.queries.shape[:2], self.values.shape[2], device=self.queries.device)
        self._merge(far, near, apart=True)
        return far, near

    def merged_output(self) -> torch.Tensor:
        """The merged outputs, in the dtype of the queries: [requests, heads, value_dim]."""
        outputs = self.queries.new_empty(*self.queries.shape[:2], self.values.shape[2])
        self._merge(outputs, outputs, apart=False)
        return outputs

    def _merge(self, far: torch.Tensor, near: torch.Tensor, apart: bool) -> None:
        shape, splits = self.value_shape, triton.next_power_of_2(self.num_splits)
        numbers = {"SPLITS": self.num_splits, "PADDED_SPLITS": splits, "APART": apart} | shape
        warps = min(MOST_WARPS, max(1, splits * shape["PADDED_VALUE_DIM"] // JOINED))
        merge_splits[(self.queries.shape[:2].numel(),)](self.partial, self.lse, far, near, **numbers, num_warps=warps, **pdl_options(far))
