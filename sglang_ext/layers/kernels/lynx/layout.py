"""Where things lie in the two streams of a page of KV: who transports them needs nothing else.

A page is [tokens, channels] of one tensor of a pool, keys or values of a layer. Its chunks are 32 consecutive tokens of one
channel, the last of fewer; a row of chunks has one of each channel.

The anchor stream, without gaps::

    header        16 bytes; the first is 0 for a page of codes, 1 for a page as it is ("raw"), the others 0
    gamma         float16 [2, channels]: least number and step of the scales; with short scales alone
    mu, sigma     float16 [rows, channels] each; with short scales further below
    sinks         [sinks, channels] as in the pool
    mu, sigma     uint8 [rows, channels] each; short scales
    codes         the planes of [tokens, channels] codes of ``bits`` bits

of a page that is stored raw, the header and [tokens, channels] as in the pool. A page is raw where it would not be smaller
otherwise, where it holds NaN, infinity or more than a float16 reaches outside its sinks.

The residual stream of ``reference="int8"``: the planes of [tokens, channels] residuals ``V * 2 ** r - I + 2 ** (r - 1)`` of
r = 8 - ``bits`` bits. That of ``reference="exact"``: uint32 [rows, ceil(channels / 64)], filled up to 8 bytes, and bits. The numbers
say at which 8 bytes after them a block of a row's 64 channels begins. Of a block the elements follow each other by token, then by
channel, lowest bits first: each is its number's index in the bin that its code and its chunk's scales name (bins.py), of as many
bits as the bin's last index. A raw page's residual stream is empty.

Codes of 2 and 4 bits are one plane; of 3 bits one of the higher 2 and one of the lowest, of 5 and 6 bits one of the highest 4 and
one of the rest. A plane of w bits has ``channels * w / 8`` bytes a token: w bytes hold 8 channels, the first in the lowest bits.

The codes and residuals of sinks mean nothing; in an exact residual they have no bits.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from sglang_ext.layers.kernels.lynx.levels import ANCHORS, BITS

CHUNK = 32
HEADER = 16
# First byte of the header.
CODED, RAW = 0, 1
# Channels of a block of an exact residual, and bytes to which its blocks are filled up.
BLOCK, UNIT = 64, 8
REFERENCES = ("int8", "exact")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Codes of so many bits are planes of so many, the highest first.
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)}


@dataclass(frozen=True)
class PageLayout:
    """Of a page's streams; all sizes and offsets in bytes.

    Attributes:
        tokens: of the page, at least 1.
        channels: of a token (heads times their dim), a multiple of 8.
        dtype: of the pool: bfloat16, float16 or float32.
        bits: of an anchor's codes: 4, 3 or 2 of 8.
        sinks: the page's first tokens that the anchor stream holds exactly.
        short_scales: mu and sigma of 8 bits, instead of 16.
        reference: what the residual restores: "int8", the numbers of 8 bits, or "exact", the pool's bits.

    Raises:
        ValueError: no such layout.
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
            (self.tokens >= 1, f"tokens={self.tokens}: a page has at least 1"),
            (self.channels >= 8 and self.channels % 8 == 0, f"channels={self.channels}: a multiple of 8; fill up with zeros"),
            (self.dtype in DTYPES, f"dtype={self.dtype}: one of {DTYPES}; convert the pool"),
            (self.bits in ANCHORS, f"bits={self.bits}: an anchor has one of {ANCHORS} of 8 bits"),
            (0 <= self.sinks <= self.tokens, f"sinks={self.sinks}: from 0 to the page's {self.tokens} tokens"),
            (self.reference in REFERENCES, f"reference={self.reference!r}: one of {REFERENCES}"),
        )
        for holds, message in allowed:
            if not holds:
                raise ValueError(message)

    @property
    def rows(self) -> int:
        """Of chunks."""
        return -(-self.tokens // CHUNK)

    @property
    def residual_bits(self) -> int:
        """Of the 8-bit reference."""
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
        """Of the anchor stream of a raw page."""
        return HEADER + self.tokens * self.channels * self.dtype.itemsize

    @cached_property
    def coded_bytes(self) -> int:
        """Of the anchor stream of a coded page."""
        return sum(self.parts["codes"])

    @cached_property
    def always_raw(self) -> bool:
        """Whether codes would not be fewer bytes; so the size of an anchor stream tells which it is."""
        return self.coded_bytes >= self.raw_bytes

    @cached_property
    def int8_bytes(self) -> int:
        """Of the residual stream of a coded page, for the 8-bit reference."""
        return self.tokens * self.channels * self.residual_bits // 8

    @property
    def blocks(self) -> int:
        """Of an exact residual, in one row of chunks."""
        return -(-self.channels // BLOCK)

    @property
    def index_bytes(self) -> int:
        """What lies before the bits of an exact residual."""
        return -(-4 * self.rows * self.blocks // UNIT) * UNIT

    def is_raw(self, anchor_bytes: int) -> bool:
        """Whether an anchor stream of that size is a raw page.

        Raises:
            ValueError: it is no anchor stream of this layout.
        """
        if anchor_bytes == self.raw_bytes or anchor_bytes == self.coded_bytes and not self.always_raw:
            return anchor_bytes == self.raw_bytes
        allowed = f"{self.raw_bytes} (raw)" if self.always_raw else f"{self.coded_bytes}, or {self.raw_bytes} (raw)"
        raise ValueError(f"an anchor stream of {anchor_bytes} bytes: {self} has {allowed}; pass the layout that it was encoded with")
