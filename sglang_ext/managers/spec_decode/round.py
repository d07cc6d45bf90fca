"""What the requests of a batch do in one round: who drafts, who answers, and who is verified at its end.

A round has y steps, forwards of one token a request. A request is verified once x drafts are gathered: y = x is the plain case, y < x
the one where full KV has to arrive first, and y = 1 a batch in which a request's tokens must be looked at one by one. Who cannot
be drafted answers in the steps in which others draft.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from sglang_ext.config.options import WIDE_REQUESTS
from sglang_ext.core import CURABLE, FALLBACK_REASONS, NO_QUERIES, NO_SELECTION, PLAIN_STEPS, SHORT_CONTEXT, SLOWER, RequestState
from sglang_ext.managers.spec_decode.requests import end_of_answer
from sglang_ext.managers.spec_decode.turns import OnDevice
from sglang_ext.mem_cache.compressed.compressed_views import CompressedViews
from sglang_ext.mem_cache.compressed.due_copies import ensure_copy, is_short, until_due

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_ext.managers.offload.verifications import Verifications

# Steps of a round in which all requests decode early, or no request drafts on compressed KV and one waits for its first selection. When a
# residual arrives, one round runs and the next one is planned, so the verification begins after at most twice as many steps.
SHORT_ROUND = 2
MIN_P = FALLBACK_REASONS.index("min-p")


@dataclass(frozen=True)
class Round:
    """What the requests of a batch do in one iteration of SGLang's scheduler.

    Attributes:
        states: draft states of the requests.
        steps: forwards of one token of each.
        lengths: tokens of each request whose full KV is known, on the device or not.
        gathered: drafts that each has from earlier rounds.
        rows: row of the token table that each request's steps read.
        viewed: tokens in that row before the round.
        fallbacks: why each request reads its full KV in this round; 0 where it does not, or needs no draft.
        answering: requests whose steps give answers; the others draft.
        left: tokens that each request's output lacks; none of one that ended in the round before, which SGLang does not know yet.
        parts: requests that are verified at its end, by the forwards that do so.
        early: requests that draft on the anchor of their full KV.
        held: whether the round has one step, because a request must be checked token by token.
        every: selection interval, in steps.
    """

    states: list[RequestState]
    steps: int
    lengths: list[int]
    gathered: list[int]
    rows: list[int]
    viewed: list[int]
    fallbacks: list[int]
    answering: list[int]
    left: list[int]
    parts: list[list[int]] = field(default_factory=list)
    early: list[int] = field(default_factory=list)
    held: bool = False
    every: int = 1

    @classmethod
    def of_nobody(cls) -> "Round":
        """Without requests."""
        return cls([], 0, [], [], [], [], [], [], [])

    @cached_property
    def due(self) -> list[int]:
        """Requests that are verified at its end."""
        return sorted(i for part in self.parts for i in part)

    @property
    def drafts(self) -> int:
        """Tokens that those who draft do; 0 where nobody drafts."""
        return self.steps if len(self.answering) < len(self.states) else 0

    @property
    def plain_steps(self) -> int:
        """Its steps where nobody drafts, else 0."""
        return 0 if self.drafts else self.steps

    @property
    def width(self) -> int:
        """Tokens of each request whose KV the round writes at most, after those that are gathered."""
        return self.steps + bool(self.parts)

    @cached_property
    def starts(self) -> list[int]:
        """Position of each request's first token in the round."""
        return [length + gathered for length, gathered in zip(self.lengths, self.gathered)]

    def offered(self, i: int) -> int:
        """Drafts that a request which drafts has at the round's end."""
        return self.gathered[i] + self.steps

    def on_copy(self, i: int) -> bool:
        """Whether a request reads a compressed copy before the verification."""
        return self.rows[i] != self.states[i].row

    def answers(self, i: int) -> int:
        """Tokens that the steps give a request that answers: no more than its output lacks."""
        return min(self.steps, self.left[i])

    def is_draft(self, i: int) -> bool:
        """Whether what a request does tells of drafts: those on full KV are never wrong."""
        return self.on_copy(i) or i in self.early

    @cached_property
    def on_full_kv(self) -> bool:
        """Whether no request reads a compressed copy before the verification."""
        return not any(map(self.on_copy, range(len(self.states))))


@dataclass(frozen=True)
class Role:
    """What a request does in a round.

    Attributes:
        drafts: its steps are drafts; else answers.
        copy: it reads its copy; else its full KV.
        reason: index into ``FALLBACK_REASONS``; why it reads its full KV.
        early: of its full KV the anchor alone is there.
    """

    drafts: bool
    copy: bool
    reason: int = 0
    early: bool = False

    @property
    def gathers(self) -> bool:
        """Whether drafts may wait for full KV, and be wrong."""
        return self.drafts and (self.copy or self.early)


