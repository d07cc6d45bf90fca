"""Plans one decode round: which requests draft, which decode on the full KV, and which are verified at its end.

A round has y draft steps, forwards of one token per request. A request is verified when it has x draft tokens. In the plain case y = x.
If the full KV has to be loaded first, y < x. If a request of the batch must be checked token by token, y = 1.

Requests that cannot be drafted decode on the full KV in the same steps. Their tokens are output tokens.
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
    """The plan of one decode round, which is one iteration of SGLang's scheduler.

    A round runs `num_steps` steps and then verifies `verify_batches`. Lists are indexed by the request's position in the batch.

    Attributes:
        states: Draft states of the requests.
        num_steps: Forwards of one token per request.
        lengths: Tokens of each request whose full KV is known, on the device or not.
        num_pending: Draft tokens from earlier rounds that are not verified yet.
        rows: Row of the token table that the steps of each request read.
        row_lens: Tokens in that row before the round.
        fallbacks: Why each request reads its full KV, as an index into ``FALLBACK_REASONS``; 0 if it does not, or needs no draft.
        full_kv_reqs: Requests that decode on the full KV. Their step tokens are output tokens, not drafts.
        remaining: Tokens left to generate. 0 if the request finished in the previous round, which SGLang has not processed yet.
        verify_batches: Requests that are verified at the end of the round; one list per forward.
        early_reqs: Requests that draft on the anchor because the residual has not arrived.
        is_shortened: The round has one step, because a request must be checked token by token.
        selection_interval: Steps between two selections.
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
        """A plan without requests."""
        return cls([], 0, [], [], [], [], [], [], [])

    @cached_property
    def verify_reqs(self) -> list[int]:
        """Requests that are verified at the end of the round, in ascending order."""
        return sorted(i for part in self.verify_batches for i in part)

    @property
    def num_draft_steps(self) -> int:
        """Draft steps of the round; 0 if no request drafts."""
        return self.num_steps if len(self.full_kv_reqs) < len(self.states) else 0

    @property
    def num_plain_steps(self) -> int:
        """Plain steps of the round; 0 if a request drafts."""
        return 0 if self.num_draft_steps else self.num_steps

    @property
    def width(self) -> int:
        """Upper limit of the tokens of each request whose KV the round writes, after the pending drafts."""
        return self.num_steps + bool(self.verify_batches)

    @cached_property
    def starts(self) -> list[int]:
        """Position of each request's first token in the round."""
        return [length + num_pending for length, num_pending in zip(self.lengths, self.num_pending)]

    def num_draft_tokens(self, i: int) -> int:
        """Draft tokens that a drafting request has at the end of the round."""
        return self.num_pending[i] + self.num_steps

    def reads_compressed(self, i: int) -> bool:
        """Whether a request's steps read its compressed KV."""
        return self.rows[i] != self.states[i].row

    def num_output_tokens(self, i: int) -> int:
        """Output tokens that the steps give a request on the full KV. Never more than its remaining tokens."""
        return min(self.num_steps, self.remaining[i])

    def can_be_rejected(self, i: int) -> bool:
        """Whether the request's drafts can be rejected. Drafts on the full KV are always accepted."""
        return self.reads_compressed(i) or i in self.early_reqs

    @cached_property
    def on_full_kv(self) -> bool:
        """Whether no request reads compressed KV in the steps."""
        return not any(map(self.reads_compressed, range(len(self.states))))


@dataclass(frozen=True)
class RequestPlan:
    """What one request does in a round.

    Attributes:
        is_drafting: Its step tokens are drafts; otherwise output tokens.
        reads_compressed: It reads its compressed KV; otherwise its full KV.
        fallback: Why it reads its full KV, as an index into ``FALLBACK_REASONS``.
        is_early: It drafts on the anchor, because the residual of its full KV has not arrived.
    """

    is_drafting: bool
    reads_compressed: bool
    fallback: int = 0
    is_early: bool = False

    @property
    def can_stay_pending(self) -> bool:
        """Whether the drafts may wait for the full KV, and may be rejected."""
        return self.is_drafting and (self.reads_compressed or self.is_early)


