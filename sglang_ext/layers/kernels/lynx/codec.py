"""Pages of KV as two streams: an anchor that serves alone, and a residual that restores 8 bits or all of them (Lynx, Algorithm 1).

On CUDA devices kernels encode and decode all tensors of a page in a launch; elsewhere PyTorch does, tensor by tensor. Both write
the same bytes, and read them to the same numbers: layout.py says what the bytes are.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_ext.layers.kernels.lynx import pytorch_codec
from sglang_ext.layers.kernels.lynx.layout import RAW, PageLayout
from sglang_ext.layers.kernels.lynx.page_tensors import PageTensors, StreamBatch


class Streams(NamedTuple):
    """Of a page of one tensor, uint8 [bytes] each; the residual of a page that is stored raw is empty."""

    anchor: torch.Tensor
    residual: torch.Tensor


def encode(x: torch.Tensor, layout: PageLayout, slots: torch.Tensor | None = None) -> Streams:
    """Streams of one tensor's page, as of :func:`encode_page`."""
    return encode_page([x], layout, slots)[0]


def encode_page(parts: Sequence[torch.Tensor] | PageTensors, layout: PageLayout, slots: torch.Tensor | None = None) -> list[Streams]:
    """Streams of a page of several tensors, such as the keys and values of all layers; waits for the device once.

    Args:
        parts: [tokens, channels], or with ``slots`` pools [slots, channels], of the layout's dtype, alike; none needs to be finite.
        slots: int64 [tokens], where the page's tokens lie.

    Returns:
        Of each tensor. A residual of ``reference="exact"`` has a size of its own; other sizes are the layout's.

    Raises:
        ValueError: tensors that do not fit the layout.
    """
    parts = PageTensors.from_tensors(parts)
    parts.check(layout, slots)
    tensors = parts.tensors
    empty = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    found = [None] * len(tensors)
    if not layout.always_raw:
        backend = _backend(tensors[0])
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
        streams or Streams(pytorch_codec.raw(part if slots is None else part[slots]), empty) for streams, part in zip(found, tensors, strict=True)
    ]


def encode_page_into(parts: PageTensors, layout: PageLayout, slots: torch.Tensor, anchors: StreamBatch, residuals: StreamBatch | None = None) -> None:
    """Write streams of several tensors where they belong, as if no page were raw; does not wait for the device.

    A stream that begins with ``RAW`` afterwards, and its residual, mean nothing: that page is for :func:`encode_page`.

    Args:
        parts, slots: as of :func:`encode_page`.
        layout: not ``always_raw``.
        anchors: zeros, ``coded_bytes`` each.
        residuals: ``int8_bytes`` each; None where they are not wanted.

    Raises:
        ValueError: tensors that do not fit the layout.
    """
    parts.check(layout, slots)
    _backend(parts.tensors[0]).write_streams(parts, layout, slots, anchors, residuals)


def decode_page_from(anchors: StreamBatch, residuals: StreamBatch | None, layout: PageLayout, outs: PageTensors, slots: torch.Tensor) -> None:
    """Write a page of several tensors of which none is raw; does not wait for the device.

    Args:
        anchors, residuals: ``coded_bytes`` and ``int8_bytes`` each; None: numbers of the anchors alone.
        outs, slots: as of :func:`decode_page`.

    Raises:
        ValueError: tensors that do not fit the layout.
    """
    outs.check(layout, slots)
    _backend(outs.tensors[0]).read_streams(anchors, residuals, layout, outs, slots)


def decode(
    anchor: torch.Tensor,
    residual: torch.Tensor | None,
    layout: PageLayout,
    out: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """The page of one tensor's streams, into ``out`` (a new [tokens, channels] without), as of :func:`decode_page`."""
    if out is None:
        out = torch.empty(layout.tokens, layout.channels, dtype=layout.dtype, device=anchor.device)
    decode_page([anchor], None if residual is None else [residual], layout, [out], slots)
    return out


def decode_page(
    anchors: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor] | None,
    layout: PageLayout,
    outs: Sequence[torch.Tensor] | PageTensors,
    slots: torch.Tensor | None = None,
) -> None:
    """Write a page of several tensors; does not wait for the device.

    Args:
        anchors: uint8 [bytes] each.
        residuals: uint8 [bytes] each, of the layout's reference; None: numbers of the anchors alone.
        outs: [tokens, channels], or with ``slots`` pools [slots, channels]; as for :func:`encode_page`.
        slots: int64 [tokens], where the page's tokens go.

    Raises:
        ValueError: streams whose size is not the layout's, or tensors that do not fit it.
    """
    outs = PageTensors.from_tensors(outs)
    outs.check(layout, slots)
    raw = [layout.is_raw(len(anchor)) for anchor in anchors]
    where = slice(None) if slots is None else slots
    for part in (part for part, is_raw in enumerate(raw) if is_raw):
        page = anchors[part][-layout.tokens * layout.channels * layout.dtype.itemsize :]
        outs.tensors[part][where] = page.clone().view(layout.dtype).view(layout.tokens, layout.channels)
    coded = [part for part, is_raw in enumerate(raw) if not is_raw]
    if residuals is not None and layout.reference == "int8":
        wrong = [len(residuals[part]) for part in coded if len(residuals[part]) != layout.int8_bytes]
        if wrong:
            raise ValueError(f"a residual of {wrong[0]} bytes: {layout} has {layout.int8_bytes}; pass the layout it was encoded with")
    if coded:
        rest = None if residuals is None else [residuals[part] for part in coded]
        those = outs if len(coded) == len(raw) else PageTensors(tuple(outs.tensors[part] for part in coded))
        _backend(outs.tensors[0]).decode([anchors[part] for part in coded], rest, layout, those, slots)


def _backend(tensor: torch.Tensor):
    """What encodes and decodes where a tensor lies."""
    if not tensor.is_cuda:
        return pytorch_codec
    from sglang_ext.layers.kernels.lynx import triton_codec

    return triton_codec
