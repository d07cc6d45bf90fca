"""Building blocks of the tensor-core kernels, in Gluon.

They convert codes to numbers and scores to weights in registers, and define the positions of channels there. They also store the results of
splits as ``store_split`` of ../flash_decoding.py does, for its ``merge_splits``.

No layout conversion moves data between registers or lanes. Otherwise it would not compile. fragments.py defines the layouts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sglang_ext.layers.kernels.gluon import assembly, fragments


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
CODE = gl.constexpr(2.0**-assembly.SUBNORMAL)
PRODUCTS = gl.constexpr(assembly.products())


@gluon.jit
def as_wide(numbers, like):
    """``numbers``, broadcast to the shape of ``like``."""
    wide, _ = gl.broadcast(numbers, like)
    return wide


@gluon.jit
def numbers_of(words, ASSEMBLY: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr, PARTS: gl.constexpr):
    """Numbers of the codes in int32 [cells, tokens, words]: float16 [cells, tokens, words, 4] for each part.

    ASSEMBLY takes words of TOKENS tokens, 1 or 2. LAYOUT is the layout of the result.
    """
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
    """Store the means ``found / total`` of COUNT channels from ``first`` on, if there are tokens.

    ``found``: float32 [COUNT, columns], rows in the order of value_byte. ``total``: float32 [columns].
    """
    column = gl.arange(0, F.value.columns, gl.SliceLayout(0, SUM))[None, :]
    row = gl.arange(0, COUNT, gl.SliceLayout(1, SUM))[:, None]
    channel = first + value_byte(row, COUNT)
    total = total[None, :]
    at = partial + (place + column * splits) * F.value.dim + channel
    gl.store(at, found / gl.where(total > 0, total, 1.0), mask=(column < F.value.group) & (total > 0))
