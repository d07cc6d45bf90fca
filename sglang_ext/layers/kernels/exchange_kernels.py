"""The hand-over between an inference rank and a cache rank on another GPU, over an arena in memory of the inference rank's GPU.

The inference rank writes questions and keys there, and a word that says so; the cache rank reads them over peer access, writes which
tokens it chose, and a word that says so. A kernel of one thread waits for that, not for long, and another one lets a copy lead to what was
chosen where it came: so that the inference rank's GPU reads no memory but its own, and what happens to the other one costs it a choice.

A *word* is the epoch of the cache rank's process times 2 ** 40, plus a number that ascends: of a lane's questions, or of all that the
inference rank wrote. Questions and answers of a lane have two places each, by the parity of the word.
"""

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.addresses import buffer_pointer
from sglang_ext.layers.kernels.system_memory import load_acquire, nanoseconds, store_release

# Words of a lane: of the question in either place, of the newest question that is done with, of the answer in either place.
LANE_WORDS = 8
QUESTION, DONE, CHOSEN = tl.constexpr(0), tl.constexpr(2), tl.constexpr(4)
WORDS = tl.constexpr(LANE_WORDS)
# Numbers of a copy that is committed: lane, word, row of the token table, tokens covered, tokens that each head keeps, first target.
COMMIT_NUMBERS = 6
NUMBERS = tl.constexpr(COMMIT_NUMBERS)
# Numbers of a question that the rank is done with: lane, word, tokens that each head keeps, 0 where there is no answer.
QUESTION_NUMBERS = 3
QUESTION_STRIDE = tl.constexpr(QUESTION_NUMBERS)
# Numbers of a block of keys: place, tokens, and where the first of these comes from, or goes.
BLOCK_NUMBERS = tl.constexpr(3)
# Counters of the device: answers that were taken, that were late, questions that were not written as their place was taken, and
# nanoseconds of waiting; rows of K and V that were taken (row_exchange/receive_rows.py).
COUNTERS = ("taken", "late", "unasked", "waited", "rows")
# Tokens of a block of keys, numbers and pointers that a program copies at once.
COPIED, POINTERS = 1024, 128


@triton.jit
def _open_places(heads, numbers, opened):
    """Whether the place of a question is free: that before it in the same place is done with."""
    i = tl.program_id(0)
    lane, word = tl.load(numbers + 2 * i), tl.load(numbers + 2 * i + 1)
    done = load_acquire(heads + lane * WORDS + DONE)
    tl.store(opened + i, (done >= word - 2).to(tl.int32))


