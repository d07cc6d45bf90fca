"""Products of queries with packed keys, and weighted sums of packed values, in Gluon.

Inputs are in a warp's registers. Outputs are scores or attention outputs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from sglang_ext.layers.kernels.gluon.tiles import A, B, CODE, QUERY, SUM, as_wide, numbers_of, products


@gluon.jit
def _of_channels(numbers, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """One number per byte, [1, bytes], in the order of the sum over channels."""
    numbers = numbers.reshape(4, COUNT // 8, 2).permute(1, 0, 2).reshape(COUNT)
    return gl.convert_layout(numbers, LAYOUT, assert_trivial=True)


@gluon.jit
def _of_scores(numbers):
    """One number per token, [1, tokens], in the order of the scores' rows, as float32 [tokens, 1]."""
    rows = numbers.reshape(2, 8, 4).permute(0, 2, 1).reshape(64)
    return gl.expand_dims(gl.convert_layout(rows, gl.SliceLayout(1, SUM), assert_trivial=True).to(gl.float32), 1)


@gluon.jit
def _key_numbers(words, F: gl.constexpr):
    """Numbers of each part, float16 [cells, tokens, words, 4]."""
    ASSEMBLY: gl.constexpr = F.value.key_assembly
    return numbers_of(words, ASSEMBLY, 1, gl.constexpr(F.value.key_layout), gl.constexpr(F.value.parts))


@gluon.jit
def query_sums(queries, F: gl.constexpr):
    """Sum of each query's channels, float32 [columns]. ``queries`` are from ``_load_queries`` of packed_blocks.py."""
    sums = gl.full([F.value.columns], 0.0, gl.float32, QUERY)
    for part in gl.static_range(gl.constexpr(F.value.parts)):
        ones = gl.full([16, F.value.bytes], 1.0, gl.float16, A)
        found = mma_v2(ones, queries[part], gl.full([16, F.value.columns], 0.0, gl.float32, SUM))
        sums += gl.max(found, 0) * F.value.powers[part]
    return sums


