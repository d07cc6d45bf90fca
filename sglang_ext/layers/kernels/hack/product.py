"""The homomorphic product: that of two quantized matrices, out of their codes (HACK, arXiv 2502.03589, equation 4).

The inner dimension is cut into partitions. In each of them a row of either matrix is ``scale * code + zero``, so that a product of
two rows is

    s_a s_b sum(a' b')  +  z_b s_a sum(a')  +  z_a s_b sum(b')  +  P z_a z_b

and the first sum alone is over all codes: one of integers. The others are stored beside the codes (summation elimination). The result is
that of dequantized rows, but for the rounding of float32.
"""

from typing import NamedTuple

import torch

# Codes of what is quantized for one product: of 8 bits, counted from the least int8.
LAST_CODE, FIRST_CODE = 255, -128
# The least scale: of numbers that hardly differ all get the first code.
SMALLEST_SCALE = 1e-30


class Partitioned(NamedTuple):
    """Rows in partitions along their last dimension, of which the last may be shorter: ``scale * code + zero``.

    Attributes:
        codes: int8 [..., rows, length].
        scale, zero: float32 [..., rows, partitions].
        sums: float32 [..., rows, partitions], of each partition's codes; integers.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    sums: torch.Tensor

    def whole(self, partition: int) -> torch.Tensor:
        """What the codes mean: float32 [..., rows, length]."""
        length = self.codes.shape[-1]
        scale, zero = (part.repeat_interleave(partition, -1)[..., :length] for part in (self.scale, self.zero))
        return self.codes.float() * scale + zero


def quantize_partitions(rows: torch.Tensor, partition: int, from_zero: bool = False) -> Partitioned:
    """Rows in 8 bits, rounded to the nearest code: queries, or softmax weights.

    Args:
        rows: float32 [..., rows, length], finite.
        partition: numbers that share a scale; the last ones may be fewer.
        from_zero: the first code means 0, not a partition's least number, and none is negative: weights of prompts, whose kernel
            looks for no minimum.
    """
    length = rows.shape[-1]
    # What fills up the last partition is as its last number is, which changes no range.
    filled = torch.cat([rows, rows[..., -1:].expand(*rows.shape[:-1], -length % partition)], -1).unflatten(-1, (-1, partition))
    least, most = filled.amin(-1, keepdim=True), filled.amax(-1, keepdim=True)
    if from_zero:
        least = torch.zeros_like(least)
    scale = ((most - least) * (1 / LAST_CODE)).clamp(min=SMALLEST_SCALE)
    codes = ((filled - least) * (1 / scale)).round().clamp(0, LAST_CODE) + FIRST_CODE
    codes = codes.flatten(-2)[..., :length]
    zero = (least - scale * FIRST_CODE).squeeze(-1)
    return Partitioned(codes.to(torch.int8), scale.squeeze(-1), zero, _split(codes, partition).sum(-1))


def product(left: Partitioned, right: Partitioned, partition: int) -> torch.Tensor:
    """Products of each row of ``left`` with each of ``right``: float32 [..., rows of left, rows of right].

    Args:
        left: rows of the first matrix.
        right: columns of the second one, as rows.
        partition: numbers that share a scale, at most 128; the last ones may be fewer.
    """
    length = left.codes.shape[-1]
    # Products of int8 that are summed up 128 at a time are below 2 ** 24: float32 holds each exactly.
    first, second = (_split(part.codes.float(), partition).transpose(-2, -3) for part in (left, right))
    integers = first @ second.mT
    scaled = (integers * left.scale.mT[..., None] * right.scale.mT[..., None, :]).sum(-3)
    sizes = torch.full_like(left.scale[..., 0, :], partition)
    sizes[..., -1] -= -length % partition
    of_left = left.scale * left.sums + left.zero * sizes[..., None, :]
    return scaled + of_left @ right.zero.mT + left.zero @ (right.scale * right.sums).mT


def _split(codes: torch.Tensor, partition: int) -> torch.Tensor:
    """With the last dimension in partitions, filled up with 0: [..., rows, partitions, partition]."""
    return torch.nn.functional.pad(codes, (0, -codes.shape[-1] % partition)).unflatten(-1, (-1, partition))
