"""Layout of the two streams of a KV page, the values of codes, and the tensors whose pages are encoded together. Code that transports streams
needs no other file of this package.

A page is [tokens, channels] of one tensor of a pool, the keys or values of a layer. It is divided into chunks: 32 consecutive tokens of
one channel. The last chunk may have fewer. A row of chunks has one chunk of each channel.

The anchor stream, without gaps::

    header        16 bytes; the first is 0 for a page of codes, 1 for a page stored as it is ("raw"), the others 0
    mu, sigma     float16 [rows, channels] each
    sinks         [sinks, channels] as in the pool
    codes         [tokens, channels] codes of 4 bits

The anchor stream of a raw page is the header and [tokens, channels] as in the pool. A page is raw if codes would not be smaller. It is
also raw if its tokens after the sinks contain NaN, infinity, or a number outside the range of float16.

The residual stream of ``reference="int8"`` is [tokens, channels] residuals. A residual is ``V * 2 ** r - I + 2 ** (r - 1)`` and has r = 4
bits.

The residual stream of ``reference="exact"`` is uint32 [rows, ceil(channels / 64)], padded to 8 bytes, and then bits. Each uint32 is the
offset, in units of 8 bytes after them, of a block of 64 channels of a row. The elements of a block are ordered by token, then by channel,
lowest bits first. Each element is its number's index in a bin (pytorch_codec.py). The number's code and its chunk's scales determine the bin. The
index has as many bits as the bin's last index.

The residual stream of ``reference="compact"`` restores the same in fewer bits, for pages in host memory (compact_codec.py). A page whose
compact streams would not be smaller is raw, too.

The residual stream of a raw page is empty.

A byte holds the codes of two channels, or their residuals, the first in the lower bits.

The codes and residuals of sinks have no meaning. In an exact residual they have no bits.

The values of codes are levels in [-1, 1], denser near 0 (Lynx, Algorithm 1), with bounds between them.
A number ``y`` is companded to ``I = round(F * ln(1 + a |y|) / ln(1 + a))``, which has 8 bits with its sign. An anchor of b bits is
the sign and ``V = (I + 2 ** (r - 1) - 1) >> r``, the highest b - 1 bits of I, rounded. The residual, of r = 8 - b bits, restores I from V.
``F`` is the greatest multiple of V's step, so that the anchor alone represents the extreme of a chunk exactly. ``V = 0`` with a sign
means a quarter of a step, not 0.

Levels and bounds have 13 significant bits, so that their products with a float16 are exact in float32. Therefore a product and a sum
round the same on every device, whether the compiler fuses them into one instruction or not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

# Bits of anchor and residual together.
BITS = 8
# Bits of a code: of streams, and of exact residuals beside packed blocks (residual_pages.py).
STREAM_BITS, ANCHORS = 4, (2, 4)
# Parameter a of the companding. All values from 1 to 4 are equally good.
CURVE = 2.0
# Significant bits of a level: the 24 of float32 less the 11 of float16.
SIGNIFICANT = 13


def level_step(bits: int) -> int:
    """Number of values of I that share one V, for an anchor of ``bits``."""
    return 2 ** (BITS - bits)


def max_level(bits: int) -> int:
    """F: the I of the extremes, 112 for an anchor of 4 bits."""
    return level_step(bits) * (2 ** (bits - 1) - 1)


def expand_level(companded: float, bits: int) -> float:
    """The number in [0, 1] that corresponds to an I, rounded to 13 significant bits."""
    size = math.expm1(companded / max_level(bits) * math.log1p(CURVE)) / CURVE
    mantissa, exponent = math.frexp(size)
    return math.ldexp(round(mantissa * 2**SIGNIFICANT), exponent - SIGNIFICANT)


@lru_cache(maxsize=None)
def fine_levels(bits: int) -> tuple[float, ...]:
    """Levels of I, from 0 to F."""
    return tuple(expand_level(i, bits) for i in range(max_level(bits) + 1))


@lru_cache(maxsize=None)
def fine_bounds(bits: int) -> tuple[float, ...]:
    """Lower bounds of I, from 0 to F. The bound of 0 is 0."""
    return (0.0, *(expand_level(i - 0.5, bits) for i in range(1, max_level(bits) + 1)))


@lru_cache(maxsize=None)
def levels(bits: int) -> tuple[float, ...]:
    """Levels of an anchor's codes 0 to ``2 ** bits - 1``, ascending. Code ``2 ** (bits - 1)`` is the smallest positive one."""
    size = level_step(bits)
    steps = [expand_level(size / 4, bits), *(expand_level(size * v, bits) for v in range(1, 2 ** (bits - 1)))]
    return (*(-each for each in reversed(steps)), *steps)


