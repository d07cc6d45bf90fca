"""Prompts that travel as codes (HACK, arXiv 2502.03589, section 6): packed at the prefill server, and never again.

Of such a prompt the decode side gets the blocks that its copy would hold, bit for bit, and no full KV for them. What copies leave as it
is, the first tokens and the newest, travels as it is. So the pages of a room are of three kinds: exact ones before the blocks, whole
blocks, and exact ones after them.

A page of blocks has keys, then values, of each layer: of each KV head the bytes of its blocks (packed_layout.py), without what fills up
their cells.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from sglang_ext.managers.disaggregation.page_hashes import page_ends
from sglang_ext.managers.disaggregation.progressive.page_codec import OneStream, PlacedPage
from sglang_ext.managers.disaggregation.progressive.pool_buffers import PoolBuffers
from sglang_ext.managers.disaggregation.progressive.raw_codec import RawCodec
from sglang_ext.managers.disaggregation.settings import LinkError, OptionValue
from sglang_ext.managers.disaggregation.wire import LayerRange, Stream
from sglang_ext.mem_cache.compressed.formats.packed_layout import Layout
from sglang_ext.mem_cache.compressed.formats.packing import Packing, as_bytes
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers


@dataclass(frozen=True)
class CodedRoom(OneStream):
    """The codec of one room whose tokens from ``begin`` to ``end`` travel as codes.

    On the prefill side a page of them is placed in the slots of their full KV; on the decode side in those of its blocks.

    Attributes:
        pool: of this rank.
        packing: how blocks lie in its slots.
        buffers: the same pool, by KV heads.
        begin, end: positions in the prompt; whole blocks lie between them.
        tokens: tokens of a page that is not packed.
        seeds: int32 [tokens of the prompt], by which codes are drawn (formats/rounding.py); None where they are not, and to write.

    Raises:
        LinkError: these are not whole blocks.
    """

    pool: PoolBuffers
    packing: Packing
    buffers: KVBuffers
    begin: int
    end: int
    tokens: int = 64
    seeds: torch.Tensor | None = None
    name = "codes"
    version = 1
    reference = "lossy"

    def __post_init__(self) -> None:
        block = self.packing.block_tokens
        if not 0 <= self.begin < self.end or (self.end - self.begin) % block:
            raise LinkError(
                f"tokens {self.begin} to {self.end} of a prompt shall travel as codes; blocks hold {block} tokens each: start both servers "
                "with the same --kv-compressor and --kv-partition"
            )

    @property
    def options(self) -> dict[str, OptionValue]:
        """None of its own: what the ends of a link agree on stands in agreement.py."""
        return {}

    @property
    def page_size(self) -> int:
        """Tokens of a page of blocks."""
        block = self.packing.block_tokens
        return max(block, self.tokens // block * block)

    def ends(self, prompt: int) -> list[int]:
        """Where pages of a prompt of so many tokens end.

        Raises:
            LinkError: it ends before its codes do.
        """
        if prompt < self.end:
            raise LinkError(f"tokens up to {self.end} shall travel as codes, of a prompt of {prompt}; start both servers alike")
        exact = page_ends(self.tokens, self.begin)
        return [*exact, *page_ends(self.page_size, self.end, self.begin), *page_ends(self.tokens, prompt, self.end)]

    def most_bytes(self, stream: Stream, layers: LayerRange) -> int:
        """Of a full page of either kind."""
        if stream is not Stream.ANCHOR:
            return 0
        blocks = self.page_size // self.packing.block_tokens
        return max(self._exact.most_bytes(stream, layers), blocks * sum(size for _, _, size in self._tensors(layers)))

    def encode_anchor(self, page: PlacedPage, layers: LayerRange) -> memoryview:
        """The page's codes, or its numbers."""
        if not self._is_packed(page):
            return self._exact.encode_anchor(page, layers)
        heads, count = self.buffers.keys[0].shape[1], len(page.slots)
        at = torch.arange(page.start, page.start + count, device=page.slots.device).expand(heads, -1)
        seeds = None if self.seeds is None else self.seeds[page.start : page.start + count].expand(heads, -1)
        parts = []
        for place, (buffer, layout, size) in enumerate(self._tensors(layers)):
            layer = self.buffers.layer_ids[layers.first + place % layers.count]
            numbers = buffer[page.slots].transpose(0, 1).float()
            block = self.packing.codes(numbers, at, place >= layers.count, layer, self.buffers.first_head, seeds)
            parts.append(layout.pack(block, layout.cells).flatten(2)[..., : size // heads].flatten())
        together = torch.cat(parts)
        content = self.pool.blocks.take(len(together))
        torch.from_numpy(content).copy_(together, non_blocking=True)
        self.pool.written()
        return memoryview(content)

    def write_anchor(self, page: PlacedPage, layers: LayerRange, anchor: memoryview) -> None:
        """Write the page's blocks, or its numbers.

        Raises:
            LinkError: it is no such page.
        """
        if not self._is_packed(page):
            self._exact.write_anchor(page, layers, anchor)
            return
        blocks = len(page.slots) // self.packing.block_slots
        expected = blocks * sum(size for _, _, size in self._tensors(layers))
        if len(anchor) != expected:
            size = self.packing.block_tokens
            raise LinkError(f"a page of {blocks} blocks of {size} tokens has {len(anchor)} bytes; expected are {expected}")
        content, begin = self.pool.blocks.to_device(anchor), 0
        for buffer, _, size in self._tensors(layers):
            cells = as_bytes(buffer)
            heads, width = cells.shape[1:]
            part = content[begin : begin + blocks * size].view(heads, blocks, -1)
            filled = torch.nn.functional.pad(part, (0, self.packing.block_slots * width - part.shape[-1]))
            cells[page.slots] = filled.view(heads, -1, width).transpose(0, 1)
            begin += blocks * size

    def _is_packed(self, page: PlacedPage) -> bool:
        return self.begin <= page.start < self.end

    @cached_property
    def _exact(self) -> RawCodec:
        return RawCodec(self.pool, self.tokens)

    def _tensors(self, layers: LayerRange) -> Iterator[tuple[torch.Tensor, Layout, int]]:
        """Keys, then values, of some layers: each with its layout, and the bytes of a block of all heads."""
        those = slice(layers.first, layers.first + layers.count)
        for kind, layout in ((self.buffers.keys, self.packing.keys), (self.buffers.values, self.packing.values)):
            for buffer in kind[those]:
                yield buffer, layout, buffer.shape[1] * layout.block_bytes
