"""Prompts that come to a decode server as codes: which do, what slots they take, and the copies that hold them.

In mode lossy nobody reads the full KV of what a copy holds. A prompt that a copy would be made of as soon as it decodes gets that copy
with its slots, before any of it has come: the prefill server packs what the copy stands for, and its blocks are written where the copy
has them. The request's own row leads to SGLang's padding page there, as where full KV was given back (quantized_only.py), and to full KV
after it. Who is retracted is prefilled again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_ext.core import CompressedKV
from sglang_ext.managers.spec_decode.request_states import RequestStates, fallback_reason, is_token_only
from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.prefix_cache.quantized_only import QuantizedOnlyKV
from sglang_ext.mem_cache.prefix_cache.recompute import RecomputeSource

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass(frozen=True)
class QuantizedPrompt:
    """A prompt that shall come as codes.

    Attributes:
        method: makes the copies of its request.
        tokens: of the prompt.
        covered: of these, those that the copy stands for: the first ones exact, the rest in blocks.
    """

    method: CompressionMethod
    tokens: int
    covered: int

    @property
    def held(self) -> int:
        """Slots of its copy, whole pages."""
        return self.method.sinks + self.method.packing.held_slots(self.covered - self.method.sinks)

    @property
    def slots(self) -> int:
        """All that it takes, whole pages: its copy, and full KV of the tokens after it."""
        page, exact = self.method.packing.page_size, self.tokens - self.covered
        return self.held + -(-exact // page) * page


def plan_quantized_prompt(req: "Req", tokens: int, method: CompressionMethod) -> QuantizedPrompt | None:
    """How the first ``tokens`` tokens of a request travel whose copies ``method`` makes; None where their full KV does.

    That is so of short ones, and of requests that read full KV. Who may be retracted must be prefilled again, and what SGLang then asks
    the prefill server names tokens alone: no adapter, image or embedding.
    """
    if not is_token_only(req) or fallback_reason(req):
        return None
    covered = method.covered(tokens - method.recent)
    if not method.packs_all or tokens < method.shortest or covered <= method.sinks:
        return None
    return QuantizedPrompt(method, tokens, covered)


class QuantizedPromptSlots(NamedTuple):
    """Where a prompt's codes go, and what is not packed of it.

    Attributes:
        packing, buffers: how blocks lie in slots, and the pool.
        begin, end: positions between which tokens lie in blocks.
        sinks: int64 [begin], slots of the tokens before them.
        blocks: int64, slots of the blocks.
        tail: int64, slots of the tokens after them.
    """

    packing: Packing
    buffers: KVBuffers
    begin: int
    end: int
    sinks: torch.Tensor
    blocks: torch.Tensor
    tail: torch.Tensor

    def slots(self, start: int, end: int) -> torch.Tensor:
        """Those of a page of tokens, which ends where the blocks begin and end or does not reach over: int64."""
        if end <= self.begin:
            return self.sinks[start:end]
        if start >= self.end:
            return self.tail[start - self.end : end - self.end]
        return self.blocks[self.packing.packed_slots(start - self.begin) : self.packing.packed_slots(end - self.begin)]


@dataclass(frozen=True)
class QuantizedPromptAllocator:
    """Those of one decode server's scheduler process.

    Attributes:
        compressed_kv: copies of the requests.
        codes: full KV that is not there.
        requests: their states.
    """

    compressed_kv: CompressedKVCache
    codes: QuantizedOnlyKV
    requests: RequestStates

    def plan(self, req: "Req", tokens: int) -> QuantizedPrompt | None:
        """How a request's first ``tokens`` tokens come; None where their full KV does."""
        return plan_quantized_prompt(req, tokens, self.compressed_kv.methods[self.requests.method_of(req)])

    def allocate(self, req: "Req", prompt: QuantizedPrompt, exact: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
        """Give a request its row, its copy and slots of the full KV after that.

        Args:
            req: has no row yet.
            prompt: of :meth:`plan`.
            exact: takes the slots that stand for the first tokens, int64 [covered], and their number; gives the request its row and
                slots of the others, int64, which are the answer.

        Raises:
            RuntimeError: the pool lacks slots: it was asked for fewer than :attr:`QuantizedPrompt.slots`.
        """
        allocator, method = self.compressed_kv.allocator, prompt.method
        own = allocator.alloc(prompt.held)
        if own is None:
            raise RuntimeError(f"{allocator.available_size()} slots are free, and request {req.rid} was admitted with {prompt.slots}")
        # SGLang's padding page.
        slots = exact(torch.arange(prompt.covered, device=own.device) % allocator.page_size, prompt.covered)
        packed = method.packing.packed_slots(prompt.covered - method.sinks)
        view = CompressedKV(
            own, prompt.covered, sinks=method.sinks, own_tokens=prompt.covered - method.sinks, own_packed=packed,
            refresh_after=method.due(prompt.tokens - method.recent),
        )  # fmt: skip
        self.requests.admit(req, 0)
        self.compressed_kv.insert(req.req_pool_idx, view)
        self.codes.begin(req.req_pool_idx, prompt.covered)
        return slots

    def slots(self, req: "Req", prompt: QuantizedPrompt) -> QuantizedPromptSlots:
        """Where the codes of a request with slots go."""
        view, packing = self.compressed_kv.get(req.req_pool_idx), prompt.method.packing
        own, tail = view.own, self.compressed_kv.token_table[req.req_pool_idx, prompt.covered : prompt.tokens]
        blocks = own[view.sinks : view.sinks + view.own_packed]
        return QuantizedPromptSlots(packing, self.compressed_kv.buffers, view.sinks, view.covered, own[: view.sinks], blocks, tail.long())

    def enable_recompute(self, req: "Req", sent: RecomputeSource) -> None:
        """Full KV of a request with a row may be given back: ``sent`` lets the prefill server compute it once more."""
        if is_token_only(req):
            self.codes.set_recompute_source(req.req_pool_idx, sent)
