"""Pages without encoding: keys and values of each layer, one after the other, in one stream."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
import numpy as np
import torch

from sglang_ext.managers.kv_transfer.progressive.page_codec import EncodedPage, SingleStreamCodec, PlacedPage
from sglang_ext.managers.kv_transfer.progressive.pool_buffers import PoolBuffers
from sglang_ext.managers.kv_transfer.link_settings import LinkError, OptionValue
from sglang_ext.managers.kv_transfer.wire import LayerRange, Stream

@dataclass(frozen=True)
class RawCodec(SingleStreamCodec):
    """Copies the pool's bytes, all of them in the anchor stream.

    Attributes:
        pool: The pool of this rank.
        page_size: Tokens of a page.
    """

    pool: PoolBuffers
    page_size: int = 64
    name = "raw"
    version = 1
    reference = "raw"

    @property
    def options(self) -> dict[str, OptionValue]:
        """No option changes the bytes."""
        return {}

    def most_bytes(self, stream: Stream, layers: LayerRange) -> int:
        """Return the bytes of a full page."""
        return self._bytes(self.page_size, layers) if stream is Stream.ANCHOR else 0

    def encode_anchor(self, page: PlacedPage, layers: LayerRange) -> memoryview:
        """Copy the pool's bytes."""
        return self.start(page, layers)().anchor

    def start(self, page: PlacedPage, layers: LayerRange, anchor: bool = True, residual: bool = True) -> Callable[[], EncodedPage]:
        """Start to copy the page; there is no residual.

        Raises:
            LinkError: Only a residual is requested.
        """
        if not anchor:
            self.encode_residual(page, layers)
        tokens, size = len(page.slots), self._bytes(len(page.slots), layers)
        if self.pool.device.type == "cpu":
            content, where = self.pool.blocks.take(size), _slot_index(page.slots)
            for rows, part in zip(self._rows(layers), self._parts(content, tokens, layers), strict=True):
                part[:] = rows[where]
            return lambda: EncodedPage(memoryview(content), None)
        brought = self.pool.copy_to_host(self.pool.gather(layers, page.slots), size)
        return lambda: EncodedPage(brought(), None)

    def write_anchor(self, page: PlacedPage, layers: LayerRange, anchor: memoryview) -> None:
        """Copy the bytes back to the pool.

        Raises:
            LinkError: The page has another size.
        """
        tokens, expected = len(page.slots), self._bytes(len(page.slots), layers)
        if len(anchor) != expected:
            raise LinkError(f"a page of {tokens} tokens has {len(anchor)} bytes; expected are {expected}")
        if self.pool.device.type == "cpu":
            where = _slot_index(page.slots)
            for rows, part in zip(self._rows(layers), self._parts(np.frombuffer(anchor, np.uint8), tokens, layers), strict=True):
                rows[where] = part
            return
        content, split = (
            self.pool.blocks.to_device(anchor).view(self.pool.dtype),
            tokens * layers.count * self.pool.heads * self.pool.key_dim,
        )
        halves = (half.view(layers.count, tokens, -1) for half in (content[:split], content[split:]))
        self.pool.scatter(layers, page.slots, tuple(halves))

    @cached_property
    def _widths(self) -> tuple[int, ...]:
        """Bytes per token of the keys, then of the values, of each layer."""
        return tuple(tensor.shape[1] * tensor.itemsize for tensor in self.pool.tensors(0, self.pool.layers))

    @cached_property
    def _pool_bytes(self) -> tuple[np.ndarray, ...]:
        """Keys, then values, of each layer of a pool in host memory: uint8 [slots, bytes per token]."""
        return tuple(tensor.view(torch.uint8).numpy() for tensor in self.pool.tensors(0, self.pool.layers))

    def _select_layers(self, of_pool: tuple, layers: LayerRange) -> tuple:
        """Select the keys, then the values, of a range of layers."""
        keys = slice(layers.first, layers.first + layers.count)
        values = slice(self.pool.layers + layers.first, self.pool.layers + layers.first + layers.count)
        return of_pool[keys] + of_pool[values]

    def _rows(self, layers: LayerRange) -> tuple[np.ndarray, ...]:
        return self._select_layers(self._pool_bytes, layers)

    def _bytes(self, tokens: int, layers: LayerRange) -> int:
        return tokens * sum(self._select_layers(self._widths, layers))

    def _parts(self, content: np.ndarray, tokens: int, layers: LayerRange) -> Iterator[np.ndarray]:
        """Split a page's bytes into keys and values of each layer: uint8 [tokens, bytes per token] each."""
        begin = 0
        for width in self._select_layers(self._widths, layers):
            yield content[begin : begin + tokens * width].reshape(tokens, width)
            begin += tokens * width


def _slot_index(slots: torch.Tensor) -> np.ndarray | slice:
    """Return slots in host memory as an index. Consecutive slots become a slice, which is copied faster."""
    places = slots.numpy()
    if len(places) == 0 or (np.diff(places) != 1).any():
        return places
    return slice(int(places[0]), int(places[0]) + len(places))
