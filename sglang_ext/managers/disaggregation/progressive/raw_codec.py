"""Pages as they are: keys and values of each layer, one after the other, in one stream."""

from dataclasses import dataclass

import torch

from sglang_ext.managers.disaggregation.progressive.page_codec import EncodedPage, PlacedPage
from sglang_ext.managers.disaggregation.progressive.pool_buffers import PoolBuffers
from sglang_ext.managers.disaggregation.settings import LinkError, OptionValue
from sglang_ext.managers.disaggregation.wire import LayerRange, Stream


@dataclass(frozen=True)
class RawCodec:
    """The pool's bytes, all of them in the anchor stream.

    Attributes:
        pool: of this rank.
        page_size: tokens of a page.
    """

    pool: PoolBuffers
    page_size: int = 64
    name = "raw"
    version = 1
    reference = "raw"
    has_residual = False

    @property
    def options(self) -> dict[str, OptionValue]:
        """None change the bytes."""
        return {}

    def most_bytes(self, stream: Stream, layers: LayerRange) -> int:
        """Of a full page."""
        return self._bytes(self.page_size, layers) if stream is Stream.ANCHOR else 0

    def encode(self, page: PlacedPage, layers: LayerRange) -> EncodedPage:
        """Copy the pool's bytes."""
        return EncodedPage(self.encode_anchor(page, layers), None)

    def encode_anchor(self, page: PlacedPage, layers: LayerRange) -> memoryview:
        """Copy the pool's bytes."""
        tokens, begin = len(page.slots), 0
        anchor = torch.empty(self._bytes(tokens, layers), dtype=torch.uint8, device=self.pool.device)
        for tensor in self.pool.tensors(layers.first, layers.count):
            rows = tensor.view(torch.uint8)
            end = begin + tokens * rows.shape[1]
            torch.index_select(rows, 0, page.slots, out=anchor[begin:end].view(tokens, -1))
            begin = end
        return memoryview(anchor.cpu().numpy())

    def write_anchor(self, page: PlacedPage, layers: LayerRange, anchor: memoryview) -> None:
        """Copy them back.

        Raises:
            LinkError: the page has another size.
        """
        expected = self._bytes(len(page.slots), layers)
        if len(anchor) != expected:
            raise LinkError(f"a page of {len(page.slots)} tokens has {len(anchor)} bytes; expected are {expected}")
        content = torch.frombuffer(bytearray(anchor), dtype=torch.uint8).to(self.pool.device)
        where = _place(page.slots)
        for tensor in self.pool.tensors(layers.first, layers.count):
            size = len(page.slots) * tensor.shape[1] * tensor.itemsize
            tensor[where] = content[:size].view(tensor.dtype).view(len(page.slots), -1)
            content = content[size:]

    def write_residual(self, page: PlacedPage, layers: LayerRange, anchor: memoryview, residual: memoryview) -> None:
        """There is none.

        Raises:
            LinkError: always.
        """
        raise LinkError(f"codec raw has no residuals, and one of {len(residual)} bytes came")

    def _bytes(self, tokens: int, layers: LayerRange) -> int:
        return tokens * sum(tensor.shape[1] * tensor.itemsize for tensor in self.pool.tensors(layers.first, layers.count))


def _place(slots: torch.Tensor) -> torch.Tensor | slice:
    """Slots as an index; on a CPU, where it takes no waiting to see that they follow each other, a slice, which is written faster."""
    if slots.is_cuda or len(slots) == 0 or not bool((slots.diff() == 1).all()):
        return slots
    first = int(slots[0])
    return slice(first, first + len(slots))
