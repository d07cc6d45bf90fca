"""Grammars over drafts: what may come after tokens that are not part of the output yet.

SGLang advances a request's grammar over its output alone. Here it is advanced over drafts to mask one
row of logits and rolled back at once, so that between forwards it always stands at the output, whatever
becomes of the request (abort, retraction).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject, GrammarRow


def can_roll_back(grammar: BaseGrammarObject) -> bool:
    """Whether drafts can be taken back from this grammar.

    Outlines cannot; SGLang's wrapper for reasoning models keeps a state of its own that it restores
    for whole verifications only.
    """
    wrapped = getattr(grammar, "grammar", None) is not None
    return not wrapped and type(grammar).rollback is not BaseGrammarObject.rollback


@contextmanager
def advanced(grammar: BaseGrammarObject, drafts: Sequence[int]) -> Iterator[None]:
    """The grammar as it is after ``drafts``, inside this context.

    Raises:
        ValueError: the grammar does not allow the drafts.
    """
    taken = 0
    try:
        for token in drafts:
            grammar.accept_token(token)
            taken += 1
        yield
    finally:
        if taken:
            grammar.rollback(taken)


def ends_after(grammar: BaseGrammarObject, drafts: Sequence[int]) -> bool:
    """Whether nothing may be drafted after ``drafts``: they end the grammar, or break it."""
    try:
        with advanced(grammar, drafts):
            return grammar.is_terminated()
    except ValueError:
        # The verification decides; SGLang aborts a request whose output breaks its grammar.
        return True


@dataclass(frozen=True)
class GrammarAfter:
    """A grammar as it is after some drafts; masks one row of logits.

    Stands in for SGLang's grammar object in ``SamplingBatchInfo.grammars``.

    Attributes:
        grammar: the request's grammar, at its output.
        drafts: tokens after the output, before the row.
    """

    grammar: BaseGrammarObject
    drafts: tuple[int, ...]

    @property
    def finished(self) -> bool:
        """Whether the output itself has finished the grammar."""
        return self.grammar.finished

    def is_terminated(self) -> bool:
        """Whether the output itself has ended the grammar; drafts never lead past its end."""
        return self.grammar.is_terminated()

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device) -> torch.Tensor:
        """The backend's mask that allows everything."""
        return self.grammar.allocate_vocab_mask(vocab_size, batch_size, device)

    def fill_vocab_mask_batched(self, entries: list[GrammarRow], vocab_mask: torch.Tensor) -> None:
        """Mask each entry's row by its own grammar after its own drafts.

        A row after drafts that end or break their grammar stays open: its token is never an answer.
        """
        for entry in entries:
            after: GrammarAfter = entry.grammar
            with suppress(ValueError), advanced(after.grammar, after.drafts):
                if not after.grammar.is_terminated():
                    after.grammar.fill_vocab_mask(vocab_mask, entry.row)

    def move_vocab_mask(self, vocab_mask: torch.Tensor, device) -> torch.Tensor:
        """The mask on ``device``."""
        return self.grammar.move_vocab_mask(vocab_mask, device)

    def apply_vocab_mask(self, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        """Set the logits of what is not allowed to minus infinity, in place."""
        self.grammar.apply_vocab_mask(logits, vocab_mask)
