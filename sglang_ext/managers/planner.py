"""What each running request does in the next iteration: draft, verify, or one token with full KV.

Requests are in different phases of their rounds, so that in an iteration some verify while the others
draft (VeriCache, section 5: cross-resource staggering).
"""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_ext.core import FALLBACK_REASONS, CompressedView, RequestState, Step
from sglang_ext.mem_cache.compressed_views import CompressedViews
from sglang_ext.mem_cache.copy_method import CopyMethod
from sglang_ext.mem_cache.tiered_node import Prefix

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

# Below this a compressed copy saves nothing worth drafting for.
MIN_CONTEXT = 128
# A copy is renewed when more exact tokens follow it than this, and than this share of it: that bounds the
# draft view, and what is spent on renewals. A renewal reads the keys of the whole context, which takes as long as some
# 600 draft steps lose by 512 tokens more (docs/results/decode.md).
RENEW_AFTER = 512
RENEW_SHARE = 1 / 8
SHORT_CONTEXT = FALLBACK_REASONS.index("short-context")
NO_FREE_SLOTS = FALLBACK_REASONS.index("no-free-slots")
# The request could draft, but another in its batch cannot (lockstep.py).
NEIGHBOUR = FALLBACK_REASONS.index("neighbour")
# Drafting would not be faster than full KV (draft_length.py).
SLOWER = FALLBACK_REASONS.index("slower")
# The method of the request scores by the newest queries, of which too few are kept: all rings were taken (query_window.py), or
# what came so far left none (steps in graphs).
NO_QUERIES = FALLBACK_REASONS.index("no-queries")
# The scores of the request's method cannot be used (compressors/check.py).
WRONG_SCORES = FALLBACK_REASONS.index("wrong-scores")
# Fallbacks that end once the context is long enough, slots are free, the other request is done, drafting pays, a ring is left;
# and one that does not, beside which others may draft.
CURABLE = (0, SHORT_CONTEXT, NO_FREE_SLOTS, NEIGHBOUR, SLOWER, NO_QUERIES, WRONG_SCORES)


@dataclass
class Planner:
    """Turns requests and their draft states into steps.

    Attributes:
        views: the compressed copies.
        draft_length: drafts per round at most.
        lossy: serve from the compressed view without verifying.
    """

    views: CompressedViews
    draft_length: int
    lossy: bool

    def plan(self, reqs: list["Req"], states: list[RequestState], lengths: list[int]) -> list[Step]:
        """One step for each request.

        Args:
            reqs: the running requests.
            states: their draft states, same order.
            lengths: tokens of each request whose full KV is in the pool (the newest output token,
                ``state.bonus``, is not among them).
        """
        due = Counter(s.target - len(s.drafts) for s in states if s.drafts)
        headroom = 2 * (self.draft_length + 1) * len(reqs)
        steps = []
        for req, state, length in zip(reqs, states, lengths):
            if not state.drafts:
                self._start_round(req, state, length, headroom, due)
            steps.append(self._step(req, state, length))
        return steps

    def _start_round(
        self, req: "Req", state: RequestState, length: int, headroom: int, due: Counter
    ) -> None:
        """Set ``state.target``: drafts before the next verification, 0 for none."""
        state.target = 0
        if state.fallback not in CURABLE or (req.grammar is not None and req.grammar.is_terminated()):
            return
        state.fallback = ensure_copy(self.views, req, state, length, headroom)
        if state.fallback:
            return
        if self.lossy:
            self.views.write_tail(state.row, length + 1)
            return
        missing = req.sampling_params.max_new_tokens - len(req.output_ids)
        state.target = spread(min(self.draft_length, missing - 1), due)
        if state.target > 0:
            due[state.target] += 1
            self.views.write_tail(state.row, length + state.target + 1)

    def _step(self, req: "Req", state: RequestState, length: int) -> Step:
        view = self.views.get(state.row)
        drafting = len(state.drafts) < state.target and not req.to_finish
        if drafting and state.drafts and (state.closed or ends_output(req, state.drafts[-1])):
            drafting = False
        serving_lossy = self.lossy and not state.fallback
        if view is None or not (drafting or serving_lossy):
            return Step(
                state=state,
                tokens=[state.bonus, *state.drafts],
                position=length,
                row=state.row,
                length=length + 1 + len(state.drafts),
                emits=True,
            )
        position = length + len(state.drafts)
        return Step(
            state=state,
            tokens=[state.drafts[-1] if state.drafts else state.bonus],
            position=position,
            row=self.views.draft_row(state.row),
            length=view.kept + position - view.covered + 1,
            emits=serving_lossy,
        )


