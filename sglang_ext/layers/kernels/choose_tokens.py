"""Which tokens of full KV each KV head needs for a query of each of its query heads: several requests and layers at once.

The score of a token is the softmax attention that the queries pay to it, mean over the query heads of its KV head (AsyncSpade,
section 4.3); the first and the newest tokens come before all others. Keys are read once: a first kernel leaves the logits, and what each
chunk of the context needs for their normalizers. Of a second one each program has a context of a KV head: it makes scores of the logits,
which stay in its registers, finds the score of the last token that is chosen by halving the range of bits in which it is, and marks
those above it; scores of a context too long for registers wait in memory, and are walked for each eighth of the range. A third one
writes down what is marked. Of equal scores those of earlier tokens are chosen first.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.fitting import launch_fitting, padded, shape_name
from sglang_ext.layers.kernels.window_scores import LOG2_E

if TYPE_CHECKING:
    from sglang_ext.layers.kernels.coded_keys.coded_logits import KeyCodes

# Tokens whose logits a program leaves; of these, keys that are multiplied at once, the more the better where they fit.
CHUNK = 1024
BLOCKS = ({"BLOCK": 128}, {"BLOCK": 64}, {"BLOCK": 32}, {"BLOCK": 16}, {"BLOCK": 16, "num_stages": 1})
# Logits of a query head begin at multiples of so many, and end at one: the longest block.
PITCH = tl.constexpr(128)
# Scores that a program keeps in registers at most, and of these those of a thread.
RESIDENT, OF_THREAD = 32768, 64
# Tokens whose scores go to memory at once, and those that a program writes down.
AT_ONCE, WRITTEN = 4096, 2048
# Tokens that were chosen whose scores a program leaves.
SCORED = 1024
# Scores in memory that are counted at once, and parts of a range that one walk tells apart.
COUNTED, PARTS = tl.constexpr(2048), tl.constexpr(8)
# Tokens that a word marks.
WORD = tl.constexpr(32)
# Chunks whose normalizers are joined at once.
JOINED = tl.constexpr(32)
# Numbers of a request (Contexts.numbers).
NUMBERS = tl.constexpr(4)
# Exponentials are powers of two on a GPU.
TO_POWERS = tl.constexpr(LOG2_E)
# Threads sum products alike only where none is fused with a sum: of two that exchange theirs, each would round the other's alone. Else
# equal logits have scores that differ in the last bit.
UNFUSED = {"enable_fp_fusion": False}
# Below all logits, and a number: of infinities no difference can be taken.
LEAST = tl.constexpr(-1e38)
# Of infinity, the bits of a score and one; between two of which one is twice the other.
BEYOND, OCTAVE = tl.constexpr(0x7F800001), tl.constexpr(1 << 23)
# What differs from launch to launch: a kernel that was compiled for one serves all.
VARYING = ("first_layer", "first_request", "requests", "pitches", "chunks", "table_row", "most")


@triton.jit
def of_pair(numbers, pair, first_layer, first_request, requests):
    """Of a pair of a layer and a request in a launch: the layer, the numbers of the request, and its row and length."""
    mine = numbers + (first_request + pair % requests) * NUMBERS
    return first_layer + pair // requests, mine, tl.load(mine), tl.load(mine + 1).to(tl.int32)


@triton.jit(do_not_specialize=VARYING)
def _leave_logits(
    queries, key_table, like, scalings, token_table, numbers, logits, tops, masses, first_layer, first_request, requests, pitches, chunks,
    table_row, slot_stride, key_head, HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Logits of a KV head's queries in a chunk of a context, times log2(e); the largest of each, and the sum of powers of two below it."""
    head, chunk, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    layer, _, at, length = of_pair(numbers, pair, first_layer, first_request, requests)
    begin = chunk * CHUNK
    if begin < length:
        LIKE: tl.constexpr = like.dtype.element_ty
        row, dim = tl.arange(0, M), tl.arange(0, PADDED_DIM)
        mine, column = row < GROUP, tl.arange(0, BLOCK)
        # Queries are in the order of requests, then layers.
        layers = tl.num_programs(2) // requests
        place = ((pair % requests) * layers + pair // requests) * HEADS + head
        q = tl.load(queries + (place * GROUP + row)[:, None] * DIM + dim[None, :], mask=mine[:, None] & (dim < DIM)[None, :], other=0.0)
        keys = tl.multiple_of(tl.load(key_table + layer).to(tl.pointer_type(LIKE)), 16) + head * key_head
        table, scaling = token_table + at * table_row, tl.load(scalings + layer) * TO_POWERS
        out = logits + ((pair * HEADS + head).to(tl.int64) * GROUP + row)[:, None] * (pitches.to(tl.int64) * PITCH)
        # Of each column its own, which are joined at the end: meanwhile no thread waits for another.
        top = tl.full((M, BLOCK), LEAST, tl.float32)
        mass = tl.zeros((M, BLOCK), tl.float32)
        for first in tl.range(begin, tl.minimum(begin + CHUNK, length), BLOCK):
            token = first + column
            inside = token < length
            slot = tl.load(table + token, mask=inside, other=0).to(tl.int64)
            k = tl.load(keys + slot[:, None] * slot_stride + dim[None, :], mask=inside[:, None] & (dim < DIM)[None, :], other=0.0)
            found = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
            found = tl.where(inside[None, :], found, float("-inf"))
            # Whole blocks, which are stored by vectors.
            tl.store(out + tl.multiple_of(first, BLOCK) + column[None, :], found.to(logits.dtype.element_ty), mask=mine[:, None])
            new = tl.maximum(top, found)
            mass = mass * tl.exp2(top - new) + tl.exp2(found - new)
            top = new
        best = tl.max(top, 1)
        place = ((pair * HEADS + head) * GROUP + row) * chunks + chunk
        tl.store(tops + place, best, mask=mine)
        tl.store(masses + place, tl.sum(mass * tl.exp2(top - best[:, None]), 1), mask=mine)


@triton.jit
def _normalizers(tops, masses, of_head, chunks, there, GROUP: tl.constexpr, G: tl.constexpr):
    """Binary logarithms of the sums of the powers of two of a KV head's logits, of the first ``there`` of its chunks, by query head."""
    row = tl.arange(0, G)
    top = tl.full((G,), LEAST, tl.float32)
    mass = tl.zeros((G,), tl.float32)
    for first in tl.range(0, there, JOINED):
        chunk = first + tl.arange(0, JOINED)
        inside = (row < GROUP)[:, None] & (chunk < there)[None, :]
        place = (of_head * GROUP + row)[:, None] * chunks + chunk[None, :]
        tops_here = tl.load(tops + place, mask=inside, other=LEAST)
        masses_here = tl.load(masses + place, mask=inside, other=0.0)
        new = tl.maximum(top, tl.max(tops_here, 1))
        mass = mass * tl.exp2(top - new) + tl.sum(masses_here * tl.exp2(tops_here - new[:, None]), 1)
        top = new
    return top + tl.log2(tl.where(row < GROUP, mass, 1.0))


@triton.jit
def _bits_of_scores(
    logits, normalizers, of_head, pitch, token, length, whole, SINKS: tl.constexpr, NEWEST: tl.constexpr, GROUP: tl.constexpr,
    G: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Bits of the mean attention to TOKENS tokens of a context, which are in the order of the scores; infinity's for the first and the
    newest, -1 beyond the end."""
    score = tl.zeros((TOKENS,), tl.float32)
    for row in tl.static_range(GROUP):
        normalizer = tl.sum(tl.where(tl.arange(0, G) == row, normalizers, 0.0))
        found = tl.load(logits + (of_head * GROUP + row) * pitch + token, mask=token < whole, other=float("-inf"))
        score += tl.exp2(found.to(tl.float32) - normalizer)
    # What is no number, as of keys that are none, comes last. Its bits tell: of a sum of powers of two ptxas (12.8) takes for granted
    # that it is 0 or more, NaN or not, and leaves out a comparison with 0.
    bits = (score / GROUP).to(tl.int32, bitcast=True)
    bits = tl.where(bits.to(tl.uint32, bitcast=True) < BEYOND, bits, 0)
    bits = tl.where((token < SINKS) | (token >= length - NEWEST), BEYOND - 1, bits)
    return tl.where(token < length, bits, -1)


@triton.jit
def _last_of_registers(bits, count, length):
    """Bits between those of the scores that are chosen and of those that are not, and how many are chosen of those that have them."""
    low, high, found, above = 0, BEYOND, length, 0
    # From the mean on in doubled steps, until both ends are known.
    middle, step = (1.0 / length).to(tl.int32, bitcast=True), OCTAVE
    while (found != count) & (high - low > 1):
        many = tl.sum((bits >= middle).to(tl.int32))
        enough = many >= count
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        found, above = tl.where(enough, many, found), tl.where(enough, above, many)
        half = (high - low) // 2
        middle = tl.where(low == 0, high - tl.minimum(step, half), low + tl.where(high == BEYOND, tl.minimum(step, half), half))
        step = tl.minimum(2 * step, 1 << 29)
    return tl.where(found == count, low - 1, low), tl.where(found == count, 0, count - above)


@triton.jit
def _last_of_memory(bits, count, length, whole):
    """As :func:`_last_of_registers`, of ``whole`` scores in memory, of which those beyond ``length`` are below all."""
    low, high, found, above = 0, BEYOND, length, 0
    while (found != count) & (high - low > 1):
        middle = low + tl.cdiv(high - low, PARTS) * tl.arange(0, PARTS)
        counted = tl.zeros((PARTS, COUNTED), tl.int32)
        for first in tl.range(0, whole, COUNTED):
            token = first + tl.arange(0, COUNTED)
            here = tl.load(bits + token, mask=token < whole, other=-1)
            counted += (here[None, :] >= middle[:, None]).to(tl.int32)
        many = tl.sum(counted, 1)
        enough, within = many >= count, middle < high
        above = tl.maximum(above, tl.max(tl.where(enough | (middle >= high), 0, many)))
        found = tl.minimum(found, tl.min(tl.where(enough & within, many, found)))
        high = tl.minimum(high, tl.min(tl.where(enough, high, middle)))
        low = tl.max(tl.where(enough & within, middle, low))
    return tl.where(found == count, low - 1, low), tl.where(found == count, 0, count - above)


@triton.jit
def _marked(bits, token, last, until, marks, whole, TOKENS: tl.constexpr):
    """Mark tokens, from a multiple of 32 on, whose bits are above ``last``, or the same where the token is ``until`` or before it."""
    chosen = (bits > last) | ((bits == last) & (token <= until))
    words = tl.reshape(chosen.to(tl.int32), (TOKENS // WORD, WORD)) << tl.arange(0, WORD)[None, :]
    place = tl.arange(0, TOKENS // WORD)
    tl.store(marks + place, tl.sum(words, 1), mask=place < whole // WORD)


@triton.jit(do_not_specialize=VARYING)
def _mark_best(
    logits, tops, masses, scores, marks, numbers, first_layer, first_request, requests, pitches, chunks, SINKS: tl.constexpr,
    NEWEST: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, AT_ONCE: tl.constexpr, RESIDENT: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Mark the tokens of a KV head's highest scores, 32 to a word."""
    head, pair = tl.program_id(0), tl.program_id(1)
    _, mine, _, length = of_pair(numbers, pair, first_layer, first_request, requests)
    count, of_head = tl.load(mine + 2).to(tl.int32), (pair * HEADS + head).to(tl.int64)
    # Rows of whole vectors.
    pitch, whole = pitches.to(tl.int64) * PITCH, tl.cdiv(length, PITCH) * PITCH
    marks += of_head * (pitch // WORD)
    normalizers = _normalizers(tops, masses, of_head, chunks, tl.cdiv(length, CHUNK), GROUP, G)
    if RESIDENT > 0:
        every = tl.arange(0, RESIDENT)
        kept = _bits_of_scores(logits, normalizers, of_head, pitch, every, length, whole, SINKS, NEWEST, GROUP, G, RESIDENT)
        last, need = _last_of_registers(kept, count, length)
        before, until = -1, tl.where(need > 0, length - 1, -1)
        while until - before > 1:
            middle = (before + until) // 2
            enough = tl.sum(((kept == last) & (every <= middle)).to(tl.int32)) >= need
            before, until = tl.where(enough, before, middle), tl.where(enough, middle, until)
        _marked(kept, every, last, until, marks, whole, RESIDENT)
    else:
        scores += of_head * pitch
        for first in tl.range(0, whole, AT_ONCE):
            token = first + tl.arange(0, AT_ONCE)
            bits = _bits_of_scores(logits, normalizers, of_head, pitch, token, length, whole, SINKS, NEWEST, GROUP, G, AT_ONCE)
            tl.store(scores + token, bits, mask=token < whole)
        tl.debug_barrier()
        last, need = _last_of_memory(scores, count, length, whole)
        equals = 0
        for first in tl.range(0, whole, AT_ONCE):
            token = first + tl.arange(0, AT_ONCE)
            bits = tl.load(scores + token, mask=token < whole, other=-1)
            rank = equals + tl.cumsum((bits == last).to(tl.int32), 0)
            # Tokens of the last score up to the last that is needed.
            until = tl.max(tl.where((bits == last) & (rank <= need), token, -1))
            _marked(bits, token, last, until, marks + first // WORD, whole - first, AT_ONCE)
            equals += tl.sum((bits == last).to(tl.int32))


@triton.jit
def _bits_set(word):
    """How many, of each."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word += word >> 8
    return (word + (word >> 16)) & 0x3F


@triton.jit(do_not_specialize=VARYING)
def _write_marked(
    marks, key_table, token_table, numbers, targets, out, first_layer, first_request, requests, pitches, table_row, most, slot_stride,
    head_stride, HEADS: tl.constexpr, PER_SLOT: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Of some tokens of a context those that are marked for a KV head, after those before: positions, or, with PER_SLOT, pointers in
    the slots of its targets."""
    head, pair, begin = tl.program_id(0), tl.program_id(2), tl.program_id(1) * TOKENS
    layer, mine, at, length = of_pair(numbers, pair, first_layer, first_request, requests)
    if begin < length:
        of_head = (pair * HEADS + head).to(tl.int64)
        marks += of_head * (pitches.to(tl.int64) * (PITCH // WORD))
        before = tl.zeros((WORDS,), tl.int32)
        for first in tl.range(0, begin // WORD, WORDS):
            place = first + tl.arange(0, WORDS)
            before += _bits_set(tl.load(marks + place, mask=place < begin // WORD, other=0))
        token = begin + tl.arange(0, TOKENS)
        marked = (tl.load(marks + token // WORD, mask=token < length, other=0) >> (token % WORD)) & 1
        chosen, place = marked > 0, tl.sum(before) + tl.cumsum(marked, 0) - 1
        if PER_SLOT:
            slot = tl.load(token_table + at * table_row + token, mask=chosen, other=0).to(tl.int32)
            held = tl.load(targets + tl.load(mine + 3) + place // PER_SLOT, mask=chosen, other=0)
            cells = tl.load(key_table + layer).to(tl.pointer_type(tl.int32))
            tl.store(cells + held * slot_stride + head * head_stride + place % PER_SLOT, slot, mask=chosen)
        else:
            tl.store(out + of_head * most + place, token, mask=chosen)


@triton.jit(do_not_specialize=VARYING)
def _score_chosen(
    logits, tops, masses, chosen, bits, numbers, first_layer, first_request, requests, pitches, chunks, most, SINKS: tl.constexpr,
    NEWEST: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Bits of the scores of some tokens that were chosen for a KV head."""
    head, pair, place = tl.program_id(0), tl.program_id(2), tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    _, mine, _, length = of_pair(numbers, pair, first_layer, first_request, requests)
    inside, of_head = place < tl.load(mine + 2), (pair * HEADS + head).to(tl.int64)
    normalizers = _normalizers(tops, masses, of_head, chunks, tl.cdiv(length, CHUNK), GROUP, G)
    token = tl.load(chosen + of_head * most + place, mask=inside, other=0)
    found = _bits_of_scores(
        logits, normalizers, of_head, pitches.to(tl.int64) * PITCH, token, length, length, SINKS, NEWEST, GROUP, G, TOKENS
    )  # fmt: skip
    tl.store(bits + of_head * most + place, found, mask=inside)


@dataclass(frozen=True)
class Contexts:
    """Requests among whose tokens is chosen.

    Attributes:
        token_table: int32 [rows, width]; a row leads to the slots of a context.
        numbers: int64 [requests, 4]: row of the table, tokens of the context, of these how many are chosen, at least 1 and at most all,
            and which of the targets are the first of the request.
        lengths: tokens of the contexts, on the host.
        always: first and newest tokens of each, which are chosen before others.
        targets: int64, slots that get pointers, those of a request one after the other; None where positions are wanted.
    """

    token_table: torch.Tensor
    numbers: torch.Tensor
    lengths: tuple[int, ...]
    always: tuple[int, int]
    targets: torch.Tensor | None = None


class Asked(NamedTuple):
    """What logits are asked for, of some layers and requests: for who multiplies queries with keys that are no numbers.

    Attributes:
        tensors: factors of the layers, token table, numbers of the requests, logits, and of each chunk maxima and masses.
        where: the first layer and request, how many requests, and units of PITCH in a row of logits.
        chunks: of the longest context.
        pairs: of a layer and a request.
        table_row: numbers in a row of the token table.
    """

    tensors: tuple[torch.Tensor, ...]
    where: tuple[int, int, int, int]
    chunks: int
    pairs: int
    table_row: int


def scratch_bytes(longest: int, kv_heads: int, group: int, number_bytes: int) -> int:
    """Bytes that a choice of one request in one layer works in, of a context of so many tokens; a number of a key has ``number_bytes``."""
    pitch = triton.cdiv(longest, PITCH.value) * PITCH.value
    of_token = group * min(4, number_bytes) + 4 * (longest > RESIDENT)
    return kv_heads * (pitch * of_token + pitch // 8 + 8 * group * triton.cdiv(longest, CHUNK))


def choose_tokens(
    queries: torch.Tensor,
    key_table: torch.Tensor,
    like: torch.Tensor,
    scalings: torch.Tensor,
    contexts: Contexts,
    layers: slice,
    requests: slice,
    most: int = 0,
    *,
    coded: "KeyCodes | None" = None,
    scored: bool = False,
) -> torch.Tensor | None:
    """Choose for some requests, in some layers, without waiting for the device.

    Args:
        queries: float32 [requests, layers, query_heads, head_dim], one of each head of those that are meant; rotary embedding applied.
        key_table: int64 [all layers], addresses of the layers' key buffers.
        like: a key buffer, [slots, kv_heads, head_dim]; all have its shape, strides and dtype.
        scalings: float32 [all layers], factors on query-key products.
        contexts: all requests.
        layers, requests: which of them are meant.
        most: tokens that are chosen at most, where positions are wanted.
        coded: the same keys in few bits, which are read in their place; None to read the buffers.
        scored: whether their scores are wanted, too.

    Returns:
        Positions, int32 [layers, requests, kv_heads, most], ascending, of each request as many as it has; with the bits of their scores in
        float32 behind them, [2, ...], where these are wanted; None where pointers were written.

    Raises:
        OptionError: no tiles of such heads fit the GPU.
    """
    heads, device = like.shape[1], like.device
    count, group, longest = requests.stop - requests.start, queries.shape[2] // heads, max(contexts.lengths[requests])
    pairs, chunks, table = (layers.stop - layers.start) * count, triton.cdiv(longest, CHUNK), contexts.token_table
    pitches, resident = triton.cdiv(longest, PITCH.value), longest <= RESIDENT
    logits = torch.empty(pairs * heads * group, pitches * PITCH.value, dtype=_logits_of(like.dtype), device=device)
    tops, masses = torch.empty(2, pairs * heads * group, chunks, device=device)
    scores = None if resident else torch.empty(pairs * heads, pitches * PITCH.value, dtype=torch.int32, device=device)
    marks = torch.empty(pairs * heads, pitches * PITCH.value // WORD.value, dtype=torch.int32, device=device)
    where = layers.start, requests.start, count, pitches
    left = scalings, table, contexts.numbers, logits, tops, masses
    if coded is None:
        _leave_exact(queries.to(like.dtype).contiguous(), key_table, like, Asked(left, where, chunks, pairs, table.stride(0)))
    else:
        coded.leave_logits(queries, Asked(left, where, chunks, pairs, table.stride(0)))
    pointing, cells = contexts.targets is not None, like.view(torch.int32)
    shape = 1 + scored, layers.stop - layers.start, count, heads, most
    out = None if pointing else torch.empty(shape, dtype=torch.int32, device=device)
    # A program has as many threads where scores lie in memory.
    tokens = min(max(1024, triton.next_power_of_2(longest)), RESIDENT)
    _mark_best[(heads, pairs)](
        logits, tops, masses, scores, marks, contexts.numbers, *where, chunks, SINKS=contexts.always[0], NEWEST=contexts.always[1],
        HEADS=heads, GROUP=group, G=triton.next_power_of_2(group), AT_ONCE=min(tokens, AT_ONCE), RESIDENT=tokens if resident else 0,
        CHUNK=CHUNK, num_warps=max(4, tokens // OF_THREAD // 32), **UNFUSED,
    )  # fmt: skip
    _write_marked[(heads, triton.cdiv(longest, WRITTEN), pairs)](
        marks, key_table, table, contexts.numbers, contexts.targets, out, *where, table.stride(0), most, cells.stride(0), cells.stride(1),
        HEADS=heads, PER_SLOT=cells.shape[2] if pointing else 0, TOKENS=WRITTEN, WORDS=WRITTEN // 2,
    )  # fmt: skip
    if scored:
        _score_chosen[(heads, triton.cdiv(most, SCORED), pairs)](
            logits, tops, masses, out[0], out[1], contexts.numbers, *where, chunks, most, SINKS=contexts.always[0],
            NEWEST=contexts.always[1], HEADS=heads, GROUP=group, G=triton.next_power_of_2(group), TOKENS=SCORED, CHUNK=CHUNK,
            **UNFUSED,
        )  # fmt: skip
    return out if pointing or scored else out[0]


def _leave_exact(queries: torch.Tensor, key_table: torch.Tensor, like: torch.Tensor, asked: Asked) -> None:
    """Logits with keys as they are, and what normalizes them; arguments as :func:`choose_tokens`'s."""
    heads, dim = like.shape[1:]
    group = queries.shape[2] // heads

    def launch(block: dict[str, int]) -> None:
        _leave_logits[(heads, asked.chunks, asked.pairs)](
            queries, key_table, like, *asked.tensors, *asked.where, asked.chunks, asked.table_row, like.stride(0), like.stride(1),
            HEADS=heads, GROUP=group, M=padded(group), DIM=dim, PADDED_DIM=padded(dim), CHUNK=CHUNK, **block,
        )  # fmt: skip

    def what() -> str:
        return f"choosing tokens with {shape_name(dim, group, like.dtype)}"

    key = ("choose", group, dim, like.dtype, like.device)
    # Several programs shall fit on a processor.
    launch_fitting(BLOCKS if like.itemsize <= 2 else BLOCKS[1:], launch, key, what, "pass --kv-compressor verify-guided")


def _logits_of(dtype: torch.dtype) -> torch.dtype:
    """As which logits are left: keys of fewer bits have no exact ones."""
    return torch.float32 if dtype == torch.float32 else torch.float16
