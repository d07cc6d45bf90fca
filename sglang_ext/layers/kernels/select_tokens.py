"""Selects the tokens of full KV that each KV head needs for the queries of its query heads, for several requests and layers at once.

The score of a token is the softmax attention of the queries to it, mean over the query heads of its KV head (AsyncSpade, section 4.3).
The first and the newest tokens are always selected. Of equal scores, earlier tokens are selected first.

Keys are read once, for the logits and the normalizers of each chunk of the context (key_scores.py). A second kernel marks the tokens with
the highest scores: a program bisects the bits of the lowest selected score of a context of a KV head. It keeps scores in registers, or if
the context is too long in memory, read once for each subdivision of the range into eighths. A third kernel writes the marked tokens.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.key_scores import CHUNK, LEAST, PITCH, VARYING, LogitsRequest, compute_exact_logits, load_pair, logits_dtype

if TYPE_CHECKING:
    from sglang_ext.layers.kernels.quantized_keys import QuantizedKeyTensors

# Scores in memory that are counted at once, and subdivisions of the range per pass.
COUNTED, PARTS = tl.constexpr(2048), tl.constexpr(8)
# Tokens per word of marks.
WORD = tl.constexpr(32)
# Chunks whose normalizers are combined at once.
JOINED = tl.constexpr(32)
# Bits of infinity plus one; and the difference in bits between a score and its double.
BEYOND, OCTAVE = tl.constexpr(0x7F800001), tl.constexpr(1 << 23)
# Maximum step between two guesses.
MOST_STEP = tl.constexpr(1 << 29)
# Without fused multiply-adds, all threads round sums of products alike. With them, two threads that exchange products would each round
# the other's separately, so that equal logits would get scores that differ in the last bit.
UNFUSED = {"enable_fp_fusion": False}


@triton.jit
def load_normalizers(tops, masses, of_head, chunks, there, GROUP: tl.constexpr, G: tl.constexpr):
    """Return the binary logarithms of the sums of powers of two of a KV head's logits, over its first ``there`` chunks, by query head."""
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
def score_bit_patterns(
    logits, normalizers, of_head, pitch, token, length, whole, SINKS: tl.constexpr, NEWEST: tl.constexpr, GROUP: tl.constexpr,
    G: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Bits of the mean attention to TOKENS tokens, in the scores' order; first and newest: infinity's bits; beyond the end: -1."""
    score = tl.zeros((TOKENS,), tl.float32)
    for row in tl.static_range(GROUP):
        normalizer = tl.sum(tl.where(tl.arange(0, G) == row, normalizers, 0.0))
        found = tl.load(logits + (of_head * GROUP + row) * pitch + token, mask=token < whole, other=float("-inf"))
        score += tl.exp2(found.to(tl.float32) - normalizer)
    # NaN scores, as of NaN keys, come last. The bits are tested instead of the value: ptxas (12.8) assumes that a sum of powers of two is
    # 0 or more, even for NaN, and removes a comparison with 0.
    bits = (score / GROUP).to(tl.int32, bitcast=True)
    bits = tl.where(bits.to(tl.uint32, bitcast=True) < BEYOND, bits, 0)
    bits = tl.where((token < SINKS) | (token >= length - NEWEST), BEYOND - 1, bits)
    return tl.where(token < length, bits, -1)


@triton.jit
def _last_of_registers(bits, count, length):
    """Return bits between the selected and the other scores, and how many tokens with exactly these bits are selected."""
    low, high, found, above = 0, BEYOND, length, 0
    # Start at the mean, with doubling steps, until both ends are known. Then interpolate linearly between the logarithms of the counts at
    # both ends. Every fourth step bisects instead, so that the search ends for any scores. Each count synchronizes all threads, so few
    # counts matter.
    middle, step = (1.0 / length).to(tl.int32, bitcast=True), OCTAVE
    while (found != count) & (high - low > 1):
        many = tl.sum((bits >= middle).to(tl.int32))
        enough = many >= count
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        found, above = tl.where(enough, many, found), tl.where(enough, above, many)
        half = (high - low) // 2
        both = (low > 0) & (high < BEYOND)
        part = tl.log2(found.to(tl.float32) / count) / tl.log2(found.to(tl.float32) / tl.maximum(above, 1))
        line = (part * (high - low).to(tl.float32)).to(tl.int32)
        onward = tl.where((step == MOST_STEP) | (line < 1) | (line >= high - low), half, line)
        middle = tl.where(low == 0, high - tl.minimum(step, half), low + tl.where(both, onward, tl.minimum(step, half)))
        # Once both ends are known, `step` counts the iterations: one more register would be too many here.
        step = tl.where(both & (step == MOST_STEP), MOST_STEP // 8, tl.minimum(2 * step, MOST_STEP))
    return tl.where(found == count, low - 1, low), tl.where(found == count, 0, count - above)


@triton.jit
def _last_of_memory(bits, count, length, whole):
    """Like :func:`_last_of_registers`, for ``whole`` scores in memory. Those beyond ``length`` are below all others."""
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
    """Mark tokens, starting at a multiple of 32, whose bits are above ``last``, or equal to it if the token is at most ``until``."""
    chosen = (bits > last) | ((bits == last) & (token <= until))
    words = tl.reshape(chosen.to(tl.int32), (TOKENS // WORD, WORD)) << tl.arange(0, WORD)[None, :]
    place = tl.arange(0, TOKENS // WORD)
    tl.store(marks + place, tl.sum(words, 1), mask=place < whole // WORD)


@triton.jit(do_not_specialize=VARYING)
def mark_top_tokens(
    logits, tops, masses, scores, marks, numbers, first_layer, first_request, requests, pitches, chunks, SINKS: tl.constexpr,
    NEWEST: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, AT_ONCE: tl.constexpr, RESIDENT: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Mark the tokens of a KV head's highest scores, 32 to a word."""
    head, pair = tl.program_id(0), tl.program_id(1)
    _, mine, _, length = load_pair(numbers, pair, first_layer, first_request, requests)
    count, of_head = tl.load(mine + 2).to(tl.int32), (pair * HEADS + head).to(tl.int64)
    # Rows consist of whole vectors.
    pitch, whole = pitches.to(tl.int64) * PITCH, tl.cdiv(length, PITCH) * PITCH
    marks += of_head * (pitch // WORD)
    normalizers = load_normalizers(tops, masses, of_head, chunks, tl.cdiv(length, CHUNK), GROUP, G)
    if RESIDENT > 0:
        every = tl.arange(0, RESIDENT)
        kept = score_bit_patterns(logits, normalizers, of_head, pitch, every, length, whole, SINKS, NEWEST, GROUP, G, RESIDENT)
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
            bits = score_bit_patterns(logits, normalizers, of_head, pitch, token, length, whole, SINKS, NEWEST, GROUP, G, AT_ONCE)
            tl.store(scores + token, bits, mask=token < whole)
        tl.debug_barrier()
        last, need = _last_of_memory(scores, count, length, whole)
        equals = 0
        for first in tl.range(0, whole, AT_ONCE):
            token = first + tl.arange(0, AT_ONCE)
            bits = tl.load(scores + token, mask=token < whole, other=-1)
            rank = equals + tl.cumsum((bits == last).to(tl.int32), 0)
            # The last token with the lowest selected score that is still needed.
            until = tl.max(tl.where((bits == last) & (rank <= need), token, -1))
            _marked(bits, token, last, until, marks + first // WORD, whole - first, AT_ONCE)
            equals += tl.sum((bits == last).to(tl.int32))


@triton.jit
def popcount(word):
    """Return the number of set bits of each word."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word += word >> 8
    return (word + (word >> 16)) & 0x3F


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=("out",))
def write_marked_tokens(
    marks, key_table, token_table, numbers, targets, out, first_layer, first_request, requests, pitches, table_row, most, slot_stride,
    head_stride, HEADS: tl.constexpr, PER_SLOT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write the marked tokens of part of a context for a KV head, after those of earlier parts: positions, or pointers with PER_SLOT."""
    WORDS: tl.constexpr = TOKENS // WORD
    head, pair, begin = tl.program_id(0), tl.program_id(2), tl.program_id(1) * TOKENS
    layer, mine, at, length = load_pair(numbers, pair, first_layer, first_request, requests)
    if begin < length:
        of_head = (pair * HEADS + head).to(tl.int64)
        marks += of_head * (pitches.to(tl.int64) * (PITCH // WORD))
        before = tl.zeros((WORDS,), tl.int32)
        for first in tl.range(0, begin // WORD, WORDS):
            place = first + tl.arange(0, WORDS)
            before += popcount(tl.load(marks + place, mask=place < begin // WORD, other=0))
        at_word = begin // WORD + tl.arange(0, WORDS)
        # Rows of marks are zero-padded to whole words.
        left = tl.load(marks + at_word, mask=at_word * WORD < length, other=0)
        many = popcount(left)
        place = tl.sum(before) + tl.cumsum(many, 0) - many
        # One token of each word per iteration: few are marked, except the newest.
        for _ in tl.range(0, tl.max(many)):
            chosen, token = left != 0, at_word * WORD + popcount((left & -left) - 1)
            if PER_SLOT:
                slot = tl.load(token_table + at * table_row + token, mask=chosen, other=0).to(tl.int32)
                held = tl.load(targets + tl.load(mine + 3) + place // PER_SLOT, mask=chosen, other=0)
                cells = tl.load(key_table + layer).to(tl.pointer_type(tl.int32))
                tl.store(cells + held * slot_stride + head * head_stride + place % PER_SLOT, slot, mask=chosen)
            else:
                tl.store(out + of_head * most + place, token, mask=chosen)
            left, place = left & (left - 1), place + 1


# Minimum and maximum scores that a program keeps in registers, a power of two; and scores of a thread.
LEAST_RESIDENT, RESIDENT, OF_THREAD = 1024, 32768, 64
# Tokens whose scores a program stores to memory at once, and tokens that a program writes.
AT_ONCE, WRITTEN = 4096, 8192


@dataclass(frozen=True)
class SelectionContexts:
    """Contexts of the requests among whose tokens the kernels select.

    Attributes:
        token_table: int32 [rows, width]; a row has the slots of a context.
        numbers: int64 [requests, 4]: row of the table, tokens of the context, tokens to select (1 to all), and index of the request's
            first target.
        lengths: Tokens of the contexts, on the host.
        always: Numbers of first and newest tokens that are always selected.
        targets: int64, slots that get pointers, concatenated by request; None to return positions.
    """

    token_table: torch.Tensor
    numbers: torch.Tensor
    lengths: tuple[int, ...]
    always: tuple[int, int]
    targets: torch.Tensor | None = None


def scratch_bytes(longest: int, kv_heads: int, group: int, number_bytes: int) -> int:
    """Scratch bytes of one request's selection in one layer, for ``longest`` tokens; a number of a key has ``number_bytes``."""
    pitch = triton.cdiv(longest, PITCH.value) * PITCH.value
    of_token = group * min(4, number_bytes) + 4 * (longest > RESIDENT)
    return kv_heads * (pitch * of_token + pitch // 8 + 8 * group * triton.cdiv(longest, CHUNK))


def kernel_lengths(longest: int) -> tuple[int, ...]:
    """Return one context length up to ``longest`` for each specialization of the kernel, ascending."""
    ends = [*(1 << power for power in range(LEAST_RESIDENT.bit_length() - 1, RESIDENT.bit_length())), RESIDENT + 1]
    return tuple(dict.fromkeys(min(end, longest) for end in ends))


def compile_ahead(like: torch.Tensor, query_heads: int, always: tuple[int, int], longest: int) -> None:
    """Compile the selection kernels for the current device in parallel, before the first context of each length, up to ``longest`` tokens.

    A compilation takes seconds if it is not cached on this machine. A failed compilation is repeated, and raises, at the first use. ``like``: a
    key buffer, as in :func:`mark_tokens`. ``always``: see :attr:`SelectionContexts.always`.
    """
    heads, lengths = like.shape[1], kernel_lengths(longest)
    with ThreadPoolExecutor(len(lengths)) as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
        for length in lengths:
            scores = None if length <= RESIDENT else torch.int32
            # dtypes instead of tensors; any integers.
            mark_top_tokens.warmup(
                logits_dtype(like.dtype), torch.float32, torch.float32, scores, torch.int32, torch.int64, *(0,) * 5,
                **_form(length, heads, query_heads // heads, always), grid=(1,),
            )  # fmt: skip


def _form(longest: int, heads: int, group: int, always: tuple[int, int]) -> dict[str, Any]:
    """Return the constants of :func:`mark_top_tokens` for a longest context of ``longest`` tokens, as in :func:`kernel_lengths`."""
    # Programs with scores in memory have the same number of threads.
    tokens = min(max(LEAST_RESIDENT, triton.next_power_of_2(longest)), RESIDENT)
    return {
        "SINKS": always[0], "NEWEST": always[1], "HEADS": heads, "GROUP": group, "G": triton.next_power_of_2(group),
        "AT_ONCE": min(tokens, AT_ONCE), "RESIDENT": tokens if longest <= RESIDENT else 0, "CHUNK": CHUNK,
        "num_warps": max(4, tokens // OF_THREAD // 32), **UNFUSED,
    }  # fmt: skip


@dataclass(frozen=True)
class MarkedTokens:
    """Selected tokens of some requests in some layers, marked on the device.

    Attributes:
        contexts: Contexts of all requests.
        tables: int64 [all layers], addresses of the layers' key buffers; and one of these buffers, [slots, kv_heads, head_dim].
        where: First layer, first request, number of requests, and units of PITCH in a row of logits.
        pairs: Pairs of a layer and a request.
        group: Query heads that share a KV head.
        logit_buffers: Logits, and maxima and sums of each chunk.
        marks: One bit per token, 32 to a word.
    """

    contexts: SelectionContexts
    tables: tuple[torch.Tensor, torch.Tensor]
    where: tuple[int, int, int, int]
    pairs: int
    group: int
    logit_buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    marks: torch.Tensor

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        _, first, count, _ = self.where
        return max(self.contexts.lengths[first : first + count])

    def write(self, out: torch.Tensor | None = None) -> None:
        """Launch the kernel that writes the marked tokens: pointers to the contexts' targets, or without targets positions to ``out``.

        ``out``: int32 [layers, requests, kv_heads, most], contiguous. Positions are ascending; each request writes as many as it selects.
        """
        contexts, (key_table, like), heads = self.contexts, self.tables, self.tables[1].shape[1]
        pointing, cells, table, most = contexts.targets is not None, like.view(torch.int32), contexts.token_table, 0
        if not pointing:
            most = out.shape[-1]
        write_marked_tokens[(heads, triton.cdiv(self.longest, WRITTEN), self.pairs)](
            self.marks, key_table, table, contexts.numbers, contexts.targets, out, *self.where, table.stride(0), most, cells.stride(0),
            cells.stride(1), HEADS=heads, PER_SLOT=cells.shape[2] if pointing else 0, TOKENS=WRITTEN, num_warps=8,
        )  # fmt: skip


def mark_tokens(
    queries: torch.Tensor,
    key_table: torch.Tensor,
    like: torch.Tensor,
    scalings: torch.Tensor,
    contexts: SelectionContexts,
    layers: slice,
    requests: slice,
    coded: "QuantizedKeyTensors | None" = None,
) -> MarkedTokens:
    """Select tokens for some requests in some layers, without waiting for the device.

    ``queries``: float32 [requests, layers, query_heads, head_dim], of the given requests and layers, one per head; rotary embedding applied.
    ``key_table``: int64 [all layers], addresses of the layers' key buffers. ``like``: one of them, [slots, kv_heads, head_dim]; all have its shape,
    strides and dtype. ``scalings``: float32 [all layers], factors on query-key products. ``contexts``: of all requests. ``coded``: the same keys,
    quantized, read instead of the buffers; None to read the buffers.

    Raises:
        OptionError: No tiles of such heads fit the GPU.
    """
    heads, device = like.shape[1], like.device
    count, group, longest = requests.stop - requests.start, queries.shape[2] // heads, max(contexts.lengths[requests])
    pairs, chunks, table = (layers.stop - layers.start) * count, triton.cdiv(longest, CHUNK), contexts.token_table
    pitches = triton.cdiv(longest, PITCH.value)
    logits = torch.empty(pairs * heads * group, pitches * PITCH.value, dtype=logits_dtype(like.dtype), device=device)
    # Separate tensors: each begins at a multiple of 16 bytes for any number of requests, which the kernels are compiled for.
    tops, masses = (torch.empty(pairs * heads * group, chunks, device=device) for _ in range(2))
    scores = None if longest <= RESIDENT else torch.empty(pairs * heads, pitches * PITCH.value, dtype=torch.int32, device=device)
    marks = torch.empty(pairs * heads, pitches * PITCH.value // WORD.value, dtype=torch.int32, device=device)
    where, left = (layers.start, requests.start, count, pitches), (logits, tops, masses)
    asked = LogitsRequest(chunks, pairs, (scalings, table, contexts.numbers, *left, *where, chunks, table.stride(0)))
    if coded is None:
        compute_exact_logits(queries.to(like.dtype), key_table, like, asked)
    else:
        coded.compute_logits(queries, asked)
    form = _form(longest, heads, group, contexts.always)
    mark_top_tokens[(heads, pairs)](*left, scores, marks, contexts.numbers, *where, chunks, **form)
    return MarkedTokens(contexts, (key_table, like), where, pairs, group, left, marks)
