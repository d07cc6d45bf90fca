"""Kernels that send rows of K and V from a cache rank to an inference rank on another GPU. Selected rows that the compressed KV lacks
replace rows that it no longer needs. mem_cache/compressed/row_exchange.py does the same in PyTorch.

The cache rank finds arriving and leaving rows among the marked tokens (:func:`exchange`) and writes them to the exchange buffer
(:func:`push_rows`). The inference rank applies them (:func:`commit_rows`), and copies the newest rows at a refresh (:func:`move_newest`).

A *move* is an index in the compressed KV and the position of the token whose row is stored there. In an exchange buffer, a *pair* is a
layer and a KV head, counted layer by layer. In marks, a pair is a layer and a request (key_scores.py:load_pair).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.exchange_kernels import COMMIT_NUMBERS, QUESTION_STRIDE
from sglang_ext.layers.kernels.gpu_launch import buffer_pointer, pointer_at
from sglang_ext.layers.kernels.key_scores import CHUNK, PITCH, VARYING, load_pair
from sglang_ext.layers.kernels.kv_copies import _copy_tokens
from sglang_ext.layers.kernels.select_tokens import BEYOND, UNFUSED, WORD, MarkedTokens, load_normalizers, popcount, score_bit_patterns

# Held rows, words of marks, copied rows, and counts of heads that a program handles at once.
LOOKED_AT, WORDS, COPIED, COUNTED = 2048, 1024, 64, 1024
# Programs that copy rows: enough for a link between GPUs, on few multiprocessors because the selection runs at the same time. Then: warps
# of each program.
COPYING, WARPS = 33, 8


@triton.jit(do_not_specialize=(*VARYING, "fresh", "held_row"))
def _exchange(
    marks, logits, tops, masses, held, token_table, numbers, coming, bits, going, counts, moves, slots, first_layer, first_request,
    requests, pitches, chunks, table_row, most, fresh, held_row, SINKS: tl.constexpr, NEWEST: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Find the arriving tokens of a KV head of a context, their slots, and the indices that they take. Marks of staying tokens are cleared."""
    head, pair = tl.program_id(0), tl.program_id(1)
    layer, mine, at, length = load_pair(numbers, pair, first_layer, first_request, requests)
    keep, of_head, pitch = tl.load(mine + 2).to(tl.int32), (pair * HEADS + head).to(tl.int64), pitches.to(tl.int64) * PITCH
    marks, coming, bits, going = marks + of_head * (pitch // WORD), coming + of_head * most, bits + of_head * most, going + of_head * most
    held += (first_request + pair % requests) * held_row.to(tl.int64) + (layer * HEADS + head) * keep
    gone, many = 0, 0
    for first in tl.range(0, keep, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < keep
        token = tl.load(held + place, mask=inside, other=-1)
        known = inside & (token >= 0) & (token < length)
        bit, word = 1 << (token & (WORD - 1)), marks + token // WORD
        stays = known & ((tl.load(word, mask=known, other=0) & bit) != 0)
        # Clear marks of staying tokens; the remaining marks are of candidates.
        tl.atomic_and(word, ~bit, mask=stays, sem="relaxed")
        goes = (inside & (stays == 0)).to(tl.int32)
        tl.store(going + gone + tl.cumsum(goes, 0) - 1, place, mask=goes > 0)
        gone += tl.sum(goes)
    tl.debug_barrier()
    for first in tl.range(0, tl.cdiv(length, WORD), WORDS):
        at_word = first + tl.arange(0, WORDS)
        left = tl.load(marks + at_word, mask=at_word * WORD < length, other=0)
        of_word = popcount(left)
        place = many + tl.cumsum(of_word, 0) - of_word
        many += tl.sum(of_word)
        # One token of each word per iteration: few arrive.
        for _ in tl.range(0, tl.max(of_word)):
            tl.store(coming + place, at_word * WORD + popcount((left & -left) - 1), mask=left != 0)
            left, place = left & (left - 1), place + 1
    tl.debug_barrier()
    # Leaving and arriving rows are equal in number, except if the record is overwritten meanwhile. Then the reply is not applied.
    limit = tl.minimum(fresh, gone)
    last, need = -1, 0
    if many > limit:
        normalizers = load_normalizers(tops, masses, of_head, chunks, tl.cdiv(length, CHUNK), GROUP, G)
        for first in tl.range(0, many, BLOCK):
            index = first + tl.arange(0, BLOCK)
            token = tl.load(coming + index, mask=index < many, other=0)
            score = score_bit_patterns(logits, normalizers, of_head, pitch, token, length, length, SINKS, NEWEST, GROUP, G, BLOCK)
            tl.store(bits + index, score, mask=index < many)
        tl.debug_barrier()
        low, high, above = 0, BEYOND, 0
        while high - low > 1:
            middle, best = low + (high - low) // 2, 0
            for first in tl.range(0, many, BLOCK):
                index = first + tl.arange(0, BLOCK)
                best += tl.sum((tl.load(bits + index, mask=index < many, other=-1) >= middle).to(tl.int32))
            enough = best >= limit
            low, high, above = tl.where(enough, middle, low), tl.where(enough, high, middle), tl.where(enough, above, best)
        last, need = low, limit - above
    written, equals = 0, 0
    for first in tl.range(0, many, BLOCK):
        index = first + tl.arange(0, BLOCK)
        # If all fit, scores are not needed.
        score = tl.load(bits + index, mask=(index < many) & (last >= 0), other=BEYOND)
        equal = ((index < many) & (score == last)).to(tl.int32)
        # Of equal scores, earlier tokens are selected first.
        comes = (index < many) & ((score > last) | ((equal > 0) & (equals + tl.cumsum(equal, 0) <= need)))
        rank = written + tl.cumsum(comes.to(tl.int32), 0) - 1
        move, token = moves + (of_head * fresh + rank) * 2, tl.load(coming + index, mask=comes, other=0)
        tl.store(move, tl.load(going + rank, mask=comes, other=0), mask=comes)
        tl.store(move + 1, token, mask=comes)
        slot = tl.load(token_table + at * table_row + token, mask=comes, other=0)
        tl.store(slots + of_head * fresh + rank, slot, mask=comes)
        written, equals = written + tl.sum(comes.to(tl.int32)), equals + tl.sum(equal)
    tl.store(counts + of_head, written)


@triton.jit
def _next_rows(counts, slots, there, part, parts, all_heads, of_request, requests, fresh, ROWS: tl.constexpr):
    """Return arriving rows of a part's head, slots of its own rows, and whether the request is published. Zeros beyond the last part."""
    of_head, index, inside = part % all_heads, part // all_heads * ROWS + tl.arange(0, ROWS), part < parts
    slot = tl.load(slots + of_head.to(tl.int64) * fresh + index, mask=inside & (index < fresh), other=0)
    return tl.load(counts + of_head, mask=inside, other=0), slot, tl.load(there + of_head // of_request % requests, mask=inside, other=0)


@triton.jit(
    do_not_specialize=(
        "requests", "all_heads", "first_layer", "first_request", "pairs", "fresh", "to_counts", "to_moves", "to_keys", "to_values",
    ),
)  # fmt: skip
def _push_rows(
    key_table, value_table, like, counts, moves, slots, asked, there, to_counts, to_moves, to_keys, to_values, requests, all_heads,
    first_layer, first_request, pairs, fresh, slot_stride, head_stride, HEADS: tl.constexpr, DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, ROWS: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Write moves and rows of several heads to their lanes, for published selection requests."""
    KIND: tl.constexpr = like.dtype.element_ty
    asked, there, dim = asked + QUESTION_STRIDE * first_request, there + first_request, tl.arange(0, PADDED_DIM)
    most = tl.zeros((COUNTED,), tl.int32)
    for first in tl.range(0, all_heads, COUNTED):
        place = first + tl.arange(0, COUNTED)
        most = tl.maximum(most, tl.load(counts + place, mask=place < all_heads, other=0))
    # First the first rows of all heads, then the next ones, so that programs have equal work if few rows arrive.
    parts = all_heads * tl.maximum(tl.cdiv(tl.max(most), ROWS), 1)
    many, slot, put = _next_rows(counts, slots, there, tl.program_id(0), parts, all_heads, HEADS, requests, fresh, ROWS)
    for part in tl.range(tl.program_id(0), parts, tl.num_programs(0)):
        # Loaded while rows are in transfer.
        next_part = part + tl.num_programs(0)
        later, later_slot, later_put = _next_rows(counts, slots, there, next_part, parts, all_heads, HEADS, requests, fresh, ROWS)
        of_head, first = (part % all_heads).to(tl.int64), part // all_heads * ROWS
        layer, request, head = first_layer + of_head // HEADS // requests, of_head // HEADS % requests, of_head % HEADS
        count, to_pair = many * put, tl.load(asked + QUESTION_STRIDE * request) * pairs + layer * HEADS + head
        if (first == 0) & (put != 0):
            tl.store(to_counts.to(tl.pointer_type(tl.int32)) + to_pair, count)
        if first < count:
            index = first + tl.arange(0, ROWS)
            inside = index < count
            read = (slot.to(tl.int64) * slot_stride + head * head_stride)[:, None] + dim[None, :]
            write, seen = ((to_pair * fresh + index) * DIM)[:, None] + dim[None, :], inside[:, None] & (dim < DIM)[None, :]
            keys, values = buffer_pointer(key_table, layer, KIND), buffer_pointer(value_table, layer, KIND)
            key, value = tl.load(keys + read, mask=seen), tl.load(values + read, mask=seen)
            move, to_move = moves + (of_head * fresh + index) * 2, to_moves.to(tl.pointer_type(tl.int32)) + (to_pair * fresh + index) * 2
            place, token = tl.load(move, mask=inside, other=0), tl.load(move + 1, mask=inside, other=0)
            tl.store(to_move, place, mask=inside)
            tl.store(to_move + 1, token, mask=inside)
            tl.store(pointer_at(to_keys, KIND) + write, key, mask=seen)
            tl.store(pointer_at(to_values, KIND) + write, value, mask=seen)
        many, slot, put = later, later_slot, later_put


class GpuRowExchange(NamedTuple):
    """Arriving rows, and the indices of compressed KV that they take, as in mem_cache/compressed/row_exchange.py:plan_exchange.

    int32 [layers, requests, kv_heads, ...]: ``counts`` of arriving tokens; ``moves``, [fresh, 2], indices and positions, ascending by position;
    ``slots``, [fresh], of these tokens at the rank.
    """

    counts: torch.Tensor
    moves: torch.Tensor
    slots: torch.Tensor


def exchange(marked: MarkedTokens, held: torch.Tensor, most: int, fresh: int) -> GpuRowExchange:
    """Find the arriving rows among ``marked`` tokens of some requests in some layers. Clears the marks.

    ``held``: int32 [all requests, numbers], result of MappedExchangeBuffer.records. For a request, the first [all layers, kv_heads, keep] are the
    positions that its compressed KV holds. An index with a position outside the context is a leaving one. ``most``: maximum tokens that a head
    keeps. ``fresh``: maximum arriving tokens of a head; if there are more, those of the highest scores arrive.
    """
    contexts, heads, (_, _, requests, pitches), device = marked.contexts, marked.tables[1].shape[1], marked.where, held.device
    sizes, chunks = (marked.pairs // requests, requests, heads), triton.cdiv(marked.longest, CHUNK)
    coming, bits, going = (torch.empty(*sizes, most, dtype=torch.int32, device=device) for _ in range(3))
    counts = torch.empty(sizes, dtype=torch.int32, device=device)
    moves = torch.empty(*sizes, fresh, 2, dtype=torch.int32, device=device)
    slots = torch.empty(*sizes, fresh, dtype=torch.int32, device=device)
    _exchange[(heads, marked.pairs)](
        marked.marks, *marked.logit_buffers, held, contexts.token_table, contexts.numbers, coming, bits, going, counts, moves, slots,
        *marked.where, chunks, contexts.token_table.stride(0), most, fresh, held.stride(0), SINKS=contexts.always[0],
        NEWEST=contexts.always[1], HEADS=heads, GROUP=marked.group, G=triton.next_power_of_2(marked.group), BLOCK=LOOKED_AT,
        WORDS=WORDS, CHUNK=CHUNK, num_warps=WARPS, **UNFUSED,
    )  # fmt: skip
    return GpuRowExchange(counts, moves, slots)


def push_rows(
    tables: tuple[torch.Tensor, torch.Tensor], like: torch.Tensor, comes: GpuRowExchange, asked: torch.Tensor, there: torch.Tensor,
    targets: tuple[int, int, int, int], first_layer: int = 0, first_request: int = 0,
) -> None:  # fmt: skip
    """Write moves of some requests in some layers, and K and V of their tokens, to an exchange buffer.

    ``tables``: int64 [all layers] each, addresses of the layers' key and value buffers. ``like``: a key buffer, [slots, kv_heads, dim]; all have its
    shape, strides and dtype. ``comes``: result of :func:`exchange`, from ``first_layer`` and ``first_request`` on. ``asked``, ``there``: as in
    exchange_kernels.py:push_chosen. ``targets``: addresses of the exchange buffer's counts, moves, keys and values, for its first lane.
    """
    layers, requests, heads, fresh = comes.slots.shape
    all_heads, dim = layers * requests * heads, like.shape[2]
    _push_rows[(min(COPYING, all_heads * triton.cdiv(fresh, COPIED)),)](
        *tables, like, *comes, asked, there, *targets, requests, all_heads, first_layer, first_request, len(tables[0]) * heads, fresh,
        like.stride(0), like.stride(1), HEADS=heads, DIM=dim, PADDED_DIM=triton.next_power_of_2(dim), ROWS=COPIED, COUNTED=COUNTED,
        num_warps=WARPS,
    )  # fmt: skip


NUMBERS = tl.constexpr(COMMIT_NUMBERS)
# Index of applied rows among the counters (managers/cache_rank/exchange_buffer.py:COUNTERS).
ROWS_COUNTER = tl.constexpr(4)
# Rows that a program copies at once.
COMMITTED = 16


@triton.jit(do_not_specialize=("fresh",))
def _commit_rows(
    counts, moves, row_keys, row_values, hits, numbers, records, counters, key_table, value_table, targets, fresh, slot_stride,
    head_stride, HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Apply some moves of a pair if a reply has arrived. Moves outside the compressed KV or its context are skipped."""
    pair, request, pairs = tl.program_id(0), tl.program_id(2), tl.num_programs(0)
    if tl.load(hits + request) != 0:
        KIND: tl.constexpr = row_keys.dtype.element_ty
        mine = numbers + request * NUMBERS
        lane, covered, keep, first = tl.load(mine), tl.load(mine + 3), tl.load(mine + 4), tl.load(mine + 5)
        of_pair = lane * pairs + pair
        index, dim = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
        inside = index < tl.minimum(tl.load(counts + of_pair), fresh)
        move = moves + (of_pair * fresh + index) * 2
        place, token = tl.load(move, mask=inside, other=-1), tl.load(move + 1, mask=inside, other=-1)
        inside &= (place >= 0) & (place < keep) & (token >= 0) & (token < covered)
        slot = tl.load(targets + first + place, mask=inside, other=0)
        read, seen = ((of_pair * fresh + index) * DIM)[:, None] + dim[None, :], inside[:, None] & (dim < DIM)[None, :]
        write = (slot * slot_stride + pair % HEADS * head_stride)[:, None] + dim[None, :]
        tl.store(buffer_pointer(key_table, pair // HEADS, KIND) + write, tl.load(row_keys + read, mask=seen), mask=seen)
        tl.store(buffer_pointer(value_table, pair // HEADS, KIND) + write, tl.load(row_values + read, mask=seen), mask=seen)
        record = tl.load(records + request).to(tl.pointer_type(tl.int32))
        tl.store(record + pair * keep + place, token, mask=inside)
        tl.atomic_add(counters + ROWS_COUNTER, tl.sum(inside.to(tl.int64)))


@triton.jit(do_not_specialize=("count",))
def _move_newest(
    key_table, value_table, keys, values, places, sources, targets, count, slot_stride, head_stride, HEADS: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy rows of some tokens to a head's indices in the compressed KV."""
    layer, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    index = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = index < count
    source = tl.load(sources + index, mask=inside, other=0)
    place = tl.load(places + tl.program_id(0).to(tl.int64) * count + index, mask=inside, other=0)
    target = tl.load(targets + place, mask=inside, other=0)
    read, written = source * slot_stride + head * head_stride, target * slot_stride + head * head_stride
    _copy_tokens(key_table, keys, layer, read, written, inside, DIM, PADDED_DIM)
    _copy_tokens(value_table, values, layer, read, written, inside, DIM, PADDED_DIM)


def commit_rows(
    arrived: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], hits: torch.Tensor, numbers: torch.Tensor,
    records: torch.Tensor, counters: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], like: torch.Tensor, targets: torch.Tensor,
) -> None:  # fmt: skip
    """Write received rows to the compressed KV of each request whose reply has arrived. The others stay unchanged.

    ``arrived``: regions of the exchange buffer, by lane: counts, moves, keys and values (managers/cache_rank/protocol.py:ExchangeLayout). ``hits``:
    result of exchange_kernels.py:wait_for_selections. ``numbers``: int64 [requests, :data:`COMMIT_NUMBERS`]. ``records``: int64 [requests],
    addresses of int32 [layers, kv_heads, keep], the positions that each compressed KV holds; updated. ``counters``: int64, of which the one of
    applied rows is incremented. ``tables``, ``like``: as in :func:`push_rows`. ``targets``: int64, slots of the compressed KV of all requests.
    """
    heads, dim = like.shape[1:]
    fresh = arrived[1].shape[2]
    _commit_rows[(len(tables[0]) * heads, triton.cdiv(fresh, COMMITTED), len(numbers))](
        *arrived, hits, numbers, records, counters, *tables, targets, fresh, like.stride(0), like.stride(1),
        HEADS=heads, DIM=dim, PADDED_DIM=triton.next_power_of_2(dim), ROWS=COMMITTED,
    )  # fmt: skip


def move_newest(
    tables: tuple[torch.Tensor, torch.Tensor], keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor, sources: torch.Tensor,
    targets: torch.Tensor,
) -> None:  # fmt: skip
    """Copy rows of tokens to indices of a compressed KV, which differ from head to head.

    ``tables``: as in :func:`push_rows`. ``keys``, ``values``: a layer's buffers, [slots, kv_heads, dim]; all have their shape, strides and dtype.
    ``places``: int64 [layers, kv_heads, count], target indices. ``sources``, ``targets``: int64, slots of the tokens, and of the compressed KV.
    """
    layers, heads, count = places.shape
    dim = keys.shape[2]
    _move_newest[(layers * heads, triton.cdiv(count, COMMITTED))](
        *tables, keys, values, places.contiguous(), sources, targets, count, keys.stride(0), keys.stride(1),
        HEADS=heads, DIM=dim, PADDED_DIM=triton.next_power_of_2(dim), ROWS=COMMITTED,
    )  # fmt: skip
