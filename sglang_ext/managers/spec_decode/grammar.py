"""Grammars over drafts: what may come after tokens that are not part of the output yet.

SGLang advances a request's grammar over its output alone. Drafts are made without it; their verification walks it along them to
mask each row of logits, and back at once, so that between forwards it always stands at the output, whatever becomes of the
request (abort, retraction). Under the overlapped loop SGLang launches a round before it has put the tokens of the last one into
outputs: a walk begins with these.
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

# Drafts that a grammar is walked along. As many and one more may be new answers before them; xgrammar takes back 200 tokens.
MAX_WALKED_DRAFTS = 96
BITS = 32
"""Tokens in a number of a mask, int32 [rows, vocabulary / 32], in xgrammar and llguidance."""


def can_roll_back(grammar: BaseGrammarObject) -> bool:
    """Whether drafts can be taken back from this grammar.

    Outlines cannot; SGLang's wrapper for reasoning models keeps a state of its own that it restores
    for whole verifications only.
    """
    wrapped = getattr(grammar, "grammar", None) is not None
    return not wrapped and type(grammar).rollback is not BaseGrammarObject.rollback


def can_walk(grammar: BaseGrammarObject | None) -> bool:
    """Whether a request's grammar may lag behind its tokens: there is none, or it can be walked along them and back."""
    return grammar is None or can_roll_back(grammar)


@dataclass(frozen=True)
class UnprocessedTokens:
    """The tokens of the newest forward, which SGLang has not put into outputs yet when it launches the next one.

    Attributes:
        reqs: the requests that the forward was of; none where no grammar has to know.
        result: of the forward: a prefill's one token, or a round's answers, of each.
    """

    reqs: Sequence["Req"] = ()
    result: GenerationBatchResult | None = None

    @classmethod
    def from_result(cls, batch: "ScheduleBatch", result: GenerationBatchResult) -> "UnprocessedTokens":
        """Those of a forward of ``batch``."""
        if all(req.grammar is None for req in batch.reqs):
            return cls()
        places = getattr(result, "requests", None)
        return cls(list(batch.reqs) if places is None else [batch.reqs[i] for i in places], result)

    def before(self, req: "Req", length: int) -> list[int]:
        """Tokens of a request that are not in its output yet; waits for the forward that gave them.

        Args:
            req: whose output may lack them.
            length: tokens whose KV it has; one more is known.
        """
        count = length + 1 - len(req.origin_input_ids) - len(req.output_ids)
        if count <= 0:
            return []
        place = next(i for i, each in enumerate(self.reqs) if each is req)
        self.result.copy_done.synchronize()
        stride = 1 if self.result.accept_lens is None else self.result.speculative_num_draft_tokens
        return self.result.next_token_ids[place * stride : place * stride + count].tolist()


@dataclass
class GrammarWalk:
    """A request's grammar along its drafts.

    Attributes:
        grammar: at the request's output, before and after each call.
        drafts: the newest tokens, of which the first :data:`MAX_WALKED_DRAFTS` count.
        before: tokens between the output and the drafts.
        answers: rows that are masked, from the first on, so that their tokens may be answers; set by :meth:`fill_mask`. The last follows
            a draft that the grammar refuses, or is the one that ends the grammar.
    """

    grammar: BaseGrammarObject
    drafts: Sequence[int] = ()
    before: Sequence[int] = ()
    answers: int = field(default=1, init=False)

    def row(self, index: int) -> "DraftGrammar | None":
        """Masks the row after ``index`` drafts; None for one that never is an answer."""
        return DraftGrammar(self, index) if index <= min(len(self.drafts), MAX_WALKED_DRAFTS) else None

    def fill_mask(self, vocab_mask: torch.Tensor, rows: dict[int, int]) -> None:
        """Mask the rows of ``vocab_mask`` that may be answers. The other rows stay open.

        SGLang aborts a request whose grammar refuses an output token, but not before it processes this token: until then its rows stay
        open. The sampler gives such a token where the grammar and ``min_new_tokens`` together allow none.

        Args:
            vocab_mask: int32 [rows, vocabulary / 32].
            rows: row of the mask by the number of drafts before it, from 0 on.
        """
        # xgrammar ignores a refused token. llguidance raises from then on, in a rollback, too.
        with suppress(ValueError):
            self._fill(vocab_mask, rows)

    def _fill(self, vocab_mask: torch.Tensor, rows: dict[int, int]) -> None:
        grammar, taken = self.grammar, 0
        try:
            for token in self.before:
                grammar.accept_token(token)
                taken += 1
                if grammar.finished:
                    # llguidance's mark of an end, which its matcher does not count; SGLang takes it back where the output goes on.
                    grammar.finished = False
                    taken -= 1
                elif grammar.is_terminated():
                    return
            for index in range(len(rows)):
                if grammar.is_terminated():
                    break
                grammar.fill_vocab_mask(vocab_mask, rows[index])
                self.answers = index + 1
                if index == len(self.drafts) or not _allows(vocab_mask[rows[index]], token := self.drafts[index]):
                    break
                grammar.accept_token(token)
                taken += 1
        finally:
            if taken:
                grammar.rollback(taken)


def _allows(mask: torch.Tensor, token: int) -> bool:
    """Whether a row of a mask, int32 [vocabulary / 32], has the bit of a token."""
    return bool(int(mask[token // BITS]) >> token % BITS & 1)


@dataclass(frozen=True)
class DraftGrammar:
    """A grammar as it is after some drafts; masks one row of logits.

    Stands in for SGLang's grammar object in ``SamplingBatchInfo.grammars``.

    Attributes:
        walk: the grammar and all drafts.
        index: drafts before the row.
    """

    walk: GrammarWalk
    index: int

    @property
    def finished(self) -> bool:
        """Whether the output itself has finished the grammar."""
        return self.walk.grammar.finished

    def is_terminated(self) -> bool:
        """Whether the output itself has ended the grammar."""
        return self.walk.grammar.is_terminated()

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device) -> torch.Tensor:
        """The backend's mask that allows everything."""
        return self.walk.grammar.allocate_vocab_mask(vocab_size, batch_size, device)

    def fill_vocab_mask_batched(self, entries: list[GrammarRow], vocab_mask: torch.Tensor) -> None:
        """Mask each entry's row by its own grammar after its own drafts."""
        walks: dict[int, tuple[GrammarWalk, dict[int, int]]] = {}
        for entry in entries:
            after: DraftGrammar = entry.grammar
            walks.setdefault(id(after.walk), (after.walk, {}))[1][after.index] = entry.row
        for walk, rows in walks.values():
            walk.fill_mask(vocab_mask, rows)

    def move_vocab_mask(self, vocab_mask: torch.Tensor, device) -> torch.Tensor:
        """The mask on ``device``."""
        return self.walk.grammar.move_vocab_mask(vocab_mask, device)

    def apply_vocab_mask(self, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        """Set the logits of what is not allowed to minus infinity, in place."""
        self.walk.grammar.apply_vocab_mask(logits, vocab_mask)