@triton.jit(do_not_specialize=("count", "window"))
def _put_queries(
    pool, places, numbers, opened, queries, count, pool_layer, window, LAYERS: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Queries of a token and layer of a request, to their place."""
    layer, at, request = tl.program_id(0) // count, tl.program_id(0) % count, tl.program_id(1)
    if tl.load(opened + request) != 0:
        lane, parity = tl.load(numbers + 2 * request), tl.load(numbers + 2 * request + 1) & 1
        source = pool + layer.to(tl.int64) * pool_layer + tl.load(places + request * count + at) * ROW
        target = queries + (((lane * 2 + parity) * LAYERS + layer) * window + at) * ROW
        for first in tl.range(0, ROW, BLOCK):
            column = first + tl.arange(0, BLOCK)
            tl.store(target + column, tl.load(source + column, mask=column < ROW), mask=column < ROW)


@triton.jit(do_not_specialize=("slots",))
def _put_keys(
    key_table, like, slots, blocks, target, slot_stride, head_stride, target_place, target_layer, DIM: tl.constexpr, ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys of a token and layer, to their place in a block."""
    token, layer, block = tl.program_id(0), tl.program_id(1), blocks + BLOCK_NUMBERS * tl.program_id(2)
    if token < tl.load(block + 1):
        keys = buffer_pointer(key_table, layer, like.dtype.element_ty)
        source = keys + tl.load(slots + tl.load(block + 2) + token) * slot_stride
        target += tl.load(block) * target_place + layer.to(tl.int64) * target_layer + token * ROW
        for first in tl.range(0, ROW, BLOCK):
            column = first + tl.arange(0, BLOCK)
            found = tl.load(source + column // DIM * head_stride + column % DIM, mask=column < ROW)
            tl.store(target + column, found, mask=column < ROW)


@triton.jit
def _signal(heads, numbers, opened):
    """Say of a question whose place was free that it is there."""
    i = tl.program_id(0)
    if tl.load(opened + i) != 0:
        mine = tl.load(numbers + 2 * i + 1)
        store_release(heads + tl.load(numbers + 2 * i) * WORDS + QUESTION + (mine & 1), mine)


@triton.jit(do_not_specialize=("word",))
def _signal_all(written, word):
    """Say how much was written in all."""
    store_release(written, word)


@triton.jit(do_not_specialize=("requests", "patience"))
def _await(heads, numbers, hits, counters, requests, patience, STRIDE: tl.constexpr):
    """Wait until questions are done with, over all of them no longer than ``patience`` nanoseconds; which were answered."""
    begun = nanoseconds()
    now = begun
    for i in range(requests):
        lane, word = tl.load(numbers + STRIDE * i), tl.load(numbers + STRIDE * i + 1)
        head = heads + lane * WORDS
        asked = load_acquire(head + QUESTION + (word & 1)) == word
        done = load_acquire(head + DONE)
        while asked & (done < word) & (now - begun < patience):
            done = load_acquire(head + DONE)
            now = nanoseconds()
        hit = asked & (load_acquire(head + CHOSEN + (word & 1)) == word)
        tl.store(hits + i, hit.to(tl.int32))
        kind = tl.where(hit, 0, tl.where(asked, 1, 2))
        tl.store(counters + kind, tl.load(counters + kind) + 1)
    tl.store(counters + 3, tl.load(counters + 3) + nanoseconds() - begun)


@triton.jit
def _commit(
    chosen, hits, numbers, key_table, token_table, targets, table_row, lane_stride, slot_stride, head_stride, HEADS: tl.constexpr,
    PER_SLOT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pointers of a layer and head to what was chosen, where an answer came; positions that are none of the context's are left out."""
    pair, request = tl.program_id(0), tl.program_id(2)
    if tl.load(hits + request) != 0:
        mine = numbers + request * NUMBERS
        lane, parity, row = tl.load(mine), tl.load(mine + 1) & 1, tl.load(mine + 2)
        covered, keep, first = tl.load(mine + 3), tl.load(mine + 4), tl.load(mine + 5)
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = place < keep
        token = tl.load(chosen + (lane * 2 + parity) * lane_stride + pair * keep + place, mask=inside, other=-1).to(tl.int64)
        inside &= (token >= 0) & (token < covered)
        slot = tl.load(token_table + row * table_row + token, mask=inside, other=0).to(tl.int32)
        held = tl.load(targets + first + place // PER_SLOT, mask=inside, other=0)
        cells = tl.load(key_table + pair // HEADS).to(tl.pointer_type(tl.int32))
        tl.store(cells + held * slot_stride + pair % HEADS * head_stride + place % PER_SLOT, slot, mask=inside)


@triton.jit(do_not_specialize=("source", "target", "token", "source_layer", "target_layer"))
def _pull_blocks(source, target, blocks, token, source_layer, target_layer, BLOCK: tl.constexpr):
    """Part of a layer of a block, in words of 32 bits, from its place in an arena to where its first token lies."""
    layers, layer, block = tl.num_programs(0), tl.program_id(0).to(tl.int64), blocks + BLOCK_NUMBERS * tl.program_id(2)
    place, length, first = tl.load(block), tl.load(block + 1) * token, tl.load(block + 2) * token
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    read = source.to(tl.pointer_type(tl.int32)) + (place * layers + layer) * source_layer + column
    write = target.to(tl.pointer_type(tl.int32)) + layer * target_layer + first + column
    tl.store(write, tl.load(read, mask=column < length), mask=column < length)


@triton.jit(do_not_specialize=("source", "length", "source_row", "of_lane", "of_parity", "target_row"))
def _gather_rows(source, asked, target, length, source_row, of_lane, of_parity, target_row, target_step, BLOCK: tl.constexpr):
    """Part of a row of words of 32 bits, of the lanes of several questions, each in the place of its parity."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(2)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lane, parity = tl.load(asked + QUESTION_STRIDE * group), tl.load(asked + QUESTION_STRIDE * group + 1) & 1
    begin = source.to(tl.pointer_type(tl.int32)) + lane * of_lane + parity * of_parity
    found = tl.load(begin + row * source_row + column, mask=column < length)
    tl.store(target + group * target_step + row * target_row + column, found, mask=column < length)


@triton.jit(do_not_specialize=("requests", "most", "target", "lane_step"))
def _push_chosen(chosen, asked, there, target, requests, most, lane_step, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Positions of a layer and head of a request, to the place of its answer."""
    pair, request = tl.program_id(0), tl.program_id(2)
    mine = asked + QUESTION_STRIDE * request
    lane, parity, keep = tl.load(mine), tl.load(mine + 1) & 1, tl.load(mine + 2) * tl.load(there + request)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = chosen + ((pair // HEADS * requests + request) * HEADS + pair % HEADS).to(tl.int64) * most
    found = tl.load(source + index, mask=index < keep)
    to = target.to(tl.pointer_type(tl.int32)) + (lane * 2 + parity) * lane_step + pair * keep
    tl.store(to + index, found, mask=index < keep)


@triton.jit(do_not_specialize=("heads", "written", "requests", "least", "patience"))
def _read_words(heads, written, asked, there, out, count, requests, least, patience, BLOCK: tl.constexpr):
    """How much was written, once it is ``least`` or ``patience`` nanoseconds are over, then the words of all lanes; and by these which
    questions are there."""
    begun, word = nanoseconds(), written.to(tl.pointer_type(tl.int64))
    found = load_acquire(word)
    while (found < least) & (nanoseconds() - begun < patience):
        found = load_acquire(word)
    tl.store(out, found)
    for first in tl.range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        of_lanes = tl.load(heads.to(tl.pointer_type(tl.int64)) + place, mask=place < count, volatile=True)
        tl.store(out + 1 + place, of_lanes, mask=place < count)
    if requests > 0:
        # What other threads of this warp stored.
        tl.debug_barrier()
        for i in range(requests):
            mine = tl.load(asked + QUESTION_STRIDE * i + 1)
            put = tl.load(out + 1 + tl.load(asked + QUESTION_STRIDE * i) * WORDS + QUESTION + (mine & 1))
            tl.store(there + i, ((found >= least) & (put == mine)).to(tl.int32))


@triton.jit(do_not_specialize=("heads",))
def _answer(heads, asked, there):
    """Say of a question that is there that it is done with; first, where tokens are kept, that its answer is there."""
    i = tl.program_id(0)
    if tl.load(there + i) != 0:
        word = tl.load(asked + QUESTION_STRIDE * i + 1)
        head = heads.to(tl.pointer_type(tl.int64)) + tl.load(asked + QUESTION_STRIDE * i) * WORDS
        if tl.load(asked + QUESTION_STRIDE * i + 2) != 0:
            store_release(head + CHOSEN + (word & 1), word)
        store_release(head + DONE, word)


def put_queries(
    heads: torch.Tensor, queries: torch.Tensor, pool: torch.Tensor, places: torch.Tensor, numbers: torch.Tensor
) -> torch.Tensor:
    """Write the queries of some questions of other lanes each, as far as their places are free.

    Args:
        heads: int64 [lanes, :data:`LANE_WORDS`], of the arena.
        queries: [lanes, 2, layers, window, query_heads, dim], of the arena.
        pool: [layers, places, query_heads, dim].
        places: int64 [requests, up to window], in the pool, oldest first.
        numbers: int64 [requests, 2], lane and word.

    Returns:
        Which were written: int32 [requests].
    """
    requests, count = places.shape
    layers, row = pool.shape[0], pool.shape[2] * pool.shape[3]
    opened = torch.empty(requests, dtype=torch.int32, device=heads.device)
    _open_places[(requests,)](heads, numbers, opened, num_warps=1)
    _put_queries[(layers * count, requests)](
        pool, places, numbers, opened, queries, count, pool.stride(0), queries.shape[3], LAYERS=layers, ROW=row, BLOCK=COPIED
    )
    return opened


def put_keys(target: torch.Tensor, blocks: torch.Tensor, key_table: torch.Tensor, like: torch.Tensor, slots: torch.Tensor) -> None:
    """Write the keys of some tokens, block by block, in one launch.

    Args:
        target: [places, layers, block, kv_heads, dim], of the arena.
        blocks: int64 [blocks, :data:`BLOCK_NUMBERS`]: place, its tokens, and which of ``slots`` is the first of these.
        key_table: int64 [layers], addresses of the layers' key buffers.
        like: a key buffer, [slots, kv_heads, dim]; all have its shape, strides and dtype.
        slots: int64 [tokens], where tokens lie.
    """
    heads, dim = like.shape[1:]
    _put_keys[(target.shape[2], len(key_table), len(blocks))](
        key_table, like, slots, blocks, target, like.stride(0), like.stride(1), target.stride(0), target.stride(1), DIM=dim, ROW=heads * dim,
        BLOCK=COPIED,
    )  # fmt: skip


def signal_written(heads: torch.Tensor, written: torch.Tensor, numbers: torch.Tensor, opened: torch.Tensor, word: int) -> None:
    """Let the cache rank know what was written by kernels before; ``word``: how much in all; others as of :func:`put_queries`."""
    # Each of these takes as long as the one before it took, where they follow one another; what was written in all is said after them.
    if len(numbers):
        _signal[(len(numbers),)](heads, numbers, opened, num_warps=1)
    _signal_all[(1,)](written, word, num_warps=1)


def wait_for_selections(heads: torch.Tensor, numbers: torch.Tensor, counters: torch.Tensor, seconds: float) -> torch.Tensor:
    """Let the stream wait for the answers to some questions.

    Args:
        heads: as :func:`put_queries`.
        numbers: int64 [requests, 2 or more], lane and word first.
        counters: int64 [5], of :data:`COUNTERS`, which go up.
        seconds: over all of them.

    Returns:
        Which were answered: int32 [requests].
    """
    hits = torch.empty(len(numbers), dtype=torch.int32, device=heads.device)
    _await[(1,)](heads, numbers, hits, counters, len(numbers), int(seconds * 1e9), STRIDE=numbers.shape[1], num_warps=1)
    return hits


def write_selected_pointers(
    chosen: torch.Tensor, hits: torch.Tensor, numbers: torch.Tensor, most: int, key_table: torch.Tensor, like: torch.Tensor,
    token_table: torch.Tensor, targets: torch.Tensor,
) -> None:  # fmt: skip
    """Let copies lead to what was chosen for them, where an answer came; others stay as they are.

    Args:
        chosen: int32 [lanes, 2, numbers], of the arena; an answer is [layers, kv_heads, keep] at the beginning of its place.
        hits: as :func:`wait_for_selections` gives them.
        numbers: int64 [requests, :data:`COMMIT_NUMBERS`].
        most: tokens that a head of one of the copies keeps at most.
        key_table, like: as :func:`put_keys`.
        token_table: int32 [rows, width].
        targets: int64, slots of the copies, one after the other.
    """
    heads, cells = like.shape[1], like.view(torch.int32)
    _commit[(len(key_table) * heads, triton.cdiv(most, POINTERS), len(numbers))](
        chosen, hits, numbers, key_table, token_table, targets, token_table.stride(0), chosen.stride(1), cells.stride(0), cells.stride(1),
        HEADS=heads, PER_SLOT=cells.shape[2], BLOCK=POINTERS,
    )  # fmt: skip


def pull_blocks(source: int, target: int, blocks: torch.Tensor, layers: int, token: int, source_layer: int, target_layer: int) -> None:
    """Copy blocks of tokens out of an arena, of all layers, in one launch.

    Args:
        source: address of the first place, [places, layers, block, ...].
        target: address of what is [layers, tokens, ...].
        blocks: int64 [blocks, :data:`BLOCK_NUMBERS`]: place, its tokens, and where the first of these goes.
        layers: how many.
        token, source_layer, target_layer: words of 32 bits of a token, of a layer of a place, and of a layer of the target.
    """
    grid = layers, triton.cdiv(source_layer, COPIED), len(blocks)
    _pull_blocks[grid](source, target, blocks, token, source_layer, target_layer, BLOCK=COPIED)


def gather_rows(source: int, asked: torch.Tensor, target: torch.Tensor, length: int, source_row: int, steps: tuple[int, int]) -> None:
    """Copy rows of the lanes of some questions from an address, of this GPU or of one whose memory is mapped.

    Args:
        source: address of the first lane's.
        asked: int64 [groups, :data:`QUESTION_NUMBERS`].
        target: int32 [groups, rows, up to length], contiguous.
        length: words of a row.
        source_row: words from a row to the next.
        steps: words from a lane to the next, and from the place of even words to that of odd ones.
    """
    groups, rows, width = target.shape
    _gather_rows[(rows, triton.cdiv(length, COPIED), groups)](
        source, asked, target, length, source_row, *steps, width, rows * width, BLOCK=COPIED
    )


def push_chosen(chosen: torch.Tensor, asked: torch.Tensor, there: torch.Tensor, target: int, lane_step: int) -> None:
    """Write which positions were chosen for some requests to an arena.

    Args:
        chosen: int32 [layers, requests, kv_heads, most], contiguous, of each request as many as it keeps.
        asked: int64 [requests, :data:`QUESTION_NUMBERS`].
        there: int32 [requests], 1 for each whose question is there; for others nothing is written.
        target: address of the arena's answers.
        lane_step: numbers from one place of an answer to the next.
    """
    layers, requests, heads, most = chosen.shape
    _push_chosen[(layers * heads, triton.cdiv(most, COPIED), requests)](
        chosen, asked, there, target, requests, most, lane_step, HEADS=heads, BLOCK=COPIED
    )


def read_words(
    heads: int, written: int, out: torch.Tensor, asked: torch.Tensor, there: torch.Tensor, least: int = 0, seconds: float = 0.0
) -> None:
    """Let the stream wait, then read words.

    Args:
        heads, written: addresses of the lanes' words, and of how much was written.
        out: int64 [1 + lanes * LANE_WORDS], how much was written, and the words of all lanes.
        asked: int64 [requests, :data:`QUESTION_NUMBERS`].
        there: int32 [requests], which of their questions are there: 1, none before ``least`` was written, or 0.
        least: until so much was written it waits.
        seconds: no longer than that.
    """
    # Of one warp: several would each wait on their own, and of the words that one reads another would say how much was written.
    _read_words[(1,)](
        heads, written, asked, there, out, len(out) - 1, len(asked), least, int(seconds * 1e9), BLOCK=COPIED, num_warps=1
    )  # fmt: skip


def answer(heads: int, asked: torch.Tensor, there: torch.Tensor) -> None:
    """Say by the address of the lanes' words of some questions, of a lane each, that they are done with; of :func:`push_chosen`'s arguments
    those that are there, and of these that they are answered where tokens are kept."""
    _answer[(len(asked),)](heads, asked, there, num_warps=1)
