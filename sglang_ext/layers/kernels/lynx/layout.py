"""Layout of the two streams of a KV page. Code that transports streams needs no other file of this package.

A page is [tokens, channels] of one tensor of a pool, the keys or values of a layer. It is divided into chunks: 32 consecutive tokens of
one channel. The last chunk may have fewer. A row of chunks has one chunk of each channel.

The anchor stream, without gaps::

    header        16 bytes; the first is 0 for a page of codes, 1 for a page stored as it is ("raw"), the others 0
    gamma         float16 [2, channels]: minimum and step of the scales; only with short scales
    mu, sigma     float16 [rows, channels] each; with short scales see below
    sinks         [sinks, channels] as in the pool
    mu, sigma     uint8 [rows, channels] each; only with short scales
    codes         the planes of [tokens, channels] codes of ``bits`` bits

The anchor stream of a raw page is the header and [tokens, channels] as in the pool. A page is raw if codes would not be smaller. It is
also raw if its tokens after the sinks contain NaN, infinity, or a number outside the range of float16.

The residual stream of ``reference="int8"`` is the planes of [tokens, channels] residuals. A residual is
``V * 2 ** r - I + 2 ** (r - 1)`` and has r = 8 - ``bits`` bits.

The residual stream of ``reference="exact"`` is uint32 [rows, ceil(channels / 64)], padded to 8 bytes, and then bits. Each uint32 is the
offset, in units of 8 bytes after them, of a block of 64 channels of a row. The elements of a block are ordered by token, then by channel,
lowest bits first. Each element is its number's index in a bin (bins.py). The number's code and its chunk's scales determine the bin. The
index has as many bits as the bin's last index.

The residual stream of a raw page is empty.

Codes of 2 and 4 bits are one plane. Codes of 3 bits are a plane of the upper 2 bits and a plane of the lowest bit. Codes of 5 and 6 bits
are a plane of the upper 4 bits and a plane of the rest. A plane of w bits has ``channels * w / 8`` bytes per token. w bytes hold 8
channels, the first in the lowest bits.

The codes and residuals of sinks have no meaning. In an exact residual they have no bits.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from sglang_ext.layers.kernels.lynx.levels import ANCHORS, BITS

CHUNK = 32
HEADER = 16
# Values of the header's first byte.
CODED, RAW = 0, 1
# Channels of a block of an exact residual, and the multiple of bytes to which its blocks are padded.
BLOCK, UNIT = 64, 8
REFERENCES = ("int8", "exact")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Widths of the planes by bits of a code, the highest plane first.
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)}


@dataclass(frozen=True)
class PageLayout:
    """Layout of a page's streams. All sizes and offsets are in bytes.

    Attributes:
        tokens: Tokens of the page, at least 1.
        channels: Channels of a token (heads times their dim), a multiple of 8.
        dtype: Dtype of the pool: bfloat16, float16 or float32.
        bits: Bits of an anchor's code: 4, 3 or 2 of 8.
        sinks: Number of first tokens that the anchor stream holds exactly.
        short_scales: mu and sigma have 8 bits instead of 16.
        reference: What the residual restores: "int8", the 8-bit codes, or "exact", the pool's bits.

    Raises:
        ValueError: A value is not allowed.
    """

    tokens: int
    channels: int
    dtype: torch.dtype
    bits: int = 4
    sinks: int = 0
    short_scales: bool = False
    reference: str = "int8"

    def __post_init__(self) -> None:
        allowed = (
            (self.tokens >= 1, f"tokens={self.tokens}: must be at least 1"),
            (self.channels >= 8 and self.channels % 8 == 0, f"channels={self.channels}: must be a multiple of 8; pad with zeros"),
            (self.dtype in DTYPES, f"dtype={self.dtype}: must be one of {DTYPES}; convert the pool"),
            (self.bits in ANCHORS, f"bits={self.bits}: must be one of {ANCHORS}"),
            (0 <= self.sinks <= self.tokens, f"sinks={self.sinks}: must be from 0 to the page's {self.tokens} tokens"),
            (self.reference in REFERENCES, f"reference={self.reference!r}: must be one of {REFERENCES}"),
        )
        for holds, message in allowed:
            if not holds:
                raise ValueError(message)

    @property
    def rows(self) -> int:
        """Number of rows of chunks."""
        return -(-self.tokens // CHUNK)

    @property
    def residual_bits(self) -> int:
        """Bits of a residual of the 8-bit reference."""
        return BITS - self.bits

    @cached_property
    def parts(self) -> dict[str, tuple[int, int]]:
        """Offset and size of each part of a coded anchor stream, in order: gamma, mu, sigma, sinks, codes."""
        scales, count = (1, self.channels * self.rows) if self.short_scales else (2, self.channels * self.rows)
        sizes = {"gamma": 4 * self.channels if self.short_scales else 0}
        chunks = {"mu": scales * count, "sigma": scales * count}
        sinks = {"sinks": self.sinks * self.channels * self.dtype.itemsize}
        sizes |= sinks | chunks if self.short_scales else chunks | sinks
        sizes["codes"] = self.tokens * self.channels * self.bits // 8
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
        return self.tokens * self.channels * self.residual_bits // 8

    @property
    def blocks(self) -> int:
        """Blocks of an exact residual in one row of chunks."""
        return -(-self.channels // BLOCK)

    @property
    def index_bytes(self) -> int:
        """Size of the offsets before the bits of an exact residual."""
        return -(-4 * self.rows * self.blocks // UNIT) * UNIT

    def is_raw(self, anchor_bytes: int) -> bool:
        """Whether an anchor stream of this size is a raw page.

        Raises:
            ValueError: It is not the size of an anchor stream of this layout.
        """
        if anchor_bytes == self.raw_bytes or anchor_bytes == self.coded_bytes and not self.always_raw:
            return anchor_bytes == self.raw_bytes
        allowed = f"{self.raw_bytes} (raw)" if self.always_raw else f"{self.coded_bytes}, or {self.raw_bytes} (raw)"
        raise ValueError(
            f"an anchor stream of {anchor_bytes} bytes does not fit {self}, which has {allowed}: pass the layout that it was encoded with"
        )
