"""Masks of grammars along draft tokens, which are not part of the output yet.

Drafts are made without the grammar. Their verification walks the grammar along the drafts to mask each row of logits, and rolls it back
at once. So between forwards the grammar is always at the end of the output, also if the request is aborted or retracted.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject, GrammarRow

# Upper limit of drafts in a walk. Unprocessed output tokens come first, at most as many plus one; xgrammar can roll back 200 tokens.
MAX_WALKED_DRAFTS = 96
# Tokens per int32 number of a mask, [rows, vocabulary / 32], in xgrammar and llguidance.
BITS = 32


def can_walk(grammar: BaseGrammarObject | None) -> bool:
    """Whether a request's grammar may lag behind its tokens: there is none, or it can be walked along them and rolled back."""
    # Outlines cannot roll back. SGLang's wrapper for reasoning models restores its own state for whole verifications only.
    wrapped = getattr(grammar, "grammar", None) is not None
    return grammar is None or (not wrapped and type(grammar).rollback is not BaseGrammarObject.rollback)


@dataclass
class GrammarWalk:
    """Walks a request's grammar along the tokens after its output: those that SGLang has not appended to it (``UnprocessedTokens``), then drafts.

    ``num_masked_rows``: rows, from the first on, whose tokens may become output tokens; :meth:`fill_mask` sets it. The last row follows a
    draft that the grammar refuses, or is the one that ends the grammar.
    """

    grammar: BaseGrammarObject
    drafts: Sequence[int] = ()
    unprocessed: Sequence[int] = ()
    num_masked_rows: int = field(default=1, init=False)

    def row(self, index: int) -> "DraftGrammar | None":
        """The mask of the row after ``index`` drafts; None if its token never becomes an output token."""
        return DraftGrammar(self, index) if index <= min(len(self.drafts), MAX_WALKED_DRAFTS) else None

    def fill_mask(self, vocab_mask: torch.Tensor, rows: dict[int, int]) -> None:
        """Mask the ``rows``, by the number of drafts before each, of ``vocab_mask``, int32 [rows, vocabulary / 32]."""
        grammar, taken = self.grammar, 0
        # The sampler gives a token that the grammar refuses if the grammar and min_new_tokens together allow none. SGLang aborts the request
        # when it processes this token. xgrammar ignores a refused token. llguidance raises from then on, also in a rollback.
        with suppress(ValueError):
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
    """A grammar after ``index`` drafts, which masks one row of logits. Replaces SGLang's object in ``SamplingBatchInfo.grammars``.

    All else that SGLang asks for (its end, how a mask is allocated, moved and applied) is that of the grammar at the end of the output.
    """

    walk: GrammarWalk
    index: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.walk.grammar, name)

    def fill_vocab_mask_batched(self, entries: list[GrammarRow], vocab_mask: torch.Tensor) -> None:
        """Mask each entry's row by its own grammar, after its own drafts."""
        walks: dict[int, tuple[GrammarWalk, dict[int, int]]] = {}
        for entry in entries:
            after: DraftGrammar = entry.grammar
            walks.setdefault(id(after.walk), (after.walk, {}))[1][after.index] = entry.row
        for walk, rows in walks.values():
            walk.fill_mask(vocab_mask, rows)
