"""Weighted sums of packed values, in Gluon: weights and what lies in a warp's registers go in, outputs come out."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from sglang_ext.layers.kernels.gluon.tiles import A, B, as_wide, numbers_of, products


@gluon.jit
def _of_weights(numbers, GROUPS: gl.constexpr):
    """Numbers of each token's groups in the order of the scores' rows: [tokens, groups]."""
    return numbers.reshape(2, 4, 2, 4, GROUPS).permute(0, 3, 1, 2, 4).reshape(64, GROUPS)


@gluon.jit
def zero_rows(zero, F: gl.constexpr):
    """A, [16, tokens]: the values' zero points by group, again and again, then from row 8 on ones, which sum the weights."""
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
    """The columns of [tokens, COUNT], 1, 2 or 4: each [tokens]."""
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
    """Weights times the values' scales, in shared memory: B for each group."""
    scales = _apart(_of_weights(scale.load(F.value.weight_layout), gl.constexpr(F.value.groups)), gl.constexpr(F.value.groups))
    found = ()
    for group in gl.static_range(gl.constexpr(F.value.groups)):
        mine = gl.convert_layout(scales[group], gl.SliceLayout(1, B), assert_trivial=True)
        found = found + (products(weights, gl.expand_dims(mine, 1)),)
    return found


@gluon.jit
def add_values(outputs, words, weights, F: gl.constexpr):
    """Outputs by part and unit, float32 [bytes of a unit, columns] over CODE, and the weighted sums of values.

    Args:
        outputs: of each part's units.
        words: of each unit int32 [cells, tokens, words], the values' codes.
        weights: of each group float16 [tokens, columns].
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
            # The assembly leaves pairs of tokens where it found neighbouring bytes.
            tile = numbers[unit][part].reshape(2, 4, 2, 4, 8, UNIT // 32, 2, 2).permute(5, 2, 6, 4, 0, 3, 1, 7).reshape(UNIT, 64)
            mine = weights[part * UNITS + unit if F.value.groups > 1 else 0]
            found = found + (mma_v2(gl.convert_layout(tile, A, assert_trivial=True), mine, outputs[part * UNITS + unit]),)
    return found
