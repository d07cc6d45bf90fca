"""Prompts that come to a decode server as codes: which do, what slots they take, and the copies that hold them.

In mode lossy nobody reads the full KV of what a copy holds. A prompt that a copy would be made of as soon as it decodes gets that copy
with its slots, before any of it has come: the prefill server packs what the copy stands for, and its blocks are written where the copy
has them. The request's own row leads to SGLang's padding page there, as where full KV was given back (codes_alone.py), and to full KV
after it. Who is retracted is prefilled again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_ext.core import CompressedView
from sglang_ext.managers.spec_decode.requests import RequestStates, fallback_reason, is_named_by_tokens
from sglang_ext.mem_cache.compressed.compressed_views import CompressedViews
from sglang_ext.mem_cache.compressed.copy_method import CopyMethod
from sglang_ext.mem_cache.compressed.formats.packing import Packing
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.prefix_cache.codes_alone import CodesAlone
from sglang_ext.mem_cache.prefix_cache.recompute import Sent

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass(frozen=True)
class CodedPrompt:
    """A prompt that shall come as codes.

    Attributes:
        method: makes the copies of its request.
        tokens: of the prompt.
        covered: of these, those that the copy stands for: the first ones exact, the rest in blocks.
    """

    method: CopyMethod
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


def coded_prompt(req: "Req", tokens: int, method: CopyMethod) -> CodedPrompt | None:
    """How the first ``tokens`` tokens of a request travel whose copies ``method`` makes; None where their full KV does.

    That is so of short ones, and of requests that read full KV. Who may be retracted must be prefilled again, and what SGLang then asks
    the prefill server names tokens alone: no adapter, image or embedding.
    """
    if not is_named_by_tokens(req) or fallback_reason(req):
        return None
    covered = method.covered(tokens - method.recent)
    if not method.packs_all or tokens < method.shortest or covered <= method.sinks:
        return None
    return CodedPrompt(method, tokens, covered)


class CodedSlots(NamedTuple):
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
class CodedPrompts:
    """Those of one decode server's scheduler process.

    Attributes:
        views: copies of the requests.
        codes: full KV that is not there.
        requests: their states.
    """

    views: CompressedViews
    codes: CodesAlone
    requests: RequestStates

    def plan(self, req: "Req", tokens: int) -> CodedPrompt | None:
        """How a request's first ``tokens`` tokens come; None where their full KV does."""
        return coded_prompt(req, tokens, self.views.methods[self.requests.method_of(req)])

    def allocate(self, req: "Req", prompt: CodedPrompt, exact: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
        """Give a request its row, its copy and slots of the full KV after that.

        Args:
            req: has no row yet.
            prompt: of :meth:`plan`.
            exact: takes the slots that stand for the first tokens, int64 [covered], and their number; gives the request its row and
                slots of the others, int64, which are the answer.

        Raises:
            RuntimeError: the pool lacks slots: it was asked for fewer than :attr:`CodedPrompt.slots`.
        """
        allocator, method = self.views.allocator, prompt.method
        own = allocator.alloc(prompt.held)
        if own is None:
            raise RuntimeError(f"{allocator.available_size()} slots are free, and request {req.rid} was admitted with {prompt.slots}")
        # SGLang's padding page.
        slots = exact(torch.arange(prompt.covered, device=own.device) % allocator.page_size, prompt.covered)
        packed = method.packing.packed_slots(prompt.covered - method.sinks)
        view = CompressedView(
            own, prompt.covered, sinks=method.sinks, own_tokens=prompt.covered - method.sinks, own_packed=packed,
            due=method.due(prompt.tokens - method.recent),
        )  # fmt: skip
        self.requests.admit(req, 0)
        self.views.put(req.req_pool_idx, view)
        self.codes.begin(req.req_pool_idx, prompt.covered)
        return slots

    def slots(self, req: "Req", prompt: CodedPrompt) -> CodedSlots:
        """Where the codes of a request with slots go."""
        view, packing = self.views.get(req.req_pool_idx), prompt.method.packing
        own, tail = view.own, self.views.token_table[req.req_pool_idx, prompt.covered : prompt.tokens]
        blocks = own[view.sinks : view.sinks + view.own_packed]
        return CodedSlots(packing, self.views.buffers, view.sinks, view.covered, own[: view.sinks], blocks, tail.long())

    def can_recompute(self, req: "Req", sent: Sent) -> None:
        """Full KV of a request with a row may be given back: ``sent`` lets the prefill server compute it once more."""
        if is_named_by_tokens(req):
            self.codes.recomputed_by(req.req_pool_idx, sent)
