"""Plans one decode round, from views of the requests alone: which draft, which decode on the full KV, and which are verified at its end.

A round has y draft steps, forwards of one token per request. A request is verified when it has x draft tokens. In the plain case y = x.
If the full KV has to be loaded first, y < x. If a request of the batch must be checked token by token, y = 1.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from sglang_ext.config.options import MAX_WIDE_REQUESTS
from sglang_ext.core import NO_QUERIES, NO_SELECTION, PLAIN_STEPS, RETRYABLE, SHORT_CONTEXT, SLOWER, RequestState

# Steps of a round in which all requests decode early, or no request drafts on compressed KV and one waits for its first selection. A
# verification begins at most twice as many steps after the residual arrives.
SHORT_ROUND = 2


@dataclass(frozen=True)
class RoundPlan:
    """The plan of one decode round: ``num_steps`` forwards of one token per request, then verifications.

    Lists of numbers are indexed by the request's position in the batch. Lists of requests have such positions.

    Attributes:
        lengths: Tokens whose full KV is known, on the device or not.
        num_pending: Draft tokens from earlier rounds that are not verified yet.
        rows, row_lens: Row of the token table that the steps read, and tokens in that row before the round.
        fallbacks: Why a request reads its full KV, as an index into ``FALLBACK_REASONS``; 0 if it does not, or needs no draft.
        full_kv_reqs: Requests that decode on the full KV. Their step tokens are output tokens, not drafts.
        remaining: Tokens left to generate. 0 if the request finished in the previous round, which SGLang has not processed yet.
        verify_batches: Requests that are verified at the end of the round; one list per forward.
        early_reqs: Requests that draft on the anchor because the residual has not arrived.
        is_shortened: The round has one step, because a request must be checked token by token.
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
        """Tokens of each request whose KV the round writes, after the pending drafts, at most."""
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
    """What one request does in a round. ``fallback``: why it reads its full KV. ``is_early``: it drafts on the anchor of its full KV."""

    is_drafting: bool
    reads_compressed: bool
    fallback: int = 0
    is_early: bool = False

    @property
    def can_stay_pending(self) -> bool:
        """Whether the drafts may wait for the full KV, and may be rejected."""
        return self.is_drafting and (self.reads_compressed or self.is_early)


@dataclass(frozen=True)
class RequestView:
    """What the plan of a round depends on, of one request. The planner only reads the state.

    Attributes:
        length, remaining: Tokens whose full KV is known, and tokens left to generate.
        is_checked_token_by_token: SGLang keeps state from token to token: a grammar, a logit processor, or hidden states.
        is_short: It has too few tokens for compressed KV, and has none.
        can_get_queries: Its queries would be recorded, so that it can be compressed later.
        is_early, has_arrived: It drafts on the anchor of its full KV; it waits for no residual.
        is_offloaded: Its row must not be read, because full KV is missing or stored elsewhere.
        is_lost: A part of its full KV is in no tier.
        tokens_until_refresh: Tokens until it gets or refreshes compressed KV; 0 if that is due now, or never happens.
    """

    state: RequestState
    length: int
    remaining: int
    is_checked_token_by_token: bool = False
    is_short: bool = False
    has_compressed: bool = False
    can_get_queries: bool = True
    is_early: bool = False
    has_arrived: bool = True
    is_offloaded: bool = False
    is_lost: bool = False
    tokens_until_refresh: int = 0

    @property
    def row(self) -> int:
        """Its row in the token table."""
        return self.state.row

    @property
    def stays_early(self) -> bool:
        """Whether it drafts on the anchor in this round: the residual is missing, or drafts on the anchor are pending."""
        return self.is_early and (self.state.num_pending > 0 or not self.has_arrived)

    @property
    def drafts_as_before(self) -> bool:
        """Whether it drafts on the compressed KV that it has. That is refreshed when the request is verified."""
        return self.is_offloaded or (self.state.num_pending > 0 and self.has_compressed)

    @property
    def is_open(self) -> bool:
        """Whether this round decides what it reads: it can be drafted, and does not continue its drafts."""
        return self.state.fallback in RETRYABLE and not (self.stays_early or self.drafts_as_before)


