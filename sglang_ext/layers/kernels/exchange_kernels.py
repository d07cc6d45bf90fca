"""Kernels of the exchange buffer between an inference rank, in whose GPU's memory it is, and a cache rank on another GPU.

The inference rank writes queries and keys to the buffer, then a word that announces them. The cache rank reads them over peer access, and
writes the selected tokens and a word. On the inference rank, a kernel of one program waits for that word for a limited time. Another
kernel points the compressed KV to the selected tokens, if they have arrived. So the inference rank's GPU reads only its own memory, and a
failure of the other GPU costs only selections.

A *word* is the epoch of the cache rank's process times 2 ** 40, plus an ascending number: of a lane's selection requests, or of all
writes of the inference rank. A lane has two slots each for selection requests and replies, by the parity of the word.
"""

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.gpu_launch import buffer_pointer, load_acquire, nanoseconds, store_release

# Words of a lane: the selection request in either slot, the newest request that is done, and the reply in either slot.
LANE_WORDS = 8
QUESTION, DONE, CHOSEN = tl.constexpr(0), tl.constexpr(2), tl.constexpr(4)
WORDS = tl.constexpr(LANE_WORDS)
# Numbers of a compressed KV that applies a selection: lane, word, token-table row, covered tokens, kept tokens per head, index of its
# first target.
COMMIT_NUMBERS = 6
NUMBERS = tl.constexpr(COMMIT_NUMBERS)
# Numbers of a selection request at the rank: lane, word, kept tokens per head; the last is 0 if there is no reply.
QUESTION_NUMBERS = 3
QUESTION_STRIDE = tl.constexpr(QUESTION_NUMBERS)
# Numbers of a block of keys: staging slot, tokens, and source or target index of the first token.
BLOCK_NUMBERS = tl.constexpr(3)
# Numbers, and pointers, that a program copies at once.
COPIED, POINTERS = 1024, 128


@triton.jit
def _open_places(heads, numbers, opened):
    """Set whether the slot of a selection request is free, that is, the previous request in the slot is done."""
    i = tl.program_id(0)
    lane, word = tl.load(numbers + 2 * i), tl.load(numbers + 2 * i + 1)
    done = load_acquire(heads + lane * WORDS + DONE)
    tl.store(opened + i, (done >= word - 2).to(tl.int32))


