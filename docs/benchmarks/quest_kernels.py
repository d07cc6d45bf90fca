"""Quest's selection on a GPU (Tang et al. 2024, arXiv 2406.10774), as fast as its bytes allow: what selection_speed.py compares with.

A page's bound is the most that a key between its least and largest numbers could give a query, mean over the query heads of its KV
head, as ``mem_cache/selection/baselines.py`` has it. It is linear in the parts of a query above and below 0, so that their means
over the heads are all that is multiplied. The pages of the largest bounds become pointers to their tokens (slot_pointers.py).
"""

from statistics import NormalDist

import torch
import triton
import triton.language as tl

# Pages that a program multiplies at once, how often it does, and of these how many it reads ahead: the first was found on an H100, whose
# memory is slower; which is best on an H200, selection_speed.py says.
CUTS = ((64, 1, 1), (32, 1, 1), (32, 4, 3), (32, 8, 4), (64, 4, 3))
# Pointers that a program writes at once.
POINTERS = 2048
# Below all bounds, as integers.
LEAST = tl.constexpr(-0x7FFFFFFF)
# From a guess of the last bound that is chosen to the next one at first, of the bounds' standard deviation.
STEP = tl.constexpr(0.125)


@triton.jit
def _ordered(bounds):
    """Bounds as integers of the same order."""
    bits = bounds.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _best(bits, inside, chosen, count, guess, first_step):
    """Which of ``count`` are the largest, of equal ones the first, and places of these.

    Each count of those above a bound waits for all threads: few are made. From the guess on in doubled steps, until both ends are known;
    then where a straight line between the counts at both ends leads, and, that any numbers come to an end, each third time to the middle.
    """
    low, high, found, above = LEAST, -LEAST, count, 0
    middle, step, turn = guess, first_step, 0
    while (found != chosen) & (low + 1 < high):
        many = tl.sum(((bits >= middle) & inside).to(tl.int32))
        enough = many >= chosen
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        found, above = tl.where(enough, many, found), tl.where(enough, above, many)
        half = (low >> 1) + (high >> 1) + (low & high & 1)
        near = tl.where(low == LEAST, tl.maximum(high, step + LEAST) - step, tl.minimum(low, -LEAST - step) + step)
        known = (low != LEAST) & (high != -LEAST)
        # Of a range that a float holds only about, which the ends bound.
        part = (found - chosen).to(tl.float32) / tl.maximum(found - above, 1).to(tl.float32)
        line = low + (part * (high.to(tl.float32) - low.to(tl.float32))).to(tl.int32)
        turn = tl.where(known, turn + 1, 0)
        line = tl.where((turn % 3 == 0) | (line <= low) | (line >= high), half, line)
        middle = tl.where(known, line, tl.where((near <= low) | (near >= high), half, near))
        step = tl.minimum(2 * step, 1 << 29)
    better = (bits >= high) & inside
    equal = (bits >= low) & (bits < high) & inside
    # Both counts in one, of 16 bits each: where all that are equal are chosen, there are no more of them than are needed.
    both = tl.cumsum(better.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    rank, need = (both >> 16) & 0xFFFF, chosen - above
    return better | (equal & (rank <= need)), (both & 0xFFFF) + tl.minimum(rank, need) - 1


@triton.jit
def _point_at_best(
    queries, extremes, pages, held, cells, bounds, listed, arrived, count, chosen, beyond, row_slots, slot_stride, head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PER_SLOT: tl.constexpr, PAGE: tl.constexpr, PADDED: tl.constexpr,
    PAGES: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr, POINTERS: tl.constexpr,
):  # fmt: skip
    """Bounds of some pages of a request for a KV head; whose program comes last, that points at the best."""
    head, request = tl.program_id(0), tl.program_id(2)
    dim, column = tl.arange(0, DIM), tl.arange(0, PAGES)
    below = tl.zeros((DIM,), tl.float32)
    above = tl.zeros((DIM,), tl.float32)
    for row in tl.static_range(GROUP):
        query = tl.load(queries + ((request * HEADS + head) * GROUP + row) * DIM + dim).to(tl.float32)
        below += tl.minimum(query, 0.0)
        above += tl.maximum(query, 0.0)
    begin = tl.program_id(1) * PAGES * BLOCKS
    for first in tl.range(begin, tl.minimum(begin + PAGES * BLOCKS, count), PAGES, num_stages=STAGES):
        place = first + column
        page = tl.load(pages + request * count + place, mask=place < count, other=0).to(tl.int64)
        mine = extremes + (page * HEADS + head)[:, None] * (2 * DIM) + dim[None, :]
        least = tl.load(mine, mask=(place < count)[:, None], other=0.0).to(tl.float32)
        largest = tl.load(mine + DIM, mask=(place < count)[:, None], other=0.0).to(tl.float32)
        found = tl.sum(least * below[None, :] + largest * above[None, :], 1) / GROUP
        tl.store(bounds + (request * HEADS + head) * count + place, found, mask=place < count)
    of_head = request * HEADS + head
    tl.debug_barrier()
    if tl.atomic_add(arrived + of_head, 1) == tl.num_programs(1) - 1:
        # For the next launch.
        tl.store(arrived + of_head, 0)
        every = tl.arange(0, PADDED)
        there = tl.load(bounds + of_head * count + every, mask=every < count, other=0.0, volatile=True)
        # While the bounds are on their way.
        numbers = tl.load(pages + request * count + every, mask=every < count, other=0)
        mean = tl.sum(there) / count
        spread = tl.sqrt(tl.sum(tl.where(every < count, (there - mean) * (there - mean), 0.0)) / count)
        guess = _ordered(mean + beyond * spread)
        step = tl.minimum(tl.maximum(_ordered(mean + (beyond + STEP) * spread) - guess, 1), 1 << 29)
        best, rank = _best(_ordered(there), every < count, chosen, count, guess, step)
        tl.store(listed + of_head * chosen + rank, numbers, mask=best)
        tl.debug_barrier()
        for first in tl.range(0, chosen * PAGE, POINTERS):
            pointer = first + tl.arange(0, POINTERS)
            inside = pointer < chosen * PAGE
            slot = tl.load(held + request * row_slots + pointer // PER_SLOT, mask=inside, other=0).to(tl.int64)
            token = tl.load(listed + of_head * chosen + pointer // PAGE, mask=inside, other=0) * PAGE + pointer % PAGE
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
    queries: torch.Tensor,
    extremes: torch.Tensor,
    pages: torch.Tensor,
    held: torch.Tensor,
    cells: torch.Tensor,
    arrived: torch.Tensor,
    chosen: int,
    page: int,
    cut: tuple[int, int, int] = CUTS[0],
) -> torch.Tensor:
    """Let each KV head's pointers lead to the tokens of its best pages, ascending; nothing waits for the device.

    Args:
        queries: [requests, query_heads, dim].
        extremes: :func:`page_extremes` of the pool.
        pages: int32 [requests, count], pages of each context, in its order; at most 65,535.
        held: int32 [requests, slots], slots that hold the pointers, those of a row next to each other.
        cells: a layer's keys as pointers, int32 [slots, kv_heads, pointers].
        arrived: int32 [requests, kv_heads], zeros, which they are again afterwards.
        chosen: pages of each head.
        page: tokens of one.
        cut: one of CUTS.

    Returns:
        The bounds: float32 [requests, kv_heads, count].
    """
    requests, count, heads, dim = *pages.shape, cells.shape[1], queries.shape[-1]
    bounds = torch.empty(requests, heads, count, device=queries.device)
    # Were bounds normal, so many standard deviations above their mean the last one would be that is chosen: where to look first.
    beyond = NormalDist().inv_cdf(1 - (chosen - 0.5) / count)
    listed = torch.empty(requests, heads, chosen, dtype=torch.int32, device=queries.device)
    pages_at_once, blocks, stages = cut
    _point_at_best[(heads, triton.cdiv(count, pages_at_once * blocks), requests)](
        queries, extremes, pages, held, cells, bounds, listed, arrived, count, chosen, beyond, held.stride(0), cells.stride(0),
        cells.stride(1), HEADS=heads, GROUP=queries.shape[1] // heads, DIM=dim, PER_SLOT=cells.shape[2], PAGE=page,
        PADDED=triton.next_power_of_2(count), PAGES=pages_at_once, BLOCKS=blocks, STAGES=stages, POINTERS=POINTERS,
    )  # fmt: skip
    return bounds
