"""Mean (mu) and range (sigma) of chunks, in PyTorch. Codes are fractions of the range (Lynx, Algorithm 1, stages 1 and 2).

The result has the same bits for any order of summation, any device, and any fusion of products and sums. A mean is computed from integers,
to 2 ** -19 of the chunk's largest number. A product that is followed by a sum is exact.
"""

from typing import NamedTuple

import torch

# The largest float16.
LARGEST = 65504.0
# Adding and then subtracting it rounds a small float32 to an integer, ties to even.
ROUNDING = 1.5 * 2**23
# Of float32: the exponent bias, and the biased exponents of 2 ** -40 and of LARGEST.
BIAS, LEAST, MOST = 127, 87, 142
# Numbers become integers below 2 ** INTEGER, so that float32 holds the sum of 32 of them. A mean is the sum divided by 2 ** SHARE.
INTEGER, SHARE = 18, 5


class ChunkScales(NamedTuple):
    """Scales of chunks, float32 [rows, channels]. Sigma is a float16. All numbers of a chunk are within mu - sigma and mu + sigma."""

    mu: torch.Tensor
    sigma: torch.Tensor


class EncodedScales(NamedTuple):
    """Scales, their bytes in the anchor stream, and the channels that they cover, bool [channels]."""

    scales: ChunkScales
    stored: dict[str, torch.Tensor]
    covered: torch.Tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, or of its contiguous copy, as uint8 [bytes]."""
    return tensor.contiguous().flatten().view(torch.uint8)


def rounded_up(numbers: torch.Tensor) -> torch.Tensor:
    """Round float32 of at least 0 up to float16. Never -0, because then the order of comparisons would decide."""
    nearest = numbers.half().abs()
    return (nearest.view(torch.int16) + (nearest.float() < numbers)).to(torch.int16).view(torch.float16)


def next_up(numbers: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """The next greater float16 of numbers of at least 0, where ``where`` is set."""
    return (numbers.view(torch.int16) + where).to(torch.int16).view(torch.float16)


def means(x: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """Means of chunks, float32 [rows, channels], of ``x``, [rows, 32, channels]. ``size``: the largest absolute value of each chunk."""
    exponent = (size.view(torch.int32) >> 23).clamp(LEAST, MOST)
    grow = ((2 * BIAS + INTEGER - 1 - exponent) << 23).view(torch.float32)
    shrink = ((exponent - INTEGER + 1 - SHARE) << 23).view(torch.float32)
    integers = (x * grow[:, None]).add_(ROUNDING).sub_(ROUNDING)
    return integers.sum(1) * shrink


def covers(mu: torch.Tensor, sigma: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Whether all numbers of a chunk are within its scales, bool."""
    return (mu + sigma >= high) & (mu - sigma <= low)


def compute_scales(x: torch.Tensor) -> EncodedScales:
    """Scales of a page's chunks, float32 [rows, 32, channels]. Chunks with fewer numbers repeat some."""
    low, high = x.amin(1), x.amax(1)
    mean = means(x, torch.maximum(low.abs(), high.abs()))
    sound = (low >= -LARGEST) & (high <= LARGEST) & mean.isfinite()
    short_mu = mean.half()
    mu = short_mu.float()
    short_sigma = rounded_up(torch.maximum(high - mu, mu - low))
    short_sigma = next_up(short_sigma, ~covers(mu, short_sigma.float(), low, high))
    sigma = short_sigma.float()
    sound &= (sigma <= LARGEST) & covers(mu, sigma, low, high)
    return EncodedScales(ChunkScales(mu, sigma), {"mu": as_bytes(short_mu), "sigma": as_bytes(short_sigma)}, sound.all(0))


def read(stored: dict[str, torch.Tensor], rows: int) -> ChunkScales:
    """Scales from the parts of an anchor stream that :func:`compute_scales` stored, uint8 [bytes] each."""
    return ChunkScales(*(stored[name].view(torch.float16).view(rows, -1).float() for name in ("mu", "sigma")))
