"""Prompts that travel as codes (HACK, arXiv 2502.03589, section 6): packed at the prefill server, and never again.

Of such a prompt the decode side gets the blocks that its copy would hold, bit for bit, and no full KV for them. What copies leave as it
is, the first tokens and the newest, travels as it is. So the pages of a room are of three kinds: exact ones before the blocks, whole
blocks, and exact ones after them.

A page of blocks has keys, then values, of each layer: of each KV head the bytes of its blocks (block_layout.py), without what fills up
their cells.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from sglang_ext.managers.kv_transfer.page_hashes import page_ends
from sglang_ext.managers.kv_transfer.progressive.page_codec import EncodedPage, SingleStreamCodec, PlacedPage
from sglang_ext.managers.kv_transfer.progressive.pool_buffers import PoolBuffers
from sglang_ext.managers.kv_transfer.progressive.raw_codec import RawCodec
from sglang_ext.managers.kv_transfer.link_settings import LinkError, OptionValue
from sglang_ext.managers.kv_transfer.wire import LayerRange, Stream
from sglang_ext.mem_cache.compressed.layouts.block_layout import BlockLayout
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing, as_bytes
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers


@dataclass(frozen=True)
class QuantizedPromptCodec(SingleStreamCodec):
    """The codec of one room whose tokens from ``begin`` to ``end`` travel as codes.

    On the prefill side a page of them is placed in the slots of their full KV; on the decode side in those of its blocks.

    Attributes:
        pool: of this rank.
        packing: how blocks lie in its slots.
        buffers: the same pool, by KV heads.
        begin, end: positions in the prompt; whole blocks lie between them.
        tokens: tokens of a page that is not packed.
        seeds: int32 [tokens of the prompt], by which codes are drawn (layouts/rounding.py); None where they are not, and to write.

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
        """None of its own: what the ends of a link agree on stands in compatibility.py."""
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
        return max(self._exact.most_bytes(stream, layers), sum(self._sizes(blocks, layers)))

    def encode_anchor(self, page: PlacedPage, layers: LayerRange) -> memoryview:
        """The page's codes, or its numbers."""
        return self.start(page, layers)().anchor

    def start(self, page: PlacedPage, layers: LayerRange, anchor: bool = True, residual: bool = True) -> Callable[[], EncodedPage]:
        """Begin with them; there is no residual. All layers are packed together, beside the pool.

        Raises:
            LinkError: a residual alone is asked for.
        """
        if not anchor or not self._is_packed(page):
            return self._exact.start(page, layers, anchor, residual)
        own, count = self._apart(page.slots, layers), len(page.slots)
        # What is kept is counted by position; of the prompt only this page is there.
        kept = torch.arange(page.start, page.start + count, device=page.slots.device).expand(layers.count, self.pool.heads, -1)
        sources = torch.arange(-page.start, count, device=page.slots.device)
        targets = torch.arange(count, len(own.keys[0]), device=page.slots.device)
        self.packing.write(own, kept, sources, targets, self.seeds)
        parts = []
        for kind, layout in zip((own.keys, own.values), self._layouts, strict=True):
            cells = torch.stack([as_bytes(buffer)[count:] for buffer in kind]).transpose(1, 2)
            blocks = cells.reshape(layers.count, self.pool.heads, count // self.packing.block_tokens, -1)
            parts.append(blocks[..., : layout.block_bytes].flatten())
        brought = self.pool.copy_to_host(parts, sum(self._sizes(count // self.packing.block_tokens, layers)))
        return lambda: EncodedPage(brought(), None)

    def write_anchor(self, page: PlacedPage, layers: LayerRange, anchor: memoryview) -> None:
        """Write the page's blocks, or its numbers.

        Raises:
            LinkError: it is no such page.
        """
        if not self._is_packed(page):
            self._exact.write_anchor(page, layers, anchor)
            return
        blocks, heads = len(page.slots) // self.packing.block_slots, self.pool.heads
        sizes = self._sizes(blocks, layers)
        if len(anchor) != sum(sizes):
            size = self.packing.block_tokens
            raise LinkError(f"a page of {blocks} blocks of {size} tokens has {len(anchor)} bytes; expected are {sum(sizes)}")
        halves = []
        for part, layout in zip(self.pool.blocks.to_device(anchor).split(sizes), self._layouts, strict=True):
            filled = self.packing.block_slots * layout.cell_bytes - layout.block_bytes
            cells = torch.nn.functional.pad(part.view(layers.count, heads, blocks, -1), (0, filled))
            rows = cells.view(layers.count, heads, len(page.slots), -1).transpose(1, 2)
            halves.append(rows.flatten(2).view(self.pool.dtype))
        self.pool.scatter(layers, page.slots, halves)

    def _is_packed(self, page: PlacedPage) -> bool:
        return self.begin <= page.start < self.end

    @cached_property
    def _exact(self) -> RawCodec:
        return RawCodec(self.pool, self.tokens)

    def _apart(self, slots: torch.Tensor, layers: LayerRange) -> KVBuffers:
        """A pool of some layers that has these tokens alone, in its first slots, and room for their blocks after them."""
        kinds, room = [], self.packing.packed_slots(len(slots))
        for half in self.pool.gather(layers, slots):
            numbers = half.view(layers.count, len(slots), self.pool.heads, -1)
            kinds.append(torch.cat([numbers, numbers.new_empty(layers.count, room, *numbers.shape[2:])], 1).unbind())
        those = self.buffers.of_layers(slice(layers.first, layers.first + layers.count))
        return replace(those, keys=kinds[0], values=kinds[1])

    def _sizes(self, blocks: int, layers: LayerRange) -> list[int]:
        """Bytes of blocks of keys, and of values, in all heads of some layers."""
        return [layers.count * self.pool.heads * blocks * layout.block_bytes for layout in self._layouts]

    @property
    def _layouts(self) -> tuple[BlockLayout, BlockLayout]:
        return self.packing.keys, self.packing.values
