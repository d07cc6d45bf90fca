"""Which tokens of full KV each KV head needs for a query of each of its query heads: several requests and layers at once.

The score of a token is the softmax attention that the queries pay to it, mean over the query heads of its KV head (AsyncSpade,
section 4.3); the first and the newest tokens come before all others. Keys are read once: a first kernel leaves the logits, and what each chunk of
the context needs for their normalizers; a second one makes scores of them; a third finds the score of the last token that is chosen, by
histograms of its bits, and writes down those above it. Of equal scores those of earlier tokens are chosen first.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.fitting import launch_fitting, padded, shape_name
from sglang_ext.layers.kernels.window_scores import LOG2_E

# Tokens whose logits a program leaves; of these, keys that are multiplied at once, the more the better where they fit.
CHUNK = 1024
BLOCKS = ({"BLOCK": 64}, {"BLOCK": 32}, {"BLOCK": 16}, {"BLOCK": 16, "num_stages": 1})
# Logits of which a program makes scores; scores that a program counts at once.
LOGITS, COUNTED = 4096, 2048
# Chunks whose normalizers are joined at once.
JOINED = 16
# Bits of a score that one histogram looks at: of 32 the first is the sign, and no score is below 0.
FIRST_BITS, LATER_BITS = 11, 10
# Numbers of a request (Contexts.numbers).
NUMBERS = tl.constexpr(4)
# Exponentials are powers of two on a GPU.
TO_POWERS = tl.constexpr(LOG2_E)
# What differs from launch to launch: a kernel that was compiled for one serves all.
VARYING = ("first_layer", "first_request", "requests", "longest", "chunks", "table_row", "most")


@triton.jit
def _of_pair(numbers, pair, first_layer, first_request, requests):
    """Of a pair of a layer and a request in a launch: the layer, the numbers of the request, and its row and length."""
    mine = numbers + (first_request + pair % requests) * NUMBERS
    return first_layer + pair // requests, mine, tl.load(mine), tl.load(mine + 1).to(tl.int32)


@triton.jit(do_not_specialize=VARYING)
def _leave_logits(
    queries, key_table, like, scalings, token_table, numbers, logits, tops, masses, first_layer, first_request, requests, longest, chunks,
    table_row, slot_stride, key_head, HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Logits of a KV head's queries in a chunk of a context, times log2(e); the largest of each, and the sum of powers of two below it."""
    head, chunk, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    layer, _, at, length = _of_pair(numbers, pair, first_layer, first_request, requests)
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
        out = logits + ((pair * HEADS + head).to(tl.int64) * GROUP + row)[:, None] * longest
        top = tl.full((M,), float("-inf"), tl.float32)
        mass = tl.zeros((M,), tl.float32)
        for first in tl.range(begin, tl.minimum(begin + CHUNK, length), BLOCK):
            token = first + column
            inside = token < length
            slot = tl.load(table + token, mask=inside, other=0).to(tl.int64)
            k = tl.load(keys + slot[:, None] * slot_stride + dim[None, :], mask=inside[:, None] & (dim < DIM)[None, :], other=0.0)
            found = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
            tl.store(out + token[None, :], found.to(logits.dtype.element_ty), mask=mine[:, None] & inside[None, :])
            found = tl.where(inside[None, :], found, float("-inf"))
            new = tl.maximum(top, tl.max(found, 1))
            mass = mass * tl.exp2(top - new) + tl.sum(tl.exp2(found - new[:, None]), 1)
            top = new
        place = ((pair * HEADS + head) * GROUP + row) * chunks + chunk
        tl.store(tops + place, top, mask=mine)
        tl.store(masses + place, mass, mask=mine)