@gluon.jit
def scores_by_token(words, queries, sums, scale, zero, F: gl.constexpr):
    """Products of queries with keys whose channels share a scale: float32 [tokens, columns].

    Args:
        words: int32 [cells, tokens, words], the keys' codes.
        queries: float16 [bytes, columns] for each part.
        sums: Sums of the queries' channels, float32 [columns].
        scale, zero: In shared memory, [1, tokens].
    """
    COUNT: gl.constexpr = F.value.bytes
    numbers = _key_numbers(words, F)
    found = gl.full([64, F.value.columns], 0.0, gl.float32, SUM)
    for part in gl.static_range(gl.constexpr(F.value.parts)):
        tile = numbers[part].reshape(2, 8, 4, 4, COUNT // 8, 2).permute(0, 2, 1, 4, 3, 5).reshape(64, COUNT)
        found = mma_v2(gl.convert_layout(tile, A, assert_trivial=True), queries[part], found)
    scale = _of_scores(scale.load(F.value.score_layout)) * CODE
    zero = _of_scores(zero.load(F.value.score_layout))
    return gl.fma(found, as_wide(scale, found), zero * sums[None, :])


@gluon.jit
def _zero_products(queries, zero, HALF: gl.constexpr, F: gl.constexpr):
    """Products of queries with the zero points of one half of the tokens, in the units of code products: float32 [32, columns]."""
    COUNT: gl.constexpr = F.value.bytes
    found = gl.full([16, F.value.columns], 0.0, gl.float32, SUM)
    for part in gl.static_range(gl.constexpr(F.value.parts)):
        channels = zero.slice(HALF * F.value.parts + part, 1).load(F.value.channel_layout)
        channels = gl.expand_dims(_of_channels(channels, COUNT, gl.constexpr(gl.SliceLayout(0, A))), 0)
        rows = as_wide(channels, gl.full([16, COUNT], 0.0, gl.float16, A))
        of_part = mma_v2(rows, queries[part], gl.full([16, F.value.columns], 0.0, gl.float32, SUM))
        found += of_part * (F.value.powers[part] / CODE)
    found = gl.join(found, found).permute(2, 0, 1).reshape(32, F.value.columns)
    return gl.convert_layout(found, SUM, assert_trivial=True)


@gluon.jit
def scores_by_channel(words, queries, scale, zero, F: gl.constexpr):
    """Products of queries with keys where half of a block's tokens share each channel's scale, divided by CODE.

    Arguments are those of :func:`scores_by_token`, but ``scale`` and ``zero`` are [parts of both halves, bytes].
    """
    COUNT: gl.constexpr = F.value.bytes
    numbers = _key_numbers(words, F)
    early, late = _zero_products(queries, zero, 0, F), _zero_products(queries, zero, 1, F)
    for part in gl.static_range(gl.constexpr(F.value.parts)):
        tiles = numbers[part].reshape(2, 8, 4, 4, COUNT // 8, 2).permute(2, 1, 4, 3, 5, 0).reshape(32, COUNT, 2)
        first, second = gl.split(tiles)
        channels = scale.slice(part, 1).load(F.value.channel_layout)
        channels = gl.expand_dims(_of_channels(channels, COUNT, gl.constexpr(gl.SliceLayout(1, B))), 1)
        early = mma_v2(gl.convert_layout(first, A, assert_trivial=True), products(queries[part], channels), early)
        channels = scale.slice(F.value.parts + part, 1).load(F.value.channel_layout)
        channels = gl.expand_dims(_of_channels(channels, COUNT, gl.constexpr(gl.SliceLayout(1, B))), 1)
        late = mma_v2(gl.convert_layout(second, A, assert_trivial=True), products(queries[part], channels), late)
    found = gl.join(early, late).permute(2, 0, 1).reshape(64, F.value.columns)
    return gl.convert_layout(found, SUM, assert_trivial=True)


@gluon.jit
def _of_weights(numbers, GROUPS: gl.constexpr):
    """Numbers of each token's groups in the order of the scores' rows: [tokens, groups]."""
    return numbers.reshape(2, 4, 2, 4, GROUPS).permute(0, 3, 1, 2, 4).reshape(64, GROUPS)


@gluon.jit
def zero_rows(zero, F: gl.constexpr):
    """A, [16, tokens]: repeated rows of the values' zero points by group, then, from row 8 on, ones, which sum the weights."""
    GROUPS: gl.constexpr = F.value.groups
    LAYOUT: gl.constexpr = F.value.row_layout
    rows = _of_weights(zero.load(F.value.zero_layout), GROUPS).permute(1, 0)
    rows = gl.expand_dims(gl.convert_layout(rows, gl.SliceLayout(0, LAYOUT), assert_trivial=True), 0)
    rows = as_wide(rows, gl.full([16 // GROUPS, GROUPS, 64], 0.0, gl.float16, LAYOUT))
    again = gl.arange(0, 16 // GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    rows = gl.where(again * GROUPS < 8, rows, 1.0).to(gl.float16).reshape(16, 64)
    return gl.convert_layout(rows, A, assert_trivial=True)


@gluon.jit
def _apart(numbers, COUNT: gl.constexpr):
    """The columns of [tokens, COUNT], for COUNT 1, 2 or 4: [tokens] each."""
    if COUNT == 1:
        return (numbers.reshape(64),)
    elif COUNT == 2:
        return gl.split(numbers)
    else:
        even, odd = gl.split(numbers.reshape(64, 2, 2))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        return (first, second, third, fourth)


@gluon.jit
def scaled_weights(weights, scale, F: gl.constexpr):
    """Weights times the values' scales, which are in shared memory: B for each group."""
    scales = _apart(_of_weights(scale.load(F.value.weight_layout), gl.constexpr(F.value.groups)), gl.constexpr(F.value.groups))
    found = ()
    for group in gl.static_range(gl.constexpr(F.value.groups)):
        mine = gl.convert_layout(scales[group], gl.SliceLayout(1, B), assert_trivial=True)
        found = found + (products(weights, gl.expand_dims(mine, 1)),)
    return found


@gluon.jit
def add_values(outputs, words, weights, F: gl.constexpr):
    """Add the weighted values to the outputs by part and unit, float32 [bytes of a unit, columns], divided by CODE.

    Args:
        outputs: Outputs of each part's units.
        words: int32 [cells, tokens, words] for each unit, the values' codes.
        weights: float16 [tokens, columns] for each group.
    """
    UNIT: gl.constexpr = F.value.value_unit
    UNITS: gl.constexpr = F.value.value_units
    LAYOUT: gl.constexpr = F.value.paired_layout
    ASSEMBLY: gl.constexpr = F.value.value_assembly
    numbers = ()
    for unit in gl.static_range(UNITS):
        paired = gl.convert_layout(words[unit], gl.SliceLayout(3, LAYOUT), assert_trivial=True)
        numbers = numbers + (numbers_of(paired, ASSEMBLY, 2, LAYOUT, gl.constexpr(F.value.parts)),)
    found = ()
    for part in gl.static_range(gl.constexpr(F.value.parts)):
        for unit in gl.static_range(UNITS):
            # The assembly puts pairs of tokens in the positions of adjacent bytes.
            tile = numbers[unit][part].reshape(2, 4, 2, 4, 8, UNIT // 32, 2, 2).permute(5, 2, 6, 4, 0, 3, 1, 7).reshape(UNIT, 64)
            mine = weights[part * UNITS + unit if F.value.groups > 1 else 0]
            found = found + (mma_v2(gl.convert_layout(tile, A, assert_trivial=True), mine, outputs[part * UNITS + unit]),)
    return found