@dataclass
class PlannedRequest:
    """A request while its round is planned.

    Attributes:
        req: SGLang's request.
        state: Its draft state.
        length: Tokens whose full KV is known.
        remaining: Tokens left to generate.
        plan: Its plan for the round.
        num_pending: Draft tokens of earlier rounds that it continues from.
    """

    req: "Req"
    state: RequestState
    length: int
    remaining: int
    plan: RequestPlan = RequestPlan(False, False)
    num_pending: int = 0


@dataclass(frozen=True)
class RoundPlanner:
    """Plans rounds. Creates and refreshes the compressed KV that they need.

    Attributes:
        compressed_kv: The compressed KV of all requests.
        full_kv: Says when the full KV of a request is ready for a verification.
        max_pending: Upper limit of a request's pending drafts.
        narrow: Draft tokens up to which any number of requests are verified in one forward. Wider verifications run in small batches.
        lossy: Decode on compressed KV without verifying.
        can_get_queries: Whether the queries of the request in a row would be recorded, so that it can be compressed later.
        separates_full_kv: Requests on the full KV must not share steps with requests on compressed KV, because the steps over compressed KV
            use another attention kernel, which rounds differently.
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
        """Plan a round of ``wanted`` draft steps or fewer; a round of plain steps if ``wanted`` is 0.

        Args:
            batch: The running requests.
            states: Their draft states, in the same order.
            lengths: Tokens of each request whose full KV is known.
            wanted: Draft length; 0 for plain decoding.
            iteration_seconds: Measured seconds of a round; None before the first measurement.
            every: Selection interval, in steps.
        """
        count = len(states)
        self.full_kv.on_round_start(self._compressed_prefixes(batch.reqs, states), iteration_seconds)
        self.full_kv.free_full_kv(batch.reqs)
        requests = [
            PlannedRequest(req, state, length, max(0, output_end(req) - length))
            for req, state, length in zip(batch.reqs, states, lengths)
        ]
        most = min(PLAIN_STEPS if self.lossy else wanted or PLAIN_STEPS, self.max_pending)
        # Slots in addition to SGLang's own reserve for each request.
        headroom = 2 * (most + 1) * count
        may_compress = self.lossy or wanted > 0
        if self.separates_full_kv and any(state.fallback not in RETRYABLE for state in states):
            # Requests that cannot be drafted need a round in which no request reads compressed KV.
            may_compress = False
        for each in requests:
            each.plan = self._plan_request(each, headroom, may_compress, wanted)
        early = [i for i, each in enumerate(requests) if each.plan.is_early]
        if len(early) == len(requests):
            # At the limit of pending drafts, a step only repeats the newest draft.
            full = all(each.state.num_pending >= self.max_pending for each in requests)
            most = min(most, 1 if full else SHORT_ROUND)
        if not any(each.plan.is_drafting and (each.plan.reads_compressed or each.plan.fallback == NO_QUERIES) for each in requests):
            # Drafts that are all made on the full KV gain nothing.
            for each in requests:
                each.plan = replace(each.plan, is_drafting=each.plan.is_early)
            if any(each.plan.fallback == NO_SELECTION for each in requests):
                # The first selection arrives soon.
                most = min(most, SHORT_ROUND)
        one_by_one = any(not each.plan.is_drafting and _is_checked_token_by_token(each) for each in requests)
        ahead = [each.remaining - (each.state.num_pending + 1) * each.plan.is_drafting for each in requests]
        # In lossy mode the round ends at the next refresh of any request. Otherwise the batch would decide when a request is refreshed.
        ends = [tokens_until_refresh(self.compressed_kv, each.state, each.length) for each in requests if self.lossy]
        steps = 1 if one_by_one else max(1, min([most, max(ahead), *filter(None, ends)]))
        for each in requests:
            if each.plan.can_stay_pending:
                # Drop the newest pending drafts that do not fit; they are drafted again.
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
        """By row of each drafting request with compressed KV: the last node of its path in the prefix tree, and the covered tokens."""
        pairs = ((req, state, self.compressed_kv.get(state.row)) for req, state in zip(reqs, states) if state.fallback in RETRYABLE)
        return {state.row: (req.last_node, compressed.covered) for req, state, compressed in pairs if compressed is not None}

    def _plan_request(self, request: PlannedRequest, headroom: int, may_compress: bool, wanted: int) -> RequestPlan:
        """What a request does. Creates or refreshes its compressed KV if ``may_compress``."""
        state, remaining = request.state, request.remaining
        if state.fallback not in RETRYABLE:
            return RequestPlan(False, False, state.fallback)
        if self.full_kv.is_early(state.row):
            if state.num_pending or not self.full_kv.has_arrived(state.row):
                return RequestPlan(True, False, is_early=True)
            self.full_kv.end_early_decoding(state.row)
        if self.full_kv.is_offloaded(state.row) or (state.num_pending and self.compressed_kv.get(state.row) is not None):
            # Its compressed KV is refreshed when it is verified. If it was evicted, it may be created again.
            return RequestPlan(True, True)
        if remaining <= 1 and not self.lossy:
            # The last token of an output needs no draft, and its fallback says nothing about the tokens before it.
            reason = state.fallback if wanted else self._full_kv_reason(request)
        elif not may_compress:
            reason = self._full_kv_reason(request)
        else:
            reason = self._ensure_compressed(request, headroom)
            if not reason:
                return RequestPlan(not self.lossy, True)
        # Pin before other requests are given memory.
        self.full_kv.pin_for_round(state.row)
        # A request that must be checked token by token drafts on the full KV while others draft; its verification checks the tokens.
        # So does a request without enough queries: verifications record queries, captured steps do not.
        needs_queries = reason == NO_QUERIES and self.can_get_queries(state.row)
        gains = remaining > 1 and (needs_queries or _is_checked_token_by_token(request))
        return RequestPlan(not self.lossy and wanted > 0 and (gains or self.separates_full_kv), False, reason)

    def _full_kv_reason(self, request: PlannedRequest) -> int:
        """Why a request reads the full KV if no compressed KV is wanted. A short context is reported first: it is never compressed."""
        return SHORT_CONTEXT if is_short(self.compressed_kv, request.state.row, request.length) else SLOWER

    def _ensure_compressed(self, request: PlannedRequest, headroom: int) -> int:
        with self.full_kv.pin_while_reading(request.state.row):
            return ensure_compressed_kv(self.compressed_kv, request.req, request.state, request.length, headroom)

    def _choose_verify_reqs(self, requests: list[PlannedRequest], steps: int, wanted: int, headroom: int) -> list[int]:
        """Select the requests to verify at the end of the round, and begin loads for later rounds.

        A request whose compressed KV cannot be refreshed gets another plan.
        """
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
                    # The pending drafts were made on compressed KV that is gone. Draft again, on the full KV that is ready now.
                    each.plan, each.num_pending = RequestPlan(True, False, reason), 0
        return [i for i, each in enumerate(requests) if each.plan.is_drafting and (not each.plan.can_stay_pending or each.state.row in full_kv)]

    def _split_verify_reqs(self, verify_reqs: list[int], offered: list[int]) -> list[list[int]]:
        """Split into verification batches: all narrow requests in one forward, the wide ones in batches of ``MAX_WIDE_REQUESTS``."""
        narrow = [i for i in verify_reqs if offered[i] <= self.narrow]
        wide = [i for i in verify_reqs if offered[i] > self.narrow]
        verify_batches = [wide[at : at + MAX_WIDE_REQUESTS] for at in range(0, len(wide), MAX_WIDE_REQUESTS)]
        return [narrow, *verify_batches] if narrow else verify_batches

    def _row_and_len(self, request: PlannedRequest) -> tuple[int, int]:
        """The row that a request reads, and its tokens before the round. In a draft row, pending drafts count too."""
        row, length = request.state.row, request.length
        if not request.plan.reads_compressed:
            return row, length + request.num_pending
        self.compressed_kv.write_tail(row, length + request.num_pending)
        compressed = self.compressed_kv.get(row)
        return self.compressed_kv.draft_row(row), compressed.num_slots + length + request.num_pending - compressed.covered


def _is_checked_token_by_token(request: PlannedRequest) -> bool:
    """Whether SGLang keeps state of a request from token to token: a grammar, a logit processor, or hidden states."""
    # A fallback names the first of several reasons. min-p does not exclude the others.
    req = request.req
    asks = req.grammar is not None or req.custom_logit_processor is not None or bool(req.return_hidden_states)
    return asks or request.state.fallback not in (*RETRYABLE, MIN_P)
