"""The interface of quantizers: which numbers share a scale, and which codes they get.

The storage of the bytes and the attention that reads them are the same for all quantizers (block_layout.py, quantized_blocks.py). A
quantizer defines what a code means: ``level[code] * scale + zero``, of vectors that it may rotate first. Attention then rotates queries in
the same way, and rotates outputs back, so that products do not change. A quantizer may also store outliers, and read keys from before
rotary embedding. Attention then dequantizes whole vectors (:func:`whole`).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch

from sglang_ext.mem_cache.compressed.layouts.block_layout import PARAMETER, Grid, Quantized

# Largest float16: scales and zero points are clamped to it, so that they stay finite.
LARGEST = torch.finfo(PARAMETER).max
# How codes are found, for a kernel that does the same:
# - "evenly": evenly over the range of a group, as quantize_evenly does;
# - "levels": the nearest level of vectors divided by their lengths, which are the scales, as TurboQuant.quantize does;
# - "centred": by the bounds that distances from a group's mean reach, over the largest distance, as Lynx.quantize does;
# - "stochastic": stochastically, with seeds, as Hack.quantize does.
Finding = Literal["evenly", "levels", "centred", "stochastic"]


@dataclass(frozen=True)
class Quantizer(ABC):
    """Turns keys and values into codes.

    Attributes:
        bits: Bits of a code.
        block: Tokens that are packed together.
        recent: Newest tokens of a context that are not quantized. The draft row points to their full KV.
        sinks: First tokens of a context that are not quantized. Much attention goes to them in any case (docs/benchmarks.md).
        before_rotary: Whether it reads keys from before rotary embedding. Models without a known one are then refused.
        finding: How :meth:`quantize` finds codes, for a kernel that does the same on a GPU; None if only PyTorch finds the codes. A subclass that
            overrides :meth:`quantize` must set this, or has None.
        has_kernels: Whether kernels read its blocks. A GPU server refuses it otherwise.
        sums: Whether blocks store the sum of each group's codes. Attention that multiplies codes as integers needs them.
        stochastic: Whether :meth:`quantize` takes ``noise`` for stochastic rounding (layouts/block_layout.py).
    """

    bits: int
    block: int = 64
    recent: int = 0
    sinks: int = 4
    before_rotary: ClassVar[bool] = False
    finding: ClassVar[Finding | None] = "evenly"
    has_kernels: ClassVar[bool] = True
    sums: ClassVar[bool] = False
    stochastic: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        defining_class = next(vars(base) for base in cls.__mro__ if {"finding", "quantize"} & vars(base).keys())
        if "finding" not in defining_class:
            cls.finding = None

    @abstractmethod
    def key_grid(self, dim: int) -> Grid:
        """Group of keys with ``dim`` channels that share a scale. Kernels support groups of one channel, or all of one token."""

    @abstractmethod
    def value_grid(self, dim: int) -> Grid:
        """Group of values with ``dim`` channels that share a scale. Kernels support groups of one channel, or of one token."""

    def rotation(self, dim: int) -> torch.Tensor | None:
        """Matrix that vectors are multiplied with before quantization: float32 [dim, dim], orthogonal; None for none."""
        return None

    def levels(self, dim: int) -> torch.Tensor | None:
        """Numbers that the codes mean: float32 [2 ** bits], ascending; None if a code means itself."""
        return None

    def bounds(self, dim: int) -> torch.Tensor | None:
        """Boundaries between codes that mean levels, the levels' midpoints: float32 [2 ** bits - 1], ascending; None without levels."""
        levels = self.levels(dim)
        return None if levels is None else (levels[1:] + levels[:-1]) / 2

    def outliers(self, dim: int) -> int:
        """Number of outliers of a block, for heads with ``dim`` channels."""
        return 0

    def rotation_on(self, device: torch.device, dim: int) -> torch.Tensor | None:
        """:meth:`rotation` on a device. It is copied once: later calls do not wait, and the tensor keeps its address."""
        return _moved_once(self, "rotation", device, dim)

    def levels_on(self, device: torch.device, dim: int) -> torch.Tensor | None:
        """:meth:`levels` on a device, as :meth:`rotation_on`."""
        return _moved_once(self, "levels", device, dim)

    def bounds_on(self, device: torch.device, dim: int) -> torch.Tensor | None:
        """:meth:`bounds` on a device, as :meth:`rotation_on`."""
        return _moved_once(self, "bounds", device, dim)

    def quantize(self, numbers: torch.Tensor, grid: Grid) -> Quantized:
        """Quantize ``numbers``, float32 [heads, blocks, tokens, dim], already rotated; by default as :func:`quantize_evenly`."""
        return quantize_evenly(numbers, grid, self.bits)


