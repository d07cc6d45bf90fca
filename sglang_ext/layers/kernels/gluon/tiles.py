"""What products on tensor cores are made of, in Gluon: codes become numbers, and scores become weights, in registers; which channel is
where in them; and what parts of rows end with, stored as ../flash_parts.py's ``store_split`` does, for its ``merge_splits``.

No conversion of a layout moves anything, or it would not compile. Layouts are as fragments.py says.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sglang_ext.layers.kernels.gluon import assembly, fragments


@gluon.jit
def key_byte(index, COUNT: gl.constexpr):
    """Byte, of COUNT of a token's key, that is the ``index``-th to be summed over: a lane has a quarter of them."""
    return index // 2 % 4 * (COUNT // 4) + index // 8 * 2 + index % 2


@gluon.jit
def value_byte(row, COUNT: gl.constexpr):
    """Byte or channel, of COUNT that share a scale, that is a row of the output: a lane has an eighth of them."""
    return row % 8 * (COUNT // 8) + row // 8


@gluon.jit
def exact_channel(index):
    """Channel of an exact key that is the ``index``-th to be summed over: a lane has eight neighbours of each 32."""
    return index // 32 * 32 + index // 2 % 4 * 8 + index // 8 % 4 * 2 + index % 2


SUM, A, B = (gl.constexpr(part) for part in (fragments.SUM, fragments.A, fragments.B))
# Of a number for each query: [columns].
QUERY = gl.constexpr(gl.SliceLayout(0, fragments.SUM))
# The number of a code is so much less than the code.
CODE = gl.constexpr(2.0**-assembly.SUBNORMAL)
PRODUCTS = gl.constexpr(assembly.products())


@gluon.jit
def as_wide(numbers, like):
    """``numbers``, broadcast to the shape of ``like``."""
    wide, _ = gl.broadcast(numbers, like)
    return wide


@gluon.jit
def numbers_of(words, ASSEMBLY: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr, PARTS: gl.constexpr):
    """Numbers of the codes in int32 [cells, tokens, words]: for each part float16 [cells, tokens, words, 4].

    ASSEMBLY takes words of as many TOKENS, 1 or 2, and the result lies as LAYOUT says.
    """
    words = gl.expand_dims(words, 3)
    # Each of a word's four numbers has the word as its input, so that one of these, its register, is the word.
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
    """Of float16, the smaller one broadcast."""
    left, right = gl.broadcast(left, right)
    return gl.inline_asm_elementwise(PRODUCTS[0], PRODUCTS[1], [left, right], gl.float16, True, 2)


@gluon.jit
def as_weights(exponents, ASSEMBLY: gl.constexpr):
    """Two to the power of [tokens, columns], a sum, as B. ASSEMBLY: instructions, registers, dtype."""
    ROWS: gl.constexpr = exponents.shape[0]
    COLUMNS: gl.constexpr = exponents.shape[1]
    found = gl.inline_asm_elementwise(ASSEMBLY[0], ASSEMBLY[1], [exponents], ASSEMBLY[2], True, 2)
    found = found.reshape(ROWS // 8, 8, COLUMNS // 8, 8).permute(0, 3, 2, 1).reshape(ROWS, COLUMNS)
    return gl.convert_layout(found, B, assert_trivial=True)


LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def totals(side):
    """Sums of weights out of a sum whose row 8 holds them, [16, columns]: float32 [columns]."""
    row = gl.arange(0, 16, gl.SliceLayout(1, SUM))[:, None]
    return gl.sum(gl.where(row == 8, side, 0.0), 0)


@gluon.jit
def finish(lse, place, splits, best, total, F: gl.constexpr):
    """Store the logarithms of the weights' sums; ``best``: the power of two that the weights were divided by."""
    column = gl.arange(0, F.value.columns, gl.SliceLayout(0, SUM))
    some = gl.where(total > 0, total, 1.0)
    gl.store(lse + place + column * splits, (best + gl.log2(some)) / LOG2E, mask=column < F.value.group)


@gluon.jit
def store_rows(partial, place, splits, found, total, first, COUNT: gl.constexpr, F: gl.constexpr):
    """Store means of COUNT channels from ``first`` on, if there are tokens: ``found`` over ``total``.

    ``found``: float32 [COUNT, columns], rows in the order of value_byte; ``total``: float32 [columns].
    """
    column = gl.arange(0, F.value.columns, gl.SliceLayout(0, SUM))[None, :]
    row = gl.arange(0, COUNT, gl.SliceLayout(1, SUM))[:, None]
    channel = first + value_byte(row, COUNT)
    total = total[None, :]
    at = partial + (place + column * splits) * F.value.dim + channel
    gl.store(at, found / gl.where(total > 0, total, 1.0), mask=(column < F.value.group) & (total > 0))
