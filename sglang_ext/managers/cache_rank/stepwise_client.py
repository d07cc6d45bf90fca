"""Client of the cache ranks on GPUs, for an inference rank on a GPU. The device orders the phases; the host never waits.

1. Publish: on a second stream after a draft step, while the next steps run.
2. Select: one selection request covers all layers of a step.
3. Apply: one selection interval later (:class:`IntervalTuner`), a kernel waits for the selections, at most :data:`~.client.WAIT_SECONDS` per
   step, and applies those that arrived.

Only the device knows whether a selection was late. The host reads the counters of late selections afterwards. The client runs on a CPU, too:
PyTorch then does the work of the kernels.
"""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median
from typing import NamedTuple

import msgspec
import torch

from sglang_ext.device import SideStream
from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.client import CacheRankClient
from sglang_ext.managers.cache_rank.exchange_buffer import COUNTERS, ExchangeBuffer, QueryUpload, SelectionTarget
from sglang_ext.managers.cache_rank.leases import PendingSelection, RankRequest
from sglang_ext.managers.cache_rank.rank_link import Pack, RankLink, RankUnavailable
from sglang_ext.mem_cache.compressed.async_selector import CompressedKVSource, compile_lengths
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.queries import QueryWindows
from sglang_ext.mem_cache.compressed.row_exchange import plan_refresh

logger = logging.getLogger(__name__)

# Rounds and replies in the sliding windows, and the minimum number of each; replies to rare selection requests are old.
WINDOW, ANSWERS, LEAST = 32, 16, 8
# Time in addition to the selection: messages, transfer of queries and rows, and the rank's polling.
BESIDE_SECONDS = 1e-3
# Reduce the interval only if a selection takes at most this share of the shorter one. This avoids oscillation.
SHORTEN_SHARE = 0.85
MOST_STEPS = 16
# Minimum seconds of a step.
SHORTEST = 1e-4


class SelectionSubmission(NamedTuple):
    """A selection request to publish: its request, the message to the rank, and the data for the exchange buffer."""

    request: RankRequest
    selection_request: protocol.SelectionRequest
    upload: QueryUpload


