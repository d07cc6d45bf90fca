"""Plain quantizers: a number's code is the nearest multiple of its group's step."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch


class PageQuantizer(Protocol):
    """Converts numbers to bytes and back.

    Attributes:
        name: Name for error messages.
        options: The options that change the bytes.
        spans_page: Whether the tokens of a page share a scale, so that the page size affects the loss.
    """

    name: str
    spans_page: bool

    @property
    def options(self) -> dict[str, int]:
        """The options that change the bytes."""

    def most_bytes(self, layers: int, tokens: int, heads: int, dim: int) -> int:
        """Return the maximum bytes of a stream of such a tensor."""

    def encode(self, x: torch.Tensor, layers: int) -> torch.Tensor:
        """Encode a stream, uint8 [bytes].

        Args:
            x: float32 [layers, tokens, heads, dim], finite.
            layers: Layers of the model; some quantizers are coarser in later layers.
        """

    def decode(self, stream: torch.Tensor, shape: tuple[int, int, int, int], layers: int) -> torch.Tensor:
        """Decode numbers of this shape, float32.

        Raises:
            ValueError: The stream has another size.
        """


def to_float16(x: torch.Tensor) -> torch.Tensor:
    """Convert scales to float16.

    Raises:
        ValueError: A number is too large for float16.
    """
    found = x.half()
    if not found.isfinite().all():
        raise ValueError(f"a scale of {x.abs().max():g} is beyond float16's {torch.finfo(torch.float16).max:g}")
    return found


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the same memory as uint8 [bytes]."""
    return x.contiguous().view(torch.uint8).flatten()


def check_size(stream: torch.Tensor, size: int) -> None:
    """Refuse a stream of another size.

    Raises:
        ValueError: The size differs; the message has both.
    """
    if len(stream) != size:
        raise ValueError(f"a stream has {len(stream)} bytes; these numbers take {size}")


@dataclass(frozen=True)
class Bfloat16Quantizer:
    """bfloat16: 16 bits of each number."""

    name = "bf16"
    spans_page = False

    @property
    def options(self) -> dict[str, int]:
        """No options."""
        return {}

    def most_bytes(self, layers: int, tokens: int, heads: int, dim: int) -> int:
        """Return the bytes of a stream."""
        return 2 * layers * tokens * heads * dim

    def encode(self, x: torch.Tensor, layers: int) -> torch.Tensor:
        """Round to nearest."""
        return as_bytes(x.bfloat16())

    def decode(self, stream: torch.Tensor, shape: tuple[int, int, int, int], layers: int) -> torch.Tensor:
        """Return the rounded numbers."""
        check_size(stream, self.most_bytes(*shape))
        return stream.clone().view(torch.bfloat16).view(shape).float()


@dataclass(frozen=True)
class Int8Quantizer:
    """8 bits: codes from -127 to 127 times a float16 step, which follows from the largest number.

    Attributes:
        by_token: Whether the numbers of a token and head share a step, which takes 16 / dim more bits per number. Otherwise a page's layer
            shares one.
    """

    by_token: bool = True

    @property
    def name(self) -> str:
        """Name of the codec."""
        return "int8" if self.by_token else "int8-tensor"

    @property
    def spans_page(self) -> bool:
        """Whether all tokens of a page share a step."""
        return not self.by_token

    @property
    def options(self) -> dict[str, int]:
        """No options other than the name."""
        return {}

    def most_bytes(self, layers: int, tokens: int, heads: int, dim: int) -> int:
        """Return the bytes of a stream."""
        return layers * tokens * heads * dim + 2 * layers * (tokens * heads if self.by_token else 1)

    def encode(self, x: torch.Tensor, layers: int) -> torch.Tensor:
        """Encode steps, then codes."""
        steps = to_float16(x.abs().amax(3 if self.by_token else (1, 2, 3), keepdim=True) / 127)
        codes = (x / steps.float()).nan_to_num_(0).round_().clamp_(-127, 127).to(torch.int8)
        return torch.cat([as_bytes(steps), as_bytes(codes)])

    def decode(self, stream: torch.Tensor, shape: tuple[int, int, int, int], layers: int) -> torch.Tensor:
        """Return codes times steps."""
        check_size(stream, self.most_bytes(*shape))
        count = len(stream) - math.prod(shape)
        steps = stream[:count].clone().view(torch.float16).float()
        steps = steps.view(*shape[:3], 1) if self.by_token else steps.view(-1, 1, 1, 1)
        return stream[count:].clone().view(torch.int8).view(shape).float() * steps


@dataclass(frozen=True)
class Int4Quantizer:
    """4 bits: 15 steps from the least number of a group. Both are float16, so groups of 32 take 5 bits per number.

    Attributes:
        group: Channels of a token and head that share them; fewer if the head dimension is smaller or not a multiple.
    """

    group: int = 32
    name = "int4"
    spans_page = False

    @property
    def options(self) -> dict[str, int]:
        """The options that change the bytes."""
        return {"group": self.group}

    def most_bytes(self, layers: int, tokens: int, heads: int, dim: int) -> int:
        """Return the bytes of a stream."""
        count = layers * tokens * heads * dim
        return -(-count // 2) + 4 * count // self._group(dim)

    def encode(self, x: torch.Tensor, layers: int) -> torch.Tensor:
        """Encode least numbers, steps, then two codes per byte."""
        groups = x.reshape(-1, self._group(x.shape[3]))
        least, most = groups.aminmax(dim=1, keepdim=True)
        least = to_float16(least)
        steps = to_float16((most - least.float()) / 15)
        codes = ((groups - least.float()) / steps.float()).nan_to_num_(0).round_().clamp_(0, 15).to(torch.uint8).flatten()
        codes = torch.cat([codes, codes.new_zeros(len(codes) % 2)])
        return torch.cat([as_bytes(least), as_bytes(steps), codes[::2] | codes[1::2] << 4])

    def decode(self, stream: torch.Tensor, shape: tuple[int, int, int, int], layers: int) -> torch.Tensor:
        """Return least numbers plus codes times steps."""
        check_size(stream, self.most_bytes(*shape))
        count, group = math.prod(shape), self._group(shape[3])
        scales = stream[: 4 * count // group].clone().view(torch.float16).float().view(2, -1, 1)
        packed = stream[4 * count // group :]
        codes = torch.stack([packed & 15, packed >> 4], 1).flatten()[:count].view(-1, group)
        return (scales[0] + codes.float() * scales[1]).view(shape)

    def _group(self, dim: int) -> int:
        return math.gcd(self.group, dim)
