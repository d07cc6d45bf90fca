"""Pages as anchor and residual (layers/kernels/lynx). The anchor holds the most significant bits; the residual restores 8 bits or all bits.

A stream of a page packs the streams of its tensors: keys of all layers, then values of all layers. It starts with their sizes as uint32.
Each tensor's stream begins at a multiple of 16 bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from sglang_ext.layers.kernels.lynx.codec import decode_page, decode_page_from, encode_page, encode_page_into
from sglang_ext.layers.kernels.lynx.layout import RAW, STREAM_BITS, UNIT, PageLayout, StreamBatch
from sglang_ext.managers.kv_transfer.progressive.page_codec import EncodedPage, PageCodec, PlacedPage
from sglang_ext.managers.kv_transfer.progressive.pool_buffers import HostBlocks, PoolBuffers
from sglang_ext.managers.kv_transfer.wire import LinkError, OptionValue, Stream

ALIGNED = 16


def pack_streams(streams: Sequence[torch.Tensor], blocks: HostBlocks, lane: int = 0) -> memoryview:
    """Pack the streams of tensors into one, in host memory of a lane of ``blocks``. A GPU copies them asynchronously."""
    sizes = np.array([len(stream) for stream in streams], "<u4")
    begins = _offsets(sizes).tolist()
    content = blocks.take(begins[-1], lane)
    content[: begins[0]] = 0
    content[: sizes.nbytes] = sizes.view(np.uint8)
    together = _contiguous_memory(streams, begins)
    if together is None:
        together = torch.zeros(begins[-1] - begins[0], dtype=torch.uint8, device=streams[0].device)
        for stream, begin in zip(streams, begins, strict=False):
            together[begin - begins[0] :][: len(stream)] = stream
    torch.from_numpy(content)[begins[0] :].copy_(together, non_blocking=True)
    return memoryview(content)


def _contiguous_memory(streams: Sequence[torch.Tensor], begins: Sequence[int]) -> torch.Tensor | None:
    """Return the memory from the first to the last stream if it has the layout of the packed stream, with 0 between streams; else None."""
    first, memory = streams[0], streams[0].untyped_storage()
    beyond = first.data_ptr() - memory.data_ptr() + begins[-1] - begins[0]
    if beyond > memory.nbytes() or any(stream.data_ptr() - first.data_ptr() != begin - begins[0] for stream, begin in zip(streams, begins)):
        return None
    return first.as_strided((begins[-1] - begins[0],), (1,))


def packed_size(sizes: Sequence[int]) -> int:
    """Return the total bytes of a packed stream whose streams have ``sizes``."""
    return int(_offsets(np.array(sizes, np.int64))[-1])


def unpack_streams(content: memoryview, count: int, blocks: HostBlocks) -> list[torch.Tensor]:
    """Unpack ``count`` streams, uint8 [bytes] each, on the device of ``blocks``. Raise ``LinkError`` if the data is not such a stream."""
    if len(content) < 4 * count:
        raise LinkError(f"a stream of {len(content)} bytes for {count} tensors; their sizes alone take 4 bytes each")
    sizes = np.frombuffer(content, "<u4", count)
    place = _offsets(sizes)
    if len(content) != place[-1]:
        raise LinkError(f"a stream has {len(content)} bytes, but its sizes add up to {place[-1]}")
    whole = blocks.to_device(content)
    return [whole[begin : begin + size] for begin, size in zip(place.tolist(), sizes.tolist(), strict=False)]


def _offsets(sizes: np.ndarray) -> np.ndarray:
    """Return the offset of each stream, and the end of the last."""
    filled = -(-np.concatenate([[4 * len(sizes)], sizes.astype(np.int64)]) // ALIGNED) * ALIGNED
    return filled.cumsum()


class _PackedLayout:
    """Layout of a packed stream of known ``groups`` of equal streams, numbers and sizes, as :func:`pack_streams` writes it."""

    def __init__(self, groups: Sequence[tuple[int, int]], device: torch.device) -> None:
        sizes = np.array([size for count, size in groups for _ in range(count)], "<u4")
        place = _offsets(sizes)
        self.bytes, self._begin, self._device = int(place[-1]), int(place[0]), device
        self._head = np.zeros(self._begin, np.uint8)
        self._head[: sizes.nbytes] = sizes.view(np.uint8)
        self._sizes = sizes.tobytes()
        self._begins, self._groups, end = torch.from_numpy(place[:-1]).to(device), [], 0
        for count, size in groups:
            begin, end = end, end + count
            self._groups.append((self._begins[begin:end], int(place[begin]), -(-size // ALIGNED) * ALIGNED, size))

    def holds(self, content: memoryview) -> bool:
        """Return whether a stream has these sizes."""
        return len(content) == self.bytes and content[: len(self._sizes)] == self._sizes

    def placed(self, memory: torch.Tensor, group: int) -> StreamBatch:
        """Return the streams of a group within the memory of all, uint8 [bytes]."""
        return StreamBatch(memory, *self._groups[group])

    def zeros(self, content: np.ndarray | None) -> torch.Tensor:
        """Return zeros on the device, uint8 [bytes]; on a CPU the zeroed ``content``, if given."""
        if content is None or self._device.type == "cuda":
            return torch.zeros(self.bytes, dtype=torch.uint8, device=self._device)
        return torch.from_numpy(content).zero_()

    def copy_to_host(self, memory: torch.Tensor, content: np.ndarray) -> None:
        """Copy the streams to host memory, uint8 [bytes]. From a GPU the current stream copies them asynchronously."""
        if self._device.type == "cuda":
            torch.from_numpy(content)[self._begin :].copy_(memory[self._begin :], non_blocking=True)
        content[: self._begin] = self._head

    def copy_kinds_to_host(self, memory: torch.Tensor, blocks: HostBlocks) -> np.ndarray:
        """Copy the first byte of each stream to host memory in the same way, uint8 [streams]."""
        kinds = blocks.take(len(self._begins))
        torch.from_numpy(kinds).copy_(memory.index_select(0, self._begins), non_blocking=True)
        return kinds


@dataclass(frozen=True)
class _Plan:
    """Data that all pages with equal numbers of tokens and sinks share."""

    # Slices of tensors that are encoded and decoded together, with their layout: all tensors, or keys and then values.
    alike: tuple[tuple[slice, PageLayout], ...]
    # Layouts of the streams of a page without raw tensors; None if every page has raw tensors. Residuals of 8 bits only.
    anchors: _PackedLayout | None = None
    residuals: _PackedLayout | None = None


@dataclass(frozen=True)
class LynxCodec(PageCodec):
    """Encodes pages as anchors of 4 bits, and residuals (Lynx), which restore the ``reference`` ``int8`` or ``exact``.

    Attributes:
        page_size: Tokens of a page, a multiple of 32.
        sinks: Number of the prompt's first tokens that an anchor holds exactly.

    Raises:
        LinkError: The pool is not bfloat16, float16 or float32.
    """

    pool: PoolBuffers
    reference: str
    page_size: int = 64
    sinks: int = 4
    _plans: dict[tuple[int, int], _Plan] = field(default_factory=dict, init=False, repr=False, compare=False)
    name = "lynx"
    version = 1
    has_residual = True

    def __post_init__(self) -> None:
        try:
            self._layouts(self.page_size, self.sinks)
        except ValueError as error:
            raise LinkError(f"codec lynx does not support this pool: {error}; or pass --kv-reference raw") from error

    @property
    def options(self) -> dict[str, OptionValue]:
        """The options that change the bytes."""
        return {"bits": STREAM_BITS, "sinks": self.sinks}

    def most_bytes(self, stream: Stream) -> int:
        """Return the maximum bytes of a full page's stream, for tensors that do not compress."""
        return self._most[stream]

    @cached_property
    def _most(self) -> dict[Stream, int]:
        layouts = [layout for layout in self._layouts(self.page_size, self.sinks) for _ in range(self.pool.layers)]
        return {stream: packed_size([_most_bytes(stream, layout) for layout in layouts]) for stream in (Stream.ANCHOR, Stream.RESIDUAL)}

    def start(self, page: PlacedPage, anchor: bool = True, residual: bool = True) -> Callable[[], EncodedPage]:
        """Start to encode a page. Return a function that waits for it, and encodes it again if a tensor turns out to be raw."""
        plan = self._plan(page)
        # Exact residuals have sizes that only the device knows. In that case this method waits.
        if plan.anchors is None or residual and plan.residuals is None:
            found = self._encode_separately(page, anchor, residual)
            return lambda: found
        # Separate lanes: a residual waits for all anchors of its room.
        first, rest = (
            self.pool.blocks.take(streams.bytes, lane) if wanted else None
            for lane, (streams, wanted) in enumerate(((plan.anchors, anchor), (plan.residuals, residual)))
        )
        anchors, residuals = plan.anchors.zeros(first), plan.residuals.zeros(rest) if residual else None
        for group, (those, layout) in enumerate(plan.alike):
            beside = plan.residuals.placed(residuals, group) if residual else None
            encode_page_into(self.pool.parts(those), layout, page.slots, plan.anchors.placed(anchors, group), beside)
        kinds = plan.anchors.copy_kinds_to_host(anchors, self.pool.blocks)
        if anchor:
            plan.anchors.copy_to_host(anchors, first)
        if residual:
            plan.residuals.copy_to_host(residuals, rest)
        reached = self.pool.reached()

        def finish() -> EncodedPage:
            reached()
            if (kinds == RAW).any():
                return self._encode_separately(page, anchor, residual)
            return EncodedPage(*(None if content is None else memoryview(content) for content in (first, rest)))

        return finish

    def write_anchor(self, page: PlacedPage, anchor: memoryview) -> None:
        """Fill the page's slots with values of 4 bits."""
        self._decode(page, anchor)

    def write_residual(self, page: PlacedPage, anchor: memoryview, residual: memoryview) -> None:
        """Fill the page's slots with values of 8 bits, or with the bits of the sender's pool."""
        self._decode(page, anchor, residual)

    def _layouts(self, tokens: int, sinks: int) -> tuple[PageLayout, PageLayout]:
        """Return the layouts of keys and of values."""
        return tuple(
            PageLayout(tokens, self.pool.heads * dim, self.pool.dtype, sinks=sinks, reference=self.reference)
            for dim in (self.pool.key_dim, self.pool.value_dim)
        )

    def _plan(self, page: PlacedPage) -> _Plan:
        tokens = len(page.slots)
        key = tokens, min(tokens, max(0, self.sinks - page.start))
        if key not in self._plans:
            self._plans[key] = self._make_plan(*key)
        return self._plans[key]

    def _make_plan(self, tokens: int, sinks: int) -> _Plan:
        (keys, values), layers = self._layouts(tokens, sinks), self.pool.layers
        both = (slice(0, layers), keys), (slice(layers, 2 * layers), values)
        alike = both if keys != values else ((slice(0, 2 * layers), keys),)
        if keys.always_raw or values.always_raw:
            return _Plan(alike)
        counted = [(those.stop - those.start, layout) for those, layout in alike]
        anchors = _PackedLayout([(count, layout.coded_bytes) for count, layout in counted], self.pool.device)
        if self.reference != "int8":
            return _Plan(alike, anchors)
        return _Plan(alike, anchors, _PackedLayout([(count, layout.int8_bytes) for count, layout in counted], self.pool.device))

    def _encode_separately(self, page: PlacedPage, anchor: bool, residual: bool) -> EncodedPage:
        """Encode streams of any size, tensor by tensor, and wait for them."""
        found = []
        for those, layout in self._plan(page).alike:
            # Exact residuals take longer, and are skipped if not requested.
            layout = layout if residual else replace(layout, reference="int8")
            found += encode_page(self.pool.parts(those), layout, page.slots)
        streams = [streams if wanted else None for streams, wanted in zip(zip(*found, strict=True), (anchor, residual))]
        page = EncodedPage(*(None if each is None else pack_streams(each, self.pool.blocks, lane) for lane, each in enumerate(streams)))
        self.pool.synchronize()
        return page

    def _decode(self, page: PlacedPage, *streams: memoryview) -> None:
        """Fill the page's slots with the values of its anchor, or of its anchor and its residual."""
        plan = self._plan(page)
        fixed = (plan.anchors, plan.residuals)[: len(streams)]
        try:
            if all(each is not None and each.holds(content) for each, content in zip(fixed, streams)):
                memory = [self.pool.blocks.to_device(content) for content in streams]
                for group, (those, layout) in enumerate(plan.alike):
                    first, *rest = (each.placed(held, group) for each, held in zip(fixed, memory, strict=True))
                    decode_page_from(first, rest[0] if rest else None, layout, self.pool.parts(those), page.slots)
                return
            found = [unpack_streams(content, 2 * self.pool.layers, self.pool.blocks) for content in streams]
            for those, layout in plan.alike:
                first, *rest = (each[those] for each in found)
                decode_page(first, rest[0] if rest else None, layout, self.pool.parts(those), page.slots)
        except (ValueError, IndexError, RuntimeError) as error:
            raise LinkError(f"the data are no streams of a page of {len(page.slots)} tokens from {page.start}: {error}") from error


def _most_bytes(stream: Stream, layout: PageLayout) -> int:
    if stream is Stream.ANCHOR:
        return max(layout.raw_bytes, layout.coded_bytes)
    if layout.reference == "int8":
        return layout.int8_bytes
    # No index takes more bits than a number. Blocks are padded.
    return layout.index_bytes + layout.tokens * layout.channels * layout.dtype.itemsize + layout.rows * layout.blocks * UNIT