@dataclass(frozen=True)
class DraftPlan:
    """The first part of a round's plan, as in :class:`RoundPlan`: what each request does in the steps. ``wanted``: the draft length."""

    views: Sequence[RequestView]
    requests: list[RequestPlan]
    wanted: int
    num_steps: int
    num_pending: list[int]
    is_shortened: bool

    @cached_property
    def on_compressed(self) -> list[int]:
        """Requests that draft on compressed KV and whose full KV is in some tier."""
        pairs = enumerate(zip(self.views, self.requests))
        return [i for i, (view, plan) in pairs if plan.is_drafting and plan.reads_compressed and not view.is_lost]

    def rounds_until_load(self, drafts_per_load: int) -> dict[int, int]:
        """By row of :attr:`on_compressed`: rounds after this one until ``drafts_per_load`` drafts are pending, at least 1."""
        found = {}
        for i in self.on_compressed:
            lacking = min(drafts_per_load, self.views[i].remaining - 1) - self.num_pending[i]
            found[self.views[i].row] = max(1, -(-lacking // self.num_steps) - 1)
        return found

    @property
    def ripe(self) -> set[int]:
        """Rows of :attr:`on_compressed` that have enough drafts at the end of the round, if the full KV is on the device."""
        offered = {i: self.num_pending[i] + self.num_steps for i in self.on_compressed}
        return {self.views[i].row for i, count in offered.items() if count >= min(self.wanted, self.views[i].remaining - 1)}

    @property
    def arrived(self) -> set[int]:
        """Rows of early requests whose residual has arrived: they are verified in this round."""
        return {view.row for view, plan in zip(self.views, self.requests) if plan.is_early and view.has_arrived}


@dataclass(frozen=True)
class RoundPlanner:
    """Plans rounds: the compression by :meth:`may_compress`, then :meth:`draft`, then :meth:`verify`.

    Attributes:
        max_pending: Upper limit of a request's pending drafts.
        narrow: Draft tokens up to which any number of requests are verified in one forward. Wider verifications run in small batches.
        separates_full_kv: Requests on the full KV must not share steps with others, whose attention kernel rounds differently.
    """

    max_pending: int
    narrow: int
    lossy: bool = False
    separates_full_kv: bool = False

    def max_steps(self, wanted: int) -> int:
        """Steps of a round that nothing shortens."""
        return min(PLAIN_STEPS if self.lossy else wanted or PLAIN_STEPS, self.max_pending)

    def headroom(self, wanted: int, num_requests: int) -> int:
        """Slots that must stay free for decoding when KV is compressed, in addition to SGLang's own reserve for each request."""
        return 2 * (self.max_steps(wanted) + 1) * num_requests

    def may_compress(self, states: Sequence[RequestState], wanted: int) -> bool:
        """Whether requests get compressed KV in a round of ``wanted`` draft steps."""
        if self.separates_full_kv and any(state.fallback not in RETRYABLE for state in states):
            # Requests that cannot be drafted need a round in which no request reads compressed KV.
            return False
        return self.lossy or wanted > 0

    def draft(self, views: Sequence[RequestView], wanted: int, compressed: Mapping[int, int]) -> DraftPlan:
        """Plan a round of ``wanted`` draft steps or fewer, or of plain steps if it is 0. ``compressed``: by position, as ``fallbacks``."""
        requests = [self._plan_request(view, wanted, compressed.get(i)) for i, view in enumerate(views)]
        most = self.max_steps(wanted)
        if all(plan.is_early for plan in requests):
            # At the limit of pending drafts, a step only repeats the newest draft.
            full = all(view.state.num_pending >= self.max_pending for view in views)
            most = min(most, 1 if full else SHORT_ROUND)
        if not any(plan.is_drafting and (plan.reads_compressed or plan.fallback == NO_QUERIES) for plan in requests):
            # Drafts that are all made on the full KV gain nothing.
            requests = [replace(plan, is_drafting=plan.is_early) for plan in requests]
            if any(plan.fallback == NO_SELECTION for plan in requests):
                # A cache rank may take the request soon.
                most = min(most, SHORT_ROUND)
        pairs = list(zip(views, requests))
        one_by_one = any(not plan.is_drafting and view.is_checked_token_by_token for view, plan in pairs)
        ahead = [view.remaining - (view.state.num_pending + 1) * plan.is_drafting for view, plan in pairs]
        # In lossy mode the round ends at the next refresh of any request. Otherwise the batch would decide when a request is refreshed.
        ends = [view.tokens_until_refresh for view in views if self.lossy]
        steps = 1 if one_by_one else max(1, min([most, max(ahead), *filter(None, ends)]))
        # Drop the newest pending drafts that do not fit; they are drafted again.
        num_pending = [min(view.state.num_pending, self.max_pending - steps) * plan.can_stay_pending for view, plan in pairs]
        return DraftPlan(views, requests, wanted, steps, num_pending, steps < most and one_by_one)

    def verify(
        self, drafts: DraftPlan, ready: Set[int], failed: Mapping[int, int], rows: Mapping[int, tuple[int, int]], selection_interval: int = 1
    ) -> RoundPlan:
        """Complete a plan: choose the requests that are verified at the end of the round, if their rows are ``ready``.

        ``failed``: by position, why compressed KV could not be refreshed. ``rows``: by row of each request that reads compressed KV, its draft
        row, and the tokens of that row minus those of the context.
        """
        requests, num_pending = [*drafts.requests], [*drafts.num_pending]
        for i, reason in failed.items():
            # The pending drafts were made on compressed KV that is gone. Draft again, on the full KV that is ready now.
            requests[i], num_pending[i] = RequestPlan(True, False, reason), 0
        views, steps, pairs = drafts.views, drafts.num_steps, list(zip(drafts.views, requests))
        verified = [i for i, (view, plan) in enumerate(pairs) if plan.is_drafting and (not plan.can_stay_pending or view.row in ready)]
        reads = [rows[view.row] if plan.reads_compressed else (view.row, 0) for view, plan in pairs]
        return RoundPlan(
            states=[view.state for view in views],
            num_steps=steps,
            lengths=[view.length for view in views],
            num_pending=num_pending,
            rows=[row for row, _ in reads],
            row_lens=[view.length + before + shift for view, before, (_, shift) in zip(views, num_pending, reads)],
            fallbacks=[plan.fallback for plan in requests],
            full_kv_reqs=[i for i, plan in enumerate(requests) if not plan.is_drafting],
            remaining=[view.remaining for view in views],
            verify_batches=self._split(verified, [before + steps for before in num_pending]),
            early_reqs=[i for i, plan in enumerate(drafts.requests) if plan.is_early],
            is_shortened=drafts.is_shortened,
            selection_interval=selection_interval,
        )

    def _plan_request(self, view: RequestView, wanted: int, compressed: int | None) -> RequestPlan:
        """What a request does. ``compressed``: why it got no compressed KV; 0 if it has some; None if none was wanted."""
        if view.state.fallback not in RETRYABLE:
            return RequestPlan(False, False, view.state.fallback)
        if view.stays_early:
            return RequestPlan(True, False, is_early=True)
        if view.drafts_as_before:
            return RequestPlan(True, True)
        if compressed == 0:
            return RequestPlan(not self.lossy, True)
        if compressed is not None:
            reason = compressed
        elif view.remaining <= 1 and not self.lossy and wanted:
            # The last token's fallback says nothing about the tokens before it.
            reason = view.state.fallback
        else:
            # A short context is reported first: it is never compressed.
            reason = SHORT_CONTEXT if view.is_short else SLOWER
        # A request that must be checked token by token drafts on the full KV while others draft; its verification checks the tokens.
        # So does a request without enough queries: verifications record queries, captured steps do not.
        needs_queries = reason == NO_QUERIES and view.can_get_queries
        gains = view.remaining > 1 and (needs_queries or view.is_checked_token_by_token)
        return RequestPlan(not self.lossy and wanted > 0 and (gains or self.separates_full_kv), False, reason)

    def _split(self, verified: list[int], offered: list[int]) -> list[list[int]]:
        """All narrow requests in one forward, the wide ones in batches of ``MAX_WIDE_REQUESTS``."""
        narrow = [i for i in verified if offered[i] <= self.narrow]
        wide = [i for i in verified if offered[i] > self.narrow]
        batches = [wide[at : at + MAX_WIDE_REQUESTS] for at in range(0, len(wide), MAX_WIDE_REQUESTS)]
        return [narrow, *batches] if narrow else batches
