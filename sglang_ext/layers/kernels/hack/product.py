"""The homomorphic product: a product of two quantized matrices computed from their codes (HACK, arXiv 2502.03589, equation 4).

The inner dimension is divided into partitions. In each partition, a row of either matrix is ``scale * code + zero``, so that a product of
two rows is

    s_a s_b sum(a' b')  +  z_b s_a sum(a')  +  z_a s_b sum(b')  +  P z_a z_b

Only the first sum is over products of codes, an integer product. The sums of codes in the other terms are stored beside the codes
(summation elimination). The result equals that of the dequantized rows, except for float32 rounding.
"""

from typing import NamedTuple

import torch

# Codes of rows that are quantized for one product: 8 bits, from the smallest int8 on.
LAST_CODE, FIRST_CODE = 255, -128
# The smallest scale. Numbers that hardly differ all get the first code.
SMALLEST_SCALE = 1e-30


class Partitioned(NamedTuple):
    """Quantized rows: ``scale * code + zero``, in partitions along the last dimension. The last partition may be shorter.

    Attributes:
        codes: int8 [..., rows, length].
        scale, zero: float32 [..., rows, partitions].
        sums: float32 [..., rows, partitions], sum of the codes of each partition; integers.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    sums: torch.Tensor

    def whole(self, partition: int) -> torch.Tensor:
        """The dequantized rows: float32 [..., rows, length]."""
        length = self.codes.shape[-1]
        scale, zero = (part.repeat_interleave(partition, -1)[..., :length] for part in (self.scale, self.zero))
        return self.codes.float() * scale + zero


def quantize_partitions(rows: torch.Tensor, partition: int, from_zero: bool = False) -> Partitioned:
    """Quantize rows, for example queries or softmax weights, to 8 bits, rounded to the nearest code.

    Args:
        rows: float32 [..., rows, length], finite.
        partition: Numbers that share a scale. The last partition may have fewer.
        from_zero: The first code means 0, not the partition's minimum. Numbers must not be negative. Softmax weights of prompts use it,
            because their kernel computes no minimum.
    """
    length = rows.shape[-1]
    # The last number pads the last partition. That changes no range.
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
    """Products of each row of ``left`` with each row of ``right``: float32 [..., rows of left, rows of right].

    Args:
        left: Rows of the first matrix.
        right: Columns of the second matrix, as rows.
        partition: Numbers that share a scale, at most 128. The last partition may have fewer.
    """
    length = left.codes.shape[-1]
    # A sum of 128 int8 products is below 2 ** 24, so float32 holds it exactly.
    first, second = (_split(part.codes.float(), partition).transpose(-2, -3) for part in (left, right))
    integers = first @ second.mT
    scaled = (integers * left.scale.mT[..., None] * right.scale.mT[..., None, :]).sum(-3)
    sizes = torch.full_like(left.scale[..., 0, :], partition)
    sizes[..., -1] -= -length % partition
    of_left = left.scale * left.sums + left.zero * sizes[..., None, :]
    return scaled + of_left @ right.zero.mT + left.zero @ (right.scale * right.sums).mT


def _split(codes: torch.Tensor, partition: int) -> torch.Tensor:
    """Divide the last dimension into partitions, padded with 0: [..., rows, partitions, partition]."""
    return torch.nn.functional.pad(codes, (0, -codes.shape[-1] % partition)).unflatten(-1, (-1, partition))
