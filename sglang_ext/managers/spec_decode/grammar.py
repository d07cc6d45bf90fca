"""Masks of grammars along draft tokens, which are not part of the output yet.

Drafts are made without the grammar. Their verification walks the grammar along the drafts to mask each row of logits, and rolls it back
at once. So between forwards the grammar is always at the end of the output, also if the request is aborted or retracted.

Under the overlapped loop, SGLang launches a round before it has appended the tokens of the last one to the outputs. A walk begins with
these tokens.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject, GrammarRow
from sglang.srt.managers.utils import GenerationBatchResult

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

# Upper limit of drafts in a walk. Unprocessed output tokens come first, at most as many plus one; xgrammar can roll back 200 tokens.
MAX_WALKED_DRAFTS = 96
# Tokens per int32 number of a mask, [rows, vocabulary / 32], in xgrammar and llguidance.
BITS = 32


def can_walk(grammar: BaseGrammarObject | None) -> bool:
    """Whether a request's grammar may lag behind its tokens: there is none, or it can be walked along them and rolled back.

    Outlines cannot roll back. SGLang's wrapper for reasoning models restores its own state for whole verifications only.
    """
    wrapped = getattr(grammar, "grammar", None) is not None
    return grammar is None or (not wrapped and type(grammar).rollback is not BaseGrammarObject.rollback)


@dataclass(frozen=True)
class UnprocessedTokens:
    """Tokens of the newest forward that SGLang has not appended to the outputs when it launches the next forward.

    ``reqs``: requests of the forward; empty if none of them has a grammar. ``result``: that of a prefill or a round.
    """

    reqs: Sequence["Req"] = ()
    result: GenerationBatchResult | None = None

    @classmethod
    def from_result(cls, batch: "ScheduleBatch", result: GenerationBatchResult) -> "UnprocessedTokens":
        """The unprocessed tokens of a forward of ``batch``."""
        if all(req.grammar is None for req in batch.reqs):
            return cls()
        places = getattr(result, "positions", None)
        return cls(list(batch.reqs) if places is None else [batch.reqs[i] for i in places], result)

    def tokens_of(self, req: "Req", length: int) -> list[int]:
        """Tokens of a request of ``length`` tokens with KV that are not in its output yet. Waits for the forward that produces them."""
        count = length + 1 - len(req.origin_input_ids) - len(req.output_ids)
        if count <= 0:
            return []
        place = next(i for i, each in enumerate(self.reqs) if each is req)
        self.result.copy_done.synchronize()
        # A prefill has one token of each request.
        stride = 1 if self.result.accept_lens is None else self.result.speculative_num_draft_tokens
        return self.result.next_token_ids[place * stride : place * stride + count].tolist()


@dataclass
class GrammarWalk:
    """Walks a request's grammar along its drafts. The grammar is at the end of the request's output before and after each call.

    Attributes:
        drafts: Draft tokens, of which the first :data:`MAX_WALKED_DRAFTS` count.
        unprocessed: Tokens between the output and the drafts.
        num_masked_rows: Masked rows, from the first on, whose tokens may become output tokens; :meth:`fill_mask` sets it. The last row
            follows a draft that the grammar refuses, or is the one that ends the grammar.
    """

    grammar: BaseGrammarObject
    drafts: Sequence[int] = ()
    unprocessed: Sequence[int] = ()
    num_masked_rows: int = field(default=1, init=False)

    def row(self, index: int) -> "DraftGrammar | None":
        """The mask of the row after ``index`` drafts; None if its token never becomes an output token."""
        return DraftGrammar(self, index) if index <= min(len(self.drafts), MAX_WALKED_DRAFTS) else None

    def fill_mask(self, vocab_mask: torch.Tensor, rows: dict[int, int]) -> None:
        """Mask the rows of ``vocab_mask``, int32 [rows, vocabulary / 32], that may give output tokens. Other rows allow all tokens.

        ``rows``: row of the mask by the number of drafts before it, from 0 on.
        """
        # The sampler gives a token that the grammar refuses if the grammar and min_new_tokens together allow none. SGLang aborts the request
        # when it processes this token. xgrammar ignores a refused token. llguidance raises from then on, also in a rollback.
        with suppress(ValueError):
            self._fill(vocab_mask, rows)

    def _fill(self, vocab_mask: torch.Tensor, rows: dict[int, int]) -> None:
        grammar, taken = self.grammar, 0
        try:
            for token in self.unprocessed:
                grammar.accept_token(token)
                taken += 1
                if grammar.finished:
                    # llguidance's end marker, which its matcher does not count. SGLang takes it back if the output continues.
                    grammar.finished = False
                    taken -= 1
                elif grammar.is_terminated():
                    return
            for index in range(len(rows)):
                if grammar.is_terminated():
                    break
                grammar.fill_vocab_mask(vocab_mask, rows[index])
                self.num_masked_rows = index + 1
                if index == len(self.drafts) or not _allows(vocab_mask[rows[index]], token := self.drafts[index]):
                    break
                grammar.accept_token(token)
                taken += 1
        finally:
            if taken:
                grammar.rollback(taken)


def _allows(mask: torch.Tensor, token: int) -> bool:
    return bool(int(mask[token // BITS]) >> token % BITS & 1)


@dataclass(frozen=True)
class DraftGrammar:
    """A grammar after ``index`` drafts, which masks one row of logits. Replaces SGLang's object in ``SamplingBatchInfo.grammars``."""

    walk: GrammarWalk
    index: int

    @property
    def finished(self) -> bool:
        """Whether the grammar is finished at the end of the output."""
        return self.walk.grammar.finished

    def is_terminated(self) -> bool:
        """Whether the grammar is terminated at the end of the output."""
        return self.walk.grammar.is_terminated()

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device) -> torch.Tensor:
        """The backend's mask that allows all tokens."""
        return self.walk.grammar.allocate_vocab_mask(vocab_size, batch_size, device)

    def fill_vocab_mask_batched(self, entries: list[GrammarRow], vocab_mask: torch.Tensor) -> None:
        """Mask each entry's row by its own grammar, after its own drafts."""
        walks: dict[int, tuple[GrammarWalk, dict[int, int]]] = {}
        for entry in entries:
            after: DraftGrammar = entry.grammar
            walks.setdefault(id(after.walk), (after.walk, {}))[1][after.index] = entry.row
        for walk, rows in walks.values():
            walk.fill_mask(vocab_mask, rows)

    def move_vocab_mask(self, vocab_mask: torch.Tensor, device) -> torch.Tensor:
        """Move the mask to ``device``."""
        return self.walk.grammar.move_vocab_mask(vocab_mask, device)

    def apply_vocab_mask(self, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        """Set the logits of tokens that are not allowed to minus infinity, in place."""
        self.walk.grammar.apply_vocab_mask(logits, vocab_mask)