@triton.jit(do_not_specialize=VARYING)
def _leave_scores(
    logits, tops, masses, scores, numbers, first_layer, first_request, requests, longest, chunks, SINKS: tl.constexpr, NEWEST: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """Mean attention to a block of a context's tokens; infinite for the first and the newest."""
    head, pair = tl.program_id(0), tl.program_id(2)
    _, _, _, length = _of_pair(numbers, pair, first_layer, first_request, requests)
    if tl.program_id(1) * BLOCK < length:
        row, of_head = tl.arange(0, G), (pair * HEADS + head).to(tl.int64)
        mine = row < GROUP
        top = tl.full((G,), float("-inf"), tl.float32)
        mass = tl.zeros((G,), tl.float32)
        for first in tl.range(0, tl.cdiv(length, CHUNK), JOINED):
            chunk = first + tl.arange(0, JOINED)
            there = mine[:, None] & (chunk < tl.cdiv(length, CHUNK))[None, :]
            place = (of_head * GROUP + row)[:, None] * chunks + chunk[None, :]
            tops_here = tl.load(tops + place, mask=there, other=float("-inf"))
            masses_here = tl.load(masses + place, mask=there, other=0.0)
            new = tl.where(mine, tl.maximum(top, tl.max(tops_here, 1)), 0.0)
            mass = mass * tl.exp2(top - new) + tl.sum(masses_here * tl.exp2(tops_here - new[:, None]), 1)
            top = new
        normalizer = tl.where(mine, top, 0.0) + tl.log2(tl.where(mine, mass, 1.0))
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < length
        place = (of_head * GROUP + row)[:, None] * longest + token[None, :]
        found = tl.load(logits + place, mask=mine[:, None] & inside[None, :], other=float("-inf")).to(tl.float32)
        score = tl.sum(tl.exp2(found - normalizer[:, None]), 0) / GROUP
        # What is no number, as of keys that are none, comes last.
        score = tl.where(score >= 0, score, 0.0)
        score = tl.where((token < SINKS) | (token >= length - NEWEST), float("inf"), score)
        tl.store(scores + of_head * longest + token, score, mask=inside)


@triton.jit
def _digit(bits, length, known, need, SHIFT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The next BITS bits of the score of the last token that is chosen, of which those above are ``known``; and how many tokens are
    to be chosen of those that have these bits."""
    value = tl.arange(0, 1 << BITS)
    counted = tl.zeros((1 << BITS,), tl.int32)
    for first in tl.range(0, length, BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = token < length
        score = tl.load(bits + token, mask=inside, other=0)
        # Scores of other bits count as the smallest, of which any number may be there.
        alike = inside & ((score >> (SHIFT + BITS)) == known)
        counted += tl.histogram(tl.where(alike, (score >> SHIFT) & ((1 << BITS) - 1), 0), 1 << BITS)
    at_least = tl.sum(counted) - tl.cumsum(counted, 0) + counted
    digit = tl.max(tl.where(at_least >= need, value, 0))
    return (known << BITS) | digit, need - tl.sum(tl.where(value > digit, counted, 0))


@triton.jit(do_not_specialize=VARYING)
def _write_best(
    bits, key_table, token_table, numbers, targets, out, first_layer, first_request, requests, longest, table_row, most, slot_stride,
    head_stride, HEADS: tl.constexpr, PER_SLOT: tl.constexpr, FIRST_BITS: tl.constexpr, LATER_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a KV head the tokens of the highest scores, ascending: positions, or, with PER_SLOT, pointers in the slots of its targets."""
    head, pair = tl.program_id(0), tl.program_id(1)
    layer, mine, at, length = _of_pair(numbers, pair, first_layer, first_request, requests)
    count, target = tl.load(mine + 2).to(tl.int32), tl.load(mine + 3)
    bits += (pair * HEADS + head).to(tl.int64) * longest
    known, need = _digit(bits, length, 0, count, 2 * LATER_BITS, FIRST_BITS, BLOCK)
    known, need = _digit(bits, length, known, need, LATER_BITS, LATER_BITS, BLOCK)
    last, need = _digit(bits, length, known, need, 0, LATER_BITS, BLOCK)
    table, written, equals = token_table + at * table_row, 0, 0
    for first in tl.range(0, length, BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = token < length
        score = tl.load(bits + token, mask=inside, other=-1)
        equal = inside & (score == last)
        rank = equals + tl.cumsum(equal.to(tl.int32), 0)
        chosen = (inside & (score > last)) | (equal & (rank <= need))
        place = written + tl.cumsum(chosen.to(tl.int32), 0) - 1
        if PER_SLOT:
            slot = tl.load(table + token, mask=chosen, other=0).to(tl.int32)
            held = tl.load(targets + target + place // PER_SLOT, mask=chosen, other=0)
            cells = tl.load(key_table + layer).to(tl.pointer_type(tl.int32))
            tl.store(cells + held * slot_stride + head * head_stride + place % PER_SLOT, slot, mask=chosen)
        else:
            tl.store(out + (pair * HEADS + head).to(tl.int64) * most + place, token, mask=chosen)
        written += tl.sum(chosen.to(tl.int32))
        equals += tl.sum(equal.to(tl.int32))


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


def scratch_bytes(longest: int, kv_heads: int, group: int, number_bytes: int) -> int:
    """Bytes that a choice of one request in one layer works in, of a context of so many tokens; a number of a key has ``number_bytes``."""
    return kv_heads * (longest * (group * min(4, number_bytes) + 4) + 8 * group * triton.cdiv(longest, CHUNK))


def choose_tokens(
    queries: torch.Tensor,
    key_table: torch.Tensor,
    like: torch.Tensor,
    scalings: torch.Tensor,
    contexts: Contexts,
    layers: slice,
    requests: slice,
    most: int = 0,
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

    Returns:
        Positions, int32 [layers, requests, kv_heads, most], ascending, of each request as many as it has; None where pointers were written.

    Raises:
        OptionError: no tiles of such heads fit the GPU.
    """
    heads, dim, device = like.shape[1], like.shape[2], like.device
    count, group, longest = requests.stop - requests.start, queries.shape[2] // heads, max(contexts.lengths[requests])
    pairs, chunks, table = (layers.stop - layers.start) * count, triton.cdiv(longest, CHUNK), contexts.token_table
    logits = torch.empty(pairs * heads * group, longest, dtype=_logits_of(like.dtype), device=device)
    tops, masses = torch.empty(2, pairs * heads * group, chunks, device=device)
    scores = torch.empty(pairs * heads, longest, device=device)
    where = layers.start, requests.start, count, longest
    queries = queries.to(like.dtype).contiguous()

    def leave_logits(block: dict[str, int]) -> None:
        _leave_logits[(heads, chunks, pairs)](
            queries, key_table, like, scalings, table, contexts.numbers, logits, tops, masses, *where, chunks, table.stride(0),
            like.stride(0), like.stride(1), HEADS=heads, GROUP=group, M=padded(group), DIM=dim, PADDED_DIM=padded(dim), CHUNK=CHUNK,
            **block,
        )  # fmt: skip

    def what() -> str:
        return f"choosing tokens with {shape_name(dim, group, like.dtype)}"

    key = ("choose", group, dim, like.dtype, like.device)
    launch_fitting(BLOCKS, leave_logits, key, what, "pass --kv-compressor verify-guided")
    rows = triton.next_power_of_2(group)
    block = max(JOINED, LOGITS // rows)
    _leave_scores[(heads, triton.cdiv(longest, block), pairs)](
        logits, tops, masses, scores, contexts.numbers, *where, chunks, SINKS=contexts.always[0], NEWEST=contexts.always[1], HEADS=heads,
        GROUP=group, G=rows, BLOCK=block, CHUNK=CHUNK, JOINED=JOINED,
    )  # fmt: skip
    pointing, cells = contexts.targets is not None, like.view(torch.int32)
    out = None if pointing else torch.empty(layers.stop - layers.start, count, heads, most, dtype=torch.int32, device=device)
    _write_best[(heads, pairs)](
        scores.view(torch.int32), key_table, table, contexts.numbers, contexts.targets, out, *where, table.stride(0), most,
        cells.stride(0), cells.stride(1), HEADS=heads, PER_SLOT=cells.shape[2] if pointing else 0, FIRST_BITS=FIRST_BITS,
        LATER_BITS=LATER_BITS, BLOCK=COUNTED,
    )  # fmt: skip
    return out


def _logits_of(dtype: torch.dtype) -> torch.dtype:
    """As which logits are left: keys of fewer bits have no exact ones."""
    return torch.float32 if dtype == torch.float32 else torch.float16
