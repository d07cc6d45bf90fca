"""Pages of Lynx codes in one stream: the baseline for measuring what splitting them gains."""

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch

from sglang_ext.managers.kv_transfer.wire import LOSSY, OptionValue
from sglang_ext.managers.kv_transfer.progressive.pool_buffers import HostBlocks
from sglang_ext.managers.kv_transfer.progressive.lynx_codec import LynxCodec, pack_streams, packed_size, unpack_streams
from sglang_ext.managers.kv_transfer.progressive.page_codec import BenchCodec, PlacedPage, page_tokens
from sglang_ext.managers.kv_transfer.progressive.pool_buffers import PoolBuffers
from sglang_ext.managers.kv_transfer.wire import Stream

# Keeps data in host memory.
ON_HOST = HostBlocks(torch.device("cpu"))


@dataclass(frozen=True)
class UnsplitCodec(BenchCodec):
    """Anchor and residual of 8 bits in one stream, or the anchor alone.

    Attributes:
        name: The name that both ends compare.
        whole: True for 8 bits, False for 4.
        split: Codec of the anchor and the residual, with reference ``int8``.
    """

    name: ClassVar[str]
    whole: ClassVar[bool]
    split: LynxCodec
    version = 1
    reference = LOSSY

    @classmethod
    def for_pool(cls, pool: PoolBuffers) -> Self:
        """Create the codec of a pool."""
        return cls(LynxCodec(pool, "int8", page_tokens(pool.bytes_per_token)))

    @property
    def pool(self) -> PoolBuffers:
        """The pool of this rank."""
        return self.split.pool

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.split.page_size

    @property
    def options(self) -> dict[str, OptionValue]:
        """The options that change the bytes."""
        return self.split.options

    def most_bytes(self, stream: Stream) -> int:
        """Return the maximum bytes of a full page."""
        if stream is not Stream.ANCHOR:
            return 0
        anchor = self.split.most_bytes(Stream.ANCHOR)
        return packed_size([anchor, self.split.most_bytes(Stream.RESIDUAL)]) if self.whole else anchor

    def encode_anchor(self, page: PlacedPage) -> memoryview:
        """Encode the page to its one stream."""
        if not self.whole:
            return self.split.start(page, residual=False)().anchor
        return pack_streams([torch.from_numpy(np.asarray(stream)) for stream in self.split.encode(page)], self.pool.blocks)

    def write_anchor(self, page: PlacedPage, anchor: memoryview) -> None:
        """Fill the page's slots with values of 8 or 4 bits.

        Raises:
            LinkError: The data is not a stream of such a page.
        """
        if not self.whole:
            self.split.write_anchor(page, anchor)
            return
        both = (memoryview(stream.numpy()) for stream in unpack_streams(anchor, 2, ON_HOST))
        self.split.write_residual(page, *both)


@dataclass(frozen=True)
class LynxInt8Codec(UnsplitCodec):
    """Lynx codes of 8 bits."""

    name: ClassVar[str] = "lynx-int8"
    whole: ClassVar[bool] = True


@dataclass(frozen=True)
class LynxInt4Codec(UnsplitCodec):
    """Lynx codes of 4 bits: the anchor alone."""

    name: ClassVar[str] = "lynx-int4"
    whole: ClassVar[bool] = False
