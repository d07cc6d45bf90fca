"""8-bit quantization inside Triton kernels, and of queries before a kernel. It matches ``quantize_partitions`` of product.py."""

import torch
import triton
import triton.language as tl

from sglang_ext.layers.kernels.hack import product

SMALLEST_SCALE = tl.constexpr(product.SMALLEST_SCALE)
FIRST_CODE, LAST_CODE = tl.constexpr(product.FIRST_CODE), tl.constexpr(product.LAST_CODE)
# Adding ROUNDING to a small float32 rounds it to an integer, ties to even, which the lowest bits of the sum hold.
ROUNDING = tl.constexpr(1.5 * 2**23)


@triton.jit
def quantize_8bit(numbers, AXIS: tl.constexpr):
    """Quantize float32 partitions along ``AXIS``. Returns int32 codes from FIRST_CODE on, and scales and zero points that keep the axis."""
    least = tl.min(numbers, AXIS, keep_dims=True)
    scale = tl.maximum((tl.max(numbers, AXIS, keep_dims=True) - least) * (1.0 / LAST_CODE), SMALLEST_SCALE)
    steps = (numbers - least) * (1.0 / scale) + ROUNDING
    codes = (steps.to(tl.int32, bitcast=True) & LAST_CODE) + FIRST_CODE
    return codes, scale, least - scale * FIRST_CODE


@triton.jit
def _query_codes(
    queries, codes, scales, zeros, rests, scaling, DIM: tl.constexpr, PARTITION: tl.constexpr, COUNT: tl.constexpr,
    PADDED_COUNT: tl.constexpr,
):  # fmt: skip
    """Quantize one head's query of one token."""
    place = tl.program_id(0)
    part, channel = tl.arange(0, PADDED_COUNT), tl.arange(0, PARTITION)
    there = part < COUNT
    at = place * DIM + part[:, None] * PARTITION + channel[None, :]
    numbers = tl.load(queries + at, mask=there[:, None], other=0.0).to(tl.float32) * scaling
    found, scale, zero = quantize_8bit(numbers, 1)
    tl.store(codes + at, found.to(tl.int8), mask=there[:, None])
    rest = scale * tl.sum(found, 1, keep_dims=True).to(tl.float32) + zero * PARTITION
    at = (place * COUNT + part)[:, None]
    tl.store(scales + at, scale, mask=there[:, None])
    tl.store(zeros + at, zero, mask=there[:, None])
    tl.store(rests + at, rest, mask=there[:, None])


def query_codes(queries: torch.Tensor, partition: int, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize queries to 8 bits, in partitions along their channels.

    Args:
        queries: [requests, heads, dim], contiguous. ``dim`` is a multiple of the partition.
        partition: Channels that share a scale.
        scaling: Factor on the queries.

    Returns:
        Codes, int8, shaped like ``queries``, and float32 [3, requests, heads, partitions]. These are the scales, the zero points, and the
        factors of the keys' zero points (equation 4): ``scale * sum of codes + partition * zero point``.
    """
    requests, heads, dim = queries.shape
    codes, count = torch.empty_like(queries, dtype=torch.int8), dim // partition
    parameters = torch.empty(3, requests, heads, count, device=queries.device)
    _query_codes[(requests * heads,)](
        queries, codes, *parameters, scaling, DIM=dim, PARTITION=partition, COUNT=count, PADDED_COUNT=triton.next_power_of_2(count),
        num_warps=1,
    )  # fmt: skip
    return codes, parameters
