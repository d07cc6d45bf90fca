"""What the requests of a batch do in one lockstep iteration: all draft and verify, or all decode with full KV."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_ext.core import RequestState
from sglang_ext.managers.draft_length import Choice
from sglang_ext.managers.planner import CURABLE, NEIGHBOUR, NO_QUERIES, SLOWER, ensure_copy
from sglang_ext.mem_cache.compressed_views import CompressedViews

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

# Tokens decoded in one iteration without drafts: more spare SGLang's scheduler work, and let requests end later.
PLAIN_STEPS = 4
# Copies made in a round that only looks whether drafting pays: the others draft on full KV, and tell nothing.
TRIAL_COPIES = 4


@dataclass(frozen=True)
class Round:
    """What the requests of a batch do in one iteration.

    Attributes:
        states: draft states of the requests.
        drafts: tokens that each drafts before the verification; 0 for none.
        steps: tokens that each decodes one by one where none is drafted, else 0.
        lengths: tokens of each request whose full KV is in the pool.
        rows: row of the token table that each request's drafts or steps read.
        viewed: tokens in that row before the round.
        fallbacks: why each request is served with full KV in this round; 0 where it is not.
        trial: whether it only looks if drafting pays, on few copies.
    """

    states: list[RequestState]
    drafts: int
    steps: int
    lengths: list[int]
    rows: list[int]
    viewed: list[int]
    fallbacks: list[int]
    trial: bool = False

    @property
    def share_on_copies(self) -> float:
        """Of the requests, those that read a compressed copy."""
        return sum(row != state.row for row, state in zip(self.rows, self.states)) / len(self.states)

    @property
    def on_full_kv(self) -> bool:
        """Whether no request reads a compressed copy before the verification."""
        return self.rows == [state.row for state in self.states]

    @property
    def width(self) -> int:
        """Tokens of each request whose KV the round writes."""
        return self.steps or self.drafts + 1

    @property
    def starts(self) -> list[int]:
        """Position of each request's first token in the round."""
        return self.lengths

    @property
    def answering(self) -> list[int]:
        """Requests whose steps give answers, not drafts."""
        return [] if self.drafts else list(range(len(self.states)))


@dataclass(frozen=True)
class RoundPlanner:
    """Plans rounds; makes and renews copies for them.

    Attributes:
        views: the compressed copies.
        stride: tokens of each request in a round at most.
        lossy: serve from the compressed views without verifying.
    """

    views: CompressedViews
    stride: int
    lossy: bool

    def plan(
        self, batch: "ScheduleBatch", states: list[RequestState], lengths: list[int], wanted: Choice
    ) -> Round:
        """A round in which ``wanted.drafts`` tokens are drafted at most.

        Where one request cannot be drafted exactly, all decode one token with full KV.

        Args:
            batch: the running requests.
            states: their draft states, same order.
            lengths: tokens of each request whose full KV is in the pool.
            wanted: what the requests shall do.
        """
        missing = max(r.sampling_params.max_new_tokens - len(r.output_ids) for r in batch.reqs)
        able = all(can_draft(req, state) for req, state in zip(batch.reqs, states))
        drafts = 0 if self.lossy or not able else max(0, min(wanted.drafts, missing - 1))
        on_copies = able and bool(self.lossy or drafts)
        headroom = 2 * self.stride * len(states)
        copies = TRIAL_COPIES if wanted.trial and not self.lossy else len(states)
        rows, viewed, fallbacks = [], [], []
        for req, state, length in zip(batch.reqs, states, lengths):
            if on_copies:
                reason = ensure_copy(self.views, req, state, length, headroom) if copies > 0 else SLOWER
                copies -= not reason
            elif able:
                # The last token of an output needs no draft.
                reason = 0 if wanted.drafts else SLOWER
            else:
                reason = state.fallback if state.fallback not in CURABLE else NEIGHBOUR
            view = self.views.get(state.row) if on_copies and not reason else None
            if view is not None:
                self.views.write_tail(state.row, length)
            rows.append(state.row if view is None else self.views.draft_row(state.row))
            viewed.append(length if view is None else view.kept + length - view.covered)
            fallbacks.append(reason)
        # Who lacks queries drafts on full KV once or twice: verifications leave them, captured plain steps do not.
        if all(reason and reason != NO_QUERIES for reason in fallbacks):
            drafts = 0
        # Penalties, grammars and log-probabilities are kept by SGLang from token to token.
        several = able and not batch.return_logprob
        steps = 0 if drafts else max(1, min(PLAIN_STEPS, self.stride, missing)) if several else 1
        return Round(states, drafts, steps, lengths, rows, viewed, fallbacks, wanted.trial and drafts > 0)


def can_draft(req, state: RequestState) -> bool:
    """Whether a request's drafts could be verified exactly."""
    return state.fallback in CURABLE and req.grammar is None