class StepwiseClient(CacheRankClient):
    """Client that publishes and applies the selections of whole steps. Arguments as :class:`CacheRankClient`'s.

    Attributes:
        interval_tuner: Tuner of the selection interval, in steps.
    """

    def __init__(
        self, links: Sequence[RankLink], method: CompressionMethod, token_table: torch.Tensor, buffers: KVBuffers, queries: QueryWindows
    ):
        super().__init__(links, method, token_table, buffers, queries)
        self._side, self._launched, self._since = SideStream(token_table.device), None, 0
        self.interval_tuner = IntervalTuner(method.compressor.every)
        self._device_counters = [ExchangeCounters(link.exchange_buffer.counters) for link in self.links]
        self._method_name = ""
        self._made: Counter[str] | None = None

    @property
    def interval(self) -> int:
        """See :attr:`CacheRankClient.interval`."""
        return self.interval_tuner.every

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
        for exchange_buffer in [link.exchange_buffer for link in self.links]:
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
        for counts in self._device_counters:
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

    def on_step_end(self, compressed_kv: CompressedKVSource, ends: dict[int, int], following: int | None) -> None:
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

    def _selection_interval(self, compressed_kv: CompressedKVSource, rows: Iterable[int]) -> int:
        """Return the selection interval in steps. Of the requests in ``rows``, only those whose keys are at a rank count."""
        at_ranks = Counter(self._requests[row].leases.link for row in rows if self._has_keys(compressed_kv, row))
        before, every = self.interval_tuner.every, self.interval_tuner.record_step(max(at_ranks.values(), default=0))
        if every != before:
            logger.info(
                "sglang-ext: cache ranks select every %d steps for each of %d concurrent requests, as often as they can "
                "(--kv-select-every %d)", every, sum(at_ranks.values()), self.interval_tuner.least,
            )  # fmt: skip
        return every

    def _take_open_requests(
        self, compressed_kv: CompressedKVSource, rows: Iterable[int]
    ) -> list[tuple[int, RankRequest, PendingSelection]]:
        """Take the open selection requests of some rows whose compressed KV still matches. Afterwards none of the rows has one open."""
        found = []
        for row in rows:
            request, compressed = self._requests.get(row), compressed_kv.get(row)
            if request is None:
                continue
            pending = request.pending.pop(0, None)
            if pending is not None and not request.has_lost_rank and (pending.covered, pending.keep) == (compressed.covered, compressed.own_tokens):
                found.append((row, request, pending))
        return found

    def _publish(self, compressed_kv: CompressedKVSource, due: dict[int, int], rows_with_missing_keys: Sequence[int], every: int) -> None:
        """Write queries and keys of requests that are ``due`` to exchange buffers, and missing keys of other requests. Notify the ranks."""
        whole = {row: end for row, end in due.items() if self._has_keys(compressed_kv, row)}
        # First, or these would wait until the rank has copied the keys of others.
        self._publish_batch(compressed_kv, whole, every)
        for row in rows_with_missing_keys:
            self._send_missing_keys(compressed_kv, row)
        self._publish_batch(compressed_kv, {row: end for row, end in due.items() if row not in whole}, every)

    def _publish_batch(self, compressed_kv: CompressedKVSource, due: dict[int, int], every: int) -> None:
        """Publish the selection requests of some requests in one batch per rank, after their missing keys. Announces earlier writes too."""
        submissions: dict[ExchangeBuffer, list[SelectionSubmission]] = {link.exchange_buffer: [] for link in self.links}
        for row, end in due.items():
            request = self._hand_over_keys(compressed_kv, row)
            if request is not None and (submission := self._build_request(compressed_kv, row, request, end, every)):
                submissions[request.leases.link.exchange_buffer].append(submission)
        for exchange_buffer, batch in submissions.items():
            self._submit(exchange_buffer, batch)

    def _submit(self, exchange_buffer: ExchangeBuffer, submissions: Sequence[SelectionSubmission]) -> None:
        """Write selection requests to an exchange buffer, and announce them and all earlier writes to the rank."""
        number = exchange_buffer.reserve_number() if submissions else exchange_buffer.number
        exchange_buffer.publish(self._queries.pool, [each.upload for each in submissions])
        for request, selection_request, _ in submissions:
            try:
                request.leases.link.send_message(msgspec.structs.replace(selection_request, number=number, together=len(submissions)))
            except RankUnavailable as error:
                self.missed[str(error)] += 1
            else:
                request.pending[0] = PendingSelection(selection_request.sequence, selection_request.covered, selection_request.keep)

    def _build_request(
        self, compressed_kv: CompressedKVSource, row: int, request: RankRequest, end: int, every: int
    ) -> SelectionSubmission | None:
        """Return a selection request with the queries before ``end``; None if there are none."""
        compressed, exchange_buffer = compressed_kv.get(row), request.leases.link.exchange_buffer
        places, positions = self._queries.newest_places(row, end, self._method.compressor.window)
        record = self._records.get(row)
        if not places or (self.sends_rows and record is None):
            return None
        request.sequence += 1
        selection_request = protocol.SelectionRequest(
            request.lane, 0, exchange_buffer.shape.layers, request.sequence, compressed.covered, compressed.own_tokens, tuple(positions),
            ahead=end + every - positions[-1],
        )  # fmt: skip
        self._method_name = compressed.method
        return SelectionSubmission(
            request,
            selection_request,
            QueryUpload(places, request.lane, exchange_buffer.word(request.sequence), None if record is None else record.positions),
        )

    def _apply(self, compressed_kv: CompressedKVSource, open_requests: Sequence[tuple[int, RankRequest, PendingSelection]]) -> None:
        """Point compressed KV to the selections that arrive in time."""
        if open_requests:
            # The wait ignores selection requests that are not written yet.
            self._wait_for_launched()
        by_buffer: dict[ExchangeBuffer, list[SelectionTarget]] = {}
        for row, request, pending in open_requests:
            link = request.leases.link
            target = self._target(compressed_kv, row, request, Pack(0, link.attach.shape.layers), pending)
            by_buffer.setdefault(link.exchange_buffer, []).append(target)
        for exchange_buffer, copies in by_buffer.items():
            exchange_buffer.apply_selections(copies, self._table, self.buffers, self.max_wait_seconds / len(by_buffer))

    def _wait_for_launched(self) -> None:
        self._side.wait(self._launched)
        self._launched, self._since = None, 0

    def flush(self, row: int) -> None:
        """See :meth:`AsyncSelector.flush`. Waits for the second stream, which reads full KV and queries."""
        self._wait_for_launched()
        super().flush(row)

    def flush_all(self) -> None:
        """See :meth:`AsyncSelector.flush_all`."""
        self._wait_for_launched()
        super().flush_all()

    def _launch_keys(self, request: RankRequest, slots: torch.Tensor) -> None:
        """See :meth:`CacheRankClient._launch_keys`. Runs on the second stream."""
        self._launched = self._side.launch(lambda: super(StepwiseClient, self)._launch_keys(request, slots), (slots,))

    def on_slots_freed(self, row: int, is_remote_only: bool) -> None:
        """See :meth:`AsyncSelector.on_slots_freed`. Waits for the second stream, which reads the slots."""
        self._wait_for_launched()
        super().on_slots_freed(row, is_remote_only)


