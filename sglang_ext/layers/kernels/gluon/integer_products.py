"""Integer products with packed blocks, in Gluon. Inputs are in a warp's registers. Outputs are scores, weights or attention outputs.

Scales, zero points and sums of both sides of a product are those of HACK's equation (4), arXiv 2502.03589.

Integer sums begin at BIASED (fragments.py). The bits of such a sum, read as float32, are a large number, so that no instruction converts
integers. The product of a scale and BIAS is exact if the scale's lowest bits are 0. The fused multiply-add of the scale then subtracts it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from sglang_ext.layers.kernels.gluon import fragments, integer_fragments
from sglang_ext.layers.kernels.gluon.tiles import QUERY, SUM, as_wide
from sglang_ext.layers.kernels.packed import integer_attention

A8, B8 = (gl.constexpr(part) for part in (integer_fragments.A8, integer_fragments.B8))
BIASED = gl.constexpr(fragments.BIASED)
BIAS = gl.constexpr(fragments.BIAS)
AS_FLOAT, ROUNDED = gl.constexpr(fragments.AS_FLOAT), gl.constexpr(fragments.ROUNDED_DOWN)
SMALL_INTEGERS, LARGER_INTEGERS = gl.constexpr(fragments.SMALL_INTEGERS), gl.constexpr(fragments.LARGER_INTEGERS)
FIRST_CODE, LAST_CODE = gl.constexpr(integer_attention.FIRST_CODE.value), gl.constexpr(integer_attention.LAST_CODE.value)
SMALLEST_SCALE = gl.constexpr(integer_attention.SMALLEST_SCALE.value)
# Adding ROUNDING rounds a number from 0 to LAST_CODE. The lowest byte of the sum is the code, from FIRST_CODE on.
ROUNDING = gl.constexpr(fragments.BIAS + integer_attention.FIRST_CODE.value)
# Tokens of a stream.
TOKENS = gl.constexpr(fragments.TOKENS)


@gluon.jit
def ones(COUNT: gl.constexpr):
    """A whose product with B is the sums of B's columns, in each row."""
    return gl.full([16, COUNT], 1, gl.int8, A8)


@gluon.jit
def doubled(tile, TIMES: gl.constexpr):
    """Extend 16 equal rows to 16 * 2 ** TIMES rows."""
    for _ in gl.static_range(TIMES):
        tile = gl.join(tile, tile).permute(2, 0, 1).reshape(2 * tile.shape[0], tile.shape[1])
        tile = gl.convert_layout(tile, SUM, assert_trivial=True)
    return tile


@gluon.jit
def rounded_down(scale):
    """Clear the lowest bits of scales, as :func:`_scaled` requires."""
    return gl.inline_asm_elementwise(ROUNDED[0], ROUNDED[1], [scale], gl.float32, True, 1)


@gluon.jit
def _scaled(sums, scale):
    """Integers that began at BIASED, times scales, float32 [columns], rounded once."""
    numbers = gl.inline_asm_elementwise(AS_FLOAT[0], AS_FLOAT[1], [sums], gl.float32, True, 1)
    return gl.fma(numbers, as_wide(scale[None, :], numbers), as_wide((scale * -BIAS)[None, :], numbers))


@gluon.jit
def joined(tile, HIGHEST: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr, F: gl.constexpr):
    """Sum (or maximum, if HIGHEST) over the streams of each query: float32 [ROWS, columns]."""
    if F.value.streams == 1:
        return tile
    else:
        apart = gl.convert_layout(tile.reshape(ROWS, F.value.streams, F.value.span), LAYOUT, assert_trivial=True)
        found = gl.expand_dims(gl.max(apart, 1) if HIGHEST else gl.sum(apart, 1), 1)
        return gl.convert_layout(as_wide(found, apart).reshape(ROWS, F.value.columns), SUM, assert_trivial=True)


@gluon.jit
def _highest_of_halves(numbers, F: gl.constexpr):
    """Maximum over both streams of each query: float32 [columns]."""
    ROWS: gl.constexpr = F.value.wide_rows
    wide = as_wide(numbers[None, :], gl.full([16, F.value.columns], 0.0, gl.float32, SUM))
    return gl.max(joined(wide, True, 16, ROWS, F), 0)


