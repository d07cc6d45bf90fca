"""Quest's selection on a GPU (Tang et al. 2024, arXiv 2406.10774), as fast as its bytes allow: what selection_speed.py compares with.

A page's bound is the most that a key between its least and largest numbers could give a query, mean over the query heads of its KV
head, as ``mem_cache/selection/baselines.py`` has it. It is linear in the parts of a query above and below 0, so that their means
over the heads are all that is multiplied. The pages of the largest bounds become pointers to their tokens (slot_pointers.py).
"""

import torch
import triton
import triton.language as tl

# Pages that a program multiplies at once, and pointers that one writes.
PAGES, POINTERS = 32, 2048


@triton.jit
def _bounds(queries, extremes, pages, out, count, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGES: tl.constexpr):
    """Bounds of some pages of a request for a KV head."""
    head, request = tl.program_id(0), tl.program_id(2)
    dim, place = tl.arange(0, DIM), tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    page = tl.load(pages + request * count + place, mask=place < count, other=0).to(tl.int64)
    mine = extremes + (page * HEADS + head)[:, None] * (2 * DIM) + dim[None, :]
    least = tl.load(mine, mask=(place < count)[:, None], other=0.0).to(tl.float32)
    largest = tl.load(mine + DIM, mask=(place < count)[:, None], other=0.0).to(tl.float32)
    below = tl.zeros((DIM,), tl.float32)
    above = tl.zeros((DIM,), tl.float32)
    for row in tl.static_range(GROUP):
        query = tl.load(queries + ((request * HEADS + head) * GROUP + row) * DIM + dim).to(tl.float32)
        below += tl.minimum(query, 0.0)
        above += tl.maximum(query, 0.0)
    found = tl.sum(least * below[None, :] + largest * above[None, :], 1) / GROUP
    tl.store(out + (request * HEADS + head) * count + place, found, mask=place < count)


@triton.jit
def _point_at_best(
    bounds, pages, held, cells, listed, count, chosen, row_slots, slot_stride, head_stride, HEADS: tl.constexpr, PER_SLOT: tl.constexpr,
    PAGE: tl.constexpr, PADDED: tl.constexpr, POINTERS: tl.constexpr,
):  # fmt: skip
    """Pointers of a KV head to the tokens of its best pages, ascending; of equal bounds those of earlier pages."""
    head, request = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, PADDED)
    bits = tl.load(bounds + (request * HEADS + head) * count + place, mask=place < count, other=float("-inf"))
    bits = bits.to(tl.int32, bitcast=True)
    # As integers in the order of the bounds.
    bits ^= (bits >> 31) & 0x7FFFFFFF
    low, high, found, above = -0x7FFFFFFF, 0x7FFFFFFF, count, 0
    while (found != chosen) & (low + 1 < high):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        many = tl.sum((bits >= middle).to(tl.int32))
        enough = many >= chosen
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        found, above = tl.where(enough, many, found), tl.where(enough, above, many)
    better = (bits >= high) & (place < count)
    equal = (bits >= low) & (bits < high) & (place < count)
    # Both counts in one, of 16 bits each: where all that are equal are chosen, there are no more of them than are needed.
    both = tl.cumsum(better.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    rank, need = (both >> 16) & 0xFFFF, chosen - above
    best = better | (equal & (rank <= need))
    listed += (request * HEADS + head) * chosen
    page = tl.load(pages + request * count + place, mask=best, other=0)
    tl.store(listed + (both & 0xFFFF) + tl.minimum(rank, need) - 1, page, mask=best)
    tl.debug_barrier()
    for first in tl.range(0, chosen * PAGE, POINTERS):
        pointer = first + tl.arange(0, POINTERS)
        inside = pointer < chosen * PAGE
        slot = tl.load(held + request * row_slots + pointer // PER_SLOT, mask=inside, other=0).to(tl.int64)
        token = tl.load(listed + pointer // PAGE, mask=inside, other=0) * PAGE + pointer % PAGE
        tl.store(cells + slot * slot_stride + head * head_stride + pointer % PER_SLOT, token, mask=inside)


def page_extremes(keys: torch.Tensor, page: int) -> torch.Tensor:
    """The least and largest number of each channel in each whole page of a pool: [pages, kv_heads, 2, dim].

    Args:
        keys: [slots, kv_heads, dim].
        page: tokens of a page.
    """
    paged = keys[: len(keys) // page * page].unflatten(0, (-1, page))
    return torch.stack([paged.amin(1), paged.amax(1)], dim=2)


def point_at_best_pages(
    queries: torch.Tensor, extremes: torch.Tensor, pages: torch.Tensor, held: torch.Tensor, cells: torch.Tensor, chosen: int, page: int
) -> torch.Tensor:
    """Let each KV head's pointers lead to the tokens of its best pages, ascending; nothing waits for the device.

    Args:
        queries: [requests, query_heads, dim].
        extremes: :func:`page_extremes` of the pool.
        pages: int32 [requests, count], pages of each context, in its order; at most 65,535.
        held: int32 [requests, slots], slots that hold the pointers, those of a row next to each other.
        cells: a layer's keys as pointers, int32 [slots, kv_heads, pointers].
        chosen: pages of each head.
        page: tokens of one.

    Returns:
        The bounds: float32 [requests, kv_heads, count].
    """
    requests, count, heads, dim = *pages.shape, cells.shape[1], queries.shape[-1]
    bounds = torch.empty(requests, heads, count, device=queries.device)
    listed = torch.empty(requests, heads, chosen, dtype=torch.int32, device=queries.device)
    shape = {"HEADS": heads, "GROUP": queries.shape[1] // heads, "DIM": dim, "PAGES": PAGES}
    _bounds[(heads, triton.cdiv(count, PAGES), requests)](queries, extremes, pages, bounds, count, **shape)
    _point_at_best[(heads, requests)](
        bounds, pages, held, cells, listed, count, chosen, held.stride(0), cells.stride(0), cells.stride(1), HEADS=heads,
        PER_SLOT=cells.shape[2], PAGE=page, PADDED=triton.next_power_of_2(count), POINTERS=POINTERS, num_warps=8,
    )  # fmt: skip
    return bounds