@triton.jit(do_not_specialize=("count", "window"))
def _put_queries(
    pool, places, numbers, opened, queries, count, pool_layer, window, LAYERS: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the queries of a token and layer of a request to their slot."""
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
    """Copy the keys of a token and layer to their index in a staged block."""
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
    """Announce a selection request whose slot was free."""
    i = tl.program_id(0)
    if tl.load(opened + i) != 0:
        mine = tl.load(numbers + 2 * i + 1)
        store_release(heads + tl.load(numbers + 2 * i) * WORDS + QUESTION + (mine & 1), mine)


@triton.jit(do_not_specialize=("word",))
def _signal_all(written, word):
    """Announce all writes so far."""
    store_release(written, word)


@triton.jit(do_not_specialize=("requests", "patience"))
def _await(heads, numbers, hits, counters, requests, patience, STRIDE: tl.constexpr):
    """Wait until selection requests are done, at most ``patience`` nanoseconds in total. Set which of them have a reply."""
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
    """Write pointers to the selected tokens of a layer and head if a reply has arrived. Positions outside the context are skipped."""
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
    """Copy part of a layer of a block, in 32-bit words, from its staging slot to its target."""
    layers, layer, block = tl.num_programs(0), tl.program_id(0).to(tl.int64), blocks + BLOCK_NUMBERS * tl.program_id(2)
    place, length, first = tl.load(block), tl.load(block + 1) * token, tl.load(block + 2) * token
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    read = source.to(tl.pointer_type(tl.int32)) + (place * layers + layer) * source_layer + column
    write = target.to(tl.pointer_type(tl.int32)) + layer * target_layer + first + column
    tl.store(write, tl.load(read, mask=column < length), mask=column < length)


@triton.jit(do_not_specialize=("source", "length", "source_row", "of_lane", "of_parity", "target_row"))
def _gather_rows(source, asked, target, length, source_row, of_lane, of_parity, target_row, target_step, BLOCK: tl.constexpr):
    """Copy part of a row of 32-bit words from the lanes of several selection requests, from the slot of each word's parity."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(2)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lane, parity = tl.load(asked + QUESTION_STRIDE * group), tl.load(asked + QUESTION_STRIDE * group + 1) & 1
    begin = source.to(tl.pointer_type(tl.int32)) + lane * of_lane + parity * of_parity
    found = tl.load(begin + row * source_row + column, mask=column < length)
    tl.store(target + group * target_step + row * target_row + column, found, mask=column < length)


@triton.jit(do_not_specialize=("requests", "most", "target", "lane_step"))
def _push_chosen(chosen, asked, there, target, requests, most, lane_step, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the positions of a layer and head of a request to the slot of its reply."""
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
    """Wait until the written word reaches ``least``, at most ``patience`` nanoseconds. Then read all words, and set which requests are published."""
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
        # Makes the stores of other threads of this warp visible.
        tl.debug_barrier()
        for i in range(requests):
            mine = tl.load(asked + QUESTION_STRIDE * i + 1)
            put = tl.load(out + 1 + tl.load(asked + QUESTION_STRIDE * i) * WORDS + QUESTION + (mine & 1))
            tl.store(there + i, ((found >= least) & (put == mine)).to(tl.int32))


@triton.jit(do_not_specialize=("heads",))
def _answer(heads, asked, there):
    """Mark a published selection request as done. If it keeps tokens, first mark its reply as available."""
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
    """Write the queries of selection requests whose slots are free, one request per lane. Returns int32 [requests], 1 for each that was written.

    ``heads``: int64 [lanes, :data:`LANE_WORDS`], in the exchange buffer; so are ``queries``, [lanes, 2, layers, window, query_heads, dim].
    ``pool``: [layers, places, query_heads, dim]. ``places``: int64 [requests, up to window], indices in the pool, oldest first. ``numbers``:
    int64 [requests, 2], lane and word.
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
    """Write the keys of tokens to staging slots, all blocks in one launch.

    ``target``: [places, layers, block, kv_heads, dim], in the exchange buffer. ``blocks``: int64 [blocks, :data:`BLOCK_NUMBERS`]: staging slot,
    tokens, and index of the first token in ``slots``, int64 [tokens]. ``key_table``: int64 [layers], addresses of the layers' key buffers. ``like``:
    one of them, [slots, kv_heads, dim]; all have its shape, strides and dtype.
    """
    heads, dim = like.shape[1:]
    _put_keys[(target.shape[2], len(key_table), len(blocks))](
        key_table, like, slots, blocks, target, like.stride(0), like.stride(1), target.stride(0), target.stride(1), DIM=dim,
        ROW=heads * dim, BLOCK=COPIED,
    )  # fmt: skip


def signal_written(heads: torch.Tensor, written: torch.Tensor, numbers: torch.Tensor, opened: torch.Tensor, word: int) -> None:
    """Announce the writes of earlier kernels to the cache rank. ``word`` is the written word; other arguments as in :func:`put_queries`."""
    # Consecutive release stores of one thread each take a full latency, so lanes are signalled in parallel. The written word follows
    # them.
    if len(numbers):
        _signal[(len(numbers),)](heads, numbers, opened, num_warps=1)
    _signal_all[(1,)](written, word, num_warps=1)


def wait_for_selections(heads: torch.Tensor, numbers: torch.Tensor, counters: torch.Tensor, seconds: float) -> torch.Tensor:
    """Make the stream wait for the replies to selection requests. Returns int32 [requests], 1 for each that has a reply.

    ``numbers``: int64 [requests, 2 or more], lane and word first. ``counters``: int64 [5], which are incremented
    (managers/cache_rank/exchange_buffer.py:COUNTERS). ``seconds``: maximum wait in total.
    """
    hits = torch.empty(len(numbers), dtype=torch.int32, device=heads.device)
    _await[(1,)](heads, numbers, hits, counters, len(numbers), int(seconds * 1e9), STRIDE=numbers.shape[1], num_warps=1)
    return hits


def write_selected_pointers(
    chosen: torch.Tensor, hits: torch.Tensor, numbers: torch.Tensor, most: int, key_table: torch.Tensor, like: torch.Tensor,
    token_table: torch.Tensor, targets: torch.Tensor,
) -> None:  # fmt: skip
    """Point compressed KV to its selected tokens if the reply has arrived. Otherwise it stays unchanged.

    ``chosen``: int32 [lanes, 2, numbers], in the exchange buffer; a selection is [layers, kv_heads, keep] at the beginning of its slot. ``hits``:
    result of :func:`wait_for_selections`. ``numbers``: int64 [requests, :data:`COMMIT_NUMBERS`]. ``most``: maximum tokens that a head of any of
    them keeps. ``key_table``, ``like``: as in :func:`put_keys`. ``targets``: int64, slots of the compressed KV of all requests, concatenated.
    """
    heads, cells = like.shape[1], like.view(torch.int32)
    _commit[(len(key_table) * heads, triton.cdiv(most, POINTERS), len(numbers))](
        chosen, hits, numbers, key_table, token_table, targets, token_table.stride(0), chosen.stride(1), cells.stride(0), cells.stride(1),
        HEADS=heads, PER_SLOT=cells.shape[2], BLOCK=POINTERS,
    )  # fmt: skip


def pull_blocks(source: int, target: int, blocks: torch.Tensor, layers: int, token: int, source_layer: int, target_layer: int) -> None:
    """Copy blocks of tokens of all layers out of an exchange buffer in one launch.

    ``source``, ``target``: addresses of the first staging slot, [places, layers, block, ...], and of the target, [layers, tokens, ...]. ``blocks``:
    int64 [blocks, :data:`BLOCK_NUMBERS`]: staging slot, tokens, and target index of the first token. ``token``, ``source_layer``,
    ``target_layer``: 32-bit words of a token, of a layer of a staging slot, and of a layer of the target.
    """
    grid = layers, triton.cdiv(source_layer, COPIED), len(blocks)
    _pull_blocks[grid](source, target, blocks, token, source_layer, target_layer, BLOCK=COPIED)


def gather_rows(source: int, asked: torch.Tensor, target: torch.Tensor, length: int, source_row: int, steps: tuple[int, int]) -> None:
    """Copy rows of the lanes of selection requests from ``source``, an address of the first lane on this GPU or one whose memory is mapped.

    ``asked``: int64 [groups, :data:`QUESTION_NUMBERS`]. ``target``: int32 [groups, rows, up to length], contiguous. In 32-bit words: ``length`` of
    a row, ``source_row`` from a row to the next, ``steps`` from a lane to the next, and from the slot of even words to that of odd ones.
    """
    groups, rows, width = target.shape
    _gather_rows[(rows, triton.cdiv(length, COPIED), groups)](
        source, asked, target, length, source_row, *steps, width, rows * width, BLOCK=COPIED
    )


def push_chosen(chosen: torch.Tensor, asked: torch.Tensor, there: torch.Tensor, target: int, lane_step: int) -> None:
    """Write the selected positions of requests to an exchange buffer.

    ``chosen``: int32 [layers, requests, kv_heads, most], contiguous; the first ``keep`` of each request are valid. ``asked``: int64 [requests,
    :data:`QUESTION_NUMBERS`]. ``there``: int32 [requests], 1 for each published selection request; nothing is written for the others. ``target``,
    ``lane_step``: address of the exchange buffer's selections, and numbers from one slot of a selection to the next.
    """
    layers, requests, heads, most = chosen.shape
    _push_chosen[(layers * heads, triton.cdiv(most, COPIED), requests)](
        chosen, asked, there, target, requests, most, lane_step, HEADS=heads, BLOCK=COPIED
    )


def read_words(
    heads: int, written: int, out: torch.Tensor, asked: torch.Tensor, there: torch.Tensor, least: int = 0, seconds: float = 0.0
) -> None:
    """Make the stream wait, at most ``seconds``, until the word at address ``written`` reaches ``least``. Then read words.

    ``heads``: address of the lanes' words. ``out``: output, int64 [1 + lanes * LANE_WORDS]: the written word, and the words of all lanes.
    ``asked``: int64 [requests, :data:`QUESTION_NUMBERS`]. ``there``: output, int32 [requests], 1 for each published selection request; 0 for all
    while the written word is below ``least``.
    """
    # One warp: several would wait independently, and one warp's written word would not match the lane words that another reads.
    _read_words[(1,)](
        heads, written, asked, there, out, len(out) - 1, len(asked), least, int(seconds * 1e9), BLOCK=COPIED, num_warps=1
    )  # fmt: skip


def answer(heads: int, asked: torch.Tensor, there: torch.Tensor) -> None:
    """Mark published selection requests, one per lane, as done, and as answered if they keep tokens. ``heads``: address of the lanes' words."""
    _answer[(len(asked),)](heads, asked, there, num_warps=1)