@gluon.jit
def _extremes(scores, F: gl.constexpr):
    """Maximum and minimum of each query's scores in a block: float32 [columns]."""
    highest, least = gl.max(scores, 0), gl.min(scores, 0)
    if F.value.halves:
        return _highest_of_halves(highest, F), -_highest_of_halves(-least, F)
    else:
        return highest, least


@gluon.jit
def _sums(numbers, F: gl.constexpr):
    """Sums of codes, stored as int16 in a float16 buffer. As float16 if that is exact, else as float32."""
    if F.value.halves:
        return gl.inline_asm_elementwise(LARGER_INTEGERS[0], LARGER_INTEGERS[1], [numbers], gl.float32, True, 2)
    else:
        return gl.inline_asm_elementwise(SMALL_INTEGERS[0], SMALL_INTEGERS[1], [numbers], gl.float16, True, 2)


@gluon.jit
def _wide(numbers, ROWS: gl.constexpr, LAYOUT: gl.constexpr, F: gl.constexpr):
    """Expand numbers of rows and streams, [ROWS, streams], to float32 in the layout of a sum, [ROWS, columns]."""
    numbers = gl.convert_layout(numbers, gl.SliceLayout(2, LAYOUT), assert_trivial=True).to(gl.float32)
    like = gl.full([ROWS, F.value.streams, F.value.span], 0.0, gl.float32, LAYOUT)
    wide = as_wide(gl.expand_dims(numbers, 2), like).reshape(ROWS, F.value.columns)
    return gl.convert_layout(wide, SUM, assert_trivial=True)


@gluon.jit
def _of_tokens(numbers, F: gl.constexpr):
    """Numbers of each partition, float32 [tokens, columns], in the order of the scores' rows, from [streams, tokens and partitions]."""
    LAYOUT: gl.constexpr = F.value.wide_tokens
    if F.value.partitions == 1:
        rows = numbers.reshape(F.value.streams, 2, 8, 4).permute(1, 3, 2, 0).reshape(64, F.value.streams)
        return (_wide(rows, 64, LAYOUT, F),)
    else:
        rows = numbers.reshape(F.value.streams, 2, 8, 4, 2).permute(1, 3, 2, 0, 4).reshape(64, F.value.streams, 2)
        first, second = gl.split(rows)
        return _wide(first, 64, LAYOUT, F), _wide(second, 64, LAYOUT, F)


@gluon.jit
def _key_codes(words, F: gl.constexpr):
    """Key codes of each part, int8 [cells, tokens, words, 4]."""
    LAYOUT: gl.constexpr = F.value.key_layout
    ASSEMBLY: gl.constexpr = F.value.key_assembly
    words = gl.expand_dims(words, 3)
    words = as_wide(words, gl.full([words.shape[0], words.shape[1], words.shape[2], 4], 0, gl.int32, LAYOUT))
    if F.value.parts == 2:
        return gl.inline_asm_elementwise(ASSEMBLY[0], ASSEMBLY[1], [words], (gl.int8, gl.int8), True, 4)
    else:
        return gl.inline_asm_elementwise(ASSEMBLY[0], ASSEMBLY[1], [words], (gl.int8, gl.int8, gl.int8, gl.int8), True, 4)


