"""Client of the cache ranks on GPUs, for an inference rank on a GPU. The device orders the phases; the host never waits.

A selection request covers all layers of a step. It is published on a second stream while the next steps run. One selection interval later
(:class:`IntervalTuner`), a kernel waits for the selections, at most :data:`~.client.WAIT_SECONDS` per step, and applies those that arrived.

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

import msgspec
import torch

from sglang_ext.device import SideStream
from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.client import CacheRankClient
from sglang_ext.managers.cache_rank.exchange_buffer import DEVICE_COUNTERS, ExchangeBuffer, QueryUpload, SelectionTarget
from sglang_ext.managers.cache_rank.leases import RankRequest
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


class StepwiseClient(CacheRankClient):
    """Client that publishes and applies the selections of whole steps. ``interval_tuner`` sets the selection interval."""

    def __init__(
        self, links: Sequence[RankLink], method: CompressionMethod, token_table: torch.Tensor, buffers: KVBuffers, queries: QueryWindows
    ):
        super().__init__(links, method, token_table, buffers, queries)
        # The only pack.
        self._layers = Pack(0, len(buffers.keys))
        self._side, self._launched, self._since = SideStream(token_table.device), None, 0
        self.interval_tuner = IntervalTuner(method.compressor.every)
        self._device_counters = [ExchangeCounters(link.exchange_buffer.counters) for link in self.links]
        # Those of the compressed KV, from the first step on.
        self._num_compressions: Counter[str] = Counter()

    @property
    def interval(self) -> int:
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
        for link in self.links:
            exchange_buffer = link.exchange_buffer
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
            if grown["taken"]:
                self._num_compressions[self._method.full_name(self._method.compressor)] += grown["taken"]

    def on_round_start(self, forwards: int, interval: int) -> None:
        """See :meth:`AsyncSelector.on_round_start`. Cache ranks choose their own selection interval."""
        self.interval_tuner.record_round(time.monotonic(), self.waited, forwards)

    def on_step_end(self, compressed_kv: CompressedKVSource, ends: dict[int, int], following: int | None) -> None:
        every, self._num_compressions = self._selection_interval(compressed_kv, ends), compressed_kv.num_compressions
        if self._launched is not None:
            self._since += 1
            if self._since >= self._queries.extra_queries:
                # The next step overwrites queries that the second stream may not have read yet.
                self._wait_for_launched()
        due = self._due_rows(compressed_kv, ends, every, following is not None)
        # Apply before asking, because the rank serves only the newest selection request.
        self._apply(compressed_kv, due)
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
        batches: dict[RankLink, list[tuple[RankRequest, QueryUpload, protocol.SelectionRequest]]] = {link: [] for link in self.links}
        for row, end in due.items():
            request = self._hand_over_keys(compressed_kv, row)
            built = None if request is None else self._build_request(compressed_kv, row, request, self._layers, end, end + every)
            if built is not None:
                batches[request.leases.link].append((request, *built))
        for link, batch in batches.items():
            exchange_buffer = link.exchange_buffer
            number = exchange_buffer.reserve_number() if batch else exchange_buffer.number
            exchange_buffer.publish(self._queries.pool, [upload for _, upload, _ in batch])
            for request, _, message in batch:
                try:
                    link.send_message(msgspec.structs.replace(message, number=number, together=len(batch)))
                except RankUnavailable as error:
                    self.missed[str(error)] += 1
                else:
                    request.pending[self._layers.first] = message

    def _apply(self, compressed_kv: CompressedKVSource, rows: Iterable[int]) -> None:
        """Point the compressed KV of some rows to the selections that arrive in time. Afterwards none of the rows has an open request."""
        by_buffer: dict[ExchangeBuffer, list[SelectionTarget]] = {}
        for row in rows:
            request = self._requests.get(row)
            target = None if request is None else self._take_target(compressed_kv, row, request, self._layers)
            if target is not None:
                by_buffer.setdefault(request.leases.link.exchange_buffer, []).append(target)
        if by_buffer:
            # The wait ignores selection requests that are not written yet.
            self._wait_for_launched()
        for exchange_buffer, targets in by_buffer.items():
            exchange_buffer.apply_selections(targets, self._table, self.buffers, self.max_wait_seconds / len(by_buffer))

    def _wait_for_launched(self) -> None:
        self._side.wait(self._launched)
        self._launched, self._since = None, 0

    def flush(self, row: int) -> None:
        """See :meth:`AsyncSelector.flush`. Waits for the second stream, which reads full KV and queries."""
        self._wait_for_launched()
        super().flush(row)

    def forget_all(self) -> None:
        self._wait_for_launched()
        super().forget_all()

    def _launch_keys(self, request: RankRequest, slots: torch.Tensor) -> None:
        """See :meth:`CacheRankClient._launch_keys`. Runs on the second stream."""
        self._launched = self._side.launch(lambda: super(StepwiseClient, self)._launch_keys(request, slots), (slots,))

    def on_slots_freed(self, row: int, is_remote_only: bool) -> None:
        """See :meth:`AsyncSelector.on_slots_freed`. Waits for the second stream, which reads the slots."""
        self._wait_for_launched()
        super().on_slots_freed(row, is_remote_only)


class ExchangeCounters:
    """Reads how much ``counters`` of an exchange buffer, :data:`DEVICE_COUNTERS`, have grown, as far as known without waiting for the device."""

    def __init__(self, counters: torch.Tensor):
        self._counters, self._seen, self._coming = counters, dict.fromkeys(DEVICE_COUNTERS, 0), None
        self._read = torch.zeros(len(counters), dtype=torch.int64, pin_memory=counters.is_cuda)

    def look(self) -> dict[str, int]:
        """Return the growth since the last call, by name. Counts that the device has not delivered yet are in a later call."""
        found = [*self._seen.values()]
        if not self._counters.is_cuda:
            found = self._counters.tolist()
        elif self._coming is None or self._coming.query():
            found = found if self._coming is None else self._read.tolist()
            self._read.copy_(self._counters, non_blocking=True)
            self._coming = torch.cuda.current_stream().record_event()
        before, self._seen = self._seen, dict(zip(DEVICE_COUNTERS, found))
        return {name: self._seen[name] - before[name] for name in DEVICE_COUNTERS}


@dataclass
class IntervalTuner:
    """Selection interval of one inference rank, for all its cache ranks: the steps that a rank needs to select for all its requests.

    If the selection for all requests takes longer than the interval, each step waits for it, up to the limit, and steps become as slow as
    selections. So the client asks less often. In between, steps read the previous selection and the newest tokens. The host can measure only
    whole rounds. It launches all steps of a round at once, far ahead of the device, and waits for the previous round in between.

    Attributes:
        least, most: Minimum and maximum selection interval, in steps.
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
        """Record the start of a round of so many ``forwards``, each of which counts as a step.

        ``now``: seconds of a monotonic clock. ``waited``: seconds that all steps so far have waited for selections.
        """
        self._rounds.append((now, waited, forwards))

    def record_step(self, requests: int) -> int:
        """Record a launched step and return the new :attr:`every`. ``requests``: maximum requests at one rank."""
        if len(self._rounds) > LEAST and len(self._costs) >= LEAST and requests:
            steps = (requests * median(self._costs) + BESIDE_SECONDS) / self.step_seconds
            if steps > self.every or steps < SHORTEN_SHARE * (self.every - 1):
                self.every = max(self.least, min(self.most, math.ceil(steps)))
        return self.every

    @property
    def step_seconds(self) -> float:
        """Seconds of a step without its waits: the median over rounds, because some rounds follow a prefill and waits are counted a step
        late."""
        rounds = zip(self._rounds, list(self._rounds)[1:])
        return max(SHORTEST, median((after[0] - before[0] - (after[1] - before[1])) / before[2] for before, after in rounds))
