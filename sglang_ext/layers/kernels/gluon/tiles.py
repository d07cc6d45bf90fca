"""Building blocks of the tensor-core kernels, in Gluon. They convert codes to numbers and scores to weights in registers, and store the results
of splits as ``store_split`` of ../flash_decoding.py does.

No layout conversion moves data between registers or lanes. Otherwise it would not compile. fragments.py defines the layouts.

:func:`exact_split` is the softmax over the exact tokens of a row, by one warp, as ``exact_split`` of ../flash_decoding.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from sglang_ext.layers.kernels.gluon import fragments


@gluon.jit
def key_byte(index, COUNT: gl.constexpr):
    """Byte, of COUNT bytes of a token's key, at position ``index`` of the sum. A lane has a quarter of the bytes."""
    return index // 2 % 4 * (COUNT // 4) + index // 8 * 2 + index % 2


@gluon.jit
def value_byte(row, COUNT: gl.constexpr):
    """Byte or channel, of COUNT that share a scale, at row ``row`` of the output. A lane has an eighth of them."""
    return row % 8 * (COUNT // 8) + row // 8


@gluon.jit
def exact_channel(index):
    """Channel of an exact key at position ``index`` of the sum. A lane has eight adjacent channels of each 32."""
    return index // 32 * 32 + index // 2 % 4 * 8 + index // 8 % 4 * 2 + index % 2


SUM, A, B = (gl.constexpr(part) for part in (fragments.SUM, fragments.A, fragments.B))
# Layout of one number per query: [columns].
QUERY = gl.constexpr(gl.SliceLayout(0, fragments.SUM))
# Factor of a code in its float16 number.
CODE = gl.constexpr(2.0**-fragments.SUBNORMAL)
PRODUCTS = gl.constexpr(fragments.PRODUCTS)


@gluon.jit
def as_wide(numbers, like):
    """``numbers``, broadcast to the shape of ``like``."""
    wide, _ = gl.broadcast(numbers, like)
    return wide


@gluon.jit
def numbers_of(words, ASSEMBLY: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr, PARTS: gl.constexpr):
    """Numbers of the codes in int32 [cells, tokens, words]: float16 [cells, tokens, words, 4] for each part. ASSEMBLY takes TOKENS tokens."""
    words = gl.expand_dims(words, 3)
    # Each of a word's four numbers has the whole word as its input. One of the four input registers is the word.
    words = as_wide(words, gl.full([words.shape[0], words.shape[1], words.shape[2], 4], 0, gl.int32, LAYOUT))
    if PARTS == 1:
        return (gl.inline_asm_elementwise(ASSEMBLY[0], ASSEMBLY[1], [words], gl.float16, True, 4 * TOKENS),)
    elif PARTS == 2:
        return gl.inline_asm_elementwise(ASSEMBLY[0], ASSEMBLY[1], [words], (gl.float16, gl.float16), True, 4 * TOKENS)
    else:
        types: gl.constexpr = (gl.float16, gl.float16, gl.float16, gl.float16)
        return gl.inline_asm_elementwise(ASSEMBLY[0], ASSEMBLY[1], [words], types, True, 4 * TOKENS)


@gluon.jit
def products(left, right):
    """Products of float16 numbers. The smaller tensor is broadcast."""
    left, right = gl.broadcast(left, right)
    return gl.inline_asm_elementwise(PRODUCTS[0], PRODUCTS[1], [left, right], gl.float16, True, 2)


@gluon.jit
def as_weights(exponents, ASSEMBLY: gl.constexpr):
    """Two to the power of ``exponents``, [tokens, columns] in the layout of a sum, as B. ASSEMBLY: instructions, registers, dtype."""
    ROWS: gl.constexpr = exponents.shape[0]
    COLUMNS: gl.constexpr = exponents.shape[1]
    found = gl.inline_asm_elementwise(ASSEMBLY[0], ASSEMBLY[1], [exponents], ASSEMBLY[2], True, 2)
    found = found.reshape(ROWS // 8, 8, COLUMNS // 8, 8).permute(0, 3, 2, 1).reshape(ROWS, COLUMNS)
    return gl.convert_layout(found, B, assert_trivial=True)


LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def totals(side):
    """Sums of weights, float32 [columns], from row 8 of ``side``, [16, columns]."""
    row = gl.arange(0, 16, gl.SliceLayout(1, SUM))[:, None]
    return gl.sum(gl.where(row == 8, side, 0.0), 0)


@gluon.jit
def finish(lse, place, splits, best, total, F: gl.constexpr):
    """Store the logs of the sums of weights. ``best`` is the power of two by which the weights were divided."""
    column = gl.arange(0, F.value.columns, gl.SliceLayout(0, SUM))
    some = gl.where(total > 0, total, 1.0)
    gl.store(lse + place + column * splits, (best + gl.log2(some)) / LOG2E, mask=column < F.value.group)


@gluon.jit
def store_rows(partial, place, splits, found, total, first, COUNT: gl.constexpr, F: gl.constexpr):
    """Store the means ``found / total`` of COUNT channels from ``first`` on, rows in the order of value_byte, if there are tokens."""
    column = gl.arange(0, F.value.columns, gl.SliceLayout(0, SUM))[None, :]
    row = gl.arange(0, COUNT, gl.SliceLayout(1, SUM))[:, None]
    channel = first + value_byte(row, COUNT)
    total = total[None, :]
    at = partial + (place + column * splits) * F.value.dim + channel
    gl.store(at, found / gl.where(total > 0, total, 1.0), mask=(column < F.value.group) & (total > 0))


PAIRED = gl.constexpr(fragments.PAIRED_TOKENS)
IN_FLOAT16 = gl.constexpr((*fragments.weights("f16"), gl.float16))
IN_BFLOAT16 = gl.constexpr((*fragments.weights("bf16"), gl.bfloat16))
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
    """Keys as A, channels in the order of :func:`exact_channel`."""
    tile = numbers.reshape(32, F.value.dim // 32, 4, 4, 2).permute(0, 1, 3, 2, 4).reshape(32, F.value.dim)
    return gl.convert_layout(tile, A, assert_trivial=True)


@gluon.jit
def _values(numbers, F: gl.constexpr):
    """Values as A, channels in the order of :func:`value_byte`."""
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
