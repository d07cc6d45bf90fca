"""Pages as anchor and residual (layers/kernels/lynx): most significant bits first, then what restores 8 bits or all of them.

A stream of a page holds those of its tensors, keys of all layers before values of all layers: uint32 sizes, then the streams, each
begun at a multiple of 16 bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sglang_ext.layers.kernels.lynx.codec import Parts, Streams, decode_parts, encode_parts
from sglang_ext.layers.kernels.lynx.layout import UNIT, Layout
from sglang_ext.managers.disaggregation.progressive.host_blocks import HostBlocks
from sglang_ext.managers.disaggregation.progressive.page_codec import EncodedPage, PlacedPage
from sglang_ext.managers.disaggregation.progressive.pool_buffers import PoolBuffers
from sglang_ext.managers.disaggregation.settings import LinkError, OptionValue
from sglang_ext.managers.disaggregation.wire import LayerRange, Stream

ALIGNED = 16


def packed(streams: Sequence[torch.Tensor], blocks: HostBlocks, lane: int = 0) -> memoryview:
    """Streams of tensors as one, in host memory of a lane of ``blocks``; from a GPU the current stream brings them, which is not waited
    for."""
    sizes = np.array([len(stream) for stream in streams], "<u4")
    begins = _places(sizes).tolist()
    content = blocks.take(begins[-1], lane)
    content[: begins[0]] = 0
    content[: sizes.nbytes] = sizes.view(np.uint8)
    together = _together(streams, begins)
    if together is None:
        together = torch.zeros(begins[-1] - begins[0], dtype=torch.uint8, device=streams[0].device)
        for stream, begin in zip(streams, begins, strict=False):
            together[begin - begins[0] :][: len(stream)] = stream
    torch.from_numpy(content)[begins[0] :].copy_(together, non_blocking=True)
    return memoryview(content)


def _together(streams: Sequence[torch.Tensor], begins: Sequence[int]) -> torch.Tensor | None:
    """The memory from the first to the last, if they lie in it as they do in the packed stream; what is between them is 0 then."""
    first, memory = streams[0], streams[0].untyped_storage()
    beyond = first.data_ptr() - memory.data_ptr() + begins[-1] - begins[0]
    if beyond > memory.nbytes() or any(stream.data_ptr() - first.data_ptr() != begin - begins[0] for stream, begin in zip(streams, begins)):
        return None
    return first.as_strided((begins[-1] - begins[0],), (1,))


def packed_bytes(sizes: Sequence[int]) -> int:
    """Of streams of such sizes as one."""
    return int(_places(np.array(sizes, np.int64))[-1])


def unpacked(content: memoryview, count: int, blocks: HostBlocks) -> list[torch.Tensor]:
    """The ``count`` streams of one, uint8 [bytes] each, on the device of ``blocks``.

    Raises:
        LinkError: it is no such stream.
    """
    if len(content) < 4 * count:
        raise LinkError(f"a stream of {len(content)} bytes for {count} tensors; it has a size of 4 bytes for each")
    sizes = np.frombuffer(content, "<u4", count)
    place = _places(sizes)
    if len(content) != place[-1]:
        raise LinkError(f"a stream of {len(content)} bytes says that it has {place[-1]}")
    whole = blocks.to_device(content)
    return [whole[begin : begin + size] for begin, size in zip(place.tolist(), sizes.tolist(), strict=False)]


def _places(sizes: np.ndarray) -> np.ndarray:
    """Where each stream begins, and where all end."""
    filled = -(-np.concatenate([[4 * len(sizes)], sizes.astype(np.int64)]) // ALIGNED) * ALIGNED
    return filled.cumsum()


@dataclass(frozen=True)
class LynxCodec:
    """Anchors of 4 bits, and residuals.

    Attributes:
        pool: of this rank: bfloat16, float16 or float32.
        reference: ``int8`` or ``exact``.
        page_size: tokens of a page, whole chunks of 32.
        bits: of an anchor's codes.
        sinks: the prompt's first tokens, which an anchor holds exactly.

    Raises:
        LinkError: the pool is none of these.
    """

    pool: PoolBuffers
    reference: str
    page_size: int = 64
    bits: int = 4
    sinks: int = 4
    name = "lynx"
    version = 1
    has_residual = True

    def __post_init__(self) -> None:
        try:
            self._layouts(self.page_size, 0)
        except ValueError as error:
            raise LinkError(f"codec lynx does not take this pool: {error}; or pass --kv-reference raw") from error

    @property
    def options(self) -> dict[str, OptionValue]:
        """What changes the bytes."""
        return {"bits": self.bits, "sinks": self.sinks}

    def most_bytes(self, stream: Stream, layers: LayerRange) -> int:
        """Of a full page of which no tensor is shorter than the pool's own bytes."""
        most = {Stream.ANCHOR: _most_anchor, Stream.RESIDUAL: _most_residual}[stream]
        keys, values = self._layouts(self.page_size, 0)
        sizes = [most(layout) for layout in (keys, values) for _ in range(layers.count)]
        return packed_bytes(sizes)

    def encode(self, page: PlacedPage, layers: LayerRange) -> EncodedPage:
        """Both streams."""
        found = self._encode(page, layers, self._layouts(len(page.slots), page.start))
        # A residual waits for all anchors of its room.
        both = EncodedPage(*(packed(streams, self.pool.blocks, lane) for lane, streams in enumerate(zip(*found, strict=True))))
        self.pool.written()
        return both

    def encode_residual(self, page: PlacedPage, layers: LayerRange) -> memoryview:
        """The second stream."""
        found = self._encode(page, layers, self._layouts(len(page.slots), page.start))
        residual = packed([each.residual for each in found], self.pool.blocks, 1)
        self.pool.written()
        return residual

    def encode_anchor(self, page: PlacedPage, layers: LayerRange) -> memoryview:
        """The first stream; the exact residual, which takes longer, is left out."""
        layouts = tuple(replace(layout, reference="int8") for layout in self._layouts(len(page.slots), page.start))
        anchor = packed([each.anchor for each in self._encode(page, layers, layouts)], self.pool.blocks)
        self.pool.written()
        return anchor

    def write_anchor(self, page: PlacedPage, layers: LayerRange, anchor: memoryview) -> None:
        """Numbers of 4 bits.

        Raises:
            LinkError: it is no anchor of such a page.
        """
        self._decode(page, layers, anchor, None)

    def write_residual(self, page: PlacedPage, layers: LayerRange, anchor: memoryview, residual: memoryview) -> None:
        """Numbers of 8 bits, or the bits that the pool of the sender has.

        Raises:
            LinkError: these are no streams of such a page.
        """
        self._decode(page, layers, anchor, residual)

    def _layouts(self, tokens: int, start: int) -> tuple[Layout, Layout]:
        """Of keys and of values."""
        sinks = min(tokens, max(0, self.sinks - start))
        return tuple(
            Layout(tokens, self.pool.heads * dim, self.pool.dtype, self.bits, sinks, reference=self.reference)
            for dim in (self.pool.key_dim, self.pool.value_dim)
        )

    def _alike(self, layers: LayerRange, layouts: tuple[Layout, Layout]) -> Iterator[tuple[Parts, slice, Layout]]:
        """Which tensors are encoded and decoded together, all, or keys and then values; which streams these are; and how."""
        keys, values = layouts
        both = (slice(0, layers.count), keys), (slice(layers.count, 2 * layers.count), values)
        for those, layout in both if keys != values else ((slice(0, 2 * layers.count), keys),):
            yield self.pool.parts(layers, those), those, layout

    def _encode(self, page: PlacedPage, layers: LayerRange, layouts: tuple[Layout, Layout]) -> list[Streams]:
        return [one for parts, _, layout in self._alike(layers, layouts) for one in encode_parts(parts, layout, page.slots)]

    def _decode(self, page: PlacedPage, layers: LayerRange, anchor: memoryview, residual: memoryview | None) -> None:
        anchors = unpacked(anchor, 2 * layers.count, self.pool.blocks)
        rest = None if residual is None else unpacked(residual, 2 * layers.count, self.pool.blocks)
        for parts, those, layout in self._alike(layers, self._layouts(len(page.slots), page.start)):
            try:
                decode_parts(anchors[those], None if rest is None else rest[those], layout, parts, page.slots)
            except (ValueError, IndexError, RuntimeError) as error:
                raise LinkError(f"no streams of a page of {len(page.slots)} tokens from {page.start}: {error}") from error


def _most_anchor(layout: Layout) -> int:
    return max(layout.raw_bytes, layout.coded_bytes)


def _most_residual(layout: Layout) -> int:
    if layout.reference == "int8":
        return layout.int8_bytes
    # No index takes more bits than a number; blocks are filled up.
    return layout.index_bytes + layout.tokens * layout.channels * layout.dtype.itemsize + layout.rows * layout.blocks * UNIT
