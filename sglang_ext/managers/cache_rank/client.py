"""Inference-side client of the cache ranks (AsyncSpade): the requests at the ranks, their keys, and counts of selections.

1. Publish: after the queries of a step are computed, the client writes those of the requests that are due for a new selection to the
   exchange buffer. It also sends KV blocks that the rank lacks, as staging slots become free.
2. Select: the cache rank scores its keys and writes the selected positions to the exchange buffer.
3. Apply: a later step waits for the selection, up to a limit, and points the compressed KV to the selected tokens. If the selection is
   late, the request keeps its previous one.

The inference rank creates the compressed KV from its own keys, and refreshes it when many exact tokens follow it. While no rank has the
request's keys, the request reads the selection made at that time.

Ranks that hold values send rows (exchange_buffer.py), so that the full KV may be freed (prefix_cache/remote_only.py). Without full KV,
compressed KV is refreshed after the rank was sent the tokens to cover: the newest tokens replace the previous newest ones. If the rank has
no free blocks for them, the compressed KV keeps its covered tokens. If the process has ended, the request must be computed again.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import torch

from sglang_ext.managers.cache_rank.exchange_buffer import QueryUpload, SelectionTarget
from sglang_ext.managers.cache_rank.leases import KeyLeases, MemoryFull, RankRequest, RowRecord, block_hashes
from sglang_ext.managers.cache_rank.protocol import BLOCK, SelectionRequest
from sglang_ext.managers.cache_rank.rank_link import Pack, RankLink, RankUnavailable
from sglang_ext.mem_cache.compressed.async_selector import AsyncSelector, CompressedKVSource, FreeBlocks
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.queries import QueryWindows
from sglang_ext.mem_cache.compressed.row_exchange import NewestRows, plan_refresh

# Reasons of a missing selection. The rank has not started, has ended, is silent, or sends wrong data. It has no blocks or no lane, has
# not received all keys, or is late.
MISSES = ("starting", "ended", "silent", "wrong", "memory-full", "no-lane", "hand-over", "late")
# Maximum wait in one step, over all ranks and requests.
WAIT_SECONDS = 0.02


class CacheRankClient(AsyncSelector):
    """Client of one inference rank; each request is at one of the ranks. For methods without a docstring see :class:`AsyncSelector`.

    Args:
        method: Compression method of all requests, with the compressor spade.
        token_table: int32, SGLang's token table with the draft rows.

    Attributes:
        max_wait_seconds: Maximum wait in one step.
        missed: Missing selections by reason: one per request and selection interval, or per round while the request reads its full KV.
        taken: Number of applied selections; one covers all layers of a request.
        waited: Seconds that steps have waited.
        rows: Received and applied rows of K and V, each of one layer and KV head.
    """

    in_place = True

    def __init__(
        self, links: Sequence[RankLink], method: CompressionMethod, token_table: torch.Tensor, buffers: KVBuffers, queries: QueryWindows
    ):
        self.links, self.buffers, self.max_wait_seconds = tuple(links), buffers, WAIT_SECONDS
        self._method, self._table, self._queries = method, token_table, queries
        self.missed: Counter[str] = Counter()
        self.taken, self.waited, self.rows = 0, 0.0, 0
        self.sends_rows = self.links[0].attach.shape.rows
        self._leases: dict[RankLink, KeyLeases] = {}
        self._requests: dict[int, RankRequest] = {}
        self._records: dict[int, RowRecord] = {}
        # Steps so far. For each verified row, the step of its last selection request.
        self._steps, self._last_due_step = 0, {}

    @property
    def ready(self) -> int:
        """Number of ranks that accept selection requests."""
        return sum(link.ready for link in self.links)

    @property
    def processes(self) -> tuple[int, int]:
        return self.ready, sum(link.epoch for link in self.links)

    @property
    def held_tokens(self) -> int:
        """Token capacity of the allocated blocks at all ranks."""
        return BLOCK * sum(leases.link.attach.blocks - leases.free_blocks for leases in self._current_leases())

    @property
    def interval(self) -> int:
        """Steps between two selections of a request."""
        return self._method.compressor.every

    def _current_leases(self) -> list[KeyLeases]:
        """Leases at the running processes of the ready ranks."""
        ready = [link for link in self.links if link.ready]
        for link in ready:
            if link not in self._leases or self._leases[link].epoch != link.epoch:
                self._leases[link] = KeyLeases(link, self.buffers)
        return [self._leases[link] for link in ready]

    def free_blocks(self) -> FreeBlocks:
        leases = self._current_leases()
        return FreeBlocks([each.free_blocks for each in leases], BLOCK, [each.free_lanes for each in leases])

    def has_request(self, row: int) -> bool:
        return self._served_request(row) is not None

    def _served_request(self, row: int) -> RankRequest | None:
        """Return the request in ``row`` if it is at a rank that has not been lost."""
        request = self._requests.get(row)
        return None if request is None or request.has_lost_rank else request

    def _due_rows(self, compressed_kv: CompressedKVSource, ends: dict[int, int], every: int, verified: bool) -> dict[int, int]:
        """Return the requests of ``ends`` that are due for a selection request."""
        self._steps += 1
        # If steps are verified, the interval is counted in steps across rounds: a round may have fewer steps, and rejected drafts reset
        # positions.
        if not verified:
            return {row: end for row, end in ends.items() if not (end - compressed_kv.get(row).covered) % every}
        due = {row: end for row, end in ends.items() if row not in self._last_due_step or self._steps - self._last_due_step[row] >= every}
        self._last_due_step.update(dict.fromkeys(due, self._steps))
        return due

    def _has_keys(self, compressed_kv: CompressedKVSource, row: int) -> bool:
        """Whether the rank has, or was sent, all keys that the request's compressed KV covers."""
        request = self._served_request(row)
        return request is not None and request.held >= compressed_kv.get(row).covered

    def _lacks_keys(self, compressed_kv: CompressedKVSource, row: int) -> bool:
        """Whether the request is at a rank that lacks some of its keys, and a staging slot is free to send them."""
        request = self._served_request(row)
        return request is not None and request.leases.link.has_free_place and not self._has_keys(compressed_kv, row)

    def _send_missing_keys(self, compressed_kv: CompressedKVSource, row: int) -> None:
        """Send keys of a request that is not due, as far as staging slots are free."""
        # An earlier request may have taken the last staging slot.
        if self._lacks_keys(compressed_kv, row):
            with suppress(RankUnavailable, MemoryFull):  # counted when it is due
                request = self._requests[row]
                request.leases.extend(request, self._table[row, : compressed_kv.get(row).covered].long())

    def _hand_over_keys(self, compressed_kv: CompressedKVSource, row: int) -> RankRequest | None:
        """Return the request in ``row`` once its rank has, or is sent, the keys that its compressed KV covers. Before, and if no rank takes
        it, return None and count a missing selection."""
        covered = compressed_kv.get(row).covered
        try:
            request = self._open_request(compressed_kv, row)
            if request.held >= covered or request.leases.extend(request, self._table[row, :covered].long()):
                return request
            self.missed["hand-over"] += 1
        except RankUnavailable as error:
            self.missed[str(error)] += 1
        except MemoryFull as error:
            # Only requests with full KV here get this error: for the others the rank has all covered tokens.
            self.missed[str(error)] += 1
            self._close_lease(row)
        return None

    def _open_request(self, compressed_kv: CompressedKVSource, row: int) -> RankRequest:
        """Return the request in ``row``. If it is at no rank, or its rank was lost, open a lease at the rank with the most free blocks.

        Raises:
            RankUnavailable: No rank is ready, the rank accepts no messages, or the request is lost.
            MemoryFull: No lane is free.
        """
        if self.is_lost(row):
            raise RankUnavailable(self._requests[row].leases.link.down_reason)
        request = self._served_request(row)
        if request is not None:
            return request
        self._requests.pop(row, None)
        leases = max(self._current_leases(), key=lambda each: (each.free_lanes > 0, each.free_blocks), default=None)
        if leases is None:
            raise RankUnavailable(self.links[0].down_reason)
        request, namespace = leases.open(), compressed_kv.state_of(row).namespace
        if namespace is not None:
            # Hashing a long prompt takes time, so it is done only after a rank has granted a lane.
            request.names = block_hashes(namespace, compressed_kv.state_of(row).prompt)
        self._requests[row] = request
        return request

    def _build_request(
        self, compressed_kv: CompressedKVSource, row: int, request: RankRequest, pack: Pack, end: int, selected_for: int
    ) -> tuple[QueryUpload, SelectionRequest] | None:
        """Return a selection request of a pack with the queries before position ``end``, for the token at another position. None if there are
        no queries, or no record of rows."""
        compressed, exchange_buffer, record = compressed_kv.get(row), request.leases.link.exchange_buffer, self._records.get(row)
        places, positions = self._queries.newest_places(row, end, self._method.compressor.window)
        if not places or (self.sends_rows and record is None):
            return None
        request.sequences[pack.first] += 1
        sequence, held = request.sequences[pack.first], None if record is None else record.positions[pack.layers]
        entry, word = exchange_buffer.shape.entry(request.lane, pack.first), exchange_buffer.word(sequence)
        message = SelectionRequest(
            request.lane, *pack, sequence, compressed.covered, compressed.own_tokens, tuple(positions), ahead=selected_for - positions[-1]
        )
        return QueryUpload(places, entry, word, held, pack.layers), message

    def _take_target(self, compressed_kv: CompressedKVSource, row: int, request: RankRequest, pack: Pack) -> SelectionTarget | None:
        """End a pack's open selection request, and return what applies its selection. None if there is no such request, or if it does not match
        the compressed KV any more."""
        pending, compressed, record = request.pending.pop(pack.first, None), compressed_kv.get(row), self._records.get(row)
        if pending is None or request.has_lost_rank or (pending.covered, pending.keep) != (compressed.covered, compressed.own_tokens):
            return None
        exchange_buffer = request.leases.link.exchange_buffer
        entry, word = exchange_buffer.shape.entry(request.lane, pack.first), exchange_buffer.word(pending.sequence)
        slots, positions = compressed.own[compressed.sinks :], None if record is None else record.positions[pack.layers]
        return SelectionTarget(entry, word, row, pending.covered, pending.keep, slots, positions)

    def flush(self, row: int) -> None:
        if row in self._requests:
            self._requests[row].pending.clear()

    def on_compressed(self, row: int, covered: int, kept: torch.Tensor) -> None:
        self._records[row] = RowRecord(kept.int().contiguous(), covered)

    def extend(self, row: int, slots: torch.Tensor) -> bool:
        request = self._served_request(row)
        if request is None:
            return False
        if request.held < len(slots):
            request.leases.link.wait(0)
            self._launch_keys(request, slots)
        return request.held >= len(slots)

    def _launch_keys(self, request: RankRequest, slots: torch.Tensor) -> None:
        """Send the missing keys of a request at ``slots``, as far as blocks and staging slots are free, and announce them."""
        try:
            request.leases.extend(request, slots)
        except (RankUnavailable, MemoryFull) as error:
            self.missed[str(error)] += 1
        # Announce the keys now. Otherwise the rank polls until the next selection request.
        request.leases.link.exchange_buffer.publish(self._queries.pool, [])

    def plan_refresh(self, row: int, covered: int, keep: int) -> NewestRows:
        before = self._records[row]
        positions, coming = plan_refresh(before.positions, before.covered, covered, keep, self._method.compressor.recent)
        self._records[row] = RowRecord(positions, covered)
        return coming

    def num_held_tokens(self, row: int) -> int:
        request = self._served_request(row)
        return 0 if request is None or row not in self._records else request.held

    def on_slots_freed(self, row: int, is_remote_only: bool) -> None:
        if is_remote_only and row in self._requests:
            self._requests[row].is_remote_only = True

    def is_lost(self, row: int) -> bool:
        request = self._requests.get(row)
        return request is not None and request.is_remote_only and request.has_lost_rank

    def forget(self, row: int) -> None:
        """See :meth:`AsyncSelector.forget`. Frees the request's lane and blocks at its rank."""
        self._records.pop(row, None)
        self._last_due_step.pop(row, None)
        self._close_lease(row)

    def _close_lease(self, row: int) -> None:
        request = self._requests.pop(row, None)
        if request is not None and not request.has_lost_rank:
            # If the rank accepts no message, its process was ended, and all leases with it.
            with suppress(RankUnavailable):
                request.leases.close(request)

    def forget_all(self) -> None:
        for row in {*self._requests, *self._records, *self._last_due_step}:
            self.flush(row)
            self.forget(row)

    def end(self) -> None:
        """End all rank processes."""
        for link in self.links:
            link.end()
