"""Which channel is where in the tensor cores' products, in Gluon: what one lane loads at once is its own in a fragment."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
