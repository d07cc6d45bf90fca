"""Copies between device slots and host pages, through the buffers of a double buffer (transfers.py).

:class:`LayerCopies` splits a transfer into pieces that fit a buffer, and into runs of consecutive pages. One copy moves a run.
:class:`FrameCopies` stores pages in frames, whole or as residuals of packed blocks. A half of the double buffer holds as many frames as
fit, and the sizes of their residuals. A store copies whole frames to the host, so that nothing waits until the device has counted the
bits. A load copies the needed part of a frame, if its store has ended.

For each number a packed block holds a code, and for each chunk mu and sigma: Lynx's anchor (compressors/level_quantizers.py). They define
a bin, the numbers of the pool's dtype between two bounds. The residual is the number's index in its bin
(layers/kernels/lynx/pytorch_codec.py). While the blocks are on the device, a load needs the residual only. Afterwards it needs the anchor too.

A frame has as many bytes as the page's full KV. It begins with the exact residual stream of layers/kernels/lynx/layout.py. The stream
covers all buffers' tokens as if they were one page. For each buffer, row of chunks and 64 channels it has a uint32, the offset of their bits
in units of 8 bytes. The bits follow, then the anchor: the content of the blocks' slots, buffer after buffer. A page without blocks is stored
whole, buffer after buffer. So is a page that would not be smaller, or that has a number outside its bin: not finite, or beyond float16's range.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from sglang_ext.layers.kernels.lynx import pytorch_codec
from sglang_ext.layers.kernels.lynx.layout import CHUNK, DTYPES, UNIT, PageLayout
from sglang_ext.layers.kernels.lynx.scales import ChunkScales
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.layouts.block_layout import as_bytes
from sglang_ext.mem_cache.host_tier.host_pool import HostPool, HostPageRun, runs

# Value of "whole" in the sizes of residuals.
WHOLE = 0


@dataclass(frozen=True)
class PageBlocks:
    """Slots of pages' packed blocks, int64 [pages, slots per page] on the device, -1 for none. ``there``: bool [pages] on the host."""

    slots: torch.Tensor
    there: torch.Tensor


@dataclass(frozen=True)
class ResidualPages:
    """Writes device pages of ``page_size`` tokens, whole blocks, to frames, and reads them.

    ``packing`` is the layout of blocks in the device's pool: codes of chunks of 32 tokens by channel, for keys and for values.
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
        """Fill ``frames``, uint8 [pages, page_bytes], and ``sizes``, int64 [pages]: bytes of residuals, 0 for whole pages.

        All tensors are on the device, which is not waited for. ``slots``: int64 [pages * page_size]. ``blocks``: as :attr:`PageBlocks.slots`, or
        None. Bytes after an anchor are undefined.
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

        If a page's blocks no longer exist, -1, its anchor must have been loaded. If the host has lost bits of frames or sizes, the numbers
        are wrong, but nothing else is written.
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


# Pairs of functions that fill and empty a buffer of a double buffer.
Moves = Iterator[tuple[Callable[[torch.Tensor], None], Callable[[torch.Tensor], None]]]


@dataclass(frozen=True)
class TransferPiece:
    """Tokens of some of the device's buffers, keys of all layers first, that are copied at once. ``runs`` are those of their pages, in tokens."""

    buffers: range
    tokens: slice
    runs: tuple[HostPageRun, ...]

    def part(self, half: torch.Tensor) -> torch.Tensor:
        """The part of a buffer, [rows, words], that the piece uses: [buffers, tokens, words]."""
        tokens = self.tokens.stop - self.tokens.start
        return half[: len(self.buffers) * tokens].view(len(self.buffers), tokens, -1)