@dataclass
class Candidate:
    """A request while its round is planned.

    Attributes:
        req: SGLang's request.
        state: its draft state.
        length: tokens whose full KV is known.
        left: tokens that its output lacks.
        role: what it does.
        gathered: drafts of earlier rounds that it goes on from.
    """

    req: "Req"
    state: RequestState
    length: int
    left: int
    role: Role = Role(False, False)
    gathered: int = 0


@dataclass(frozen=True)
class RoundPlanner:
    """Plans rounds; makes and renews copies for them.

    Attributes:
        views: the compressed copies.
        turns: whose full KV is there for a verification.
        longest: drafts that a request gathers at most.
        narrow: drafts of the verifications that any number of requests share; wider ones come in small parts.
        lossy: serve from the compressed copies without verifying.
        may_get_queries: whether the queries of the request in a row would be kept, so that it can have a copy later.
        apart: whether answers must not come of steps in which others read copies, where they would round otherwise.
    """

    views: CompressedViews
    turns: "OnDevice | Verifications"
    longest: int
    narrow: int
    lossy: bool = False
    may_get_queries: Callable[[int], bool] = lambda row: True
    apart: bool = False

    def plan(
        self,
        batch: "ScheduleBatch",
        states: list[RequestState],
        lengths: list[int],
        wanted: int,
        iteration_seconds: float | None = None,
        every: int = 1,
    ) -> Round:
        """A round of ``wanted`` draft steps, or fewer; of plain steps where none are wanted.

        Args:
            batch: the running requests.
            states: their draft states, same order.
            lengths: tokens of each request whose full KV is known.
            wanted: draft length; 0 for plain decoding.
            iteration_seconds: measured seconds of a round; None before the first measurement.
            every: selection interval, in steps.
        """
        count = len(states)
        self.turns.begin(self._drafting_on_copies(batch.reqs, states), iteration_seconds)
        self.turns.give_back(batch.reqs)
        requests = [
            Candidate(req, state, length, max(0, end_of_answer(req) - length))
            for req, state, length in zip(batch.reqs, states, lengths)
        ]
        most = min(PLAIN_STEPS if self.lossy else wanted or PLAIN_STEPS, self.longest)
        # Beside the slots that SGLang keeps ahead of each request.
        headroom = 2 * (most + 1) * count
        copies = self.lossy or wanted > 0
        if self.apart and any(state.fallback not in CURABLE for state in states):
            # Requests that cannot be drafted need a round without copies.
            copies = False
        for each in requests:
            each.role = self._role(each, headroom, copies, wanted)
        early = [i for i, each in enumerate(requests) if each.role.early]
        if len(early) == len(requests):
            # At the limit of pending drafts a step only repeats the newest draft.
            full = all(each.state.gathered >= self.longest for each in requests)
            most = min(most, 1 if full else SHORT_ROUND)
        if not any(each.role.drafts and (each.role.copy or each.role.reason == NO_QUERIES) for each in requests):
            # Drafts on full KV alone would gain nothing.
            for each in requests:
                each.role = replace(each.role, drafts=each.role.early)
            if any(each.role.reason == NO_SELECTION for each in requests):
                # Soon there is one.
                most = min(most, SHORT_ROUND)
        one_by_one = any(not each.role.drafts and _is_looked_at(each) for each in requests)
        ahead = [each.left - (each.state.gathered + 1) * each.role.drafts for each in requests]
        ends = [until_due(self.views, each.state, each.length) for each in requests if self.lossy]  # or company would decide when
        steps = 1 if one_by_one else max(1, min([most, max(ahead), *filter(None, ends)]))
        for each in requests:
            if each.role.gathers:
                # Where they would not fit any more, the newest drafts are drafted again.
                each.gathered = min(each.state.gathered, self.longest - steps)
        due = self._due(requests, steps, wanted, headroom)
        rows, viewed = zip(*map(self._row, requests))
        gathered = [each.gathered for each in requests]
        return Round(
            states=states,
            steps=steps,
            lengths=lengths,
            gathered=gathered,
            rows=[*rows],
            viewed=[*viewed],
            fallbacks=[each.role.reason for each in requests],
            answering=[i for i, each in enumerate(requests) if not each.role.drafts],
            left=[each.left for each in requests],
            parts=self._parts(due, [before + steps for before in gathered]),
            early=early,
            held=steps < most and one_by_one,
            every=every,
        )

    def _drafting_on_copies(self, reqs: list["Req"], states: list[RequestState]) -> dict[int, tuple]:
        """Of those that have a copy and draft, by row: the end of their path in the prefix tree, and tokens that the copy covers."""
        pairs = ((req, state, self.views.get(state.row)) for req, state in zip(reqs, states) if state.fallback in CURABLE)
        return {state.row: (req.last_node, view.covered) for req, state, view in pairs if view is not None}

    def _role(self, request: Candidate, headroom: int, copies: bool, wanted: int) -> Role:
        """What a request does. Makes its copy, or renews it, where ``copies`` may be read."""
        state, left = request.state, request.left
        if state.fallback not in CURABLE:
            return Role(False, False, state.fallback)
        if self.turns.is_early(state.row):
            if state.gathered or not self.turns.is_here(state.row):
                return Role(True, False, early=True)
            self.turns.settle(state.row)
        if self.turns.is_stale(state.row) or (state.gathered and self.views.get(state.row) is not None):
            # Its copy is renewed when it is verified. Where the copy was taken away, another may be made.
            return Role(True, True)
        if left <= 1 and not self.lossy:
            # The last token of an output needs no draft, and says nothing of those before.
            reason = state.fallback if wanted else self._without_copy(request)
        elif not copies:
            reason = self._without_copy(request)
        else:
            reason = self._copy(request, headroom)
            if not reason:
                return Role(not self.lossy, True)
        # Before others are given room.
        self.turns.keep(state.row)
        # Who must be looked at token by token drafts on full KV where others draft: its verification looks. So does who lacks
        # queries: verifications leave them, captured steps do not.
        lacks = reason == NO_QUERIES and self.may_get_queries(state.row)
        gains = left > 1 and (lacks or _is_looked_at(request))
        return Role(not self.lossy and wanted > 0 and (gains or self.apart), False, reason)

    def _without_copy(self, request: Candidate) -> int:
        """Why full KV serves a request for which no copy is wanted: too few tokens are told first, as for them none would be made."""
        return SHORT_CONTEXT if is_short(self.views, request.state.row, request.length) else SLOWER

    def _copy(self, request: Candidate, headroom: int) -> int:
        with self.turns.reading(request.state.row):
            return ensure_copy(self.views, request.req, request.state, request.length, headroom)

    def _due(self, requests: list[Candidate], steps: int, wanted: int, headroom: int) -> list[int]:
        """Who is verified at the round's end; loads for later rounds begin. A role whose copy cannot be renewed changes."""
        rounds, ripe, arrived = {}, set(), set()
        for each in requests:
            row = each.state.row
            if each.role.early and self.turns.is_here(row):
                self.turns.settle(row)
                arrived.add(row)
            if not (each.role.drafts and each.role.copy) or self.turns.is_lost(row):
                continue
            lacking = min(self.turns.drafts, each.left - 1) - each.gathered
            rounds[row] = max(1, -(-lacking // steps) - 1)
            if each.gathered + steps >= min(wanted, each.left - 1):
                ripe.add(row)
        turns = arrived | self.turns.take(rounds, ripe)
        for each in requests:
            if each.state.row in turns and self.turns.is_stale(each.state.row):
                self.turns.restore(each.state.row)
                reason = self._copy(each, headroom)
                if reason:
                    # What has gathered was drafted on a copy that is gone: it begins anew, on the full KV that is there now.
                    each.role, each.gathered = Role(True, False, reason), 0
        return [i for i, each in enumerate(requests) if each.role.drafts and (not each.role.gathers or each.state.row in turns)]

    def _parts(self, due: list[int], offered: list[int]) -> list[list[int]]:
        """Those with the drafts of a round in one forward; few wide ones in each other one."""
        narrow = [i for i in due if offered[i] <= self.narrow]
        wide = [i for i in due if offered[i] > self.narrow]
        parts = [wide[at : at + WIDE_REQUESTS] for at in range(0, len(wide), WIDE_REQUESTS)]
        return [narrow, *parts] if narrow else parts

    def _row(self, request: Candidate) -> tuple[int, int]:
        """The row that a request reads, and the tokens in it before the round: of its draft row what it has gathered, too."""
        row, length = request.state.row, request.length
        if not request.role.copy:
            return row, length + request.gathered
        self.views.write_tail(row, length + request.gathered)
        view = self.views.get(row)
        return self.views.draft_row(row), view.kept + length + request.gathered - view.covered


def _is_looked_at(request: Candidate) -> bool:
    """Whether SGLang keeps something of a request from answer to answer: a grammar, a processor, hidden states."""
    # A reason names the first of several: min-p says nothing of the others.
    req = request.req
    asks = req.grammar is not None or req.custom_logit_processor is not None or bool(req.return_hidden_states)
    return asks or request.state.fallback not in (*CURABLE, MIN_P)
