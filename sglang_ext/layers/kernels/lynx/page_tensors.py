"""Tensors whose pages are encoded and decoded together, such as keys and values of all layers, and the addresses of streams."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from sglang_ext.layers.kernels.lynx.layout import PageLayout

# Addresses of streams and tensors are multiples of this.
ALIGNMENT = 16


@dataclass(frozen=True)
class PageTensors:
    """Tensors whose pages are repeatedly encoded and decoded together. They are checked once.

    Attributes:
        tensors: [tokens or slots, channels], all of one dtype and shape with the same strides, channels contiguous.
    """

    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def from_tensors(cls, tensors: "Sequence[torch.Tensor] | PageTensors") -> "PageTensors":
        """Create from tensors whose channels may be [heads, dim].

        Raises:
            ValueError: The tensors differ, or channels are not contiguous.
        """
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
        """Addresses of the tensors, int64 [parts], on the device.

        Raises:
            ValueError: As in :func:`addresses`.
        """
        return addresses(self.tensors)

    def check(self, layout: PageLayout, slots: torch.Tensor | None) -> None:
        """Check that the tensors' ``slots`` hold pages of ``layout``.

        Raises:
            ValueError: Names the difference.
        """
        one = self.tensors[0]
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

    @property
    def rows(self) -> torch.Tensor:
        """The streams, uint8 [parts, size]."""
        return self.memory.as_strided((len(self.begins), self.size), (self.width, 1), self.memory.storage_offset() + self.first)

    @property
    def addresses(self) -> torch.Tensor:
        """Addresses of the streams, int64 [parts], on the device."""
        return self.begins + self.memory.data_ptr()


def addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Addresses of tensors, int64 [tensors], on their device.

    Raises:
        ValueError: An address is not a multiple of ``ALIGNMENT``, so kernels cannot read it.
    """
    found = torch.tensor([tensor.data_ptr() for tensor in tensors])
    if torch.any(found % ALIGNMENT):
        raise ValueError(f"addresses {found.tolist()}: tensors must begin at multiples of {ALIGNMENT} bytes; pass a copy")
    return found.pin_memory().to(tensors[0].device, non_blocking=True) if tensors[0].is_cuda else found


def _described(tensor: torch.Tensor) -> str:
    return f"a tensor {tuple(tensor.shape)} of {tensor.dtype} with strides {tensor.stride()}"