@lru_cache(maxsize=None)
def bounds(bits: int) -> tuple[float, ...]:
    """Lower bounds of an anchor's codes, and the end of the last: ``2 ** bits + 1`` numbers from -1 to 1."""
    size = level_step(bits)
    ends = [*(fine_bounds(bits)[size * v - size // 2 + 1] for v in range(1, 2 ** (bits - 1))), 1.0]
    return (*(-each for each in reversed(ends)), 0.0, *ends)


CHUNK = 32
HEADER = 16
# Values of the header's first byte.
CODED, RAW = 0, 1
# Channels of a block of an exact residual, and the multiple of bytes to which its blocks are padded.
BLOCK, UNIT = 64, 8
REFERENCES = ("int8", "exact", "compact")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class PageLayout:
    """Layout of a page's streams. All sizes and offsets are in bytes.

    Attributes:
        tokens: Tokens of the page, at least 1.
        channels: Channels of a token (heads times their dim), a multiple of 8.
        dtype: Dtype of the pool: bfloat16, float16 or float32.
        bits: Bits of an anchor's code: 4 of 8 in streams, 4 or 2 in packed blocks.
        sinks: Number of first tokens that the anchor stream holds exactly.
        reference: What the residual restores: "int8", the 8-bit codes, or "exact", the pool's bits. "compact" is "exact" in fewer bits, for pages
            in host memory and anchors of 4 bits.

    Raises:
        ValueError: A value is not allowed.
    """

    tokens: int
    channels: int
    dtype: torch.dtype
    bits: int = STREAM_BITS
    sinks: int = 0
    reference: str = "int8"

    def __post_init__(self) -> None:
        allowed = (
            (self.tokens >= 1, f"tokens={self.tokens}: must be at least 1"),
            (self.channels >= 8 and self.channels % 8 == 0, f"channels={self.channels}: must be a multiple of 8; pad with zeros"),
            (self.dtype in DTYPES, f"dtype={self.dtype}: must be one of {DTYPES}; convert the pool"),
            (self.bits in ANCHORS, f"bits={self.bits}: must be one of {ANCHORS}"),
            (0 <= self.sinks <= self.tokens, f"sinks={self.sinks}: must be from 0 to the page's {self.tokens} tokens"),
            (self.reference in REFERENCES, f"reference={self.reference!r}: must be one of {REFERENCES}"),
            (self.reference != "compact" or self.bits == 4, f"bits={self.bits}: compact residuals need anchors of 4 bits"),
        )
        for holds, message in allowed:
            if not holds:
                raise ValueError(message)

    @property
    def rows(self) -> int:
        """Number of rows of chunks."""
        return -(-self.tokens // CHUNK)

    @cached_property
    def parts(self) -> dict[str, tuple[int, int]]:
        """Offset and size of each part of a coded anchor stream, in order: mu, sigma, sinks, codes."""
        scales, sinks = 2 * self.channels * self.rows, self.sinks * self.channels * self.dtype.itemsize
        sizes = {"mu": scales, "sigma": scales, "sinks": sinks, "codes": self.tokens * self.channels // 2}
        offset, parts = HEADER, {}
        for name, size in sizes.items():
            parts[name] = (offset, size)
            offset += size
        return parts

    @cached_property
    def raw_bytes(self) -> int:
        """Size of the anchor stream of a raw page."""
        return HEADER + self.tokens * self.channels * self.dtype.itemsize

    @cached_property
    def coded_bytes(self) -> int:
        """Size of the anchor stream of a coded page."""
        return sum(self.parts["codes"])

    @cached_property
    def always_raw(self) -> bool:
        """Whether codes would not be smaller than raw pages. Therefore the size of an anchor stream shows whether it is raw."""
        return self.coded_bytes >= self.raw_bytes

    @cached_property
    def int8_bytes(self) -> int:
        """Size of the residual stream of a coded page, for the 8-bit reference."""
        return self.tokens * self.channels // 2

    @property
    def most_compact_bytes(self) -> int:
        """Size that no compact residual exceeds."""
        return max(0, self.raw_bytes - self.coded_bytes) // 4 * 4

    @property
    def blocks(self) -> int:
        """Blocks of an exact residual in one row of chunks."""
        return -(-self.channels // BLOCK)

    @property
    def index_bytes(self) -> int:
        """Size of the offsets before the bits of an exact residual."""
        return -(-4 * self.rows * self.blocks // UNIT) * UNIT

    def is_raw(self, anchor_bytes: int) -> bool:
        """Whether an anchor stream of this size is a raw page. Raises ValueError if no anchor stream of this layout has this size."""
        if anchor_bytes == self.raw_bytes or anchor_bytes == self.coded_bytes and not self.always_raw:
            return anchor_bytes == self.raw_bytes
        allowed = f"{self.raw_bytes} (raw)" if self.always_raw else f"{self.coded_bytes}, or {self.raw_bytes} (raw)"
        raise ValueError(
            f"an anchor stream of {anchor_bytes} bytes does not fit {self}, which has {allowed}: pass the layout that it was encoded with"
        )


# Addresses of streams and tensors are multiples of this.
ALIGNMENT = 16


@dataclass(frozen=True)
class PageTensors:
    """Tensors whose pages are encoded and decoded together, checked once: [tokens or slots, channels], of one dtype, shape and strides."""

    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def from_tensors(cls, tensors: "Sequence[torch.Tensor] | PageTensors") -> "PageTensors":
        """Create from tensors whose channels may be [heads, dim]. Raises ValueError if they differ, or channels are not contiguous."""
        if isinstance(tensors, PageTensors):
            return tensors
        flat = tuple(tensor.view(len(tensor), -1) for tensor in tensors)
        kinds = {(each.shape, each.dtype, each.stride()) for each in flat}
        if len(kinds) != 1 or flat[0].stride(1) != 1:
            raise ValueError(
                f"{', '.join(map(_described, flat[:2]))}: tensors must have the same shape, dtype and strides, and contiguous channels; "
                "pass contiguous copies"
            )
        return cls(flat)

    @cached_property
    def table(self) -> torch.Tensor:
        """Addresses of the tensors, int64 [parts], on the device. Raises ValueError as :func:`addresses`."""
        return addresses(self.tensors)

    def check(self, layout: PageLayout, slots: torch.Tensor | None) -> None:
        """Check that the tensors' ``slots`` hold pages of ``layout``. Raises ValueError that names the difference."""
        one = self.tensors[0]
        if layout.bits != STREAM_BITS:
            raise ValueError(f"{layout}: codes of streams have {STREAM_BITS} bits")
        if one.shape[1] != layout.channels or one.dtype != layout.dtype:
            raise ValueError(
                f"{_described(one)} does not fit {layout}, which needs its dtype and contiguous channels: pass a pool's buffer, or its "
                "contiguous copy"
            )
        if len(one if slots is None else slots) != layout.tokens:
            given = None if slots is None else tuple(slots.shape)
            raise ValueError(f"{_described(one)}, slots {given}: {layout} has {layout.tokens} tokens")


@dataclass(frozen=True)
class StreamBatch:
    """Streams of a page's parts, all of the same size, at regular distances in one memory.

    Attributes:
        memory: uint8 [bytes]. On a GPU, its address is a multiple of ``ALIGNMENT``.
        begins: int64 [parts], offset of each stream in ``memory``, on its device. Multiples of ``ALIGNMENT``.
        first, width: Offset of the first stream, and bytes from one stream to the next.
        size: Bytes of each stream.
    """

    memory: torch.Tensor
    begins: torch.Tensor
    first: int
    width: int
    size: int

    @classmethod
    def empty(cls, count: int, size: int, device: torch.device) -> "StreamBatch":
        """Memory for ``count`` streams of ``size`` bytes, with zeros between them."""
        width = -(-size // ALIGNMENT) * ALIGNMENT
        memory = torch.empty(count, width, dtype=torch.uint8, device=device)
        memory[:, size:] = 0
        return cls(memory.flatten(), torch.arange(count, device=device) * width, 0, width, size)

    @property
    def rows(self) -> torch.Tensor:
        """The streams, uint8 [parts, size]."""
        return self.memory.as_strided((len(self.begins), self.size), (self.width, 1), self.memory.storage_offset() + self.first)

    @property
    def addresses(self) -> torch.Tensor:
        """Addresses of the streams, int64 [parts], on the device."""
        return self.begins + self.memory.data_ptr()


def addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Addresses of tensors, int64 [tensors], on their device. Raises ValueError if one is not a multiple of ``ALIGNMENT``."""
    found = torch.tensor([tensor.data_ptr() for tensor in tensors])
    if torch.any(found % ALIGNMENT):
        raise ValueError(f"addresses {found.tolist()}: tensors must begin at multiples of {ALIGNMENT} bytes; pass a copy")
    return found.pin_memory().to(tensors[0].device, non_blocking=True) if tensors[0].is_cuda else found


def _described(tensor: torch.Tensor) -> str:
    return f"a tensor {tuple(tensor.shape)} of {tensor.dtype} with strides {tensor.stride()}"
