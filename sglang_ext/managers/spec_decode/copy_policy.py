"""When a request has a compressed copy: made once its context is long enough, renewed as tokens follow it, or why it has none."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sglang_ext.core import FALLBACK_REASONS, CompressedView, RequestState
from sglang_ext.mem_cache.compressed.compressed_views import CompressedViews
from sglang_ext.mem_cache.compressed.copy_method import CopyMethod
from sglang_ext.mem_cache.compressed.query_window import Recorded
from sglang_ext.mem_cache.compressors import Compressor, catalogue
from sglang_ext.mem_cache.prefix_cache.tiered_node import Prefix

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

# A copy is renewed when more exact tokens follow it than this, and than this share of it: that bounds the
# draft view, and what is spent on renewals. A renewal reads the keys of the whole context, which takes as long as some
# 600 draft steps lose by 512 tokens more (docs/benchmarks.md).
RENEW_AFTER = 512
RENEW_SHARE = 1 / 8
SHORT_CONTEXT = FALLBACK_REASONS.index("short-context")
NO_FREE_SLOTS = FALLBACK_REASONS.index("no-free-slots")
# Drafting would not be faster than full KV (draft_length.py).
SLOWER = FALLBACK_REASONS.index("slower")
# The method of the request scores by the newest queries, of which too few are kept: all rings were taken (query_window.py), or
# what came so far left none (steps in graphs).
NO_QUERIES = FALLBACK_REASONS.index("no-queries")
# The scores of the request's method cannot be used (compressors/contracts/check.py).
WRONG_SCORES = FALLBACK_REASONS.index("wrong-scores")
# Fallbacks that end once the context is long enough, slots are free, drafting pays, a ring is left; and one that does not, but
# whose requests can be verified too.
CURABLE = (0, SHORT_CONTEXT, NO_FREE_SLOTS, SLOWER, NO_QUERIES, WRONG_SCORES)


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
        if length < method.shortest:
            return SHORT_CONTEXT
        if views.is_refused(state.row):
            return WRONG_SCORES
        if not views.has_queries(state.row):
            return NO_QUERIES
        prefix = Prefix(req.last_node, state.matched) if state.matched else None
        if not views.compress(state.row, length, headroom, prefix):
            return WRONG_SCORES if views.is_refused(state.row) else NO_FREE_SLOTS
    elif views.has_queries(state.row) and views.reach(state.row, length) >= renew_at(view, method.compressor):
        if not views.compress(state.row, length, headroom):
            if views.is_refused(state.row):
                return WRONG_SCORES
            if method.compressor.follows_queries:
                # It may lead to slots of a prompt that the prefix tree had already, and has exchanged since.
                views.release_copy(state.row)
                return NO_FREE_SLOTS
    state.compressor = catalogue.number(views.get(state.row).method.partition(":")[0])
    return 0


def copy_is_near(views: CompressedViews, state: RequestState, end: int) -> bool:
    """Whether queries of tokens up to position ``end`` may be among those by which a copy is chosen.

    Those before need not be kept, nor those of requests that are never drafted. A copy covers whole units, so that the newest
    queries before its end may begin a unit earlier.
    """
    method, view = views.method(state.row), views.get(state.row)
    if not method.compressor.window or state.fallback not in CURABLE or views.is_refused(state.row):
        return False
    if view is not None and method.compressor.follows_queries:
        return True
    due = method.shortest if view is None else renew_at(view, method.compressor)
    return end + method.compressor.window + method.unit >= due


def until_due(views: CompressedViews, state: RequestState, length: int) -> int:
    """Tokens after which a request of ``length`` tokens gets a copy, or a new one; 0 where that is due, or it never gets any."""
    method, view = views.method(state.row), views.get(state.row)
    if state.fallback not in CURABLE or (view is not None and method.compressor.follows_queries):
        # What follows queries is chosen anew within rounds.
        return 0
    due = method.shortest if view is None else renew_at(view, method.compressor) + method.recent
    return max(0, due - length)


def of_use(views: CompressedViews, states: Iterable[RequestState], rows: Iterable[Recorded]) -> tuple[Recorded, ...]:
    """Of ``rows`` of a forward, of the requests with these ``states``, those whose queries may choose a copy."""
    return tuple(row for state, row in zip(states, rows) if copy_is_near(views, state, row.position + row.end - row.start))


def renew_at(view: CompressedView, compressor: Compressor) -> int:
    """Tokens at which a copy is made anew: after each round as soon as there are new ones."""
    if compressor.follows_queries:
        return view.covered + (1 if compressor.each_round else compressor.every)
    return view.covered + 1 + int(max(RENEW_AFTER, RENEW_SHARE * view.kept))
