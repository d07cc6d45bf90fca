"""Encodes KV pages as two streams: an anchor that is usable alone, and a residual that restores 8 bits or all bits (Lynx, Algorithm 1).

On CUDA devices, kernels encode and decode all tensors of a page in one launch. On other devices, PyTorch does so tensor by tensor. Both
write the same bytes and decode them to the same numbers. layout.py defines the bytes. Compiled loops encode and decode compact residuals.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch

from sglang_ext.layers.kernels.lynx import pytorch_codec
from sglang_ext.layers.kernels.lynx.layout import RAW, PageLayout, PageTensors, StreamBatch


class Streams(NamedTuple):
    """Streams of a page of one tensor, uint8 [bytes] each. The residual of a raw page is empty."""

    anchor: torch.Tensor
    residual: torch.Tensor


def encode_page(parts: Sequence[torch.Tensor] | PageTensors, layout: PageLayout, slots: torch.Tensor | None = None) -> list[Streams]:
    """Encode a page of several tensors, such as the keys and values of all layers. Waits for the device once.

    ``parts``: [tokens, channels] each, or with ``slots``, int64 [tokens], pools [slots, channels], of the layout's dtype. All have the same
    shape and strides. Numbers need not be finite. The size of an exact or a compact residual varies. Other sizes are the layout's.

    Raises:
        ValueError: The tensors do not fit the layout.
    """
    parts = PageTensors.from_tensors(parts)
    parts.check(layout, slots)
    tensors = parts.tensors
    empty = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    found = [None] * len(tensors)
    if layout.reference == "compact" and not layout.always_raw:
        found = [streams and Streams(*streams) for streams in _backend(tensors[0], layout).encode(parts, layout, slots)]
    elif not layout.always_raw:
        backend = _backend(tensors[0], layout)
        anchors, residuals = backend.anchors(parts, layout, slots)
        coded = [part for part, kind in enumerate(anchors[:, 0].tolist()) if kind != RAW]
        anchors = anchors.unbind()
        if layout.reference == "int8":
            residuals = residuals.unbind()
        else:
            those = parts if len(coded) == len(tensors) else PageTensors(tuple(tensors[part] for part in coded))
            exact = backend.exact_residuals(those, [anchors[part] for part in coded], layout, slots) if coded else []
            residuals = dict(zip(coded, exact, strict=True))
        for part in coded:
            found[part] = Streams(anchors[part], residuals[part])
    return [
        streams or Streams(pytorch_codec.raw(part if slots is None else part[slots]), empty)
        for streams, part in zip(found, tensors, strict=True)
    ]


def encode_page_into(
    parts: PageTensors, layout: PageLayout, slots: torch.Tensor, anchors: StreamBatch, residuals: StreamBatch | None = None
) -> None:
    """Encode pages into existing memory, as if no page were raw (``layout`` is not ``always_raw``). Does not wait for the device.

    If a stream then begins with ``RAW``, it and its residual have no meaning. Encode that page with :func:`encode_page`. ``anchors``: memory
    filled with zeros, ``coded_bytes`` each. ``residuals``: ``int8_bytes`` each, None if they are not needed.

    Raises:
        ValueError: The tensors do not fit the layout.
    """
    parts.check(layout, slots)
    _backend(parts.tensors[0], layout).write_streams(parts, layout, slots, anchors, residuals)


def decode_page_from(
    anchors: StreamBatch, residuals: StreamBatch | None, layout: PageLayout, outs: PageTensors, slots: torch.Tensor
) -> None:
    """Decode a page of several tensors, none of them raw, as :func:`decode_page`. Streams have ``coded_bytes`` and ``int8_bytes`` each.

    Raises:
        ValueError: The tensors do not fit the layout.
    """
    outs.check(layout, slots)
    _backend(outs.tensors[0], layout).decode(anchors, residuals, layout, outs, slots)


def decode_page(
    anchors: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor] | None,
    layout: PageLayout,
    outs: Sequence[torch.Tensor] | PageTensors,
    slots: torch.Tensor | None = None,
) -> None:
    """Decode a page of several tensors. Does not wait for the device.

    ``anchors``, ``residuals``: uint8 [bytes] each; residuals of the layout's reference, None to decode the anchors alone. ``outs``: as ``parts``
    of :func:`encode_page`; with ``slots``, int64 [tokens], the destination of the page's tokens.

    Raises:
        ValueError: A stream's size is not the layout's, or the tensors do not fit the layout.
    """
    outs = PageTensors.from_tensors(outs)
    outs.check(layout, slots)
    raw = [layout.is_raw(len(anchor)) for anchor in anchors]
    for part in (part for part, is_raw in enumerate(raw) if is_raw):
        page = anchors[part][-layout.tokens * layout.channels * layout.dtype.itemsize :]
        if slots is None:
            outs.tensors[part].view(torch.uint8).copy_(page.view(layout.tokens, -1))
        else:
            # The bytes may not be aligned as the dtype needs.
            outs.tensors[part][slots] = page.clone().view(layout.dtype).view(layout.tokens, layout.channels)
    coded = [part for part, is_raw in enumerate(raw) if not is_raw]
    if residuals is not None and layout.reference == "int8":
        wrong = [len(residuals[part]) for part in coded if len(residuals[part]) != layout.int8_bytes]
        if wrong:
            raise ValueError(
                f"a residual of {wrong[0]} bytes does not fit {layout}, which has {layout.int8_bytes}: pass the layout that it was encoded "
                "with"
            )
    if coded:
        rest = None if residuals is None else [residuals[part] for part in coded]
        those = outs if len(coded) == len(raw) else PageTensors(tuple(outs.tensors[part] for part in coded))
        _backend(outs.tensors[0], layout).decode([anchors[part] for part in coded], rest, layout, those, slots)


def _backend(tensor: torch.Tensor, layout: PageLayout) -> ModuleType:
    """The module that encodes and decodes on the device of ``tensor``. Raises ValueError if the device has no compact residuals."""
    if layout.reference == "compact":
        if tensor.is_cuda:
            raise ValueError(f"compact residuals are encoded and decoded in host memory, not on {tensor.device}: copy the page to the host")
        from sglang_ext.layers.kernels.lynx import compact_codec

        return compact_codec
    if not tensor.is_cuda:
        return pytorch_codec
    from sglang_ext.layers.kernels.lynx import triton_codec

    return triton_codec
