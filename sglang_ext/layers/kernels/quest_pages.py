"""Quest's page selection on a GPU (Tang et al. 2024, arXiv 2406.10774), limited by memory bandwidth.

A page's bound is the largest product that a query can have with a key between the page's minima and maxima. It is the mean over the query
heads of the KV head, as in ``mem_cache/selection/scoring.py``. The bound is linear in the positive and negative parts of a query. So
only the means of these parts over the heads are multiplied. The pages with the largest bounds become pointers to their tokens (pointers.py).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_ext.layers.kernels.gpu_launch import pdl_options
from sglang_ext.mem_cache.compressed.layouts.pointers import PagePointerLayout


class QuestGrid(NamedTuple):
    """Division of a batch's page selection into programs.

    ``step_bytes``: bytes of extremes that a program multiplies at once, while those of its next step are loaded to registers. ``programs``: maximum
    over all requests and heads; beyond it each takes more steps. ``resident``: maximum bounds that a program keeps in registers, at most 2,048;
    with more pages it reads them again, CHUNK at once. ``registers``: maximum registers of a thread; None for no limit.
    """

    step_bytes: int
    programs: int
    resident: int = 2048
    registers: int | None = 128


# Servers use the first, with as many programs as an H200 runs at once. `sglang-ext-bench sparse-kernels` compares them.
QUEST_GRIDS = (QuestGrid(16384, 528), QuestGrid(16384, 1056), QuestGrid(16384, 2112), QuestGrid(32768, 396, 2048, 168))
CHUNK = 1024
# Trial bounds at which pages are counted at once, and bits of each count in one integer; for bounds in registers, and in memory.
TRIALS, BITS, MEMORY_TRIALS, MEMORY_BITS = 5, 12, 3, 21
# Pages whose token pointers a program writes at once.
KEPT = 128
# As integers: a value below all bounds, the largest bound (infinity), and the order of pages that are always selected, above it.
LEAST, LARGEST, ALWAYS = tl.constexpr(-0x7FFFFFFF), tl.constexpr(0x7F800000), tl.constexpr(0x7FFFFFF0)
# First distance between trial bounds, in standard deviations of the bounds.
STEP = tl.constexpr(0.05)


@triton.jit
def _ordered(bounds):
    """Return bounds as integers of the same order."""
    bits = bounds.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _orders(found, place, count, FIRST: tl.constexpr, NEWEST: tl.constexpr):
    """Return the order of pages, largest first: the newest, the first, then by bounds; indices beyond the last page come last."""
    order = tl.minimum(tl.maximum(_ordered(found), LEAST), LARGEST)
    order = tl.where(place < FIRST, ALWAYS - NEWEST - place, order)
    order = tl.where(place >= count - NEWEST, ALWAYS - (count - 1 - place), order)
    return tl.where(place < count, order, LEAST - 1)


@triton.jit
def _guess(total, squares, count, chosen, TRIALS: tl.constexpr):
    """Return the first trial bound and the step, as integers near the lowest selected bound of normally distributed bounds."""
    mean = total / count
    spread = tl.sqrt(tl.maximum(squares / count - mean * mean, 0.0))
    share = (chosen - 0.5) / count
    # Abramowitz and Stegun, 26.2.22: the lowest selected bound is this many standard deviations above the mean.
    root = tl.sqrt(-2.0 * tl.log(tl.maximum(tl.minimum(share, 1.0 - share), 1e-6)))
    beyond = root - (2.30753 + 0.27061 * root) / (1.0 + root * (0.99229 + 0.04481 * root))
    beyond = tl.where(share < 0.5, beyond, -beyond)
    guess = tl.minimum(tl.maximum(_ordered(mean + beyond * spread), LEAST + 1), -LEAST - 1).to(tl.int64)
    step = _ordered(mean + (beyond + STEP) * spread) - guess
    step = tl.minimum(tl.maximum(step, 1), 1 << 29)
    return guess - TRIALS // 2 * step, step


@triton.jit
def _trial(low, high, first, step, number):
    """Return a trial bound, as a 32-bit integer between both ends, at which pages are counted."""
    return tl.minimum(tl.maximum(first + number * step, low + 1), high - 1).to(tl.int32)


@triton.jit
def _counted(order, low, high, first, step, TRIALS: tl.constexpr, BITS: tl.constexpr):
    """Return for each page the trials that count it: BITS bits a trial, the first trial lowest."""
    several = tl.zeros(order.shape, tl.int64)
    for number in tl.static_range(TRIALS):
        several += tl.where(order >= _trial(low, high, first, step, number), tl.full((), 1 << (BITS * number), tl.int64), 0)
    return several


@triton.jit
def _narrowed(low, high, found, above, first, step, several, chosen, TRIALS: tl.constexpr, BITS: tl.constexpr):
    """Narrow the range of the lowest selected order, given that ``several`` pages reach the trials. Steps grow until both ends are known."""
    lowest, highest = low, high
    for number in tl.static_range(TRIALS):
        trial = _trial(lowest, highest, first, step, number).to(tl.int64)
        many = ((several >> (BITS * number)) & ((1 << BITS) - 1)).to(tl.int32)
        enough = many >= chosen
        # The last trial with enough pages, and the first with too few.
        low, found = tl.where(enough, trial, low), tl.where(enough, many, found)
        fewer = (many < chosen) & (trial < high)
        high, above = tl.where(fewer, trial, high), tl.where(fewer, many, above)
    known = (low != LEAST) & (high != -LEAST)
    step = tl.where(known, tl.maximum((high - low) // (TRIALS + 1), 1), tl.minimum(step * (TRIALS + 1), 1 << 29))
    return low, high, found, above, tl.where(low == LEAST, high - TRIALS * step, low + step), step


@triton.jit
def _list_best(order, low, high, need, better_before, equal_before, listed, slot):
    """List the slots, ``slot``, of pages of the highest orders: all at ``high`` or above, and the first ``need`` at ``low`` or above."""
    better = (order >= high).to(tl.int32)
    equal = ((order >= low) & (order < high)).to(tl.int32)
    # Both counts in one integer, 16 bits each.
    both = tl.cumsum(better + (equal << 16), 0)
    rank = equal_before + ((both >> 16) & 0xFFFF)
    best = (better != 0) | ((equal != 0) & (rank <= need))
    tl.store(listed + better_before + (both & 0xFFFF) + tl.minimum(rank, need) - 1, slot, mask=best)
    return better_before + tl.sum(better), equal_before + tl.sum(equal)


@triton.jit
def _noted(bounds, place, count):
    """Load bounds, 0 where there is no page. Loads of consecutive indices are vectorized, whatever the count."""
    found = tl.load(bounds + place, mask=place // 16 < tl.cdiv(count, 16), other=0.0, volatile=True)
    return tl.where(place < count, found, 0.0)


@triton.jit
def _first_slots(context, place, among, PAGE: tl.constexpr):
    """Load the first slots of a context's pages where ``among`` is true."""
    return tl.load(context + place.to(tl.int64) * PAGE, mask=among, other=0)


