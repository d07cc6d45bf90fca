"""What the requests of a batch do in a rolling round: all draft, those whose turn it is verify.

Full KV may be off the device. Drafts then gather over several rounds, until the full KV is there for their verification
(verifications.py). A request that cannot draft, or has no copy, decodes on its full KV meanwhile, which stays.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from sglang_ext.core import FALLBACK_REASONS, RequestState
from sglang_ext.managers.draft_length import Choice
from sglang_ext.managers.planner import CURABLE, SLOWER, ensure_copy
from sglang_ext.managers.round_plan import PLAIN_STEPS, TRIAL_COPIES, Round, can_draft
from sglang_ext.managers.verifications import Verifications
from sglang_ext.mem_cache.compressed_views import CompressedViews
from sglang_ext.options import WIDE_REQUESTS

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

GRAMMAR = FALLBACK_REASONS.index("grammar")


@dataclass(frozen=True)
class RollingRound(Round):
    """A round in which ``drafts`` steps are done by all, and some verify what they drafted in this and earlier rounds.

    Attributes:
        gathered: drafts that each has from earlier rounds; 0 for those that decode on their full KV.
        due: requests that verify at its end.
    """

    gathered: list[int] = field(default_factory=list)
    due: list[int] = field(default_factory=list)

    @cached_property
    def starts(self) -> list[int]:
        """Position of each request's first token in the round."""
        return [length + gathered for length, gathered in zip(self.lengths, self.gathered)]

    @cached_property
    def answering(self) -> list[int]:
        """Requests that decode on their full KV."""
        return [i for i, (state, row) in enumerate(zip(self.states, self.rows)) if row == state.row]

    @cached_property
    def offered(self) -> list[int]:
        """Drafts that each has at the round's end."""
        return [gathered + self.drafts for gathered in self.gathered]

    @property
    def verified_together(self) -> list[list[int]]:
        """Those that verify, apart by whether they have the drafts of one round, or more: few wide ones in one forward."""
        narrow = [i for i in self.due if self.offered[i] <= self.drafts]
        wide = [i for i in self.due if self.offered[i] > self.drafts]
        parts = [wide[at : at + WIDE_REQUESTS] for at in range(0, len(wide), WIDE_REQUESTS)]
        return [narrow, *parts] if narrow else parts


