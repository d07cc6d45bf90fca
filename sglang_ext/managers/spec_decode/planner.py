"""What the requests of a batch do in one round: who drafts, who answers, and who is verified at its end.

A round has y steps, forwards of one token a request. A request is verified once x drafts are gathered: y = x is the plain case, y < x
the one where full KV has to arrive first, and y = 1 a batch in which a request's tokens must be looked at one by one. Who cannot
be drafted answers in the steps in which others draft.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from sglang_ext.config.options import MAX_WIDE_REQUESTS
from sglang_ext.core import RETRYABLE, FALLBACK_REASONS, NO_QUERIES, NO_SELECTION, PLAIN_STEPS, SHORT_CONTEXT, SLOWER, RequestState
from sglang_ext.managers.spec_decode.request_states import output_end
from sglang_ext.managers.spec_decode.full_kv import ResidentFullKV
from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
from sglang_ext.mem_cache.compressed.policy import ensure_compressed_kv, is_short, tokens_until_refresh

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_ext.managers.kv_offload.offloaded_full_kv import OffloadedFullKV

# Steps of a round in which all requests decode early, or no request drafts on compressed KV and one waits for its first selection. When a
# residual arrives, one round runs and the next one is planned, so the verification begins after at most twice as many steps.
SHORT_ROUND = 2
MIN_P = FALLBACK_REASONS.index("min-p")


@dataclass(frozen=True)
class RoundPlan:
    """What the requests of a batch do in one iteration of SGLang's scheduler.

    Attributes:
        states: draft states of the requests.
        num_steps: forwards of one token of each.
        lengths: tokens of each request whose full KV is known, on the device or not.
        num_pending: drafts that each has from earlier rounds.
        rows: row of the token table that each request's steps read.
        row_lens: tokens in that row before the round.
        fallbacks: why each request reads its full KV in this round; 0 where it does not, or needs no draft.
        full_kv_reqs: requests whose steps give answers; the others draft.
        remaining: tokens that each request's output lacks; none of one that ended in the round before, which SGLang does not know yet.
        verify_batches: requests that are verified at its end, by the forwards that do so.
        early_reqs: requests that draft on the anchor of their full KV.
        is_shortened: whether the round has one step, because a request must be checked token by token.
        selection_interval: selection interval, in steps.
    """

    states: list[RequestState]
    num_steps: int
    lengths: list[int]
    num_pending: list[int]
    rows: list[int]
    row_lens: list[int]
    fallbacks: list[int]
    full_kv_reqs: list[int]
    remaining: list[int]
    verify_batches: list[list[int]] = field(default_factory=list)
    early_reqs: list[int] = field(default_factory=list)
    is_shortened: bool = False
    selection_interval: int = 1

    @classmethod
    def empty(cls) -> "RoundPlan":
        """Without requests."""
        return cls([], 0, [], [], [], [], [], [], [])

    @cached_property
    def verify_reqs(self) -> list[int]:
        """Requests that are verified at its end."""
        return sorted(i for part in self.verify_batches for i in part)

    @property
    def num_draft_steps(self) -> int:
        """Tokens that those who draft do; 0 where nobody drafts."""
        return self.num_steps if len(self.full_kv_reqs) < len(self.states) else 0

    @property
    def num_plain_steps(self) -> int:
        """Its steps where nobody drafts, else 0."""
        return 0 if self.num_draft_steps else self.num_steps

    @property
    def width(self) -> int:
        """Tokens of each request whose KV the round writes at most, after those that are gathered."""
        return self.num_steps + bool(self.verify_batches)

    @cached_property
    def starts(self) -> list[int]:
        """Position of each request's first token in the round."""
        return [length + num_pending for length, num_pending in zip(self.lengths, self.num_pending)]

    def num_draft_tokens(self, i: int) -> int:
        """Drafts that a request which drafts has at the round's end."""
        return self.num_pending[i] + self.num_steps

    def reads_compressed(self, i: int) -> bool:
        """Whether a request reads a compressed copy before the verification."""
        return self.rows[i] != self.states[i].row

    def num_output_tokens(self, i: int) -> int:
        """Tokens that the steps give a request that answers: no more than its output lacks."""
        return min(self.num_steps, self.remaining[i])

    def can_be_rejected(self, i: int) -> bool:
        """Whether what a request does tells of drafts: those on full KV are never wrong."""
        return self.reads_compressed(i) or i in self.early_reqs

    @cached_property
    def on_full_kv(self) -> bool:
        """Whether no request reads a compressed copy before the verification."""
        return not any(map(self.reads_compressed, range(len(self.states))))


@dataclass(frozen=True)
class RequestPlan:
    """What a request does in a round.

    Attributes:
        is_drafting: its steps are drafts; else answers.
        reads_compressed: it reads its copy; else its full KV.
        fallback: index into ``FALLBACK_REASONS``; why it reads its full KV.
        is_early: of its full KV the anchor alone is there.
    """

    is_drafting: bool
    reads_compressed: bool
    fallback: int = 0
    is_early: bool = False

    @property
    def can_stay_pending(self) -> bool:
        """Whether drafts may wait for full KV, and be wrong."""
        return self.is_drafting and (self.reads_compressed or self.is_early)


