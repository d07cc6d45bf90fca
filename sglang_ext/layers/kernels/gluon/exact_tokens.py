"""Softmax over the exact tokens of a row in Gluon, by one warp. Does what ``exact_split`` of ../flash_decoding.py does, and stores it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from sglang_ext.layers.kernels.gluon import assembly
from sglang_ext.layers.kernels.gluon.tiles import A, B, LOG2E, QUERY, SUM, as_weights, exact_channel, finish, store_rows, totals

PAIRED = gl.constexpr(assembly.paired_tokens())
IN_FLOAT16 = gl.constexpr((*assembly.weights("f16"), gl.float16))
IN_BFLOAT16 = gl.constexpr((*assembly.weights("bf16"), gl.bfloat16))
# Tokens of a step.
STEP = gl.constexpr(32)


@gluon.jit
def _load(numbers, slots, inside, slot_numbers, LAYOUT: gl.constexpr, F: gl.constexpr):
    """Load the numbers of tokens, [tokens, dim]. Tokens that are not ``inside`` are 0."""
    channel = gl.arange(0, F.value.dim, gl.SliceLayout(0, LAYOUT))[None, :]
    at = (slots.to(gl.int64) * slot_numbers)[:, None] + channel
    return gl.load(numbers + at, mask=inside[:, None], other=0.0)


@gluon.jit
def _keys(numbers, F: gl.constexpr):
    """Keys as A, channels in the order of :func:`~.tiles.exact_channel`."""
    tile = numbers.reshape(32, F.value.dim // 32, 4, 4, 2).permute(0, 1, 3, 2, 4).reshape(32, F.value.dim)
    return gl.convert_layout(tile, A, assert_trivial=True)


@gluon.jit
def _values(numbers, F: gl.constexpr):
    """Values as A, channels in the order of :func:`~.tiles.value_byte`."""
    paired = gl.convert_layout(numbers, F.value.exact_paired, assert_trivial=True)
    # Puts pairs of tokens in the positions of adjacent channels.
    paired = gl.inline_asm_elementwise(PAIRED[0], PAIRED[1], [paired], numbers.dtype, True, 4)
    tile = paired.reshape(16, 2, 8, F.value.dim // 16, 2).permute(3, 1, 2, 0, 4).reshape(F.value.dim, 32)
    return gl.convert_layout(tile, A, assert_trivial=True)


@gluon.jit
def exact_split(
    queries, keys, values, table, begin, end, part, scaling, partial, lse, place, splits, key_slot, value_slot,
    parts, F: gl.constexpr,
):  # fmt: skip
    """Softmax over split ``part`` of ``parts`` of a row's tokens [begin, end). ``keys`` and ``values`` point to the head's first cells."""
    N: gl.constexpr = F.value.columns
    DIM: gl.constexpr = F.value.dim
    LIKE: gl.constexpr = keys.dtype.element_ty
    WEIGHTS: gl.constexpr = IN_FLOAT16 if LIKE == gl.float16 else IN_BFLOAT16
    KEYS: gl.constexpr = F.value.exact_keys
    VALUES: gl.constexpr = F.value.exact_values
    each = gl.cdiv(end - begin, parts)
    first = begin + each * part
    last = gl.minimum(first + each, end)
    index, column = gl.arange(0, DIM, gl.SliceLayout(1, B)), gl.arange(0, N, gl.SliceLayout(0, B))[None, :]
    q = gl.load(queries + column * DIM + exact_channel(index)[:, None], mask=column < F.value.group, other=0.0).to(LIKE)
    outputs, side = gl.full([DIM, N], 0.0, gl.float32, SUM), gl.full([16, N], 0.0, gl.float32, SUM)
    best = gl.full([N], float("-inf"), gl.float32, QUERY)
    for start in range(first, last, STEP):
        of_keys = start + gl.arange(0, STEP, gl.SliceLayout(1, KEYS))
        of_values = start + gl.arange(0, STEP, gl.SliceLayout(1, VALUES))
        slots = gl.load(table + of_keys, mask=of_keys < last, other=0)
        value_slots = gl.load(table + of_values, mask=of_values < last, other=0)
        tile = _keys(_load(keys, slots, of_keys < last, key_slot, KEYS, F), F)
        numbers = _load(values, value_slots, of_values < last, value_slot, VALUES, F)
        scores = mma_v2(tile, q, gl.full([STEP, N], 0.0, gl.float32, SUM)) * (scaling * LOG2E)
        inside = start + gl.arange(0, STEP, gl.SliceLayout(1, SUM)) < last
        scores = gl.where(inside[:, None], scores, float("-inf"))
        new_best = gl.maximum(best, gl.max(scores, 0))
        rescale = gl.exp2(best - new_best)[None, :]
        best = new_best
        weights = as_weights(scores - best[None, :], WEIGHTS)
        side = mma_v2(gl.full([16, STEP], 1.0, LIKE, A), weights, side * rescale)
        outputs = mma_v2(_values(numbers, F), weights, outputs * rescale)
    total = totals(side)
    finish(lse, place, splits, best, total, F)
    store_rows(partial, place, splits, outputs, total, 0, DIM, F)