class ExchangeCounters:
    """Reads how much the counters of an exchange buffer have grown, as far as known without waiting for the device.

    Args:
        counters: int64 [counters], on the device, in the order of :data:`COUNTERS`.
    """

    def __init__(self, counters: torch.Tensor):
        self._counters, self._seen, self._coming = counters, dict.fromkeys(COUNTERS, 0), None
        self._read = torch.zeros(len(counters), dtype=torch.int64, pin_memory=counters.is_cuda)

    def look(self) -> dict[str, int]:
        """Return the growth since the last call, by name. Counts that the device has not delivered yet are in a later call."""
        if self._counters.is_cuda:
            if self._coming is not None and not self._coming.query():
                return dict.fromkeys(COUNTERS, 0)
            found = None if self._coming is None else self._read.tolist()
            self._read.copy_(self._counters, non_blocking=True)
            self._coming = torch.cuda.current_stream().record_event()
            if found is None:
                return dict.fromkeys(COUNTERS, 0)
        else:
            found = self._counters.tolist()
        before, self._seen = self._seen, dict(zip(COUNTERS, found))
        return {name: self._seen[name] - before[name] for name in COUNTERS}


@dataclass
class IntervalTuner:
    """Selection interval of one inference rank, for all its cache ranks: the steps that a rank needs to select for all its requests, but at
    least the configured number.

    If the selection for all requests takes longer than the interval, each step waits for it, up to the limit, and steps become as slow as
    selections. So the client asks less often. In between, steps read the previous selection and the newest tokens.

    The host can measure only whole rounds. It launches all steps of a round at once, far ahead of the device, and waits for the previous
    round in between.

    Args:
        least: Minimum selection interval, in steps.
        most: Maximum selection interval, in steps.

    Attributes:
        every: Selection interval, in steps.
    """

    least: int
    most: int = MOST_STEPS
    every: int = field(init=False)
    _rounds: deque[tuple[float, float, int]] = field(init=False, default_factory=lambda: deque(maxlen=WINDOW + 1))
    _costs: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=ANSWERS))

    def __post_init__(self) -> None:
        self.every = self.least

    def record_replies(self, seconds: float, together: int) -> None:
        """Record one batch of ``together`` replies and its seconds. Call once per batch, so that a slow launch for many requests counts
        once in the median."""
        self._costs.append(seconds / together)

    def record_round(self, now: float, waited: float, forwards: int) -> None:
        """Record the start of a round.

        Args:
            now: Seconds of a monotonic clock.
            waited: Seconds that all steps so far have waited for selections.
            forwards: Forwards of the round, each of which counts as a step.
        """
        self._rounds.append((now, waited, forwards))

    def record_step(self, requests: int) -> int:
        """Record a launched step and return the new :attr:`every`. ``requests``: maximum requests at one rank."""
        if len(self._rounds) > LEAST and len(self._costs) >= LEAST and requests:
            self._update_interval(requests * median(self._costs) + BESIDE_SECONDS)
        return self.every

    @property
    def step_seconds(self) -> float:
        """Seconds of a step without its waits: the median over rounds, because some rounds follow a prefill and waits are counted a step
        late."""
        rounds = zip(self._rounds, list(self._rounds)[1:])
        return max(SHORTEST, median((after[0] - before[0] - (after[1] - before[1])) / before[2] for before, after in rounds))

    def _update_interval(self, cycle: float) -> None:
        steps = cycle / self.step_seconds
        if steps > self.every or steps < SHORTEN_SHARE * (self.every - 1):
            self.every = max(self.least, min(self.most, math.ceil(steps)))
