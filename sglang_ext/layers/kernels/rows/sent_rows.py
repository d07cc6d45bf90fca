"""Which rows a copy lacks of what was chosen for it, and the way of these into the memory of its GPU."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.addresses import buffer_of, numbers_at
from sglang_ext.layers.kernels.hand_over import ASKED

# Of infinity, the bits of a score and one: above those of all scores.
BEYOND = tl.constexpr(0x7F800001)
# Beyond all positions.
NOWHERE = tl.constexpr(0x7FFFFFFF)
# Places that a program looks at, and rows that one copies, at once.
LOOKED_AT, COPIED = 1024, 64
# Programs that copy rows, and warps of each: as many as a link between GPUs wants, on few of the processors for what chooses beside them.
COPYING, WARPS = 33, 8


@triton.jit
def _fresh(present, first, keep, BLOCK: tl.constexpr):
    """Which of a head's chosen tokens from ``first`` on the copy lacks."""
    index = first + tl.arange(0, BLOCK)
    return (index < keep) & (tl.load(present + index, mask=index < keep, other=1) == 0)


@triton.jit(
    do_not_specialize=("requests", "most", "fresh", "held_row", "table_row", "first_pair", "steps"),
    do_not_specialize_on_alignment=("bits", "present"),
)
def _exchange(
    chosen, bits, held, token_table, present, going, counts, moves, slots, asked, requests, most, fresh, held_row, table_row, first_pair,
    steps, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a pair of a request what comes, where it lies, and the places that it takes."""
    pair, request, pairs = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    keep = tl.load(asked + ASKED * request + 2).to(tl.int32)
    of_chosen = ((pair // HEADS * requests + request) * HEADS + pair % HEADS).to(tl.int64) * most
    of_pair = (request * pairs + pair).to(tl.int64)
    chosen, bits, present, going = chosen + of_chosen, bits + of_chosen, present + of_pair * most, going + of_pair * most
    held += request * held_row.to(tl.int64) + (first_pair + pair) * keep
    gone, coming = 0, 0
    for first in tl.range(0, keep, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < keep
        token = tl.load(held + place, mask=inside, other=-1)
        low = tl.zeros((BLOCK,), tl.int32)
        high = low + keep
        for _ in tl.range(0, steps):
            middle = (low + high) // 2
            below = tl.load(chosen + middle, mask=inside & (middle < keep), other=NOWHERE) < token
            low, high = tl.where(below, middle + 1, low), tl.where(below, high, middle)
        stays = inside & (token >= 0) & (tl.load(chosen + low, mask=inside & (low < keep), other=NOWHERE) == token)
        tl.store(present + low, tl.full((BLOCK,), 1, tl.int8), mask=stays)
        goes = (inside & (stays == 0)).to(tl.int32)
        tl.store(going + gone + tl.cumsum(goes, 0) - 1, place, mask=goes > 0)
        gone += tl.sum(goes)
    tl.debug_barrier()
    for first in tl.range(0, keep, BLOCK):
        coming += tl.sum(_fresh(present, first, keep, BLOCK).to(tl.int32))
    # Places are as many as tokens, but for a record that is written meanwhile, of which the answer is not taken.
    limit = tl.minimum(fresh, gone)
    last, need = -1, 0
    if coming > limit:
        low, high, above = 0, BEYOND, 0
        while high - low > 1:
            middle, many = low + (high - low) // 2, 0
            for first in tl.range(0, keep, BLOCK):
                index = first + tl.arange(0, BLOCK)
                score = tl.load(bits + index, mask=index < keep, other=-1)
                many += tl.sum((_fresh(present, first, keep, BLOCK) & (score >= middle)).to(tl.int32))
            enough = many >= limit
            low, high, above = tl.where(enough, middle, low), tl.where(enough, high, middle), tl.where(enough, above, many)
        last, need = low, limit - above
    written, equals = 0, 0
    for first in tl.range(0, keep, BLOCK):
        index = first + tl.arange(0, BLOCK)
        comes = _fresh(present, first, keep, BLOCK)
        score = tl.load(bits + index, mask=index < keep, other=-1)
        equal = (comes & (score == last)).to(tl.int32)
        # Of equal scores those of earlier tokens.
        comes &= (score > last) | ((equal > 0) & (equals + tl.cumsum(equal, 0) <= need))
        rank = written + tl.cumsum(comes.to(tl.int32), 0) - 1
        move, token = moves + (of_pair * fresh + rank) * 2, tl.load(chosen + index, mask=comes, other=0)
        tl.store(move, tl.load(going + rank, mask=comes, other=0), mask=comes)
        tl.store(move + 1, token, mask=comes)
        slot = tl.load(token_table + request * table_row.to(tl.int64) + token, mask=comes, other=0)
        tl.store(slots + of_pair * fresh + rank, slot, mask=comes)
        written, equals = written + tl.sum(comes.to(tl.int32)), equals + tl.sum(equal)
    tl.store(counts + of_pair, written)


@triton.jit
def _next_rows(counts, slots, there, part, parts, here, pairs, fresh, ROWS: tl.constexpr):
    """Of a part how many rows come for its pair in all, where its own lie, and whether the question is there; nothing beyond the last."""
    of_pair, index, inside = part % here, part // here * ROWS + tl.arange(0, ROWS), part < parts
    slot = tl.load(slots + of_pair.to(tl.int64) * fresh + index, mask=inside & (index < fresh), other=0)
    return tl.load(counts + of_pair, mask=inside, other=0), slot, tl.load(there + of_pair // pairs, mask=inside, other=0)


@triton.jit(
    do_not_specialize=("requests", "pairs", "first_pair", "all_pairs", "fresh", "to_counts", "to_moves", "to_keys", "to_values")
)  # fmt: skip
def _push_rows(
    key_table, value_table, like, counts, moves, slots, asked, there, to_counts, to_moves, to_keys, to_values, requests, pairs, first_pair,
    all_pairs, fresh, slot_stride, head_stride, HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Moves of pairs of requests whose questions are there, and their rows, to their lanes: some at once."""
    KIND: tl.constexpr = like.dtype.element_ty
    here, dim = requests * pairs, tl.arange(0, PADDED_DIM)
    # First rows of all pairs, then the next ones: where few come all programs have as many of them.
    parts = here * tl.cdiv(fresh, ROWS)
    many, slot, put = _next_rows(counts, slots, there, tl.program_id(0), parts, here, pairs, fresh, ROWS)
    for part in tl.range(tl.program_id(0), parts, tl.num_programs(0)):
        # Looked up while rows are on their way.
        later, later_slot, later_put = _next_rows(counts, slots, there, part + tl.num_programs(0), parts, here, pairs, fresh, ROWS)
        of_pair, first = (part % here).to(tl.int64), part // here * ROWS
        request, pair = of_pair // pairs, first_pair + of_pair % pairs
        count, to_pair = many * put, tl.load(asked + ASKED * request) * all_pairs + pair
        if (first == 0) & (put != 0):
            tl.store(to_counts.to(tl.pointer_type(tl.int32)) + to_pair, count)
        if first < count:
            index = first + tl.arange(0, ROWS)
            inside = index < count
            read = (slot.to(tl.int64) * slot_stride + pair % HEADS * head_stride)[:, None] + dim[None, :]
            write, seen = ((to_pair * fresh + index) * DIM)[:, None] + dim[None, :], inside[:, None] & (dim < DIM)[None, :]
            keys, values = buffer_of(key_table, pair // HEADS, KIND), buffer_of(value_table, pair // HEADS, KIND)
            key, value = tl.load(keys + read, mask=seen), tl.load(values + read, mask=seen)
            move, to_move = moves + (of_pair * fresh + index) * 2, to_moves.to(tl.pointer_type(tl.int32)) + (to_pair * fresh + index) * 2
            place, token = tl.load(move, mask=inside, other=0), tl.load(move + 1, mask=inside, other=0)
            tl.store(to_move, place, mask=inside)
            tl.store(to_move + 1, token, mask=inside)
            tl.store(numbers_at(to_keys, KIND) + write, key, mask=seen)
            tl.store(numbers_at(to_values, KIND) + write, value, mask=seen)
        many, slot, put = later, later_slot, later_put


class Exchange(NamedTuple):
    """What comes for some requests in some layers, and which places of their copies it takes, as held_rows.py:exchange says.

    Attributes:
        counts: int32 [requests, pairs], how many tokens come for each.
        moves: int32 [requests, pairs, fresh, 2], places and positions, ascending by position.
        slots: int32 [requests, pairs, fresh], where these tokens lie.
    """

    counts: torch.Tensor
    moves: torch.Tensor
    slots: torch.Tensor


def exchange(
    chosen: torch.Tensor, bits: torch.Tensor, held: torch.Tensor, token_table: torch.Tensor, asked: torch.Tensor, fresh: int,
    first_layer: int, present: torch.Tensor,
) -> Exchange:  # fmt: skip
    """What comes of what was chosen for some requests in some layers.

    Args:
        chosen: int32 [layers, requests, kv_heads, most], positions, ascending, of each request as many as it keeps.
        bits: int32, like ``chosen``: of float32 scores, none of which is below 0. Of more tokens than ``fresh`` those of the highest come.
        held: int32 [requests, numbers], of which a request's first [all layers, kv_heads, keep] are the positions that its copy holds.
        token_table: int32 [requests, width]; a row leads to the slots of a context.
        asked: int64 [requests, :data:`~sglang_ext.layers.kernels.hand_over.ASKED_NUMBERS`].
        fresh: tokens that come for a pair at most.
        first_layer: of those that are meant.
        present: int8, a number for each of ``chosen``, zeros, in which is worked.
    """
    layers, requests, heads, most = chosen.shape
    of_all, device = (requests, layers * heads), chosen.device
    going = torch.empty(*of_all, most, dtype=torch.int32, device=device)
    counts = torch.empty(of_all, dtype=torch.int32, device=device)
    moves = torch.empty(*of_all, fresh, 2, dtype=torch.int32, device=device)
    slots = torch.empty(*of_all, fresh, dtype=torch.int32, device=device)
    _exchange[(layers * heads, requests)](
        chosen, bits, held, token_table, present, going, counts, moves, slots, asked, requests, most, fresh, held.stride(0),
        token_table.stride(0), first_layer * heads, most.bit_length() + 1, HEADS=heads, BLOCK=LOOKED_AT,
    )  # fmt: skip
    return Exchange(counts, moves, slots)


def push_rows(
    tables: tuple[torch.Tensor, torch.Tensor], like: torch.Tensor, comes: Exchange, asked: torch.Tensor, there: torch.Tensor,
    targets: tuple[int, int, int, int], first_layer: int = 0,
) -> None:  # fmt: skip
    """Write moves of some requests in some layers, and K and V of their tokens, to an arena.

    Args:
        tables: int64 [all layers] each, addresses of the layers' key and value buffers.
        like: a key buffer, [slots, kv_heads, dim]; all have its shape, strides and dtype.
        comes: what :func:`exchange` found.
        asked: as :func:`exchange`'s.
        there: int32 [requests], 1 for each whose question is there; of others nothing is written.
        targets: addresses of the arena's counts, moves, keys and values, of its first lane.
        first_layer: of those that are meant.
    """
    heads, dim = like.shape[1:]
    requests, pairs, fresh = comes.slots.shape
    _push_rows[(min(COPYING, requests * pairs * triton.cdiv(fresh, COPIED)),)](
        *tables, like, *comes, asked, there, *targets, requests, pairs, first_layer * heads, len(tables[0]) * heads, fresh,
        like.stride(0), like.stride(1), HEADS=heads, DIM=dim, PADDED_DIM=triton.next_power_of_2(dim), ROWS=COPIED, num_warps=WARPS,
    )  # fmt: skip
