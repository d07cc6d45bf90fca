"""Quest's selection on a GPU (Tang et al. 2024, arXiv 2406.10774), as fast as its bytes allow: extremes of pages, and the choice of a step.

A page's bound is the most that a key between its least and largest numbers could give a query, mean over the query heads of its KV
head, as ``mem_cache/selection/baselines.py`` has it. It is linear in the parts of a query above and below 0, so that their means
over the heads are all that is multiplied. The pages of the largest bounds become pointers to their tokens (chosen_pages.py).
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressed.formats.chosen_pages import ChosenPages


class Cut(NamedTuple):
    """How the choice of a batch is cut into programs.

    Attributes:
        pages: that a program multiplies at once.
        stages: of so many pages, that it has on their way.
        programs: of all requests and heads, beyond which each multiplies several times as many pages.
        resident: bounds that a program can have in registers; of more pages it reads them again, so many as CHUNK at once.
        registers: of a thread, None for as many as the compiler likes.
    """

    pages: int
    stages: int
    programs: int
    resident: int = 2048
    registers: int | None = 128


# Servers take the first; which is best docs/benchmarks/selection_speed.py says.
CUTS = (Cut(64, 1, 8192), Cut(32, 3, 1056), Cut(64, 3, 528), Cut(32, 4, 528), Cut(32, 3, 2112), Cut(64, 1, 8192, 4096, None))
CHUNK = 1024
# Pointers that a program writes at once.
POINTERS = 2048
# Numbers of a page's tokens that a program bounds at once.
COLUMNS = 512
# Below all bounds, as integers, and the largest that a bound may be: infinity. What is chosen in any case is above that.
LEAST, LARGEST, ALWAYS = tl.constexpr(-0x7FFFFFFF), tl.constexpr(0x7F800000), tl.constexpr(0x7FFFFFF0)
# From a guess of the last bound that is chosen to the next one at first, of the bounds' standard deviation.
STEP = tl.constexpr(0.125)


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
        keys = tl.multiple_of(tl.load(key_table + layer).to(tl.pointer_type(like.dtype.element_ty)), 16)
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
def _guess(total, squares, count, chosen):
    """Were bounds normal, about the last one that is chosen, as an integer, and from there to the next guess: where to look first."""
    mean = total / count
    spread = tl.sqrt(tl.maximum(squares / count - mean * mean, 0.0))
    share = (chosen - 0.5) / count
    # Abramowitz and Stegun, 26.2.22: so many standard deviations above the mean is the last.
    root = tl.sqrt(-2.0 * tl.log(tl.maximum(tl.minimum(share, 1.0 - share), 1e-6)))
    beyond = root - (2.30753 + 0.27061 * root) / (1.0 + root * (0.99229 + 0.04481 * root))
    beyond = tl.where(share < 0.5, beyond, -beyond)
    guess = tl.minimum(tl.maximum(_ordered(mean + beyond * spread), LEAST + 1), -LEAST - 1)
    step = _ordered(mean + (beyond + STEP) * spread) - guess
    return guess, tl.minimum(tl.maximum(step, 1), 1 << 29)


@triton.jit
def _narrowed(low, high, found, above, middle, step, turn, many, chosen):
    """Both ends of where the last order is that is chosen, and where to count next, as ``many`` are at ``middle`` or above.

    From the guess on in doubled steps, until both ends are known; then where a straight line between the counts at both ends leads, and,
    that any numbers come to an end, each third time to the middle.
    """
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
    return low, high, found, above, middle, tl.minimum(2 * step, 1 << 29), turn


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
def _noted(numbers, place, count):
    """What programs noted of pages at places, bounds or slots, 0 where there is no page: several are read at once, whatever the count."""
    found = tl.load(numbers + place, mask=place // 16 < tl.cdiv(count, 16), other=0, volatile=True)
    return tl.where(place < count, found, 0)


@triton.jit
def _choose_resident(bounds, slots, listed, count, chosen, FIRST: tl.constexpr, NEWEST: tl.constexpr, RESIDENT: tl.constexpr):
    """List the best pages of a head, whose bounds are in registers. Each count waits for all threads: few are made."""
    place = tl.arange(0, RESIDENT)
    found, slot = _noted(bounds, place, count), _noted(slots, place, count)
    middle, step = _guess(tl.sum(found), tl.sum(found * found), count, chosen)
    order = _orders(found, place, count, FIRST, NEWEST)
    low, high, there, above, turn = LEAST, -LEAST, count, 0, 0
    while (there != chosen) & (low + 1 < high):
        many = tl.sum((order >= middle).to(tl.int32))
        low, high, there, above, middle, step, turn = _narrowed(low, high, there, above, middle, step, turn, many, chosen)
    _list_best(order, low, high, chosen - above, 0, 0, listed, slot)


@triton.jit
def _choose_in_memory(bounds, slots, listed, count, chosen, FIRST: tl.constexpr, NEWEST: tl.constexpr, CHUNK: tl.constexpr):
    """The same, where there are too many for registers."""
    column = tl.arange(0, CHUNK)
    total = tl.zeros((CHUNK,), tl.float32)
    squares = tl.zeros((CHUNK,), tl.float32)
    for first in tl.range(0, count, CHUNK):
        found = _noted(bounds, first + column, count)
        total += found
        squares += found * found
    middle, step = _guess(tl.sum(total), tl.sum(squares), count, chosen)
    low, high, there, above, turn = LEAST, -LEAST, count, 0, 0
    while (there != chosen) & (low + 1 < high):
        several = tl.zeros((CHUNK,), tl.int32)
        for first in tl.range(0, count, CHUNK):
            found = _noted(bounds, first + column, count)
            several += (_orders(found, first + column, count, FIRST, NEWEST) >= middle).to(tl.int32)
        many = tl.sum(several)
        low, high, there, above, middle, step, turn = _narrowed(low, high, there, above, middle, step, turn, many, chosen)
    better, equal = 0, 0
    for first in tl.range(0, count, CHUNK):
        place = first + column
        found = _noted(bounds, place, count)
        order = _orders(found, place, count, FIRST, NEWEST)
        better, equal = _list_best(order, low, high, chosen - above, better, equal, listed, _noted(slots, place, count))


@triton.jit
def _first_slots(context, place, count, PAGE: tl.constexpr):
    """Of pages at places of a context."""
    return tl.load(context + place.to(tl.int64) * PAGE, mask=place < count, other=0)


@triton.jit
def _bound_all(
    bounds, slots, extremes, context, begin, count, by, head, below, above, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Note bounds and first slots of every ``by``-th PAGES pages from ``begin`` on, by a head's queries' parts below and above 0."""
    dim, each = tl.arange(0, PADDED_DIM), tl.arange(0, PAGES)
    slot = _first_slots(context, begin + each, count, PAGE)
    for first in tl.range(begin, count, by, num_stages=STAGES):
        place = first + each
        # Read a step ahead, so that extremes of several steps may be on their way.
        next_slot = _first_slots(context, place + by, count, PAGE)
        page = slot.to(tl.uint32) // PAGE
        mine = extremes + (page.to(tl.int64) * HEADS + head)[:, None] * (2 * DIM) + dim[None, :]
        some = (place < count)[:, None]
        if DIM < PADDED_DIM:
            some = some & (dim < DIM)[None, :]
        least = tl.load(mine, mask=some, other=0.0).to(tl.float32)
        largest = tl.load(mine + DIM, mask=some, other=0.0).to(tl.float32)
        found = tl.sum(least * below[None, :] + largest * above[None, :], 1) / GROUP
        tl.store(bounds + place, found, mask=place < count)
        tl.store(slots + place, slot, mask=place < count)
        slot = next_slot


