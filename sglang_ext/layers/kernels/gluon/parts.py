"""What parts of rows end with, in Gluon: stored as ../flash_parts.py's ``store_part`` does, for its ``join_parts``."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sglang_ext.layers.kernels.gluon.orders import value_byte
from sglang_ext.layers.kernels.gluon.tiles import SUM

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