@gluon.jit
def products_with_keys(words, queries, code_sums, F: gl.constexpr):
    """Products of query codes and key codes: int32 [tokens, columns] for each partition, from BIASED on.

    ``words``: int32 [cells, tokens, words] for each stream. ``queries``: int8 [bytes, columns] for each part and stream, 0 in the columns of other
    streams. ``code_sums``: sums of a query's codes for each partition, int32 [16, columns] with equal rows.
    """
    STREAMS: gl.constexpr = F.value.streams
    TOGETHER: gl.constexpr = F.value.together
    codes, found = (), ()
    for stream in gl.static_range(STREAMS):
        codes = codes + (_key_codes(words[stream], F),)
    for partition in gl.static_range(gl.constexpr(F.value.partitions)):
        summed = gl.full([64, F.value.columns], BIASED, gl.int32, SUM)
        if F.value.key_signed[partition]:
            summed = doubled(code_sums[partition] * 128 + BIASED, 2)
        for at in gl.static_range(gl.constexpr(F.value.together * F.value.streams)):
            tile = codes[at % STREAMS][partition * TOGETHER + at // STREAMS]
            tile = tile.reshape(2, 8, 4, 4, F.value.bytes // 16, 4).permute(0, 2, 1, 4, 3, 5).reshape(64, F.value.bytes)
            summed = mma_v2(gl.convert_layout(tile, A8, assert_trivial=True), queries[partition * TOGETHER * STREAMS + at], summed)
        found = found + (summed,)
    return found


@gluon.jit
def numbers_of_keys(numbers, F: gl.constexpr):
    """Scales, zero points and sums of keys, float32 [tokens, columns] for each partition. ``numbers``: all streams', in shared memory."""
    scales = _of_tokens(_number_rows(numbers, 0, F), F)
    zeros = _of_tokens(_number_rows(numbers, 1, F), F)
    return scales, zeros, _of_tokens(_sums(_number_rows(numbers, 2, F), F), F)


@gluon.jit
def _number_rows(numbers, KIND: gl.constexpr, F: gl.constexpr):
    """Numbers of all streams, [streams, tokens and partitions]. If streams are halves of a block, each row begins with its half's."""
    STREAMS: gl.constexpr = F.value.streams
    LAYOUT: gl.constexpr = F.value.key_numbers
    if F.value.halves:
        return numbers.slice(KIND * STREAMS, STREAMS).slice(0, TOKENS, 1).load(LAYOUT)
    else:
        return numbers.slice(KIND * STREAMS, STREAMS).load(LAYOUT)


@gluon.jit
def scores_of_products(products, of_queries, of_keys, F: gl.constexpr):
    """Products of queries with keys, float32 [tokens, columns]. ``of_queries``: scales (:func:`rounded_down`), zero points and rests."""
    scales, zeros, sums = of_keys
    found = gl.full([64, F.value.columns], 0.0, gl.float32, SUM)
    for partition in gl.static_range(gl.constexpr(F.value.partitions)):
        scale, zero, rest = of_queries[partition]
        inner = _scaled(products[partition], scale) + sums[partition] * zero[None, :]
        found = found + zeros[partition] * rest[None, :]
        found = found + scales[partition] * inner
    return found


@gluon.jit
def coded_weights(scores, best, there, mask, F: gl.constexpr):
    """Quantize weights, 2 ** ``scores``, to 8 bits, as ``quantize_8bit`` of packed/integer_attention.py does.

    ``scores``, ``best``: float32 [tokens, columns], and the maximum so far, [columns]. ``there``: whether a column's block exists. ``mask``: int32
    [tokens, columns], set where codes are the first stream's. Returns the new maximum, the factor for older sums, the sums of weights, [16,
    columns], to be added over rows; B of each stream; scales and zero points, [columns], the latter once per block; the factors of the values'
    zero points, float32, and the sums of codes, int32, both [16, columns] with equal rows.
    """
    N: gl.constexpr = F.value.columns
    ASSEMBLY: gl.constexpr = F.value.weight_assembly
    highest, least = _extremes(scores, F)
    new_best = gl.maximum(best, highest)
    low = gl.exp2(least - new_best)
    scale = rounded_down(gl.maximum((gl.exp2(highest - new_best) - low) * (1.0 / LAST_CODE), SMALLEST_SCALE))
    weights = gl.exp2(scores - new_best[None, :])
    steps = (weights - low[None, :]) * (1.0 / scale)[None, :] + ROUNDING
    zero = low - scale * FIRST_CODE
    scale, zero = gl.where(there, scale, 0.0), gl.where(there, zero, 0.0)
    if F.value.streams == 1:
        codes = (gl.inline_asm_elementwise(ASSEMBLY[0], ASSEMBLY[1], [steps], gl.int8, True, 4),)
    else:
        codes = gl.inline_asm_elementwise(ASSEMBLY[0], ASSEMBLY[1], [steps, mask], (gl.int8, gl.int8), True, 4)
    sides, sums = (), gl.full([16, N], 0, gl.int32, SUM)
    for stream in gl.static_range(gl.constexpr(F.value.streams)):
        side = codes[stream].reshape(4, 2, 8, N // 8, 4, 2).permute(0, 4, 1, 5, 3, 2).reshape(64, N)
        sides = sides + (gl.convert_layout(side, B8, assert_trivial=True),)
        sums = mma_v2(ones(64), sides[stream], sums)
    rest = sums.to(gl.float32) * scale[None, :] + (zero * TOKENS)[None, :]
    if F.value.halves:
        zero = gl.where(gl.arange(0, N, QUERY) < F.value.span, zero, 0.0)
    total = gl.convert_layout(gl.sum(weights.reshape(4, 16, N), 0), SUM, assert_trivial=True)
    return new_best, gl.exp2(best - new_best), gl.where(there[None, :], total, 0.0), sides, scale, zero, rest, sums


@gluon.jit
def _value_codes(words, F: gl.constexpr):
    """Value codes of each part as A, [channels, tokens], with channels in the order of value_byte."""
    LAYOUT: gl.constexpr = F.value.quartet_layout
    ASSEMBLY: gl.constexpr = F.value.value_assembly
    words = gl.expand_dims(gl.convert_layout(words, gl.SliceLayout(3, LAYOUT), assert_trivial=True), 3)
    words = as_wide(words, gl.full([words.shape[0], words.shape[1], words.shape[2], 4], 0, gl.int32, LAYOUT))
    if F.value.parts == 2:
        codes = gl.inline_asm_elementwise(ASSEMBLY[0], ASSEMBLY[1], [words], (gl.int8, gl.int8), True, 16)
    else:
        codes = gl.inline_asm_elementwise(ASSEMBLY[0], ASSEMBLY[1], [words], (gl.int8, gl.int8, gl.int8, gl.int8), True, 16)
    found = ()
    for part in gl.static_range(gl.constexpr(F.value.parts)):
        # The assembly puts four tokens in the positions of adjacent bytes, and these bytes in the positions of the tokens.
        tile = codes[part].reshape(2, 4, 2, 2, 2, 8, F.value.bytes // 32, 4).permute(6, 2, 4, 5, 0, 3, 1, 7)
        found = found + (gl.convert_layout(tile.reshape(F.value.bytes, 64), A8, assert_trivial=True),)
    return found


@gluon.jit
def _of_channels(numbers, F: gl.constexpr):
    """Numbers of a part, [streams, channels], as float32 [channels, columns] in the order of value_byte."""
    LAYOUT: gl.constexpr = F.value.wide_channels
    rows = numbers.reshape(F.value.streams, 8, F.value.bytes // 8).permute(2, 1, 0).reshape(F.value.bytes, F.value.streams)
    return _wide(rows, gl.constexpr(F.value.bytes), LAYOUT, F)


@gluon.jit
def products_with_values(words, sides, sums, F: gl.constexpr):
    """Products of value codes, int32 [cells, tokens, words] for each stream, and weight codes: int32 [channels, columns] for each part."""
    codes, found = (), ()
    for stream in gl.static_range(gl.constexpr(F.value.streams)):
        codes = codes + (_value_codes(words[stream], F),)
    for part in gl.static_range(gl.constexpr(F.value.parts)):
        summed = gl.full([F.value.bytes, F.value.columns], BIASED, gl.int32, SUM)
        if F.value.value_signed[part]:
            summed = doubled(sums * 128 + BIASED, gl.constexpr(F.value.doublings))
        for stream in gl.static_range(gl.constexpr(F.value.streams)):
            summed = mma_v2(codes[stream][part], sides[stream], summed)
        found = found + (summed,)
    return found


@gluon.jit
def add_products(outputs, products, rescale, scale, zero, rest, numbers, F: gl.constexpr):
    """Outputs by part, float32 [channels, columns], times ``rescale``, plus the weighted values. ``numbers``: the values', in shared memory."""
    STREAMS: gl.constexpr = F.value.streams
    BYTES: gl.constexpr = F.value.bytes
    LAYOUT: gl.constexpr = F.value.value_numbers
    rest, found = doubled(rest, gl.constexpr(F.value.doublings)), ()
    for part in gl.static_range(gl.constexpr(F.value.parts)):
        value_scale = _of_channels(numbers.slice(0, STREAMS).slice(part * BYTES, BYTES, 1).load(LAYOUT), F)
        value_zero = _of_channels(numbers.slice(STREAMS, STREAMS).slice(part * BYTES, BYTES, 1).load(LAYOUT), F)
        value_sums = _sums(numbers.slice(2 * STREAMS, STREAMS).slice(part * BYTES, BYTES, 1).load(LAYOUT), F)
        inner = _scaled(products[part], scale * (1.0 / F.value.value_powers[part])) + _of_channels(value_sums, F) * zero[None, :]
        mine = outputs[part] * rescale[None, :] + value_zero * rest
        found = found + (mine + value_scale * inner,)
    return found
