"""What a codec does with pages of a rank's pool."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from sglang_ext.managers.kv_transfer.progressive.pool_buffers import PoolBuffers
from sglang_ext.managers.kv_transfer.link_settings import LinkError, OptionValue
from sglang_ext.managers.kv_transfer.wire import LayerRange, Stream


# Tokens of which pages are whole multiples: chunks of codecs, and blocks of copies.
UNIT = 64
# Of the pool, in a page, and tokens: below, calls of the host take as long as the bytes; above, a link waits for the first.
PAGE_BYTES, MOST_TOKENS = 1 << 25, 256


def page_tokens(bytes_per_token: int) -> int:
    """Tokens of a page of a pool; both ends of a link have equal ones, and so equal pages.

    Args:
        bytes_per_token: of one rank, keys and values of all layers.
    """
    return max(UNIT, min(PAGE_BYTES // bytes_per_token, MOST_TOKENS) // UNIT * UNIT)


@dataclass(frozen=True)
class PlacedPage:
    """A page of a prompt, and where its tokens lie in the pool.

    Attributes:
        start: position in the prompt of its first token.
        slots: int64 [tokens], on the pool's device; of a page that is written as blocks those of the blocks (quantized/prompt_codec.py).
    """

    start: int
    slots: torch.Tensor


class EncodedPage(NamedTuple):
    """Streams of one page and range of layers, in host memory that nobody writes to any more.

    Either is None where it was not asked for, ``residual`` also where the codec has none.
    """

    anchor: memoryview | None
    residual: memoryview | None


class SingleStreamCodec:
    """What codecs have in common that write all of a page into its anchor stream."""

    has_residual = False

    def encode(self, page: PlacedPage, layers: LayerRange) -> EncodedPage:
        """The one stream."""
        return EncodedPage(self.encode_anchor(page, layers), None)

    def start(self, page: PlacedPage, layers: LayerRange, anchor: bool = True, residual: bool = True) -> Callable[[], EncodedPage]:
        """The one stream, all of it at once.

        Raises:
            LinkError: a residual alone is asked for.
        """
        found = self.encode(page, layers) if anchor else EncodedPage(None, self.encode_residual(page, layers))
        return lambda: found

    def encode_residual(self, page: PlacedPage, layers: LayerRange) -> memoryview:
        """There is none.

        Raises:
            LinkError: always.
        """
        raise LinkError(f"codec {self.name} has no residuals")

    def write_residual(self, page: PlacedPage, layers: LayerRange, anchor: memoryview, residual: memoryview) -> None:
        """There is none.

        Raises:
            LinkError: always.
        """
        raise LinkError(f"codec {self.name} has no residuals, and one of {len(residual)} bytes came")


class PageCodec(Protocol):
    """Pages of one pool as streams, and back. It keeps nothing of a page; its methods may be called from several threads.

    Attributes:
        pool: of this rank.
        name, version, options: as the two ends of a link compare them (settings.py).
        reference: what all streams of a page restore.
        page_size: tokens of a page.
        has_residual: whether there is a second stream.
    """

    pool: PoolBuffers
    name: str
    version: int
    options: dict[str, OptionValue]
    reference: str
    page_size: int
    has_residual: bool

    def most_bytes(self, stream: Stream, layers: LayerRange) -> int:
        """Of a page's stream; 0 for a stream that the codec does not have."""

    def encode(self, page: PlacedPage, layers: LayerRange) -> EncodedPage:
        """Streams of what the pool holds now."""

    def start(self, page: PlacedPage, layers: LayerRange, anchor: bool = True, residual: bool = True) -> Callable[[], EncodedPage]:
        """Begin with those streams of what the pool holds now that are asked for, if the codec has them; what waits for them.

        It may be called from another thread; the pool must hold the page, and what it gave is kept, until it has returned.
        """

    def encode_anchor(self, page: PlacedPage, layers: LayerRange) -> memoryview:
        """The first of them alone, the same bytes."""

    def encode_residual(self, page: PlacedPage, layers: LayerRange) -> memoryview:
        """The second of them alone, of a codec that has it, the same bytes."""

    def write_anchor(self, page: PlacedPage, layers: LayerRange, anchor: memoryview) -> None:
        """Fill the page's slots with what the anchor alone restores.

        Raises:
            LinkError: it is no anchor of such a page.
        """

    def write_residual(self, page: PlacedPage, layers: LayerRange, anchor: memoryview, residual: memoryview) -> None:
        """Fill the page's slots with the reference.

        Raises:
            LinkError: these are no streams of such a page.
        """