@triton.jit
def _choose_pages(
    queries, extremes, token_table, rows, lengths, counts, pages, chosen_at, arrived, cells, bounds, slots, listed, width, full_rows,
    table_row, slot_stride, head_stride, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PER_SLOT: tl.constexpr, EVERY: tl.constexpr, FIRST: tl.constexpr, NEWEST: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr,
    STAGES: tl.constexpr, RESIDENT: tl.constexpr, LONG: tl.constexpr, CHUNK: tl.constexpr, POINTERS: tl.constexpr,
):  # fmt: skip
    """Bounds of some pages of a request for a KV head; whose program comes last, that points at the best."""
    head, request = tl.program_id(0), tl.program_id(2)
    row = tl.load(rows + request).to(tl.int64)
    dim = tl.arange(0, PADDED_DIM)
    below = tl.zeros((PADDED_DIM,), tl.float32)
    above = tl.zeros((PADDED_DIM,), tl.float32)
    for each in tl.static_range(GROUP):
        query = tl.load(queries + ((request * HEADS + head) * GROUP + each) * DIM + dim, mask=dim < DIM, other=0.0).to(tl.float32)
        below += tl.minimum(query, 0.0)
        above += tl.maximum(query, 0.0)
    of_row, of_head = row * HEADS + head, (request * HEADS + head).to(tl.int64)
    count, kept, after = tl.load(pages + row), tl.load(counts + row), 0
    if EVERY > 1:
        after = tl.load(lengths + request).to(tl.int32) - tl.cdiv(kept, PER_SLOT)
        count = tl.where(after - tl.load(chosen_at + of_row) >= EVERY, count, 0)
    begin = tl.program_id(1) * PAGES
    if begin < count:
        context = token_table + (row - full_rows) * table_row
        mine, my_slots, list_of_mine = bounds + of_head * width, slots + of_head * width, listed + of_head * width
        _bound_all(
            mine, my_slots, extremes, context, begin, count, tl.num_programs(1) * PAGES, head, below, above, HEADS, GROUP, DIM, PADDED_DIM,
            PAGE, PAGES, STAGES,
        )  # fmt: skip
        tl.debug_barrier()
        if tl.atomic_add(arrived + of_row, 1) == tl.minimum(tl.num_programs(1), tl.cdiv(count, PAGES)) - 1:
            # For the next launch.
            tl.store(arrived + of_row, 0)
            if EVERY > 1:
                tl.store(chosen_at + of_row, after)
            if LONG:
                if count > RESIDENT:
                    _choose_in_memory(mine, my_slots, list_of_mine, count, kept // PAGE, FIRST, NEWEST, CHUNK)
                else:
                    _choose_resident(mine, my_slots, list_of_mine, count, kept // PAGE, FIRST, NEWEST, RESIDENT)
            else:
                _choose_resident(mine, my_slots, list_of_mine, count, kept // PAGE, FIRST, NEWEST, RESIDENT)
            tl.debug_barrier()
            for first in tl.range(0, kept, POINTERS):
                pointer = first + tl.arange(0, POINTERS)
                inside = pointer < kept
                slot = tl.load(token_table + row * table_row + pointer // PER_SLOT, mask=inside, other=0).to(tl.int64)
                token = tl.load(list_of_mine + pointer // PAGE, mask=inside, other=0) + pointer % PAGE
                tl.store(cells + slot * slot_stride + head * head_stride + pointer % PER_SLOT, token, mask=inside)


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
    """Bytes in which :func:`point_at_best_pages` works, for so many requests and KV heads: bounds and slots of pages, and of the best.

    Args:
        requests, heads: for which it is launched.
        tokens: in a row of the token table.
        page: tokens of a page.
    """
    return requests * heads * _width(triton.cdiv(tokens, page)) * (torch.float32.itemsize + 2 * torch.int32.itemsize)


def point_at_best_pages(
    begins: "ChosenPages",
    layer: int,
    queries: torch.Tensor,
    cells: torch.Tensor,
    token_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    cut: Cut = CUTS[0],
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
        The bounds: float32 [requests, kv_heads, at least pages], where there were any to choose from.
    """
    requests, heads, dim, page = len(rows), cells.shape[1], queries.shape[-1], begins.page
    most = triton.cdiv(token_table.shape[1], page)
    parts = min(triton.cdiv(most, cut.pages), max(1, cut.programs // (heads * requests)))
    width = _width(most)
    bounds = torch.empty(requests, heads, width, dtype=torch.float32, device=queries.device)
    slots, listed = (torch.empty(requests, heads, width, dtype=torch.int32, device=queries.device) for _ in range(2))
    _choose_pages[(heads, parts, requests)](
        queries.contiguous(), begins.extremes.held[layer], token_table, rows, lengths, begins.counts, begins.pages,
        begins.chosen_at[layer], begins.arrived, cells, bounds, slots, listed, width, len(token_table) // 2, token_table.stride(0),
        cells.stride(0), cells.stride(1), HEADS=heads, GROUP=queries.shape[1] // heads, DIM=dim, PADDED_DIM=triton.next_power_of_2(dim),
        PER_SLOT=begins.form.per_slot, EVERY=begins.every, FIRST=begins.first, NEWEST=begins.newest, PAGE=page, PAGES=cut.pages,
        STAGES=cut.stages, RESIDENT=min(cut.resident, triton.next_power_of_2(most)), LONG=most > cut.resident, CHUNK=CHUNK,
        POINTERS=POINTERS, maxnreg=cut.registers,
    )  # fmt: skip
    return bounds
