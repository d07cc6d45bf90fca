"""When a request gets a compressed copy, or a new one, and what is kept of its queries for that."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sglang_ext.core import (
    RETRYABLE, NO_FREE_SLOTS, NO_QUERIES, NO_SELECTION, PLAIN_STEPS, SHORT_CONTEXT, WRONG_SCORES, CompressedKV, RequestState,
)  # fmt: skip
from sglang_ext.mem_cache.compressed.remote_selector import prepare
from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.queries import RecordedRows
from sglang_ext.mem_cache.compressors import Compressor, catalogue
from sglang_ext.mem_cache.prefix_cache.nodes import SharedPrefix

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

# A copy is renewed when more exact tokens follow it than this, and than this share of it: that bounds the
# draft view, and what is spent on renewals. A renewal reads the keys of the whole context, which takes as long as some
# 600 draft steps lose by 512 tokens more (docs/benchmarks.md).
REFRESH_AFTER = 512
REFRESH_SHARE = 1 / 8


def ensure_compressed_kv(compressed_kv: CompressedKVCache, req: "Req", state: RequestState, length: int, headroom: int) -> int:
    """Make or renew a request's compressed copy when due; the fallback reason, 0 for none.

    Args:
        compressed_kv: the compressed copies.
        req: the request, whose path in the prefix tree is locked.
        state: the request's draft state.
        length: tokens of the request whose full KV is in the pool.
        headroom: slots that must stay free or evictable for decoding.
    """
    view, method = compressed_kv.get(state.row), compressed_kv.method(state.row)
    if view is None:
        if is_short(compressed_kv, state.row, length):
            return SHORT_CONTEXT
        if compressed_kv.is_refused(state.row):
            return WRONG_SCORES
        if not compressed_kv.has_queries(state.row):
            return NO_QUERIES
        if compressed_kv.remote_selector is not None and not prepare(compressed_kv, state.row, length):
            return NO_SELECTION
        prefix = SharedPrefix(req.last_node, state.cached_prompt_len) if state.cached_prompt_len else None
        if not compressed_kv.compress(state.row, length, headroom, prefix):
            return WRONG_SCORES if compressed_kv.is_refused(state.row) else NO_FREE_SLOTS
    elif compressed_kv.has_queries(state.row) and compressed_kv.reach(state.row, length) >= refresh_position(view, method.compressor):
        if reason := _renew(compressed_kv, state.row, length, headroom):
            return reason
    state.compressor = catalogue.number(compressed_kv.get(state.row).method.partition(":")[0])
    return 0


def is_short(compressed_kv: CompressedKVCache, row: int, length: int) -> bool:
    """Whether a request without a copy has too few tokens for one."""
    return compressed_kv.get(row) is None and length < compressed_kv.method(row).shortest


def _renew(compressed_kv: CompressedKVCache, row: int, length: int, headroom: int) -> int:
    """Make the copy of the request in ``row`` anew; the fallback reason, 0 where it has one afterwards, be it that of before."""
    is_usable_without_refresh = compressed_kv.is_usable_without_refresh(row)
    if not _prepared(compressed_kv, row, length):
        if compressed_kv.is_usable_without_refresh(row):
            return 0
        compressed_kv.release_compressed_kv(row)
        return NO_SELECTION
    # Without full KV it frees more slots than it takes.
    if not compressed_kv.compress(row, length, 0 if is_usable_without_refresh and compressed_kv.can_lack_full_kv(row) else headroom):
        if compressed_kv.is_refused(row):
            return WRONG_SCORES
        if compressed_kv.method(row).compressor.follows_queries and not is_usable_without_refresh:
            # It may lead to slots of a prompt that the prefix tree had already, and has exchanged since.
            compressed_kv.release_compressed_kv(row)
            return NO_FREE_SLOTS
    return 0


def _prepared(compressed_kv: CompressedKVCache, row: int, length: int) -> bool:
    """Whether what a new copy asks of other processes is there."""
    if compressed_kv.remote_selector is not None:
        return prepare(compressed_kv, row, length)
    if compressed_kv.row_sender is None or not compressed_kv.can_lack_full_kv(row):
        return True
    return compressed_kv.async_selector.extend(row, compressed_kv.token_table[row, : compressed_kv.method(row).covered(compressed_kv.reach(row, length))].long())


def max_exact_tail(kept: int) -> int:
    """Tokens that follow a copy at most before it is renewed, where that is not made anew in each round; it keeps so many."""
    return 1 + int(max(REFRESH_AFTER, REFRESH_SHARE * kept))


def max_tail(method: CompressionMethod, page_size: int, context: int, beside: bool) -> int:
    """Tokens that follow a copy at most where full KV is given back: those of two rounds, as their slots go back in the round after, what
    fills no page, and those that come before it is renewed.

    Args:
        method: makes the copy.
        page_size: slots that the pool hands out together.
        context: tokens of the longest context.
        beside: whether tokens are chosen beside steps, and copies are renewed by their exact tokens alone.
    """
    before = max_exact_tail(method.kept(context)) if beside else method.compressor.every - 1
    return 2 * PLAIN_STEPS + page_size + before


def is_compression_near(compressed_kv: CompressedKVCache, state: RequestState, end: int) -> bool:
    """Whether queries of tokens up to position ``end`` may be among those by which a copy is chosen.

    Those before need not be kept, nor those of requests that are never drafted. A copy covers whole units, so that the newest
    queries before its end may begin a unit earlier.
    """
    method, view = compressed_kv.method(state.row), compressed_kv.get(state.row)
    if not method.compressor.window or state.fallback not in RETRYABLE or compressed_kv.is_refused(state.row):
        return False
    if view is not None and method.compressor.follows_queries:
        return True
    due = method.shortest if view is None else refresh_position(view, method.compressor)
    return end + method.compressor.window + method.unit >= due


def tokens_until_refresh(compressed_kv: CompressedKVCache, state: RequestState, length: int) -> int:
    """Tokens after which a request of ``length`` tokens gets a copy, or a new one; 0 where that is due, or it never gets any."""
    method, view = compressed_kv.method(state.row), compressed_kv.get(state.row)
    if state.fallback not in RETRYABLE or (view is not None and _made_anew(view, method.compressor)):
        # What follows queries is chosen anew within rounds.
        return 0
    due = method.shortest if view is None else refresh_position(view, method.compressor) + method.recent
    return max(0, due - length)


def select_useful_rows(compressed_kv: CompressedKVCache, states: Iterable[RequestState], rows: Iterable[RecordedRows]) -> tuple[RecordedRows, ...]:
    """Of ``rows`` of a forward, of the requests with these ``states``, those whose queries may choose a copy."""
    return tuple(row for state, row in zip(states, rows) if is_compression_near(compressed_kv, state, row.position + row.end - row.start))


def refresh_position(view: CompressedKV, compressor: Compressor) -> int:
    """Tokens at which a copy is made anew, over all that is there: after each round as soon as there are new ones, where it must follow
    queries; where it does so beside steps (async_selector.py), when the exact tokens after it are many."""
    if _made_anew(view, compressor):
        return view.covered + (1 if compressor.each_round else compressor.every)
    if view.refresh_after:
        return view.refresh_after
    return view.covered + max_exact_tail(view.kept)


def _made_anew(view: CompressedKV, compressor: Compressor) -> bool:
    return compressor.follows_queries and (compressor.each_round or view.back_slots is None)