def pieces(buffers: int, pages: torch.Tensor, page_size: int, buffer_pages: int) -> Iterator[TransferPiece]:
    """Split a transfer of ``pages`` (int64 [pages]) of ``buffers`` buffers into pieces of at most ``buffer_pages`` pages each."""
    span = min(len(pages), buffer_pages)
    group = buffer_pages // span
    spans = []
    for first in range(0, len(pages), span):
        part = pages[first : first + span]
        of_tokens = tuple(HostPageRun(r.place * page_size, r.first * page_size, r.count * page_size) for r in runs(part))
        spans.append((slice(first * page_size, (first + len(part)) * page_size), of_tokens))
    for first in range(0, buffers, group):
        for tokens, of_tokens in spans:
            yield TransferPiece(range(first, min(first + group, buffers)), tokens, of_tokens)


@dataclass(frozen=True)
class LayerCopies:
    """Copies between one device's KV and one layer-first pool. Each is launched in the current stream.

    ``rows`` are the device's KV, keys of all layers before values: [slots, words] each. Both buffers have ``staging`` bytes together, or
    one page each.
    """

    rows: list[torch.Tensor]
    pool: HostPool
    staging: int

    @cached_property
    def buffer_pages(self) -> int:
        """Pages of one layer's keys per buffer, [rows, words]."""
        return max(1, self.staging // 2 // (self.pool.page_size * self.rows[0].shape[1] * self.rows[0].element_size()))

    def halves(self) -> torch.Tensor:
        """Both buffers, [2, rows, words]."""
        return self.rows[0].new_empty(2, self.buffer_pages * self.pool.page_size, self.rows[0].shape[1])

    def stores(self, pages: torch.Tensor, slots: torch.Tensor, blocks: None) -> Moves:
        """Yield, piece after piece, the functions that fill a buffer from device slots and empty it into host pages."""
        for piece in pieces(len(self.rows), pages, self.pool.page_size, self.buffer_pages):
            yield partial(self.gather, piece, slots), partial(self._to_host, piece)

    def loads(self, pages: torch.Tensor, slots: torch.Tensor, blocks: None, stored: bool) -> tuple[int, Moves]:
        """The bytes to copy, and the functions for the other direction."""
        parts = pieces(len(self.rows), pages, self.pool.page_size, self.buffer_pages)
        moves = ((partial(self._from_host, piece), partial(self.scatter, piece, slots)) for piece in parts)
        return len(pages) * self.pool.page_bytes, moves

    def gather(self, piece: TransferPiece, slots: torch.Tensor, half: torch.Tensor) -> None:
        """Copy from ``slots`` to a buffer."""
        for part, buffer in zip(piece.part(half), piece.buffers):
            torch.index_select(self.rows[buffer], 0, slots[piece.tokens], out=part)

    def scatter(self, piece: TransferPiece, slots: torch.Tensor, half: torch.Tensor) -> None:
        """Copy from a buffer to ``slots``."""
        for part, buffer in zip(piece.part(half), piece.buffers):
            self.rows[buffer].index_copy_(0, slots[piece.tokens], part)

    def _to_host(self, piece: TransferPiece, half: torch.Tensor) -> None:
        for of_host, of_device in self._blocks(piece, half):
            of_host.copy_(of_device, non_blocking=True)

    def _from_host(self, piece: TransferPiece, half: torch.Tensor) -> None:
        for of_host, of_device in self._blocks(piece, half):
            of_device.copy_(of_host, non_blocking=True)

    def _blocks(self, piece: TransferPiece, half: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield corresponding blocks of memory on the host and in a buffer."""
        for part, buffer in zip(piece.part(half), piece.buffers):
            of_host = self.pool.words[buffer]
            for run in piece.runs:
                yield of_host[run.first : run.first + run.count], part[run.place : run.place + run.count]


SIZE_BYTES = 8


@dataclass(frozen=True)
class FrameCopies:
    """Copies between one device's KV and one page-first pool, as :class:`LayerCopies`."""

    pool: HostPool
    residuals: ResidualPages
    staging: int

    @cached_property
    def buffer_pages(self) -> int:
        """Pages per buffer, with their sizes."""
        return max(1, self.staging // 2 // (self.pool.page_bytes + SIZE_BYTES))

    def halves(self) -> torch.Tensor:
        """Both buffers, uint8 [2, bytes]."""
        size = self.buffer_pages * (self.pool.page_bytes + SIZE_BYTES)
        return torch.empty(2, size, dtype=torch.uint8, device=self.residuals.buffers.keys[0].device)

    def stores(self, pages: torch.Tensor, slots: torch.Tensor, blocks: PageBlocks | None) -> Moves:
        """Yield the copies that store device slots to host pages, see :meth:`ResidualPages.write`."""
        for span in self._spans(pages):
            of_slots, of_blocks = self._of_span(span, slots, blocks)
            yield partial(self._write, of_slots, of_blocks), partial(self._to_host, runs(pages[span]))

    def loads(self, pages: torch.Tensor, slots: torch.Tensor, blocks: PageBlocks | None, stored: bool) -> tuple[int, Moves]:
        """The bytes to copy, and the copies that load host pages to device slots. ``stored``: their stores have ended, so that sizes are known."""
        needed = self._needed(pages, blocks, stored)
        moves = (
            (partial(self._from_host, pages[span], needed[span]), partial(self._read, *self._of_span(span, slots, blocks)))
            for span in self._spans(pages)
        )
        return sum(needed), moves

    def _needed(self, pages: torch.Tensor, blocks: PageBlocks | None, stored: bool) -> list[int]:
        """Bytes to copy for each page, from the beginning of its frame."""
        sizes, anchor = self.pool.sizes[pages], self.residuals.anchor_bytes
        known = (sizes > WHOLE) & (sizes <= self.pool.page_bytes - anchor) & stored
        coming = sizes + anchor if blocks is None else torch.where(blocks.there, sizes, sizes + anchor)
        return torch.where(known, coming, self.pool.page_bytes).tolist()

    def _spans(self, pages: torch.Tensor) -> Iterator[slice]:
        """Yield the parts of ``pages`` that fit in a buffer."""
        for first in range(0, len(pages), self.buffer_pages):
            yield slice(first, min(len(pages), first + self.buffer_pages))

    def _of_span(self, span: slice, slots: torch.Tensor, blocks: PageBlocks | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens = self.pool.page_size
        return slots[span.start * tokens : span.stop * tokens], None if blocks is None else blocks.slots[span]

    def _frames_and_sizes(self, half: torch.Tensor, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The frames, uint8 [pages, page_bytes], and sizes, int64 [pages], of the first ``pages`` pages in a buffer."""
        end = self.buffer_pages * self.pool.page_bytes
        return half[:end].view(self.buffer_pages, -1)[:pages], half[end:].view(torch.int64)[:pages]

    def _write(self, slots: torch.Tensor, blocks: torch.Tensor | None, half: torch.Tensor) -> None:
        self.residuals.write(slots, blocks, *self._frames_and_sizes(half, len(slots) // self.pool.page_size))

    def _read(self, slots: torch.Tensor, blocks: torch.Tensor | None, half: torch.Tensor) -> None:
        self.residuals.read(*self._frames_and_sizes(half, len(slots) // self.pool.page_size), slots, blocks)

    def _to_host(self, moved: tuple[HostPageRun, ...], half: torch.Tensor) -> None:
        frames, sizes = self._frames_and_sizes(half, self.buffer_pages)
        for run in moved:
            there, here = slice(run.first, run.first + run.count), slice(run.place, run.place + run.count)
            self.pool.frames[there].copy_(frames[here], non_blocking=True)
            self.pool.sizes[there].copy_(sizes[here], non_blocking=True)

    def _from_host(self, pages: torch.Tensor, needed: list[int], half: torch.Tensor) -> None:
        frames, sizes = self._frames_and_sizes(half, self.buffer_pages)
        for run in runs(pages):
            sizes[run.place : run.place + run.count].copy_(self.pool.sizes[run.first : run.first + run.count], non_blocking=True)
        for place, (page, size) in enumerate(zip(pages.tolist(), needed, strict=True)):
            frames[place, :size].copy_(self.pool.frames[page, :size], non_blocking=True)
