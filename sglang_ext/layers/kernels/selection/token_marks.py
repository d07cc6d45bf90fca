"""Marks the tokens of a context with the highest scores, from logits and normalizers (exact_logits.py), and writes the marked tokens.

A program handles a context of a KV head. It computes scores from the logits and keeps them in registers. It finds the lowest selected
score by bisecting the range of its bits, and marks the tokens above it. Scores of a context too long for registers are stored in memory.
They are read once for each subdivision of the range into eighths. Another kernel writes the marked tokens.
"""

import triton
import triton.language as tl

from sglang_ext.layers.kernels.selection.exact_logits import LEAST, PITCH, VARYING, load_pair

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
    """Return the bits of the mean attention to TOKENS tokens of a context; their order is that of the scores. The first and newest tokens
    get infinity's bits, tokens beyond the end -1."""
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
    """Write the marked tokens of part of a context for a KV head, after those of earlier parts.

    Writes positions, or with PER_SLOT pointers in the target slots.
    """
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
