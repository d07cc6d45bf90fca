"""Prompts that are transferred as quantized KV, in mode lossy (HACK, arXiv 2502.03589, section 6): packed once, at the prefill server.

The decode side receives the blocks of its compressed KV, bit for bit, and no full KV for them. The first and the newest tokens, which
compressed KV keeps exactly, are sent unchanged. So a room has three kinds of pages: exact pages before the blocks, pages of whole blocks,
and exact pages after them. A page of blocks has keys, then values, of each layer: for each KV head the bytes of its blocks
(block_layout.py), without the padding of their cells.

At the decode server, no request reads the full KV that compressed KV replaces. If a prompt would be compressed as soon as it decodes, its
compressed KV is allocated with its slots, before any data arrives, and the blocks are written directly into it. For the covered tokens, the
request's own row points to SGLang's padding page, as after full KV was freed (quantized_only.py). After them it points to full KV. A
retracted request is prefilled again.

SGLang prefills prompts ahead of their decode side (``--optimistic-prefill-attempts``), and keeps their full KV until that side has slots. A
prompt that will be sent as quantized KV is packed into host memory as soon as it is prefilled, and its full KV can be freed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_ext.managers.kv_transfer.progressive.page_codec import EncodedPage, PageCodec, PlacedPage, RawCodec, page_ends
from sglang_ext.managers.kv_transfer.progressive.pool_buffers import PoolBuffers
from sglang_ext.managers.kv_transfer.wire import LinkError, Stream
from sglang_ext.managers.spec_decode.request_states import RequestStates, fallback_reason, is_token_only
from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.block_layout import BlockLayout, as_bytes
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.prefix_cache.freed_full_kv import RemotePrefill
from sglang_ext.mem_cache.prefix_cache.quantized_only import QuantizedOnlyKV
from sglang_ext.mem_cache.prefix_cache.segments import CompressedKV

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass(frozen=True)
class QuantizedPromptCodec(PageCodec):
    """Codec of one room whose tokens from ``begin`` to ``end`` are sent as quantized KV. Its exact pages have ``tokens`` tokens.

    The slots of a packed page are those of its full KV on the prefill side, and those of its blocks on the decode side.

    Attributes:
        packing, buffers: Layout of blocks in the pool's slots, and the same pool by KV heads.
        seeds: int32 [tokens of the prompt], seeds of stochastic rounding (layouts/block_layout.py); None for other rounding, and for writing.

    Raises:
        LinkError: The range is not whole blocks.
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
                f"tokens {self.begin} to {self.end} of a prompt are to be quantized; blocks hold {block} tokens each: start both servers "
                "with the same --kv-compressor and --kv-partition"
            )

    @property
    def page_size(self) -> int:
        """Tokens of a page of blocks."""
        block = self.packing.block_tokens
        return max(block, self.tokens // block * block)

    def ends(self, prompt: int, prefix: int = 0) -> list[int]:
        """Return the ends of a prompt's pages; no prefix is left out. Raise ``LinkError`` if it has fewer than ``end`` tokens."""
        if prompt < self.end:
            raise LinkError(f"tokens up to {self.end} are to be quantized, of a prompt of {prompt}; start both servers alike")
        exact = page_ends(self.tokens, self.begin)
        return [*exact, *page_ends(self.page_size, self.end, self.begin), *page_ends(self.tokens, prompt, self.end)]

    def most_bytes(self, stream: Stream) -> int:
        """Return the maximum bytes of a full page of either kind."""
        if stream is not Stream.ANCHOR:
            return 0
        blocks = self.page_size // self.packing.block_tokens
        return max(self._raw_codec.most_bytes(stream), sum(self._sizes(blocks)))

    def start(self, page: PlacedPage, anchor: bool = True, residual: bool = True) -> Callable[[], EncodedPage]:
        """Start to encode the page; there is no residual. All layers are packed together, outside the pool."""
        if not self._is_packed(page):
            return self._raw_codec.start(page)
        own, count = self._staging_buffers(page.slots), len(page.slots)
        # The kept tokens are indexed by prompt position. Only this page's part of the prompt is available.
        kept = torch.arange(page.start, page.start + count, device=page.slots.device).expand(self.pool.layers, self.pool.heads, -1)
        sources = torch.arange(-page.start, count, device=page.slots.device)
        targets = torch.arange(count, len(own.keys[0]), device=page.slots.device)
        self.packing.write(own, kept, sources, targets, self.seeds)
        parts = []
        for kind, layout in zip((own.keys, own.values), self._layouts, strict=True):
            cells = torch.stack([as_bytes(buffer)[count:] for buffer in kind]).transpose(1, 2)
            blocks = cells.reshape(self.pool.layers, self.pool.heads, count // self.packing.block_tokens, -1)
            parts.append(blocks[..., : layout.block_bytes].flatten())
        brought = self.pool.copy_to_host(parts, sum(self._sizes(count // self.packing.block_tokens)))
        return lambda: EncodedPage(brought(), None)

    def write_anchor(self, page: PlacedPage, anchor: memoryview) -> None:
        """Write the page's blocks, or its exact values."""
        if not self._is_packed(page):
            self._raw_codec.write_anchor(page, anchor)
            return
        blocks, heads = len(page.slots) // self.packing.block_slots, self.pool.heads
        sizes = self._sizes(blocks)
        if len(anchor) != sum(sizes):
            size = self.packing.block_tokens
            raise LinkError(f"a page of {blocks} blocks of {size} tokens has {len(anchor)} bytes; expected are {sum(sizes)}")
        halves = []
        for part, layout in zip(self.pool.blocks.to_device(anchor).split(sizes), self._layouts, strict=True):
            filled = self.packing.block_slots * layout.cell_bytes - layout.block_bytes
            cells = torch.nn.functional.pad(part.view(self.pool.layers, heads, blocks, -1), (0, filled))
            rows = cells.view(self.pool.layers, heads, len(page.slots), -1).transpose(1, 2)
            halves.append(rows.flatten(2).view(self.pool.dtype))
        self.pool.scatter(page.slots, halves)

    def _is_packed(self, page: PlacedPage) -> bool:
        return self.begin <= page.start < self.end

    @cached_property
    def _raw_codec(self) -> RawCodec:
        return RawCodec(self.pool, self.tokens)

    def _staging_buffers(self, slots: torch.Tensor) -> KVBuffers:
        """Copy these tokens into the first slots of new buffers, with space for their blocks after them."""
        kinds, packed = [], self.packing.packed_slots(len(slots))
        for half in self.pool.gather(slots):
            numbers = half.view(self.pool.layers, len(slots), self.pool.heads, -1)
            kinds.append(torch.cat([numbers, numbers.new_empty(self.pool.layers, packed, *numbers.shape[2:])], 1).unbind())
        return replace(self.buffers, keys=kinds[0], values=kinds[1], codes=None)

    def _sizes(self, blocks: int) -> list[int]:
        """Return the bytes of blocks of keys, and of values, in all heads and layers."""
        return [self.pool.layers * self.pool.heads * blocks * layout.block_bytes for layout in self._layouts]

    @property
    def _layouts(self) -> tuple[BlockLayout, BlockLayout]:
        return self.packing.keys, self.packing.values


@dataclass(frozen=True)
class QuantizedPrompt:
    """A prompt of ``tokens`` tokens to transfer as quantized KV, which replaces the first ``covered``: sinks exactly, others in blocks."""

    method: CompressionMethod
    tokens: int
    covered: int

    @property
    def held(self) -> int:
        """Slots of its compressed KV, in whole pages."""
        return self.method.sinks + self.method.packing.held_slots(self.covered - self.method.sinks)

    @property
    def slots(self) -> int:
        """All slots of the prompt, in whole pages: its compressed KV, and the full KV of the tokens after it."""
        page, exact = self.method.packing.page_size, self.tokens - self.covered
        return self.held + -(-exact // page) * page


def plan_quantized_prompt(req: "Req", tokens: int, method: CompressionMethod) -> QuantizedPrompt | None:
    """Plan the transfer of a request's first ``tokens`` tokens as quantized KV for ``method``; None to transfer their full KV.

    Full KV is transferred for short prompts and for requests that read full KV.
    """
    # A retracted request is prefilled again. SGLang then sends token ids only, without adapters, images or embeddings.
    if not is_token_only(req) or fallback_reason(req):
        return None
    covered = method.covered(tokens - method.recent)
    if not method.packs_all or tokens < method.min_context or covered <= method.sinks:
        return None
    return QuantizedPrompt(method, tokens, covered)


class QuantizedPromptSlots(NamedTuple):
    """Slots, int64, for a prompt: ``sinks`` before prompt position ``begin``, ``blocks`` up to ``end``, and ``tail`` after that."""

    packing: Packing
    buffers: KVBuffers
    begin: int
    end: int
    sinks: torch.Tensor
    blocks: torch.Tensor
    tail: torch.Tensor

    def slots(self, start: int, end: int) -> torch.Tensor:
        """Return the slots of a page of tokens, int64. A page does not cross the begin or the end of the blocks."""
        if end <= self.begin:
            return self.sinks[start:end]
        if start >= self.end:
            return self.tail[start - self.end : end - self.end]
        return self.blocks[self.packing.packed_slots(start - self.begin) : self.packing.packed_slots(end - self.begin)]


@dataclass(frozen=True)
class QuantizedPromptAllocator:
    """Plans and allocates quantized prompts in a decode server's scheduler. ``freed_full_kv`` records which full KV does not exist."""

    compressed_kv: CompressedKVCache
    freed_full_kv: QuantizedOnlyKV
    requests: RequestStates

    def plan(self, req: "Req", tokens: int) -> QuantizedPrompt | None:
        """Plan the transfer of a request's first ``tokens`` tokens as quantized KV; None to transfer their full KV."""
        return plan_quantized_prompt(req, tokens, self.compressed_kv.methods[self.requests.method_of(req)])

    def allocate(self, req: "Req", prompt: QuantizedPrompt, exact: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
        """Allocate a request's row, its compressed KV, and slots for the full KV after that.

        ``exact`` takes the slots that the row has for the covered tokens, int64 [covered], and their number. It assigns the row and slots
        for the other tokens, and returns these, int64, as this method does.

        Raises:
            RuntimeError: The pool lacks slots: the request was admitted with fewer than :attr:`QuantizedPrompt.slots`.
        """
        allocator, method = self.compressed_kv.allocator, prompt.method
        own = allocator.alloc(prompt.held)
        if own is None:
            raise RuntimeError(f"{allocator.available_size()} slots are free, and request {req.rid} was admitted with {prompt.slots}")
        # SGLang's padding page.
        slots = exact(torch.arange(prompt.covered, device=own.device) % allocator.page_size, prompt.covered)
        packed = method.packing.packed_slots(prompt.covered - method.sinks)
        compressed = CompressedKV(
            own, prompt.covered, sinks=method.sinks, own_tokens=prompt.covered - method.sinks, own_packed=packed,
            refresh_after=method.next_refresh(prompt.tokens - method.recent),
        )  # fmt: skip
        self.requests.admit(req, 0)
        self.compressed_kv.insert(req.req_pool_idx, compressed)
        self.freed_full_kv.begin(req.req_pool_idx, prompt.covered)
        return slots

    def slots(self, req: "Req", prompt: QuantizedPrompt) -> QuantizedPromptSlots:
        """Return the slots to write a request's quantized prompt to."""
        compressed, packing = self.compressed_kv.get(req.req_pool_idx), prompt.method.packing
        own, tail = compressed.own, self.compressed_kv.token_table[req.req_pool_idx, prompt.covered : prompt.tokens]
        blocks = own[compressed.sinks : compressed.sinks + compressed.own_packed]
        return QuantizedPromptSlots(
            packing, self.compressed_kv.buffers, compressed.sinks, compressed.covered, own[: compressed.sinks], blocks, tail.long()
        )

    def enable_recompute(self, req: "Req", prefill_again: RemotePrefill) -> None:
        """Allow to free the full KV of a request with a row: the prefill server can compute it again."""
        if is_token_only(req):
            self.freed_full_kv.set_remote_prefill(req.req_pool_idx, prefill_again)