@dataclass
class PlannedRequest:
    """A request while its round is planned.

    Attributes:
        req: SGLang's request.
        state: its draft state.
        length: tokens whose full KV is known.
        remaining: tokens that its output lacks.
        plan: what it does.
        num_pending: drafts of earlier rounds that it goes on from.
    """

    req: "Req"
    state: RequestState
    length: int
    remaining: int
    plan: RequestPlan = RequestPlan(False, False)
    num_pending: int = 0


@dataclass(frozen=True)
class RoundPlanner:
    """Plans rounds; makes and renews copies for them.

    Attributes:
        compressed_kv: the compressed copies.
        full_kv: whose full KV is there for a verification.
        max_pending: drafts that a request gathers at most.
        narrow: drafts of the verifications that any number of requests share; wider ones come in small parts.
        lossy: serve from the compressed copies without verifying.
        can_get_queries: whether the queries of the request in a row would be kept, so that it can have a copy later.
        separates_full_kv: whether answers must not come of steps in which others read copies, where they would round otherwise.
    """

    compressed_kv: CompressedKVCache
    full_kv: "ResidentFullKV | OffloadedFullKV"
    max_pending: int
    narrow: int
    lossy: bool = False
    can_get_queries: Callable[[int], bool] = lambda row: True
    separates_full_kv: bool = False

    def plan(
        self,
        batch: "ScheduleBatch",
        states: list[RequestState],
        lengths: list[int],
        wanted: int,
        iteration_seconds: float | None = None,
        every: int = 1,
    ) -> RoundPlan:
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
        self.full_kv.on_round_start(self._compressed_prefixes(batch.reqs, states), iteration_seconds)
        self.full_kv.free_full_kv(batch.reqs)
        requests = [
            PlannedRequest(req, state, length, max(0, output_end(req) - length))
            for req, state, length in zip(batch.reqs, states, lengths)
        ]
        most = min(PLAIN_STEPS if self.lossy else wanted or PLAIN_STEPS, self.max_pending)
        # Beside the slots that SGLang keeps ahead of each request.
        headroom = 2 * (most + 1) * count
        copies = self.lossy or wanted > 0
        if self.separates_full_kv and any(state.fallback not in RETRYABLE for state in states):
            # Requests that cannot be drafted need a round without copies.
            copies = False
        for each in requests:
            each.plan = self._plan_request(each, headroom, copies, wanted)
        early = [i for i, each in enumerate(requests) if each.plan.is_early]
        if len(early) == len(requests):
            # At the limit of pending drafts a step only repeats the newest draft.
            full = all(each.state.num_pending >= self.max_pending for each in requests)
            most = min(most, 1 if full else SHORT_ROUND)
        if not any(each.plan.is_drafting and (each.plan.reads_compressed or each.plan.fallback == NO_QUERIES) for each in requests):
            # Drafts on full KV alone would gain nothing.
            for each in requests:
                each.plan = replace(each.plan, is_drafting=each.plan.is_early)
            if any(each.plan.fallback == NO_SELECTION for each in requests):
                # Soon there is one.
                most = min(most, SHORT_ROUND)
        one_by_one = any(not each.plan.is_drafting and _is_checked_token_by_token(each) for each in requests)
        ahead = [each.remaining - (each.state.num_pending + 1) * each.plan.is_drafting for each in requests]
        ends = [tokens_until_refresh(self.compressed_kv, each.state, each.length) for each in requests if self.lossy]  # or company would decide when
        steps = 1 if one_by_one else max(1, min([most, max(ahead), *filter(None, ends)]))
        for each in requests:
            if each.plan.can_stay_pending:
                # Where they would not fit any more, the newest drafts are drafted again.
                each.num_pending = min(each.state.num_pending, self.max_pending - steps)
        verify_reqs = self._choose_verify_reqs(requests, steps, wanted, headroom)
        rows, row_lens = zip(*map(self._row_and_len, requests))
        num_pending = [each.num_pending for each in requests]
        return RoundPlan(
            states=states,
            num_steps=steps,
            lengths=lengths,
            num_pending=num_pending,
            rows=[*rows],
            row_lens=[*row_lens],
            fallbacks=[each.plan.fallback for each in requests],
            full_kv_reqs=[i for i, each in enumerate(requests) if not each.plan.is_drafting],
            remaining=[each.remaining for each in requests],
            verify_batches=self._split_verify_reqs(verify_reqs, [before + steps for before in num_pending]),
            early_reqs=early,
            is_shortened=steps < most and one_by_one,
            selection_interval=every,
        )

    def _compressed_prefixes(self, reqs: list["Req"], states: list[RequestState]) -> dict[int, tuple]:
        """Of those that have a copy and draft, by row: the end of their path in the prefix tree, and tokens that the copy covers."""
        pairs = ((req, state, self.compressed_kv.get(state.row)) for req, state in zip(reqs, states) if state.fallback in RETRYABLE)
        return {state.row: (req.last_node, view.covered) for req, state, view in pairs if view is not None}

    def _plan_request(self, request: PlannedRequest, headroom: int, copies: bool, wanted: int) -> RequestPlan:
        """What a request does. Makes its copy, or renews it, where ``copies`` may be read."""
        state, remaining = request.state, request.remaining
        if state.fallback not in RETRYABLE:
            return RequestPlan(False, False, state.fallback)
        if self.full_kv.is_early(state.row):
            if state.num_pending or not self.full_kv.has_arrived(state.row):
                return RequestPlan(True, False, is_early=True)
            self.full_kv.end_early_decoding(state.row)
        if self.full_kv.is_offloaded(state.row) or (state.num_pending and self.compressed_kv.get(state.row) is not None):
            # Its copy is renewed when it is verified. Where the copy was taken away, another may be made.
            return RequestPlan(True, True)
        if remaining <= 1 and not self.lossy:
            # The last token of an output needs no draft, and says nothing of those before.
            reason = state.fallback if wanted else self._full_kv_reason(request)
        elif not copies:
            reason = self._full_kv_reason(request)
        else:
            reason = self._ensure_compressed(request, headroom)
            if not reason:
                return RequestPlan(not self.lossy, True)
        # Before others are given room.
        self.full_kv.pin_for_round(state.row)
        # Who must be looked at token by token drafts on full KV where others draft: its verification looks. So does who lacks
        # queries: verifications leave them, captured steps do not.
        lacks = reason == NO_QUERIES and self.can_get_queries(state.row)
        gains = remaining > 1 and (lacks or _is_checked_token_by_token(request))
        return RequestPlan(not self.lossy and wanted > 0 and (gains or self.separates_full_kv), False, reason)

    def _full_kv_reason(self, request: PlannedRequest) -> int:
        """Why full KV serves a request for which no copy is wanted: too few tokens are told first, as for them none would be made."""
        return SHORT_CONTEXT if is_short(self.compressed_kv, request.state.row, request.length) else SLOWER

    def _ensure_compressed(self, request: PlannedRequest, headroom: int) -> int:
        with self.full_kv.pin_while_reading(request.state.row):
            return ensure_compressed_kv(self.compressed_kv, request.req, request.state, request.length, headroom)

    def _choose_verify_reqs(self, requests: list[PlannedRequest], steps: int, wanted: int, headroom: int) -> list[int]:
        """Who is verified at the round's end; loads for later rounds begin. A role whose copy cannot be renewed changes."""
        rounds, ripe, arrived = {}, set(), set()
        for each in requests:
            row = each.state.row
            if each.plan.is_early and self.full_kv.has_arrived(row):
                self.full_kv.end_early_decoding(row)
                arrived.add(row)
            if not (each.plan.is_drafting and each.plan.reads_compressed) or self.full_kv.is_lost(row):
                continue
            lacking = min(self.full_kv.drafts_per_load, each.remaining - 1) - each.num_pending
            rounds[row] = max(1, -(-lacking // steps) - 1)
            if each.num_pending + steps >= min(wanted, each.remaining - 1):
                ripe.add(row)
        full_kv = arrived | self.full_kv.schedule_verifications(rounds, ripe)
        for each in requests:
            if each.state.row in full_kv and self.full_kv.is_offloaded(each.state.row):
                self.full_kv.restore(each.state.row)
                reason = self._ensure_compressed(each, headroom)
                if reason:
                    # What has gathered was drafted on a copy that is gone: it begins anew, on the full KV that is there now.
                    each.plan, each.num_pending = RequestPlan(True, False, reason), 0
        return [i for i, each in enumerate(requests) if each.plan.is_drafting and (not each.plan.can_stay_pending or each.state.row in full_kv)]

    def _split_verify_reqs(self, verify_reqs: list[int], offered: list[int]) -> list[list[int]]:
        """Those with the drafts of a round in one forward; few wide ones in each other one."""
        narrow = [i for i in verify_reqs if offered[i] <= self.narrow]
        wide = [i for i in verify_reqs if offered[i] > self.narrow]
        verify_batches = [wide[at : at + MAX_WIDE_REQUESTS] for at in range(0, len(wide), MAX_WIDE_REQUESTS)]
        return [narrow, *verify_batches] if narrow else verify_batches

    def _row_and_len(self, request: PlannedRequest) -> tuple[int, int]:
        """The row that a request reads, and the tokens in it before the round: of its draft row what it has gathered, too."""
        row, length = request.state.row, request.length
        if not request.plan.reads_compressed:
            return row, length + request.num_pending
        self.compressed_kv.write_tail(row, length + request.num_pending)
        view = self.compressed_kv.get(row)
        return self.compressed_kv.draft_row(row), view.kept + length + request.num_pending - view.covered


def _is_checked_token_by_token(request: PlannedRequest) -> bool:
    """Whether SGLang keeps something of a request from answer to answer: a grammar, a processor, hidden states."""
    # A reason names the first of several: min-p says nothing of the others.
    req = request.req
    asks = req.grammar is not None or req.custom_logit_processor is not None or bool(req.return_hidden_states)
    return asks or request.state.fallback not in (*RETRYABLE, MIN_P)
