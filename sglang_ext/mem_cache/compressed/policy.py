"""Compression policy: when a request's compressed KV is created or refreshed, and which of its queries are recorded for that.

:func:`observe_step` decides which requests select again in a step. Quest on a CPU selects synchronously: each layer of a step selects tokens by
the step's own query, just before attention (:class:`SynchronousSelector`).
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from sglang_ext.core import NO_FREE_SLOTS, NO_QUERIES, NO_SELECTION, PLAIN_STEPS, RETRYABLE, SHORT_CONTEXT, WRONG_SCORES, RequestState
from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.queries import LayerObserver, RecordedRows
from sglang_ext.mem_cache.compressors import Compressor, ContextKV, Part, catalogue
from sglang_ext.mem_cache.prefix_cache.nodes import SharedPrefix
from sglang_ext.mem_cache.prefix_cache.segments import CompressedKV

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

# Compressed KV is refreshed when more exact tokens follow it than REFRESH_AFTER, and more than this share of its tokens. This bounds the
# draft row's length and the cost of refreshes. A refresh reads all keys of the context, which costs as much as 512 more exact tokens in
# about 600 draft steps.
REFRESH_AFTER = 512
REFRESH_SHARE = 1 / 8


def ensure_compressed_kv(compressed_kv: CompressedKVCache, req: "Req", state: RequestState, length: int, headroom: int) -> int:
    """Create or refresh a request's compressed KV when it is due. Returns the fallback reason, 0 for none.

    Args:
        req: The request. Its path in the prefix tree is locked.
        length: Tokens of the request whose full KV is in the pool.
        headroom: Slots that must stay free or evictable for decoding.
    """
    compressed, method = compressed_kv.get(state.row), compressed_kv.method(state.row)
    if compressed is not None and _must_read_full_kv(compressed_kv, state.row, length):
        compressed_kv.release_compressed_kv(state.row)
        return NO_SELECTION
    if compressed is None:
        if length < method.min_context:
            return SHORT_CONTEXT
        if compressed_kv.is_refused(state.row):
            return WRONG_SCORES
        if not compressed_kv.has_queries(state.row):
            return NO_QUERIES
        if _must_read_full_kv(compressed_kv, state.row, length):
            return NO_SELECTION
        prefix = SharedPrefix(req.last_node, state.cached_prompt_len) if state.cached_prompt_len else None
        if not compressed_kv.compress(state.row, length, headroom, prefix):
            return WRONG_SCORES if compressed_kv.is_refused(state.row) else NO_FREE_SLOTS
    elif compressed_kv.has_queries(state.row) and compressed_kv.max_covered(state.row, length) >= refresh_position(compressed, method.compressor):
        if reason := _refresh(compressed_kv, state.row, length, headroom):
            return reason
    state.compressor = catalogue.number(compressed_kv.get(state.row).method.partition(":")[0])
    return 0


def _must_read_full_kv(compressed_kv: CompressedKVCache, row: int, length: int) -> bool:
    """Whether the request in ``row`` must decode on its full KV, because no cache rank can select its tokens."""
    selector = compressed_kv.async_selector
    return selector is not None and not compressed_kv.can_lack_full_kv(row) and selector.must_read_full_kv(row, length)


def _refresh(compressed_kv: CompressedKVCache, row: int, length: int, headroom: int) -> int:
    """Refresh the compressed KV of the request in ``row``. Returns the fallback reason, 0 if the request has (new or old) compressed KV."""
    is_usable_without_refresh = compressed_kv.is_usable_without_refresh(row)
    if compressed_kv.row_sender is not None and compressed_kv.can_lack_full_kv(row):
        # The cache rank needs the tokens that the refresh will cover.
        covered = compressed_kv.method(row).covered(compressed_kv.max_covered(row, length))
        if not compressed_kv.async_selector.extend(row, compressed_kv.token_table[row, :covered].long()):
            return 0
    # No headroom without full KV: after the refresh, more slots are free than before.
    if not compressed_kv.compress(row, length, 0 if is_usable_without_refresh and compressed_kv.can_lack_full_kv(row) else headroom):
        if compressed_kv.is_refused(row):
            return WRONG_SCORES
        if compressed_kv.method(row).compressor.follows_queries and not is_usable_without_refresh:
            # Its pointers may be stale: SGLang replaces slots of a prompt that the prefix tree already has.
            compressed_kv.release_compressed_kv(row)
            return NO_FREE_SLOTS
    return 0


def max_unrefreshed_tail(kept: int) -> int:
    """Maximum exact tokens after compressed KV of ``kept`` tokens before a refresh, if it is not refreshed in each round."""
    return 1 + int(max(REFRESH_AFTER, REFRESH_SHARE * kept))


def max_tail(method: CompressionMethod, page_size: int, context: int) -> int:
    """Maximum tokens after compressed KV if full KV is freed and cache ranks select. ``context``: tokens of the longest context.

    It is the sum of the tokens of two rounds, because slots are freed one round late, an incomplete page, and the tokens up to the next refresh.
    """
    return 2 * PLAIN_STEPS + page_size + max_unrefreshed_tail(method.num_kept(context))


def is_compression_near(compressed_kv: CompressedKVCache, state: RequestState, end: int) -> bool:
    """Whether queries of tokens up to position ``end`` may be used to select the tokens of compressed KV.

    Queries of earlier tokens, and of requests that never draft, are not recorded. Compressed KV ends at a whole unit, so the queries before its end
    may begin up to one unit earlier.
    """
    method, compressed = compressed_kv.method(state.row), compressed_kv.get(state.row)
    if not method.compressor.window or state.fallback not in RETRYABLE or compressed_kv.is_refused(state.row):
        return False
    if compressed is not None and method.compressor.follows_queries:
        return True
    due = method.min_context if compressed is None else refresh_position(compressed, method.compressor)
    return end + method.compressor.window + method.unit >= due


def tokens_until_refresh(compressed_kv: CompressedKVCache, state: RequestState, length: int) -> int:
    """Tokens until a request of ``length`` tokens gets or refreshes compressed KV; 0 if that is due now, or never happens."""
    method, compressed = compressed_kv.method(state.row), compressed_kv.get(state.row)
    if state.fallback not in RETRYABLE or (compressed is not None and _refreshes_with_queries(compressed, method.compressor)):
        # Methods that follow queries select again within rounds.
        return 0
    due = method.min_context if compressed is None else refresh_position(compressed, method.compressor) + method.recent
    return max(0, due - length)


def rows_to_record(
    compressed_kv: CompressedKVCache, states: Iterable[RequestState], rows: Iterable[RecordedRows]
) -> tuple[RecordedRows, ...]:
    """Filter the ``rows`` of a forward: keep those whose queries may select tokens. ``states`` are the states of their requests."""
    return tuple(row for state, row in zip(states, rows) if is_compression_near(compressed_kv, state, row.position + row.end - row.start))


def refresh_position(compressed: CompressedKV, compressor: Compressor) -> int:
    """Context length, in tokens, at which compressed KV is refreshed over all tokens.

    A method that follows queries refreshes after each round that added tokens, or every selection interval. If it selects asynchronously
    (async_selector.py), it refreshes when many exact tokens follow the compressed KV.
    """
    if _refreshes_with_queries(compressed, compressor):
        return compressed.covered + (1 if compressor.each_round else compressor.every)
    if compressed.refresh_after:
        return compressed.refresh_after
    return compressed.covered + max_unrefreshed_tail(compressed.num_slots)


def _refreshes_with_queries(compressed: CompressedKV, compressor: Compressor) -> bool:
    return compressor.follows_queries and (compressor.each_round or compressed.back_slots is None)


class SynchronousSelector(LayerObserver):
    """An observer that selects tokens in each layer of one step.

    ``ends`` are the positions after the step's token, by row, of the requests that select in this step.
    """

    def __init__(self, compressed_kv: CompressedKVCache, ends: Mapping[int, int]):
        self._compressed_kv = compressed_kv
        self._ends = ends

    def on_queries_recorded(self, layer: int) -> None:
        """Select the tokens that the layer reads."""
        compressed_kv, layers = self._compressed_kv, slice(layer, layer + 1)
        for row, end in self._ends.items():
            compressed, chooser = compressed_kv.get(row), compressed_kv.method(row).compressor
            found = compressed_kv.queries.get(row, end, chooser.window, layers)
            if found is None:
                continue
            slots = compressed_kv.token_table[row, : compressed.covered].long()
            context = ContextKV(compressed_kv.buffers.of_layers(layers), slots, *found, compressed_kv.rotary)
            compressed_kv.write_selection(row, layers, chooser.select(context, [Part(0, compressed.covered, compressed.own_tokens)])[0])


def observe_step(compressed_kv: CompressedKVCache, ends: dict[int, int], following: int | None) -> LayerObserver | None:
    """The observer of a step's layers; None if no selector needs it.

    Without an asynchronous selector, it selects for the requests whose method selects in steps and whose selection interval ends. If
    attention itself selects, there is no observer, and the selections are counted here. Arguments as
    :meth:`~.async_selector.AsyncSelector.on_step_end`'s.
    """
    if compressed_kv.async_selector is not None:
        return compressed_kv.async_selector.observe_step(compressed_kv, ends, following)
    if not ends:
        return None
    waiting = {row: end for row, end in ends.items() if compressed_kv.method(row).compressor.synchronous}
    after = {row: end - compressed_kv.get(row).covered for row, end in waiting.items()}
    if compressed_kv.layout.selects_in_attention:
        chosen = (row for row in waiting if compressed_kv.layout.record_step(compressed_kv.draft_row(row), after[row]))
        compressed_kv.num_compressions.update(compressed_kv.get(row).method for row in chosen)
        return None
    due = {row: end for row, end in waiting.items() if not (after[row] - 1) % compressed_kv.method(row).compressor.every}
    return SynchronousSelector(compressed_kv, due) if due else None