def ensure_copy(views: CompressedViews, req: "Req", state: RequestState, length: int, headroom: int) -> int:
    """Make or renew a request's compressed copy when due; the fallback reason, 0 for none.

    Args:
        views: the compressed copies.
        req: the request, whose path in the prefix tree is locked.
        state: the request's draft state.
        length: tokens of the request whose full KV is in the pool.
        headroom: slots that must stay free or evictable for decoding.
    """
    view, method = views.get(state.row), views.method(state.row)
    if view is None:
        if length < shortest(method):
            return SHORT_CONTEXT
        if views.is_refused(state.row):
            return WRONG_SCORES
        if not views.has_queries(state.row):
            return NO_QUERIES
        prefix = Prefix(req.last_node, state.matched) if state.matched else None
        if not views.compress(state.row, length, headroom, prefix):
            return WRONG_SCORES if views.is_refused(state.row) else NO_FREE_SLOTS
    elif views.has_queries(state.row) and views.reach(state.row, length) >= renew_at(
        view, each_round := method.compressor.each_round
    ):
        if not views.compress(state.row, length, headroom):
            if views.is_refused(state.row):
                return WRONG_SCORES
            if each_round:
                # It may lead to slots of a prompt that the prefix tree had already, and has exchanged since.
                views.release_copy(state.row)
                return NO_FREE_SLOTS
    state.compressor = views.get(state.row).method
    return 0


def copy_is_near(views: CompressedViews, state: RequestState, end: int) -> bool:
    """Whether queries of tokens up to position ``end`` may be among those by which a copy is chosen.

    Those before need not be kept, nor those of requests that are never drafted. A copy covers whole units, so that the newest
    queries before its end may begin a unit earlier.
    """
    method, view = views.method(state.row), views.get(state.row)
    if not method.compressor.window or state.fallback not in CURABLE or views.is_refused(state.row):
        return False
    due = shortest(method) if view is None else renew_at(view, method.compressor.each_round)
    return end + method.compressor.window + method.unit >= due


def shortest(method: CopyMethod) -> int:
    """Tokens of the shortest context that a method makes a copy of."""
    return max(MIN_CONTEXT, method.least) + method.recent


def renew_at(view: CompressedView, each_round: bool = False) -> int:
    """Tokens at which a copy is made anew; ``each_round``: as soon as there are new ones."""
    if each_round:
        return view.covered + 1
    return view.covered + 1 + int(max(RENEW_AFTER, RENEW_SHARE * view.kept))


def spread(longest: int, due: Counter) -> int:
    """A round's length up to ``longest``: the one whose verification meets the fewest others.

    Args:
        longest: drafts allowed; nothing is shortened below half of it.
        due: verifications already due, by iterations from now.
    """
    if longest <= 1:
        return max(0, longest)
    return min(range(longest, longest // 2, -1), key=lambda length: due[length])


def ends_output(req: "Req", token: int) -> bool:
    """Whether a drafted token would end the output, so that drafting on is wasted."""
    params = req.sampling_params
    if params.ignore_eos:
        return False
    if params.stop_token_ids and token in params.stop_token_ids:
        return True
    if req.eos_token_ids and token in req.eos_token_ids:
        return True
    return req.tokenizer is not None and token == req.tokenizer.eos_token_id