@triton.jit
def _choose_resident(
    bounds, context, listed, count, chosen, zero, FIRST: tl.constexpr, NEWEST: tl.constexpr, PAGE: tl.constexpr, RESIDENT: tl.constexpr,
    TRIALS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """List the best pages of a head with bounds in registers. ``zero`` is 0, which the compiler cannot know. Counts synchronize threads."""
    # Hides the order from the compiler. Otherwise a thread reads several bounds and lists its pages one by one, after a layout
    # conversion.
    place = tl.arange(0, RESIDENT) ^ zero
    found = _noted(bounds, place, count)
    # Loaded while pages are counted.
    slot = _first_slots(context, place, place < count, PAGE)
    first, step = _guess(tl.sum(found), tl.sum(found * found), count, chosen, TRIALS)
    order = _orders(found, place, count, FIRST, NEWEST)
    low, high, there, above = tl.full((), LEAST, tl.int64), tl.full((), -LEAST, tl.int64), count, 0
    while (there != chosen) & (low + 1 < high):
        several = tl.sum(_counted(order, low, high, first, step, TRIALS, BITS))
        low, high, there, above, first, step = _narrowed(low, high, there, above, first, step, several, chosen, TRIALS, BITS)
    _list_best(order, low.to(tl.int32), high.to(tl.int32), chosen - above, 0, 0, listed, slot)


@triton.jit
def _choose_in_memory(
    bounds, context, listed, count, chosen, FIRST: tl.constexpr, NEWEST: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr,
    TRIALS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """List the best pages of a head with too many bounds for registers."""
    column = tl.arange(0, CHUNK)
    total = tl.zeros((CHUNK,), tl.float32)
    squares = tl.zeros((CHUNK,), tl.float32)
    for begin in tl.range(0, count, CHUNK):
        found = _noted(bounds, begin + column, count)
        total += found
        squares += found * found
    first, step = _guess(tl.sum(total), tl.sum(squares), count, chosen, TRIALS)
    low, high, there, above = tl.full((), LEAST, tl.int64), tl.full((), -LEAST, tl.int64), count, 0
    while (there != chosen) & (low + 1 < high):
        several = tl.zeros((CHUNK,), tl.int64)
        for begin in tl.range(0, count, CHUNK):
            order = _orders(_noted(bounds, begin + column, count), begin + column, count, FIRST, NEWEST)
            several += _counted(order, low, high, first, step, TRIALS, BITS)
        low, high, there, above, first, step = _narrowed(low, high, there, above, first, step, tl.sum(several), chosen, TRIALS, BITS)
    better, equal, lowest, highest = 0, 0, low.to(tl.int32), high.to(tl.int32)
    for begin in tl.range(0, count, CHUNK):
        place = begin + column
        order = _orders(_noted(bounds, place, count), place, count, FIRST, NEWEST)
        slot = _first_slots(context, place, order >= lowest, PAGE)
        better, equal = _list_best(order, lowest, highest, chosen - above, better, equal, listed, slot)


@triton.jit
def _point(cells, table, listed, chosen, slot_stride, PER_SLOT: tl.constexpr, PAGE: tl.constexpr, KEPT: tl.constexpr):
    """Write a head's pointers, in cells of a row's slots, to the tokens of the pages listed by their first slots."""
    in_page = tl.arange(0, PAGE)
    for first in tl.range(0, chosen, KEPT):
        place = first + tl.arange(0, KEPT)
        inside = place < chosen
        token = tl.load(listed + place, mask=inside, other=0)[:, None] + in_page[None, :]
        if PER_SLOT % PAGE == 0:
            # All pointers to a page are in one slot.
            holder = tl.load(table + place * PAGE // PER_SLOT, mask=inside, other=0).to(tl.int64)
            pointer = (holder * slot_stride + place * PAGE % PER_SLOT)[:, None] + in_page[None, :]
        else:
            number = place[:, None] * PAGE + in_page[None, :]
            holder = tl.load(table + number // PER_SLOT, mask=inside[:, None], other=0).to(tl.int64)
            pointer = holder * slot_stride + number % PER_SLOT
        tl.store(cells + pointer, token, mask=inside[:, None])


@triton.jit
def _extremes(extremes, slot, inside, head, dim, HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PAGE: tl.constexpr):
    """Load the minima and maxima of a head in the pages with these first slots."""
    page = slot.to(tl.uint32) // PAGE
    mine = extremes + (page.to(tl.int64) * HEADS + head)[:, None] * (2 * DIM) + dim[None, :]
    some = inside[:, None]
    if DIM < PADDED_DIM:
        some = some & (dim < DIM)[None, :]
    # Each is read once; evict them first to keep shared data in the cache.
    least = tl.load(mine, mask=some, other=0.0, eviction_policy="evict_first")
    return least, tl.load(mine + DIM, mask=some, other=0.0, eviction_policy="evict_first")


@triton.jit
def _choose_pages(
    queries, extremes, token_table, rows, lengths, counts, pages, chosen_at, arrived, cells, bounds, listed, width, most, full_rows,
    table_row, slot_stride, head_stride, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PER_SLOT: tl.constexpr, EVERY: tl.constexpr, FIRST: tl.constexpr, NEWEST: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr,
    RESIDENT: tl.constexpr, LONG: tl.constexpr, CHUNK: tl.constexpr, KEPT: tl.constexpr, TRIALS: tl.constexpr, BITS: tl.constexpr,
    MEMORY_TRIALS: tl.constexpr, MEMORY_BITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute bounds of some pages of a request for a KV head. The last program of a head writes pointers to the best pages.

    ``arrived`` counts the programs of a head that have finished, and is 0 before the first and after the pointers are written. Launched
    ``EARLY``, it waits for the previous kernel, and lets the next one begin when all programs have arrived.
    """
    if EARLY:
        gdc_wait()
    head, request = tl.program_id(0), tl.program_id(2)
    row = tl.load(rows + request).to(tl.int64)
    # Rows of full KV have no context row; nothing is selected for them.
    context = token_table + tl.maximum(row - full_rows, 0) * table_row
    dim, each, by = tl.arange(0, PADDED_DIM), tl.arange(0, PAGES), tl.num_programs(1) * PAGES
    begin = tl.program_id(1) * PAGES
    # Slots of two steps, loaded before the page count is known, so that all loads here overlap.
    slot = _first_slots(context, begin + each, begin + each < most, PAGE)
    next_slot = _first_slots(context, begin + by + each, begin + by + each < most, PAGE)
    below = tl.zeros((PADDED_DIM,), tl.float32)
    above = tl.zeros((PADDED_DIM,), tl.float32)
    for number in tl.static_range(GROUP):
        query = tl.load(queries + ((request * HEADS + head) * GROUP + number) * DIM + dim, mask=dim < DIM, other=0.0).to(tl.float32)
        below += tl.minimum(query, 0.0)
        above += tl.maximum(query, 0.0)
    of_row, of_head = row * HEADS + head, (request * HEADS + head).to(tl.int64)
    count, kept, after = tl.load(pages + row), tl.load(counts + row), 0
    if EVERY > 1:
        after = tl.load(lengths + request).to(tl.int32) - tl.cdiv(kept, PER_SLOT)
        count = tl.where(after - tl.load(chosen_at + of_row) >= EVERY, count, 0)
    if begin < count:
        mine, list_of_mine = bounds + of_head * width, listed + of_head * width
        least, largest = _extremes(extremes, slot, begin + each < count, head, dim, HEADS, DIM, PADDED_DIM, PAGE)
        for first in tl.range(begin, count, by):
            place = first + each
            # Extremes of the next step, and slots of the one after it.
            next_least, next_largest = _extremes(extremes, next_slot, place + by < count, head, dim, HEADS, DIM, PADDED_DIM, PAGE)
            next_slot = _first_slots(context, place + 2 * by, place + 2 * by < count, PAGE)
            found = tl.sum(least.to(tl.float32) * below[None, :] + largest.to(tl.float32) * above[None, :], 1) / GROUP
            tl.store(mine + place, found, mask=place < count)
            least, largest = next_least, next_largest
        tl.debug_barrier()
        last = tl.minimum(tl.num_programs(1), tl.cdiv(count, PAGES)) - 1
        before = tl.atomic_add(arrived + of_row, 1)
        if before == last:
            if EARLY:
                gdc_launch_dependents()
            if EVERY > 1:
                tl.store(chosen_at + of_row, after)
            chosen = kept // PAGE
            if LONG:
                if count > RESIDENT:
                    _choose_in_memory(mine, context, list_of_mine, count, chosen, FIRST, NEWEST, PAGE, CHUNK, MEMORY_TRIALS, MEMORY_BITS)
                else:
                    _choose_resident(mine, context, list_of_mine, count, chosen, before - last, FIRST, NEWEST, PAGE, RESIDENT, TRIALS, BITS)
            else:
                _choose_resident(mine, context, list_of_mine, count, chosen, before - last, FIRST, NEWEST, PAGE, RESIDENT, TRIALS, BITS)
            tl.debug_barrier()
            _point(
                cells + head * head_stride, token_table + row * table_row, list_of_mine, chosen, slot_stride, PER_SLOT, PAGE, KEPT
            )  # fmt: skip
            tl.debug_barrier()
            # For the next launch, and for kernels that wait for the pointers.
            tl.atomic_xchg(arrived + of_row, 0, sem="release")


def _width(pages: int) -> int:
    """Bounds of a head, padded so that loads are vectorized."""
    return -(-pages // 16) * 16


def scratch_bytes(requests: int, heads: int, tokens: int, page: int) -> int:
    """Scratch bytes of :func:`point_at_best_pages`, bounds of pages and slots of the best, for rows of ``tokens`` tokens."""
    return requests * heads * _width(triton.cdiv(tokens, page)) * (torch.float32.itemsize + torch.int32.itemsize)


def point_at_best_pages(
    begins: PagePointerLayout,
    layer: int,
    queries: torch.Tensor,
    cells: torch.Tensor,
    token_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    cut: QuestGrid = QUEST_GRIDS[0],
) -> torch.Tensor:
    """Point each KV head's pointers to the tokens of its best pages, in the order of the context.

    Reads no device memory on the host, and ``begins`` always at the same addresses, so CUDA graphs may capture it. Rows without pointers,
    and rows that are not due for a selection, stay unchanged.

    ``begins``: which rows begin with pointers, and their numbers of pages. ``queries``: [requests, query_heads, dim]. ``cells``: a layer's keys as
    pointers, int32 [slots, kv_heads, pointers]. ``token_table``: int32 [2 * rows, width]; the first half has the contexts, with whole pages, the
    second half, at the same index, the slots that hold their pointers. ``rows``, ``lengths``: int64 [requests], rows of the table, each at most
    once except rows without pointers, and slots of each. ``cut``: division into programs.

    Returns the bounds: float32 [requests, kv_heads, at least pages], valid where a selection was due. A caller that launches work before the
    selection has ended must keep this tensor until then, because the selection uses its memory.
    """
    requests, heads, dim, page = len(rows), cells.shape[1], queries.shape[-1], begins.page
    extremes, padded = begins.extremes.held[layer], triton.next_power_of_2(dim)
    most, at_once = triton.cdiv(token_table.shape[1], page), max(1, cut.step_bytes // (2 * padded * extremes.itemsize))
    parts = min(triton.cdiv(most, at_once), max(1, cut.programs // (heads * requests)))
    width = _width(most)
    bounds, listed = torch.empty(2, requests, heads, width, dtype=torch.float32, device=queries.device)
    _choose_pages[(heads, parts, requests)](
        queries.contiguous(), extremes, token_table, rows, lengths, begins.counts, begins.pages, begins.selected_at[layer], begins.finished_parts,
        cells, bounds, listed.view(torch.int32), width, most, len(token_table) // 2, token_table.stride(0), cells.stride(0),
        cells.stride(1), HEADS=heads, GROUP=queries.shape[1] // heads, DIM=dim, PADDED_DIM=padded, PER_SLOT=cells.shape[2],
        EVERY=begins.every, FIRST=begins.first, NEWEST=begins.newest, PAGE=page, PAGES=at_once,
        RESIDENT=min(cut.resident, triton.next_power_of_2(most)), LONG=most > cut.resident, CHUNK=CHUNK, KEPT=KEPT, TRIALS=TRIALS,
        BITS=BITS, MEMORY_TRIALS=MEMORY_TRIALS, MEMORY_BITS=MEMORY_BITS, maxnreg=cut.registers, **pdl_options(queries),
    )  # fmt: skip
    return bounds
