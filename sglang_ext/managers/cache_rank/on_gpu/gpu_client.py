"""Inference-side client of the cache ranks on GPUs (AsyncSpade).

The client works in three phases, without blocking the host:

1. Publish: after a draft step, it writes the queries of the requests that are due for a new selection to the exchange buffer, on a second
   stream. After any step it also sends KV blocks that the rank lacks, as staging slots become free.
2. Select: the cache rank scores its keys and writes the selected positions to the exchange buffer.
3. Apply: one selection interval later (interval_tuner.py), a kernel waits for the selection, at most :data:`WAIT_SECONDS` per step, and
   points the compressed KV to the selected tokens. If the selection is late, the request keeps its previous one.

Only the device knows whether a selection was late. The host reads the counters of late selections afterwards.

If steps are verified, the selection interval is counted in steps across rounds. A round may have fewer steps than the interval, and
rejected drafts reset positions. A selection requested in one round may be applied in a later one, if the compressed KV covers the same
tokens.

This GPU creates the compressed KV from its own keys, and refreshes it when many exact tokens follow it. While no rank has the request's
keys, the request reads the selection made at that time.

Ranks that hold values send K and V of selected tokens that the compressed KV lacks. The compressed KV then stores rows. Its *record* on
the device lists the tokens of these rows (exchange_buffer.py). The full KV may then be freed (prefix_cache/remote_only.py). Without full
KV, compressed KV is refreshed after the rank was sent the tokens to cover: the newest tokens replace the previous newest ones. If the
rank has no free blocks for them, the compressed KV keeps its covered tokens. If the process has ended, the request is lost and must be
computed again.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import groupby

import msgspec
import torch

from sglang_ext.device import SideStream
from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.leases import MemoryFull, block_hashes
from sglang_ext.managers.cache_rank.rank_link import RankUnavailable, RankLink
from sglang_ext.managers.cache_rank.client import CacheRankClient
from sglang_ext.managers.cache_rank.on_gpu.exchange_buffer import ExchangeBuffer, QueryUpload, SelectionTarget
from sglang_ext.managers.cache_rank.on_gpu.gpu_requests import GpuRankRequest, SelectionSubmission, PendingSelection, RowRecord
from sglang_ext.managers.cache_rank.on_gpu.gpu_counters import GpuCounters
from sglang_ext.managers.cache_rank.on_gpu.interval_tuner import IntervalTuner
from sglang_ext.mem_cache.compressed.async_selector import AsyncSelector, compile_lengths
from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.row_exchange import NewestRows, plan_refresh
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.queries import QueryWindows

logger = logging.getLogger(__name__)

# Maximum wait of the device in one step, over all ranks and requests.
WAIT_SECONDS = 0.02


class GpuRankClient(CacheRankClient, AsyncSelector):
    """Client of one inference rank; each request is at one of the ranks.

    Args:
        links: Connections to the ranks.
        arenas: Exchange buffer of each rank, in the same order.
        method: Compression method of all requests; its compressor is :class:`~sglang_ext.mem_cache.compressors.spade.Spade`.
        token_table: int32, SGLang's token table with the draft rows.
        buffers: Layers of SGLang's KV pool.
        queries: Newest queries of each request.
        patience: Maximum wait of the device in one step, in seconds.

    Attributes:
        missed: Missing selections by reason: one per request and selection interval.
        waited: Seconds that steps have waited on the device.
        rows: Received and applied rows of K and V, each of one layer and KV head.
        sends_rows: See :class:`RowSender`.
        interval_tuner: Tuner of the selection interval, in steps.
    """

    in_place = True

    def __init__(
        self, links: Sequence[RankLink], exchange_buffers: Sequence[ExchangeBuffer], method: CompressionMethod, token_table: torch.Tensor,
        buffers: KVBuffers, queries: QueryWindows, max_wait_seconds: float = WAIT_SECONDS,
    ):  # fmt: skip
        super().__init__(links, buffers)
        self._exchange_buffers = dict(zip(links, exchange_buffers))
        self._method, self._table, self._queries, self._max_wait_seconds = method, token_table, queries, max_wait_seconds
        self._side, self._launched, self._since = SideStream(token_table.device), None, 0
        self.sends_rows = exchange_buffers[0].shape.rows
        self.interval_tuner = IntervalTuner(method.compressor.every)
        self._requests: dict[int, GpuRankRequest] = {}
        # Steps so far. For each verified row, the step of its last selection request.
        self._steps, self._last_due_step = 0, {}
        self._records: dict[int, RowRecord] = {}
        self._device_counters = {exchange_buffer: GpuCounters(exchange_buffer.counters) for exchange_buffer in exchange_buffers}
        self._method_name = ""
        self._made: Counter[str] | None = None

    @property
    def _known(self) -> dict[int, GpuRankRequest]:
        return self._requests

    def compile_kernels(self) -> None:
        """See :meth:`AsyncSelector.compile_kernels`. Runs before any request, with a word that makes every selection request find its
        slot taken."""
        # Kernels that create compressed KV on this GPU.
        compile_lengths(self._method, self._table, self.buffers, self._queries.pool.shape[2])
        slots = torch.zeros(1, dtype=torch.int64, device=self._table.device)
        window, record = self._method.compressor.window, None
        if self.sends_rows:
            record = slots.int().expand(len(self.buffers.keys), self.buffers.keys[0].shape[1], -1).contiguous()
            coming = plan_refresh(record, 1, 2, 1, 1)[1]
            self.buffers.move_newest(coming, slots.expand(2), slots)
        for exchange_buffer in self._exchange_buffers.values():
            word = exchange_buffer.word(1 << 31)
            exchange_buffer.put_keys([protocol.StagedTokens(0, 1, 0)], self.buffers, slots)
            exchange_buffer.publish(self._queries.pool, [QueryUpload([0] * window, 0, word, record)])
            exchange_buffer.apply_selections([SelectionTarget(0, word, 0, 1, 1, slots, record)], self._table, self.buffers, 0.0)
            exchange_buffer.counters.zero_()

    def poll(self) -> None:
        """See :meth:`AsyncSelector.poll`. Also reads the device's counters."""
        for link in self.links:
            link.poll()
            # Selection requests answered in one batch share one duration.
            for (seconds, together), _ in groupby((each.seconds, each.together) for each in link.replies if each.chosen):
                self.interval_tuner.record_replies(seconds, together)
            link.replies.clear()
        for counts in self._device_counters.values():
            grown = counts.look()
            self.missed["late"] += grown["late"] + grown["unasked"]
            self.waited += grown["waited"] / 1e9
            self.rows += grown["rows"]
            self.taken += grown["taken"]
            if self._made is not None and grown["taken"]:
                self._made[self._method_name] += grown["taken"]

    def on_round_start(self, forwards: int, interval: int) -> None:
        """See :meth:`AsyncSelector.on_round_start`. Cache ranks choose their own selection interval."""
        self.interval_tuner.record_round(time.monotonic(), self.waited, forwards)

    def on_step_end(self, compressed_kv: CompressedKVCache, ends: dict[int, int], following: int | None) -> None:
        """See :meth:`AsyncSelector.on_step_end`."""
        every, self._made = self._selection_interval(compressed_kv, ends), compressed_kv.num_compressions
        if self._launched is not None:
            self._since += 1
            if self._since >= self._queries.extra_queries:
                # The next step overwrites queries that the second stream may not have read yet.
                self._wait_for_launched()
        due = self._due_rows(compressed_kv, ends, every, following is not None)
        # Apply before asking, because the rank serves only the newest selection request.
        self._apply(compressed_kv, self._take_open_requests(compressed_kv, due))
        for link in self.links:
            link.wait(0)
        rows_with_missing_keys = [row for row in ends if row not in due and self._lacks_keys(compressed_kv, row)]
        if due or rows_with_missing_keys:
            # Its tensors are allocated on the second stream; tables, buffers and pools persist.
            self._launched = self._side.launch(lambda: self._publish(compressed_kv, due, rows_with_missing_keys, every), ())
        if following == 0:
            # Verification overwrites the queries of drafts.
            self._wait_for_launched()

    def _due_rows(self, compressed_kv: CompressedKVCache, ends: dict[int, int], every: int, verified: bool) -> dict[int, int]:
        """Return the requests of ``ends`` that are due for a selection request."""
        self._steps += 1
        if not verified:
            return {row: end for row, end in ends.items() if not (end - compressed_kv.get(row).covered) % every}
        due = {row: end for row, end in ends.items() if row not in self._last_due_step or self._steps - self._last_due_step[row] >= every}
        self._last_due_step.update(dict.fromkeys(due, self._steps))
        return due

    def _selection_interval(self, compressed_kv: CompressedKVCache, rows: Iterable[int]) -> int:
        """Return the selection interval in steps. Only requests whose keys are at a rank count.

        Args:
            rows: Rows of all requests of the step.
        """
        at_ranks = Counter(self._requests[row].leases.link for row in rows if self._has_keys(compressed_kv, row))
        before, every = self.interval_tuner.every, self.interval_tuner.record_step(max(at_ranks.values(), default=0))
        if every != before:
            logger.info(
                "sglang-ext: cache ranks select every %d steps for each of %d concurrent requests, as often as they can "
                "(--kv-select-every %d)", every, sum(at_ranks.values()), self.interval_tuner.least,
            )  # fmt: skip
        return every

    def _take_open_requests(
        self, compressed_kv: CompressedKVCache, rows: Iterable[int]
    ) -> list[tuple[int, GpuRankRequest, PendingSelection]]:
        """Take the open selection requests of some rows whose compressed KV still matches. Afterwards none of the rows has one open."""
        found = []
        for row in rows:
            request, compressed = self._requests.get(row), compressed_kv.get(row)
            if request is None:
                continue
            pending, request.pending = request.pending, None
            if pending is not None and not request.has_lost_rank and (pending.covered, pending.keep) == (compressed.covered, compressed.own_tokens):
                found.append((row, request, pending))
        return found

    def _has_keys(self, compressed_kv: CompressedKVCache, row: int) -> bool:
        """Whether the rank has, or was sent, all keys that the request's compressed KV covers."""
        request = self._requests.get(row)
        return request is not None and not request.has_lost_rank and request.lease.held >= compressed_kv.get(row).covered

    def _lacks_keys(self, compressed_kv: CompressedKVCache, row: int) -> bool:
        """Whether the rank lacks keys of a request that it has begun, and a staging slot is free to send some."""
        request = self._requests.get(row)
        return (
            request is not None and not request.has_lost_rank and request.leases.link.has_free_place
            and not self._has_keys(compressed_kv, row)
        )  # fmt: skip

    def _publish(self, compressed_kv: CompressedKVCache, due: dict[int, int], rows_with_missing_keys: Sequence[int], every: int) -> None:
        """Write queries and keys of requests that are ``due`` to exchange buffers, and missing keys of other requests. Notify the ranks."""
        whole = {row: end for row, end in due.items() if self._has_keys(compressed_kv, row)}
        # First, or these would wait until the rank has copied the keys of others.
        self._publish_batch(compressed_kv, whole, every)
        for row in rows_with_missing_keys:
            # An earlier request may have taken the last staging slot.
            if self._lacks_keys(compressed_kv, row):
                with suppress(RankUnavailable, MemoryFull):  # counted when it is due
                    self._requests[row].extend(self._table[row, : compressed_kv.get(row).covered].long())
        self._publish_batch(compressed_kv, {row: end for row, end in due.items() if row not in whole}, every)

    def _publish_batch(self, compressed_kv: CompressedKVCache, due: dict[int, int], every: int) -> None:
        """Publish the selection requests of some requests in one batch per rank, after their missing keys. Announces earlier writes too."""
        submissions: dict[ExchangeBuffer, list[SelectionSubmission]] = {exchange_buffer: [] for exchange_buffer in self._exchange_buffers.values()}
        for row, end in due.items():
            try:
                request = self._hand_over_keys(compressed_kv, row)
                if request is not None and (submission := self._build_request(compressed_kv, row, request, end, every)):
                    submissions[self._exchange_buffers[request.leases.link]].append(submission)
            except RankUnavailable as error:
                self.missed[str(error)] += 1
            except MemoryFull as error:
                # Only requests with full KV here get this error: for the others the rank has all covered tokens.
                self.missed[str(error)] += 1
                self._close_lease(row)
        for exchange_buffer, batch in submissions.items():
            self._submit(exchange_buffer, batch)

    def _submit(self, exchange_buffer: ExchangeBuffer, submissions: Sequence[SelectionSubmission]) -> None:
        """Write selection requests to an exchange buffer, and announce them and all earlier writes to the rank."""
        number = exchange_buffer.reserve_number() if submissions else exchange_buffer.number
        if exchange_buffer.has_unannounced:
            exchange_buffer.publish(self._queries.pool, [each.upload for each in submissions])
        for request, selection_request, _ in submissions:
            try:
                request.leases.link.send_message(msgspec.structs.replace(selection_request, number=number, together=len(submissions)))
            except RankUnavailable as error:
                self.missed[str(error)] += 1
            else:
                request.pending = PendingSelection(selection_request.sequence, selection_request.covered, selection_request.keep)

    def _hand_over_keys(self, compressed_kv: CompressedKVCache, row: int) -> GpuRankRequest | None:
        """Return the request in ``row`` once its rank has, or is sent, the keys that its compressed KV covers; None before.

        Raises:
            RankUnavailable: No rank is ready, the rank accepts no messages, or the request is lost.
            MemoryFull: No lane or block is free.
        """
        request, covered = self._requests.get(row), compressed_kv.get(row).covered
        if request is not None and request.has_lost_rank:
            if request.is_remote_only:
                raise RankUnavailable(request.leases.link.down_reason)
            del self._requests[row]
            request = None
        if request is None:
            request = self._requests[row] = self._open_lease(compressed_kv, row)
        if request.lease.held < covered and not request.extend(self._table[row, :covered].long()):
            self.missed["hand-over"] += 1
            return None
        return request

    def _open_lease(self, compressed_kv: CompressedKVCache, row: int) -> GpuRankRequest:
        leases = self._select_rank()
        lease, namespace = leases.open(), compressed_kv.namespace_of(row)
        # Hashing a long prompt takes time, so it is done only after a rank has granted a lane.
        return GpuRankRequest(leases, lease, () if namespace is None else block_hashes(namespace, compressed_kv.prompt_of(row)))

    def _build_request(
        self, compressed_kv: CompressedKVCache, row: int, request: GpuRankRequest, end: int, every: int
    ) -> SelectionSubmission | None:
        """Return a selection request with the queries before ``end``; None if there are none."""
        compressed, lease, exchange_buffer = compressed_kv.get(row), request.lease, self._exchange_buffers[request.leases.link]
        places, positions = self._queries.newest_places(row, end, self._method.compressor.window)
        record = self._records.get(row)
        if not places or (self.sends_rows and record is None):
            return None
        lease.sequence += 1
        selection_request = protocol.SelectionRequest(
            lease.lane, 0, exchange_buffer.shape.layers, lease.sequence, compressed.covered, compressed.own_tokens, tuple(positions),
            ahead=end + every - positions[-1],
        )  # fmt: skip
        self._method_name = compressed.method
        return SelectionSubmission(
            request,
            selection_request,
            QueryUpload(places, lease.lane, exchange_buffer.word(lease.sequence), None if record is None else record.positions),
        )

    def _apply(self, compressed_kv: CompressedKVCache, open_requests: Sequence[tuple[int, GpuRankRequest, PendingSelection]]) -> None:
        """Point compressed KV to the selections that arrive in time."""
        if open_requests:
            # The wait ignores selection requests that are not written yet.
            self._wait_for_launched()
        by_buffer: dict[ExchangeBuffer, list[SelectionTarget]] = {}
        for row, request, pending in open_requests:
            exchange_buffer, compressed, record = self._exchange_buffers[request.leases.link], compressed_kv.get(row), self._records.get(row)
            copy = SelectionTarget(
                request.lease.lane, exchange_buffer.word(pending.sequence), row, pending.covered, pending.keep, compressed.own[compressed.sinks :],
                None if record is None else record.positions,
            )  # fmt: skip
            by_buffer.setdefault(exchange_buffer, []).append(copy)
        for exchange_buffer, copies in by_buffer.items():
            exchange_buffer.apply_selections(copies, self._table, self.buffers, self._max_wait_seconds / len(by_buffer))

    def _wait_for_launched(self) -> None:
        self._side.wait(self._launched)
        self._launched, self._since = None, 0

    def flush(self, row: int) -> None:
        """See :meth:`AsyncSelector.flush`. Waits for the second stream, which reads full KV and queries."""
        self._wait_for_launched()
        if row in self._requests:
            self._requests[row].pending = None

    def flush_all(self) -> None:
        """See :meth:`AsyncSelector.flush_all`."""
        self._wait_for_launched()
        for request in self._requests.values():
            request.pending = None

    def on_compressed(self, row: int, covered: int, kept: torch.Tensor) -> None:
        """See :meth:`AsyncSelector.on_compressed`."""
        self._records[row] = RowRecord(kept.int().contiguous(), covered)

    def extend(self, row: int, slots: torch.Tensor) -> bool:
        """See :meth:`AsyncSelector.extend`. Runs on the second stream."""
        request = self._requests.get(row)
        if request is None or request.has_lost_rank:
            return False
        if request.lease.held < len(slots):
            request.leases.link.wait(0)
            self._launched = self._side.launch(lambda: self._send_keys(request, slots), (slots,))
        return request.lease.held >= len(slots)

    def _send_keys(self, request: GpuRankRequest, slots: torch.Tensor) -> None:
        """Send the missing keys of a request at ``slots``, as far as blocks and staging slots are free."""
        try:
            request.extend(slots)
        except (RankUnavailable, MemoryFull) as error:
            self.missed[str(error)] += 1
        # Announce the keys now. Otherwise the rank polls until the next selection request.
        self._submit(self._exchange_buffers[request.leases.link], ())

    def plan_refresh(self, row: int, covered: int, keep: int) -> NewestRows:
        """See :meth:`AsyncSelector.plan_refresh`."""
        before = self._records[row]
        positions, coming = plan_refresh(before.positions, before.covered, covered, keep, self._method.compressor.recent)
        self._records[row] = RowRecord(positions, covered)
        return coming

    def num_held_tokens(self, row: int) -> int:
        """See :meth:`RowSender.num_held_tokens`."""
        request = self._requests.get(row)
        return 0 if request is None or request.has_lost_rank or row not in self._records else request.lease.held

    def on_slots_freed(self, row: int, is_remote_only: bool) -> None:
        """See :meth:`RowSender.on_slots_freed`. Waits for the second stream, which reads the slots."""
        self._wait_for_launched()
        if is_remote_only and row in self._requests:
            self._requests[row].is_remote_only = True

    def is_lost(self, row: int) -> bool:
        """See :meth:`RowSender.is_lost`."""
        request = self._requests.get(row)
        return request is not None and request.is_remote_only and request.has_lost_rank

    def forget(self, row: int) -> None:
        """See :meth:`AsyncSelector.forget`. Frees the request's lane and blocks at its rank."""
        self._records.pop(row, None)
        self._last_due_step.pop(row, None)
        self._close_lease(row)

    def _close_lease(self, row: int) -> None:
        request = self._requests.pop(row, None)
        if request is None:
            return
        if not request.has_lost_rank:
            try:
                request.leases.close(request.lease)
            except RankUnavailable:
                # All leases ended with the process.
                return

    def forget_all(self) -> None:
        """See :meth:`AsyncSelector.forget_all`."""
        self.flush_all()
        self._records.clear()
        self._last_due_step.clear()
        for row in list(self._requests):
            self._close_lease(row)
