"""The interface of methods that keep tokens in few bits: what shares a scale, and which codes numbers get.

Where the bytes lie and how attention reads them is the same for all (block_layout.py, quantized_blocks.py). A quantizer says
what a code means: ``level[code] * scale + zero``, of vectors that it may rotate first. Attention then rotates queries
alike, and the outputs back, so that products stay what they were. It may also keep some numbers beside their codes, and take
the keys as they were before rotary embedding: then attention makes whole vectors of the codes (:func:`whole`).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch

from sglang_ext.mem_cache.compressed.layouts.block_layout import PARAMETER, Grid, Quantized

# Bounds of float16: scales and zero points stay finite.
LARGEST = torch.finfo(PARAMETER).max
# How codes are found where a kernel can, too: evenly over the range of a group, as Quantizer.quantize does; as the nearest of
# the levels, for vectors over their lengths, which are the scales, as TurboQuant.quantize does; or by the bounds that numbers
# reach, for distances from a group's mean over the greatest of them, as Lynx.quantize does; or drawn by seeds, as Hack.quantize does.
Finding = Literal["evenly", "levels", "centred", "stochastic"]


@dataclass(frozen=True)
class Quantizer(ABC):
    """Turns keys and values into codes.

    Attributes:
        bits: of a code.
        block: tokens that are packed together.
        recent: newest tokens of a context that are not quantized; the draft row leads to the full KV's own.
        sinks: first tokens of a context that are not quantized: much attention goes to them, whatever is asked
            (docs/benchmarks.md).
        before_rotary: whether it takes keys as they were before rotary embedding; models without a known one are refused then.
        finding: what :meth:`quantize` does, for a kernel that does the same on a GPU; None where PyTorch alone finds the codes. A
            class with a :meth:`quantize` of its own has None unless it says otherwise.
        has_kernels: whether kernels read its blocks; on a GPU it is refused without.
        sums: whether blocks hold those of each group's codes, and attention multiplies codes as integers, which needs them.
        stochastic: whether :meth:`quantize` takes ``noise``, which codes are drawn by (layouts/rounding.py).
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
        nearest_to_say = next(vars(base) for base in cls.__mro__ if {"finding", "quantize"} & vars(base).keys())
        if "finding" not in nearest_to_say:
            cls.finding = None

    @abstractmethod
    def key_grid(self, dim: int) -> Grid:
        """Numbers of keys with ``dim`` channels that share a scale. Kernels read those of one channel, or all of one token."""

    @abstractmethod
    def value_grid(self, dim: int) -> Grid:
        """Numbers of values with ``dim`` channels that share a scale. Kernels read those of one channel, or of one token."""

    def rotation(self, dim: int) -> torch.Tensor | None:
        """What vectors are multiplied with before they are quantized: float32 [dim, dim], orthogonal; None for nothing."""
        return None

    def levels(self, dim: int) -> torch.Tensor | None:
        """Numbers that the codes mean: float32 [2 ** bits], ascending; None for the codes themselves."""
        return None

    def bounds(self, dim: int) -> torch.Tensor | None:
        """Between which numbers codes change, where they mean levels: float32 [2 ** bits - 1], ascending; midpoints of the levels."""
        levels = self.levels(dim)
        return None if levels is None else (levels[1:] + levels[:-1]) / 2

    def outliers(self, dim: int) -> int:
        """Numbers of a block of heads with ``dim`` channels that are kept beside its codes."""
        return 0

    def rotation_on(self, device: torch.device, dim: int) -> torch.Tensor | None:
        """:meth:`rotation` on a device; copied there once, so that later calls neither wait for it nor move in memory."""
        return _moved_once(self, "rotation", device, dim)

    def levels_on(self, device: torch.device, dim: int) -> torch.Tensor | None:
        """:meth:`levels` on a device, as :meth:`rotation_on`."""
        return _moved_once(self, "levels", device, dim)

    def bounds_on(self, device: torch.device, dim: int) -> torch.Tensor | None:
        """:meth:`bounds` on a device, as :meth:`rotation_on`."""
        return _moved_once(self, "bounds", device, dim)

    def quantize(self, numbers: torch.Tensor, grid: Grid) -> Quantized:
        """Codes of ``numbers``, float32 [heads, blocks, tokens, dim], rotated already.

        Asymmetric: the scale is the range of a group over ``2 ** bits - 1``, the zero point its least number. Codes are
        those of the parameters as they are stored, so that their rounding costs nothing more.
        """
        groups = grouped(numbers, grid)
        least, most = groups.amin((3, 5), keepdim=True), groups.amax((3, 5), keepdim=True)
        zero = stored(least)
        scale = stored((most - zero) / (2**self.bits - 1))
        steps = torch.where(scale > 0, (groups - zero) / scale, 0.0)
        codes = steps.round().clamp(0, 2**self.bits - 1).to(torch.uint8)
        return Quantized(codes.view(numbers.shape), squeezed(scale), squeezed(zero))


