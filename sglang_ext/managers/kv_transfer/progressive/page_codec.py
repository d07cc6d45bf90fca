"""The interface of a page codec, and the size of pages."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch

from sglang_ext.managers.kv_transfer.link_settings import LinkError, OptionValue
from sglang_ext.managers.kv_transfer.progressive.pool_buffers import PoolBuffers
from sglang_ext.managers.kv_transfer.wire import LayerRange, Stream

# Page sizes are multiples of this many tokens: chunks of codecs, and blocks of quantized KV.
UNIT = 64
# Target bytes of the pool and maximum tokens in a page. Smaller pages cost as much host time as transfer time; larger ones delay the link's
# first page.
PAGE_BYTES, MOST_TOKENS = 1 << 25, 256


def page_tokens(bytes_per_token: int) -> int:
    """Return the tokens of a page. Both ends of a link have equal pools, and therefore equal pages.

    Args:
        bytes_per_token: Bytes of one token on one rank: keys and values of all layers.
    """
    return max(UNIT, min(PAGE_BYTES // bytes_per_token, MOST_TOKENS) // UNIT * UNIT)


@dataclass(frozen=True)
class PlacedPage:
    """A page of a prompt, and its slots in the pool.

    Attributes:
        start: Prompt position of its first token.
        slots: int64 [tokens], on the pool's device. For a page that is written as quantized blocks, the slots of the blocks
            (quantized/prompt_codec.py).
    """

    start: int
    slots: torch.Tensor


class EncodedPage(NamedTuple):
    """Streams of one page and one range of layers, in host memory that is not written to any more.

    A stream is None if it was not requested; ``residual`` is also None if the codec has none.
    """

    anchor: memoryview | None
    residual: memoryview | None


class SingleStreamCodec:
    """Common base of codecs that write a whole page into its anchor stream."""

    has_residual = False

    def encode(self, page: PlacedPage, layers: LayerRange) -> EncodedPage:
        """Encode the one stream."""
        return EncodedPage(self.encode_anchor(page, layers), None)

    def start(self, page: PlacedPage, layers: LayerRange, anchor: bool = True, residual: bool = True) -> Callable[[], EncodedPage]:
        """Encode the one stream at once.

        Raises:
            LinkError: Only a residual is requested.
        """
        found = self.encode(page, layers) if anchor else EncodedPage(None, self.encode_residual(page, layers))
        return lambda: found

    def encode_residual(self, page: PlacedPage, layers: LayerRange) -> memoryview:
        """Refuse: there is no residual.

        Raises:
            LinkError: Always.
        """
        raise LinkError(f"codec {self.name} has no residuals")

    def write_residual(self, page: PlacedPage, layers: LayerRange, anchor: memoryview, residual: memoryview) -> None:
        """Refuse: there is no residual.

        Raises:
            LinkError: Always.
        """
        raise LinkError(f"codec {self.name} has no residuals, and received one of {len(residual)} bytes")


class BenchCodec(SingleStreamCodec, ABC):
    """Base of the codecs that benchmarks compare with: ``--kv-bench-codec`` names subclasses. They are outside this package."""

    @classmethod
    @abstractmethod
    def for_pool(cls, pool: PoolBuffers) -> Self:
        """Create the codec of a pool.

        Raises:
            LinkError: The codec does not support such a pool.
        """


class PageCodec(Protocol):
    """Encodes pages of one pool to streams, and decodes them. It keeps no state of a page. Its methods may be called from several threads.

    Attributes:
        pool: The pool of this rank.
        name, version, options: Compared by the two ends of a link (link_settings.py).
        reference: What all streams of a page together restore.
        page_size: Tokens of a page.
        has_residual: Whether there is a second stream.
    """

    pool: PoolBuffers
    name: str
    version: int
    options: dict[str, OptionValue]
    reference: str
    page_size: int
    has_residual: bool

    def most_bytes(self, stream: Stream, layers: LayerRange) -> int:
        """Return the maximum bytes of a page's stream; 0 for a stream that the codec does not have."""

    def encode(self, page: PlacedPage, layers: LayerRange) -> EncodedPage:
        """Encode the current KV of the page to all streams."""

    def start(self, page: PlacedPage, layers: LayerRange, anchor: bool = True, residual: bool = True) -> Callable[[], EncodedPage]:
        """Start to encode the requested streams that the codec has, from the current KV. Return a function that waits for them.

        The function may be called from another thread. The pool must keep the page, and the arguments must be kept alive, until it returns.
        """

    def encode_anchor(self, page: PlacedPage, layers: LayerRange) -> memoryview:
        """Encode only the first stream, to the same bytes."""

    def encode_residual(self, page: PlacedPage, layers: LayerRange) -> memoryview:
        """Encode only the second stream, to the same bytes. For codecs that have one."""

    def write_anchor(self, page: PlacedPage, layers: LayerRange, anchor: memoryview) -> None:
        """Fill the page's slots with the values that the anchor alone restores.

        Raises:
            LinkError: The data is not an anchor of such a page.
        """

    def write_residual(self, page: PlacedPage, layers: LayerRange, anchor: memoryview, residual: memoryview) -> None:
        """Fill the page's slots with the reference.

        Raises:
            LinkError: The data are not streams of such a page.
        """