@lru_cache(maxsize=None)
def _moved_once(packs: Quantizer, made_by: str, device: torch.device, dim: int) -> torch.Tensor | None:
    made = getattr(packs, made_by)(dim)
    return None if made is None else made.to(device)


def quantize_evenly(numbers: torch.Tensor, grid: Grid, bits: int) -> Quantized:
    """Quantize float32 [heads, blocks, tokens, dim] to asymmetric integers.

    The scale is the range of a group over ``2 ** bits - 1``, the zero point is its smallest number. Codes are computed from the stored
    parameters, so that rounding of the parameters adds no error.
    """
    groups = grouped(numbers, grid)
    least, most = groups.amin((3, 5), keepdim=True), groups.amax((3, 5), keepdim=True)
    zero = round_to_float16(least)
    scale = round_to_float16((most - zero) / (2**bits - 1))
    steps = torch.where(scale > 0, (groups - zero) / scale, 0.0)
    codes = steps.round().clamp(0, 2**bits - 1).to(torch.uint8)
    return Quantized(codes.view(numbers.shape), squeezed(scale), squeezed(zero))


def grouped(numbers: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Split [heads, blocks, tokens, dim] into groups: [heads, blocks, groups, grid.tokens, groups, grid.channels]."""
    heads, blocks, tokens, dim = numbers.shape
    return numbers.reshape(heads, blocks, tokens // grid.tokens, grid.tokens, dim // grid.channels, grid.channels)


def squeezed(parameter: torch.Tensor) -> torch.Tensor:
    """Reshape one number per group of :func:`grouped`: [heads, blocks, groups along tokens, groups along channels]."""
    return parameter.squeeze(5).squeeze(3)


def code_values(codes: torch.Tensor, levels: torch.Tensor | None) -> torch.Tensor:
    """Numbers of codes before scale and zero point: float32. ``levels`` as :meth:`Quantizer.levels`."""
    return codes.float() if levels is None else levels.take(codes.long())


def whole(block: Quantized, grid: Grid, levels: torch.Tensor | None) -> torch.Tensor:
    """Dequantize blocks, including outliers: float32 [heads, blocks, tokens, dim]. ``levels`` as :meth:`Quantizer.levels`."""
    codes = code_values(block.codes, levels)
    scale, zero = (part[:, :, :, None, :, None] for part in (block.scale, block.zero))
    numbers = (grouped(codes, grid) * scale + zero).reshape(codes.shape)
    if block.outliers is None:
        return numbers
    return numbers.flatten(2).scatter_add(2, *block.outliers).view(codes.shape)


def round_to_float16(parameter: torch.Tensor) -> torch.Tensor:
    """Scales or zero points as readers see them: float32, rounded to float16, finite."""
    return parameter.clamp(-LARGEST, LARGEST).to(PARAMETER).float()


def stored_above(sizes: torch.Tensor) -> torch.Tensor:
    """``sizes``, at least 0, rounded up to float16, finite: float32. For numbers that must not become smaller when stored."""
    sizes = sizes.clamp(max=LARGEST)
    near = sizes.to(PARAMETER)
    # The bits of the next larger float16 are those of the integer that is greater by one.
    return (near.view(torch.int16) + (near.float() < sizes)).view(PARAMETER).float()
