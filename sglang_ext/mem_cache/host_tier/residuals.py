"""Pages of full KV as anchors and residuals: packed blocks of the same tokens, and the bits that restore the pool's numbers from them.

For each number a packed block holds a code, and for each chunk mu and sigma: Lynx's anchor (compressors/level_quantizers.py). They define a bin, the
numbers of the pool's dtype between two bounds. The residual is the number's index in its bin (layers/kernels/lynx/pytorch_codec.py). While the
blocks are on the device, a load needs the residual only. Afterwards it needs the anchor too.

A page has a frame of as many bytes as its full KV. The frame begins with the exact residual stream of layers/kernels/lynx/layout.py. In it
the tokens of all buffers follow one another as those of one page, keys of all layers before values. The stream has a uint32 for each
buffer, row of chunks and 64 channels, with the offset of its bits in units of 8 bytes. The bits follow. After the stream comes the anchor:
the content of the blocks' slots, buffer after buffer.

A page without blocks is stored whole, buffer after buffer. So is a page that would not be smaller, or that has a number outside its bin: a
number that is not finite, or beyond the range of float16.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from sglang_ext.layers.kernels.lynx import pytorch_codec
from sglang_ext.layers.kernels.lynx.layout import CHUNK, DTYPES, UNIT, PageLayout
from sglang_ext.layers.kernels.lynx.scales import ChunkScales
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.layouts.block_layout import as_bytes

# Value of "whole" in the sizes of residuals.
WHOLE = 0


@dataclass(frozen=True)
class PageBlocks:
    """Slots of the packed blocks of pages.

    Attributes:
        slots: int64 [pages, slots of a page's blocks], on the device. -1 if a page has none.
        there: bool [pages], on the host: whether a page has blocks.
    """

    slots: torch.Tensor
    there: torch.Tensor

    def part(self, first: int, end: int) -> "PageBlocks":
        """The blocks of pages ``first`` to ``end``."""
        return PageBlocks(self.slots[first:end], self.there[first:end])


@dataclass(frozen=True)
class ResidualPages:
    """Writes device pages to frames, and reads them.

    Attributes:
        buffers: The device's pool.
        packing: Layout of blocks in the pool: codes of chunks of 32 tokens by channel, for keys and for values.
        page_size: Tokens per page, a multiple of a block's.
    """

    buffers: KVBuffers
    packing: Packing
    page_size: int

    @cached_property
    def layout(self) -> PageLayout:
        """Layout of a page's residual stream, all buffers' tokens one after another."""
        key = self.buffers.keys[0]
        tokens = 2 * len(self.buffers.keys) * self.page_size
        return PageLayout(tokens, key[0].numel(), key.dtype, self.packing.keys.bits, reference="exact")

    @property
    def page_bytes(self) -> int:
        """Bytes of a frame."""
        return self.page_size * self.buffers.bytes_per_slot

    @property
    def page_slots(self) -> int:
        """Slots of a page's blocks."""
        return self.packing.packed_slots(self.page_size)

    @property
    def anchor_bytes(self) -> int:
        """Bytes of a page's anchor."""
        return self.page_slots * self.buffers.bytes_per_slot

    def write(self, slots: torch.Tensor, blocks: torch.Tensor | None, frames: torch.Tensor, sizes: torch.Tensor) -> None:
        """Fill frames. Does not wait for the device.

        Args:
            slots: int64 [pages * page_size], on the device.
            blocks: int64 [pages, slots of a page's blocks], on the device, -1 if a page has none. None if no page has any.
            frames: uint8 [pages, page_bytes], on the device. Bytes after an anchor are undefined.
            sizes: int64 [pages], on the device: set to the bytes of residuals, 0 for whole pages.
        """
        if self.buffers.on_gpu:
            from sglang_ext.layers.kernels.lynx.residual_pages import write_pages

            write_pages(self.buffers, self.layout, self.packing, slots, blocks, frames, sizes)
            return
        for page, of_page in enumerate(slots.view(-1, self.page_size)):
            stream = None if blocks is None or blocks[page, 0] < 0 else self._stream(of_page, blocks[page])
            sizes[page] = WHOLE if stream is None else len(stream)
            frame = frames[page]
            if stream is None:
                for part, buffer in zip(self._parts(frame), self._all, strict=True):
                    part.copy_(buffer[of_page])
            else:
                frame[: len(stream)] = stream
                self._anchor(frame, len(stream)).copy_(self._cells(blocks[page]))

    def read(self, frames: torch.Tensor, sizes: torch.Tensor, slots: torch.Tensor, blocks: torch.Tensor | None) -> None:
        """Write the pages that :meth:`write` stored to device slots. Does not wait for the device.

        ``blocks`` are those of the store, -1 if a page's blocks no longer exist. Then its anchor must have been loaded. Frames and sizes
        come from the host, which may have lost bits. Then the numbers are wrong, but nothing else is written.
        """
        if self.buffers.on_gpu:
            from sglang_ext.layers.kernels.lynx.residual_pages import read_pages

            read_pages(self.buffers, self.layout, self.packing, frames, sizes, slots, blocks)
            return
        for page, of_page in enumerate(slots.view(-1, self.page_size)):
            frame, size = frames[page], int(sizes[page])
            if size == WHOLE:
                parts = self._parts(frame)
            elif blocks is None or blocks[page, 0] < 0:
                parts = self._numbers(frame[:size], self._anchor(frame, size))
            else:
                parts = self._numbers(frame[:size], self._cells(blocks[page]))
            for part, buffer in zip(parts, self._all, strict=True):
                buffer[of_page] = part

    def compile_kernels(self) -> None:
        """Write and read a page of slot 0, which no request owns, so that no request waits for compilers."""
        device = self.buffers.keys[0].device
        slots, blocks = (torch.zeros(count, dtype=torch.int64, device=device) for count in (self.page_size, self.page_slots))
        frame = torch.zeros(1, self.page_bytes, dtype=torch.uint8, device=device)
        for each in (None, blocks[None]):
            size = slots[:1].clone()
            self.write(slots, each, frame, size)
            self.read(frame, size, slots, each)

    @property
    def _all(self) -> tuple[torch.Tensor, ...]:
        return (*self.buffers.keys, *self.buffers.values)

    def _parts(self, frame: torch.Tensor) -> torch.Tensor:
        """A whole page, by buffer: [buffers, page_size, kv_heads, head_dim]. A view of ``frame``."""
        key = self.buffers.keys[0]
        return frame.view(key.dtype).view(len(self._all), self.page_size, *key.shape[1:])

    def _anchor(self, frame: torch.Tensor, size: int) -> torch.Tensor:
        """The anchor after a residual: uint8 [buffers, page_slots, kv_heads, cell bytes]. A view of ``frame``, never beyond its end."""
        heads = self.buffers.keys[0].shape[1]
        begin = min(size, self.page_bytes - self.anchor_bytes)
        return frame[begin : begin + self.anchor_bytes].view(len(self._all), self.page_slots, heads, -1)

    @cached_property
    def _coded(self) -> torch.Tensor:
        return torch.ones(self.layout.rows, CHUNK, 1, dtype=torch.bool)

    def _cells(self, blocks: torch.Tensor) -> torch.Tensor:
        """The content of blocks' slots, by buffer: uint8 [buffers, page_slots, kv_heads, cell bytes]."""
        return torch.stack([as_bytes(buffer)[blocks] for buffer in self._all])

    def _bins(self, cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The first ordinal and the last index of each number's bin, int64 [rows, 32, channels]."""
        found, every = [], torch.arange(self.page_slots)
        for layout, kind in zip((self.packing.keys, self.packing.values), cells.chunk(2), strict=True):
            for buffer in kind:
                block = self.packing.read(buffer, layout, every)
                codes, mu, sigma = (each.flatten(1, 2).transpose(0, 1).flatten(1) for each in (block.codes, block.zero, block.scale))
                found.append((codes.view(-1, CHUNK, codes.shape[1]).long(), mu, sigma))
        codes, mu, sigma = (torch.cat(each) for each in zip(*found))
        return pytorch_codec.bins(codes, ChunkScales(mu, sigma), self.layout.bits, self.layout.dtype)

    def _stream(self, slots: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor | None:
        """A page's residual, uint8 [bytes]. None if the page must be stored whole."""
        numbers = torch.cat([buffer[slots].flatten(1) for buffer in self._all])
        first, last = self._bins(self._cells(blocks))
        index = pytorch_codec.ordinals(numbers.view(first.shape)) - first
        if not torch.all((index >= 0) & (index <= last)):
            return None
        stream = pytorch_codec.encode_indices(index, last, self._coded, self.layout)
        return stream if len(stream) + self.anchor_bytes < self.page_bytes else None

    def _numbers(self, stream: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        """Decode :meth:`_stream`: [buffers, page_size, kv_heads, head_dim]. Zeros if the stream has a wrong size."""
        first, last = self._bins(cells)
        try:
            ranks = first + pytorch_codec.decode_indices(stream, last, self._coded, self.layout)
        except ValueError:  # the checksum detects it
            ranks = torch.zeros_like(first)
        key = self.buffers.keys[0]
        return pytorch_codec.from_ordinals(ranks, key.dtype).view(len(self._all), self.page_size, *key.shape[1:])


def unsupported_reason(packing: Packing, buffers: KVBuffers, page_size: int) -> str:
    """Why pages of this pool cannot be residuals of such blocks, and the remedy. Empty if they can."""
    from sglang_ext.layers.kernels.packed.pack_blocks import can_pack

    key = buffers.keys[0]
    if page_size % packing.block_tokens:
        return f"pages are {page_size} tokens, blocks {packing.block_tokens}: pass --page-size {packing.block_tokens}"
    if key.dtype not in DTYPES or key[0].numel() % UNIT:
        return f"numbers are {key.dtype}, {key[0].numel()} a token: pass --kv-cache-dtype auto"
    if buffers.on_gpu and not can_pack(packing, buffers):
        return f"no kernel packs heads of {key.shape[-1]} channels"
    return ""