@lru_cache(maxsize=None)
def _moved_once(packs: Quantizer, made_by: str, device: torch.device, dim: int) -> torch.Tensor | None:
    made = getattr(packs, made_by)(dim)
    return None if made is None else made.to(device)


def grouped(numbers: torch.Tensor, grid: Grid) -> torch.Tensor:
    """[heads, blocks, tokens, dim] with its groups apart: [heads, blocks, groups, grid.tokens, groups, grid.channels]."""
    heads, blocks, tokens, dim = numbers.shape
    return numbers.reshape(heads, blocks, tokens // grid.tokens, grid.tokens, dim // grid.channels, grid.channels)


def squeezed(parameter: torch.Tensor) -> torch.Tensor:
    """A number for each group of :func:`grouped`: [heads, blocks, groups along tokens, groups along channels]."""
    return parameter.squeeze(5).squeeze(3)


def meant(codes: torch.Tensor, levels: torch.Tensor | None) -> torch.Tensor:
    """What codes mean before scale and zero point: float32; ``levels`` as :meth:`Quantizer.levels`."""
    return codes.float() if levels is None else levels.take(codes.long())


def whole(block: Quantized, grid: Grid, levels: torch.Tensor | None) -> torch.Tensor:
    """What blocks mean, outliers included: float32 [heads, blocks, tokens, dim]; ``levels`` as :meth:`Quantizer.levels`."""
    codes = meant(block.codes, levels)
    scale, zero = (part[:, :, :, None, :, None] for part in (block.scale, block.zero))
    numbers = (grouped(codes, grid) * scale + zero).reshape(codes.shape)
    if block.outliers is None:
        return numbers
    return numbers.flatten(2).scatter_add(2, *block.outliers).view(codes.shape)


def stored(parameter: torch.Tensor) -> torch.Tensor:
    """Scales or zero points as they are read again: float32, rounded to float16, finite."""
    return parameter.clamp(-LARGEST, LARGEST).to(PARAMETER).float()


def stored_above(sizes: torch.Tensor) -> torch.Tensor:
    """``sizes``, at least 0, as they are read again where they must not become less: float32, the next float16, finite."""
    sizes = sizes.clamp(max=LARGEST)
    near = sizes.to(PARAMETER)
    # The bits of the next float16 are those of an integer that is greater by one.
    return (near.view(torch.int16) + (near.float() < sizes)).view(PARAMETER).float()


def stored_next(sizes: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Of :func:`stored_above`'s, the next float16 where asked, finite: float32."""
    return (sizes.to(PARAMETER).view(torch.int16) + (where & (sizes < LARGEST))).view(PARAMETER).float()


def stored_below(numbers: torch.Tensor) -> torch.Tensor:
    """``numbers`` as they are read again where they must not become more: float32, the next float16, finite."""
    numbers = numbers.clamp(-LARGEST, LARGEST)
    near = numbers.to(PARAMETER)
    # Of negative numbers, and of what became -0, the bits of the lower float16 are those of the greater integer.
    lower = torch.where(numbers < 0, 1, -1).to(torch.int16)
    return (near.view(torch.int16) + lower * (near.float() > numbers)).view(PARAMETER).float()


def nearest(numbers: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Which of ``levels``, ascending, lies nearest to each number; of two as near the lower: uint8, as ``numbers``.

    Counts the midpoints below: for some 16 levels that is three times as fast on a CPU as a search of each number.
    """
    codes = torch.zeros(numbers.shape, dtype=torch.uint8, device=numbers.device)
    for midpoint in (levels[1:] + levels[:-1]) / 2:
        codes += (numbers > midpoint).view(torch.uint8)
    return codes
