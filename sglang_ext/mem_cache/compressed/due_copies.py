"""When a request gets a compressed copy, or a new one, and what is kept of its queries for that."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sglang_ext.core import (
    CURABLE, NO_FREE_SLOTS, NO_QUERIES, NO_SELECTION, PLAIN_STEPS, SHORT_CONTEXT, WRONG_SCORES, CompressedView, RequestState,
)  # fmt: skip
from sglang_ext.mem_cache.compressed.chosen_elsewhere import prepare
from sglang_ext.mem_cache.compressed.compressed_views import CompressedViews
from sglang_ext.mem_cache.compressed.copy_method import CopyMethod
from sglang_ext.mem_cache.compressed.query_window import Recorded
from sglang_ext.mem_cache.compressors import Compressor, catalogue
from sglang_ext.mem_cache.prefix_cache.nodes import Prefix

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

# A copy is renewed when more exact tokens follow it than this, and than this share of it: that bounds the
# draft view, and what is spent on renewals. A renewal reads the keys of the whole context, which takes as long as some
# 600 draft steps lose by 512 tokens more (docs/benchmarks.md).
RENEW_AFTER = 512
RENEW_SHARE = 1 / 8


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
        if is_short(views, state.row, length):
            return SHORT_CONTEXT
        if views.is_refused(state.row):
            return WRONG_SCORES
        if not views.has_queries(state.row):
            return NO_QUERIES
        if views.elsewhere is not None and not prepare(views, state.row, length):
            return NO_SELECTION
        prefix = Prefix(req.last_node, state.matched) if state.matched else None
        if not views.compress(state.row, length, headroom, prefix):
            return WRONG_SCORES if views.is_refused(state.row) else NO_FREE_SLOTS
    elif views.has_queries(state.row) and views.reach(state.row, length) >= renew_at(view, method.compressor):
        if reason := _renew(views, state.row, length, headroom):
            return reason
    state.compressor = catalogue.number(views.get(state.row).method.partition(":")[0])
    return 0


def is_short(views: CompressedViews, row: int, length: int) -> bool:
    """Whether a request without a copy has too few tokens for one."""
    return views.get(row) is None and length < views.method(row).shortest


def _renew(views: CompressedViews, row: int, length: int, headroom: int) -> int:
    """Make the copy of the request in ``row`` anew; the fallback reason, 0 where it has one afterwards, be it that of before."""
    stands = views.stands(row)
    if not _prepared(views, row, length):
        if views.stands(row):
            return 0
        views.release_copy(row)
        return NO_SELECTION
    # Without full KV it frees more slots than it takes.
    if not views.compress(row, length, 0 if stands and views.is_alone(row) else headroom):
        if views.is_refused(row):
            return WRONG_SCORES
        if views.method(row).compressor.follows_queries and not stands:
            # It may lead to slots of a prompt that the prefix tree had already, and has exchanged since.
            views.release_copy(row)
            return NO_FREE_SLOTS
    return 0


def _prepared(views: CompressedViews, row: int, length: int) -> bool:
    """Whether what a new copy asks of other processes is there."""
    if views.elsewhere is not None:
        return prepare(views, row, length)
    if views.senders is None or not views.is_alone(row):
        return True
    return views.beside.extend(row, views.token_table[row, : views.method(row).covered(views.reach(row, length))].long())


def most_exact(kept: int) -> int:
    """Tokens that follow a copy at most before it is renewed, where that is not made anew in each round; it keeps so many."""
    return 1 + int(max(RENEW_AFTER, RENEW_SHARE * kept))


def longest_tail(method: CopyMethod, page_size: int, context: int, beside: bool) -> int:
    """Tokens that follow a copy at most where full KV is given back: those of two rounds, as their slots go back in the round after, what
    fills no page, and those that come before it is renewed.

    Args:
        method: makes the copy.
        page_size: slots that the pool hands out together.
        context: tokens of the longest context.
        beside: whether tokens are chosen beside steps, and copies are renewed by their exact tokens alone.
    """
    before = most_exact(method.kept(context)) if beside else method.compressor.every - 1
    return 2 * PLAIN_STEPS + page_size + before


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
    if state.fallback not in CURABLE or (view is not None and _made_anew(view, method.compressor)):
        # What follows queries is chosen anew within rounds.
        return 0
    due = method.shortest if view is None else renew_at(view, method.compressor) + method.recent
    return max(0, due - length)


def of_use(views: CompressedViews, states: Iterable[RequestState], rows: Iterable[Recorded]) -> tuple[Recorded, ...]:
    """Of ``rows`` of a forward, of the requests with these ``states``, those whose queries may choose a copy."""
    return tuple(row for state, row in zip(states, rows) if copy_is_near(views, state, row.position + row.end - row.start))


def renew_at(view: CompressedView, compressor: Compressor) -> int:
    """Tokens at which a copy is made anew, over all that is there: after each round as soon as there are new ones, where it must follow
    queries; where it does so beside steps (chosen_beside.py), when the exact tokens after it are many."""
    if _made_anew(view, compressor):
        return view.covered + (1 if compressor.each_round else compressor.every)
    if view.due:
        return view.due
    return view.covered + most_exact(view.kept)


def _made_anew(view: CompressedView, compressor: Compressor) -> bool:
    return compressor.follows_queries and (compressor.each_round or view.spare is None)
