"""Quantized prompts at the decode server: which prompts are transferred so, their slots, and their compressed KV.

In mode lossy, no request reads the full KV that compressed KV replaces. If a prompt would be compressed as soon as it decodes, its
compressed KV is allocated with its slots, before any data arrives. The prefill server packs the covered tokens, and their blocks are
written directly into the compressed KV.

For the covered tokens, the request's own row points to SGLang's padding page, as after full KV was freed (quantized_only.py). After them it
points to full KV. A retracted request is prefilled again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_ext.mem_cache.prefix_cache.segments import CompressedKV
from sglang_ext.managers.spec_decode.request_states import RequestStates, fallback_reason, is_token_only
from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.prefix_cache.quantized_only import QuantizedOnlyKV
from sglang_ext.mem_cache.prefix_cache.freed_full_kv import RecomputeSource

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass(frozen=True)
class QuantizedPrompt:
    """A prompt to transfer as quantized KV.

    Attributes:
        method: Compression method of its request.
        tokens: Prompt tokens.
        covered: Number of first prompt tokens that the compressed KV replaces: the sinks exactly, the others in blocks.
    """

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

    Full KV is transferred for short prompts and for requests that read full KV. A retracted request must be prefilled again. SGLang then
    sends the prefill server token ids only, without adapters, images or embeddings; such requests use full KV too.
    """
    if not is_token_only(req) or fallback_reason(req):
        return None
    covered = method.covered(tokens - method.recent)
    if not method.packs_all or tokens < method.shortest or covered <= method.sinks:
        return None
    return QuantizedPrompt(method, tokens, covered)


class QuantizedPromptSlots(NamedTuple):
    """Slots for a prompt's quantized blocks, and for its tokens that are not packed.

    Attributes:
        packing, buffers: Layout of blocks in slots, and the pool.
        begin, end: Range of prompt positions that is stored in blocks.
        sinks: int64 [begin], slots of the tokens before the blocks.
        blocks: int64, slots of the blocks.
        tail: int64, slots of the tokens after the blocks.
    """

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
    """Plans and allocates quantized prompts in a decode server's scheduler process.

    Attributes:
        compressed_kv: Compressed KV of the requests.
        freed_full_kv: Records which full KV does not exist.
        requests: State of the requests.
    """

    compressed_kv: CompressedKVCache
    freed_full_kv: QuantizedOnlyKV
    requests: RequestStates

    def plan(self, req: "Req", tokens: int) -> QuantizedPrompt | None:
        """Plan the transfer of a request's first ``tokens`` tokens as quantized KV; None to transfer their full KV."""
        return plan_quantized_prompt(req, tokens, self.compressed_kv.methods[self.requests.method_of(req)])

    def allocate(self, req: "Req", prompt: QuantizedPrompt, exact: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
        """Allocate a request's row, its compressed KV, and slots for the full KV after that.

        Args:
            req: Request without a row.
            prompt: Result of :meth:`plan`.
            exact: Takes the slots that the row has for the covered tokens, int64 [covered], and their number. Assigns the row and slots for
                the other tokens, and returns these, int64.

        Returns:
            The result of ``exact``.

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

    def enable_recompute(self, req: "Req", sent: RecomputeSource) -> None:
        """Allow to free the full KV of a request with a row: ``sent`` lets the prefill server compute it again."""
        if is_token_only(req):
            self.freed_full_kv.set_recompute_source(req.req_pool_idx, sent)
