"""Quest's selection on a GPU (Tang et al. 2024, arXiv 2406.10774), as fast as its bytes allow: extremes of pages, and the choice of a step.

A page's bound is the most that a key between its least and largest numbers could give a query, mean over the query heads of its KV
head, as ``mem_cache/selection/baselines.py`` has it. It is linear in the parts of a query above and below 0, so that their means
over the heads are all that is multiplied. The pages of the largest bounds become pointers to their tokens (pages.py).
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_ext.layers.kernels.addresses import buffer_pointer
from sglang_ext.layers.kernels.gpu_launch import pdl_options

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressed.layouts.pages import PagePointerLayout


class QuestGrid(NamedTuple):
    """How the choice of a batch is cut into programs.

    Attributes:
        step_bytes: of extremes that a program multiplies at once, while those of its next step are on their way to registers.
        programs: of all requests and heads, beyond which each takes several times as many steps.
        resident: bounds that a program can have in registers, at most 2,048; of more pages it reads them again, CHUNK at once.
        registers: of a thread, None for as many as the compiler likes.
    """

    step_bytes: int
    programs: int
    resident: int = 2048
    registers: int | None = 128


# Servers take the first, as many programs as an H200 has room for at once; which is best docs/benchmarks/sparse_kernels.py says.
QUEST_GRIDS = (QuestGrid(16384, 528), QuestGrid(16384, 1056), QuestGrid(16384, 2112), QuestGrid(32768, 396, 2048, 168))
CHUNK = 1024
# At how many bounds pages are counted at once, by so many bits each of one integer, where bounds are in registers, and in memory.
TRIALS, BITS, MEMORY_TRIALS, MEMORY_BITS = 5, 12, 3, 21
# Pages to whose tokens a program writes pointers at once.
KEPT = 128
# Numbers of a page's tokens that a program bounds at once.
COLUMNS = 512
# Below all bounds, as integers, and the largest that a bound may be: infinity. What is chosen in any case is above that.
LEAST, LARGEST, ALWAYS = tl.constexpr(-0x7FFFFFFF), tl.constexpr(0x7F800000), tl.constexpr(0x7FFFFFF0)
# Between bounds at which pages are counted at first, of the bounds' standard deviation.
STEP = tl.constexpr(0.05)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots"])
def _bound_pages(
    key_table, like, slots, extremes, count, pages, slot_stride, head_stride, HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of the page of a slot in a layer; of slots next to each other that share a page the last one has it bounded."""
    token, layer = tl.program_id(0), tl.program_id(1)
    page = tl.load(slots + token).to(tl.int64) // PAGE
    last = token + 1 >= count
    if last | (tl.load(slots + token + tl.where(last, 0, 1)).to(tl.int64) // PAGE != page):
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        head, channel, inside = column // DIM, column % DIM, column < HEADS * DIM
        # Else the compiler takes its numbers for scattered ones: buffers begin at multiples of 16 bytes.
        keys = buffer_pointer(key_table, layer, like.dtype.element_ty)
        mine = keys + page * PAGE * slot_stride + tl.arange(0, PAGE)[:, None] * slot_stride + (head * head_stride + channel)[None, :]
        numbers = tl.load(mine, mask=inside[None, :], other=0.0).to(tl.float32)
        target = extremes + (layer.to(tl.int64) * pages + page) * (HEADS * 2 * DIM) + head * (2 * DIM) + channel
        tl.store(target, tl.min(numbers, 0).to(extremes.dtype.element_ty), mask=inside)
        tl.store(target + DIM, tl.max(numbers, 0).to(extremes.dtype.element_ty), mask=inside)


@triton.jit
def _ordered(bounds):
    """Bounds as integers of the same order."""
    bits = bounds.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _orders(found, place, count, FIRST: tl.constexpr, NEWEST: tl.constexpr):
    """The order in which pages are chosen, the largest first: the newest, the first, then by bounds; what is no page comes last."""
    order = tl.minimum(tl.maximum(_ordered(found), LEAST), LARGEST)
    order = tl.where(place < FIRST, ALWAYS - NEWEST - place, order)
    order = tl.where(place >= count - NEWEST, ALWAYS - (count - 1 - place), order)
    return tl.where(place < count, order, LEAST - 1)


@triton.jit
def _guess(total, squares, count, chosen, TRIALS: tl.constexpr):
    """Were bounds normal, about the last one that is chosen: where to count first, integers about that one's, and a step between them."""
    mean = total / count
    spread = tl.sqrt(tl.maximum(squares / count - mean * mean, 0.0))
    share = (chosen - 0.5) / count
    # Abramowitz and Stegun, 26.2.22: so many standard deviations above the mean is the last.
    root = tl.sqrt(-2.0 * tl.log(tl.maximum(tl.minimum(share, 1.0 - share), 1e-6)))
    beyond = root - (2.30753 + 0.27061 * root) / (1.0 + root * (0.99229 + 0.04481 * root))
    beyond = tl.where(share < 0.5, beyond, -beyond)
    guess = tl.minimum(tl.maximum(_ordered(mean + beyond * spread), LEAST + 1), -LEAST - 1).to(tl.int64)
    step = _ordered(mean + (beyond + STEP) * spread) - guess
    step = tl.minimum(tl.maximum(step, 1), 1 << 29)
    return guess - TRIALS // 2 * step, step


@triton.jit
def _trial(low, high, first, step, number):
    """One of the bounds, as an integer of 32 bits between both ends, at which pages are counted."""
    return tl.minimum(tl.maximum(first + number * step, low + 1), high - 1).to(tl.int32)


@triton.jit
def _counted(order, low, high, first, step, TRIALS: tl.constexpr, BITS: tl.constexpr):
    """For each page at which trials it is counted: BITS bits a trial, those of the first lowest."""
    several = tl.zeros(order.shape, tl.int64)
    for number in tl.static_range(TRIALS):
        several += tl.where(order >= _trial(low, high, first, step, number), tl.full((), 1 << (BITS * number), tl.int64), 0)
    return several


@triton.jit
def _narrowed(low, high, found, above, first, step, several, chosen, TRIALS: tl.constexpr, BITS: tl.constexpr):
    """Both ends of where the last order is that is chosen, as ``several`` pages are at trials or above, and where to count next.

    From the guess on in steps that grow until both ends are known; then between them.
    """
    lowest, highest = low, high
    for number in tl.static_range(TRIALS):
        trial = _trial(lowest, highest, first, step, number).to(tl.int64)
        many = ((several >> (BITS * number)) & ((1 << BITS) - 1)).to(tl.int32)
        enough = many >= chosen
        # Of those with enough the last one, of the others the first.
        low, found = tl.where(enough, trial, low), tl.where(enough, many, found)
        fewer = (many < chosen) & (trial < high)
        high, above = tl.where(fewer, trial, high), tl.where(fewer, many, above)
    known = (low != LEAST) & (high != -LEAST)
    step = tl.where(known, tl.maximum((high - low) // (TRIALS + 1), 1), tl.minimum(step * (TRIALS + 1), 1 << 29))
    return low, high, found, above, tl.where(low == LEAST, high - TRIALS * step, low + step), step


@triton.jit
def _list_best(order, low, high, need, better_before, equal_before, listed, slot):
    """List the ``slot`` of pages of the largest orders: those from ``high`` on, and of those from ``low`` on the first ``need``."""
    better = (order >= high).to(tl.int32)
    equal = ((order >= low) & (order < high)).to(tl.int32)
    # Both counts in one, of 16 bits each.
    both = tl.cumsum(better + (equal << 16), 0)
    rank = equal_before + ((both >> 16) & 0xFFFF)
    best = (better != 0) | ((equal != 0) & (rank <= need))
    tl.store(listed + better_before + (both & 0xFFFF) + tl.minimum(rank, need) - 1, slot, mask=best)
    return better_before + tl.sum(better), equal_before + tl.sum(equal)


@triton.jit
def _noted(bounds, place, count):
    """Bounds of pages at places, 0 where there is no page: where places are in order several are read at once, whatever the count."""
    found = tl.load(bounds + place, mask=place // 16 < tl.cdiv(count, 16), other=0.0, volatile=True)
    return tl.where(place < count, found, 0.0)


@triton.jit
def _first_slots(context, place, among, PAGE: tl.constexpr):
    """Of the pages at places of a context for which ``among`` is true."""
    return tl.load(context + place.to(tl.int64) * PAGE, mask=among, other=0)


@triton.jit
def _choose_resident(
    bounds, context, listed, count, chosen, zero, FIRST: tl.constexpr, NEWEST: tl.constexpr, PAGE: tl.constexpr, RESIDENT: tl.constexpr,
    TRIALS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """List the best pages of a head, whose bounds are in registers. Each count waits for all threads: few are made. ``zero`` is 0, which
    the compiler cannot know."""
    # As if in no order: else threads read several bounds each, and list pages one by one, for which all changes places in between.
    place = tl.arange(0, RESIDENT) ^ zero
    found = _noted(bounds, place, count)
    # On their way while pages are counted.
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
    """The same, where there are too many for registers."""
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
    """Let a head's pointers, in cells of a row's slots, lead to the tokens of the pages that are listed by their first slots."""
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
    """Least and largest numbers of a head in the pages that begin with slots."""
    page = slot.to(tl.uint32) // PAGE
    mine = extremes + (page.to(tl.int64) * HEADS + head)[:, None] * (2 * DIM) + dim[None, :]
    some = inside[:, None]
    if DIM < PADDED_DIM:
        some = some & (dim < DIM)[None, :]
    # Each is read once: what all programs read stays in the cache.
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
    """Bounds of some pages of a request for a KV head; whose program comes last, that points at the best. ``arrived`` is 0 for a head while
    none of its programs has come, and once it points there. Where it is launched ``EARLY`` it waits until what comes before has ended, and
    what comes after may begin when all programs have arrived."""
    if EARLY:
        gdc_wait()
    head, request = tl.program_id(0), tl.program_id(2)
    row = tl.load(rows + request).to(tl.int64)
    # Rows of full KV have no other row; nothing is chosen for them.
    context = token_table + tl.maximum(row - full_rows, 0) * table_row
    dim, each, by = tl.arange(0, PADDED_DIM), tl.arange(0, PAGES), tl.num_programs(1) * PAGES
    begin = tl.program_id(1) * PAGES
    # Of two steps, and whether there are so many pages or not: all that is read here is on its way at the same time.
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
            # Of the next step, and slots of the one after it.
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
            # For the next launch, and for who waits for the pointers.
            tl.atomic_xchg(arrived + of_row, 0, sem="release")


def bound_pages(key_table: torch.Tensor, like: torch.Tensor, slots: torch.Tensor, extremes: torch.Tensor, page: int) -> None:
    """Bring extremes up to date of the pages of ``slots``, in all layers, by the keys that are there; nothing waits for the device.

    Args:
        key_table: int64 [layers], addresses of the layers' key buffers.
        like: a key buffer, [slots, kv_heads, dim]; all have its shape, strides and dtype.
        slots: int64 [tokens], at least one.
        extremes: [layers, pages, kv_heads, 2, dim], of the keys' dtype: least and largest number of each channel.
        page: tokens of a page.
    """
    layers, pages, heads, _, dim = extremes.shape
    columns = min(COLUMNS, triton.next_power_of_2(heads * dim))
    _bound_pages[(len(slots), layers, triton.cdiv(heads * dim, columns))](
        key_table, like, slots, extremes, len(slots), pages, like.stride(0), like.stride(1), HEADS=heads, DIM=dim,
        PAGE=page, COLUMNS=columns,
    )  # fmt: skip


def _width(pages: int) -> int:
    """Bounds of a head for so many pages: as many as lets several be read at once."""
    return -(-pages // 16) * 16


def scratch_bytes(requests: int, heads: int, tokens: int, page: int) -> int:
    """Bytes in which :func:`point_at_best_pages` works, for so many requests and KV heads: bounds of pages, and slots of the best.

    Args:
        requests, heads: for which it is launched.
        tokens: in a row of the token table.
        page: tokens of a page.
    """
    return requests * heads * _width(triton.cdiv(tokens, page)) * (torch.float32.itemsize + torch.int32.itemsize)


def point_at_best_pages(
    begins: "PagePointerLayout",
    layer: int,
    queries: torch.Tensor,
    cells: torch.Tensor,
    token_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    cut: QuestGrid = QUEST_GRIDS[0],
) -> torch.Tensor:
    """Let each KV head's pointers lead to the tokens of its best pages, in the context's order.

    Reads nothing of the device on the host, and ``begins`` where it always lies: CUDA graphs may capture it. Rows that begin with no
    pointers, and those whose turn it is not, stay as they are.

    Args:
        begins: which rows begin with pointers, and to pages among how many.
        layer: counted from 0.
        queries: [requests, query_heads, dim].
        cells: a layer's keys as pointers, int32 [slots, kv_heads, pointers].
        token_table: int32 [2 * rows, width]: contexts, whose pages are whole, in the first half, in the other at the same place the
            slots that hold their pointers.
        rows: int64 [requests], of the table, each at most once but those without pointers.
        lengths: int64 [requests], slots of each row.
        cut: how the work is cut into programs.

    Returns:
        The bounds: float32 [requests, kv_heads, at least pages], where there were any to choose from. Who launches what begins before the
        choice has ended keeps them until then: the choice works in their memory.
    """
    requests, heads, dim, page = len(rows), cells.shape[1], queries.shape[-1], begins.page
    extremes, padded = begins.extremes.held[layer], triton.next_power_of_2(dim)
    most, at_once = triton.cdiv(token_table.shape[1], page), max(1, cut.step_bytes // (2 * padded * extremes.itemsize))
    parts = min(triton.cdiv(most, at_once), max(1, cut.programs // (heads * requests)))
    width = _width(most)
    bounds, listed = torch.empty(2, requests, heads, width, dtype=torch.float32, device=queries.device)
    _choose_pages[(heads, parts, requests)](
        queries.contiguous(), extremes, token_table, rows, lengths, begins.counts, begins.pages, begins.chosen_at[layer], begins.arrived,
        cells, bounds, listed.view(torch.int32), width, most, len(token_table) // 2, token_table.stride(0), cells.stride(0),
        cells.stride(1), HEADS=heads, GROUP=queries.shape[1] // heads, DIM=dim, PADDED_DIM=padded, PER_SLOT=begins.layout.per_slot,
        EVERY=begins.every, FIRST=begins.first, NEWEST=begins.newest, PAGE=page, PAGES=at_once,
        RESIDENT=min(cut.resident, triton.next_power_of_2(most)), LONG=most > cut.resident, CHUNK=CHUNK, KEPT=KEPT, TRIALS=TRIALS, BITS=BITS,
        MEMORY_TRIALS=MEMORY_TRIALS, MEMORY_BITS=MEMORY_BITS, maxnreg=cut.registers, **pdl_options(queries),
    )  # fmt: skip
    return bounds