@dataclass(frozen=True)
class RollingPlanner:
    """Plans rolling rounds; makes and renews copies for them.

    Attributes:
        views: the compressed copies.
        verifications: whose turn it is, and what is loaded for it.
        longest: drafts that a request gathers at most; a multiple of the drafts of a round.
    """

    views: CompressedViews
    verifications: Verifications
    longest: int

    def plan(
        self,
        batch: "ScheduleBatch",
        states: list[RequestState],
        lengths: list[int],
        wanted: Choice,
        iteration_seconds: float | None = None,
    ) -> RollingRound:
        """A round of ``wanted.drafts`` steps, or fewer: one where a request's tokens must be looked at one by one.

        Where none are wanted, requests decode a few tokens on their full KV, as far as it is on the device.

        Args:
            batch: the running requests.
            states: their draft states, same order.
            lengths: tokens of each request whose full KV is known, on the device or not.
            wanted: what the requests shall do.
            iteration_seconds: of a round, as measured.
        """
        residency = self.verifications.residency
        residency.settle()
        able = [can_draft(req, state) for req, state in zip(batch.reqs, states)]
        residency.update(
            {
                state.row: (req.last_node, view.covered)
                for req, state, can in zip(batch.reqs, states, able)
                if can and (view := self.views.get(state.row)) is not None
            }
        )
        # Beside the slots that SGLang keeps ahead of each request.
        headroom = 2 * (wanted.drafts or PLAIN_STEPS) * len(states)
        copies = _copies(wanted, len(states))
        reasons = [self._fallback(*each, headroom, copies) for each in zip(batch.reqs, states, lengths, able)]
        on_copy = [can and not reason for can, reason in zip(able, reasons)]
        missing = [req.sampling_params.max_new_tokens - len(req.output_ids) for req in batch.reqs]
        # Drafts of a round have to fit where they gather; plain steps too, as some requests may draft beside them.
        most = min(wanted.drafts or PLAIN_STEPS, self.longest)
        steps = _steps(batch, able, on_copy, max(missing), most)
        self._take_turns(states, on_copy, missing, steps, iteration_seconds)
        turns = [i for i, state in enumerate(states) if on_copy[i] and state.row in self.verifications.turns]
        for i in turns:
            if residency.is_stale(states[i].row):
                residency.restore(states[i].row)
                self._copy(batch.reqs[i], states[i], lengths[i], headroom)
        gathered = [min(state.gathered, self.longest - steps) if drafting else 0 for state, drafting in zip(states, on_copy)]
        assert all(0 <= before <= self.longest - steps for before in gathered), (gathered, steps, self.longest)
        places = [self._row(*each) for each in zip(states, lengths, gathered, on_copy)]
        rows, viewed = [row for row, _ in places], [tokens for _, tokens in places]
        drafted, plain = (steps, 0) if any(on_copy) else (0, steps)
        trial = wanted.trial and drafted > 0
        return RollingRound(states, drafted, plain, lengths, rows, viewed, reasons, trial, gathered=gathered, due=turns)

    def _fallback(
        self, req: "Req", state: RequestState, length: int, able: bool, headroom: int, copies: Iterator[int]
    ) -> int:
        """Why a request decodes on its full KV in this round; 0 where it drafts. Makes its copy, or renews it."""
        if not able:
            return state.fallback if state.fallback not in CURABLE else GRAMMAR
        if state.gathered or self.verifications.residency.is_stale(state.row):
            # It has a copy, which is renewed when the full KV is there.
            return 0
        if next(copies, None) is None:
            # Before others are given room.
            self.verifications.keep(state.row)
            return SLOWER
        reason = self._copy(req, state, length, headroom)
        if reason:
            self.verifications.keep(state.row)
        return reason

    def _copy(self, req: "Req", state: RequestState, length: int, headroom: int) -> int:
        with self.verifications.residency.reading(state.row):
            return ensure_copy(self.views, req, state, length, headroom)

    def _take_turns(
        self,
        states: list[RequestState],
        on_copy: list[bool],
        missing: list[int],
        steps: int,
        iteration_seconds: float | None,
    ) -> None:
        """Find who verifies in this round, and begin the loads for later ones."""
        verifications = self.verifications
        verifications.begin(iteration_seconds)
        rounds = {}
        for state, drafting, left in zip(states, on_copy, missing):
            if drafting and not verifications.residency.is_lost(state.row):
                target = min(verifications.drafts, left - 1) - state.gathered
                rounds[state.row] = max(1, -(-target // steps) - 1)
        verifications.want(rounds)

    def _row(self, state: RequestState, length: int, gathered: int, drafting: bool) -> tuple[int, int]:
        """The row of the token table that a request's steps read, and the tokens in it before them."""
        if not drafting:
            return state.row, length
        self.views.write_tail(state.row, length + gathered)
        view = self.views.get(state.row)
        return self.views.draft_row(state.row), view.kept + length + gathered - view.covered


def _copies(wanted: Choice, requests: int) -> Iterator[int]:
    """A turn for each request that may draft on a copy: none where drafts are not wanted, few where they are tried."""
    if not wanted.drafts and not wanted.trial:
        return iter(())
    return iter(range(TRIAL_COPIES if wanted.trial else requests))


def _steps(batch: "ScheduleBatch", able: list[bool], on_copy: list[bool], missing: int, drafts: int) -> int:
    """Steps of the round. SGLang keeps penalties, grammars and log-probabilities of answers from token to token."""
    if not all(able) or (batch.return_logprob and not all(on_copy)):
        return 1
    return max(1, min(drafts, missing))
