"""Inference-side client of the cache ranks (AsyncSpade): the requests at the ranks, their keys, and counts of selections.

A client works in three phases:

1. Publish: after the queries of a step are computed, it writes those of the requests that are due for a new selection to the exchange
   buffer. It also sends KV blocks that the rank lacks, as staging slots become free.
2. Select: the cache rank scores its keys and writes the selected positions to the exchange buffer.
3. Apply: a later step waits for the selection, up to a limit, and points the compressed KV to the selected tokens. If the selection is
   late, the request keeps its previous one.

On a GPU, the device orders the phases, step by step (stepwise_client.py). On a CPU, the host orders them, pack by pack of layers
(layerwise_client.py).

The inference rank creates the compressed KV from its own keys, and refreshes it when many exact tokens follow it. While no rank has the
request's keys, the request reads the selection made at that time.

Ranks that hold values send K and V of selected tokens that the compressed KV lacks. The compressed KV then stores rows. Its *record* lists
the tokens of these rows (exchange_buffer.py). The full KV may then be freed (prefix_cache/remote_only.py). Without full KV, compressed KV
is refreshed after the rank was sent the tokens to cover: the newest tokens replace the previous newest ones. If the rank has no free blocks
for them, the compressed KV keeps its covered tokens. If the process has ended, the request is lost and must be computed again.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import torch

from sglang_ext.managers.cache_rank.leases import KeyLeases, MemoryFull, RankRequest, RowRecord, block_hashes
from sglang_ext.managers.cache_rank.protocol import BLOCK
from sglang_ext.managers.cache_rank.rank_link import RankLink, RankUnavailable
from sglang_ext.mem_cache.compressed.async_selector import AsyncSelector, FreeBlocks
from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
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
    """Client of one inference rank; each request is at one of the ranks.

    Args:
        links: Connections to the ranks.
        method: Compression method of all requests; its compressor is :class:`~sglang_ext.mem_cache.compressors.step_selectors.Spade`.
        token_table: int32, SGLang's token table with the draft rows.
        buffers: Layers of SGLang's KV pool.
        queries: Newest queries of each request.
        max_wait_seconds: Maximum wait in one step.

    Attributes:
        missed: Missing selections by reason: one per request and selection interval, or per round while the request reads its full KV.
        taken: Number of applied selections; one covers all layers of a request.
        waited: Seconds that steps have waited.
        rows: Received and applied rows of K and V, each of one layer and KV head.
        sends_rows: See :class:`RowSender`.
    """

    in_place = True

    def __init__(
        self, links: Sequence[RankLink], method: CompressionMethod, token_table: torch.Tensor, buffers: KVBuffers, queries: QueryWindows,
        max_wait_seconds: float = WAIT_SECONDS,
    ):  # fmt: skip
        self.links, self.buffers = tuple(links), buffers
        self._method, self._table, self._queries, self.max_wait_seconds = method, token_table, queries, max_wait_seconds
        self.missed: Counter[str] = Counter()
        self.taken, self.waited, self.rows = 0, 0.0, 0
        self.sends_rows = self.links[0].settings.attach.shape.rows
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
    def starts(self) -> int:
        """Number of processes started."""
        return sum(link.starts for link in self.links)

    @property
    def processes(self) -> tuple[int, int]:
        """See :attr:`RowSender.processes`."""
        return self.ready, self.starts

    @property
    def slowest(self) -> float:
        """Duration of the last selection, of a pack of layers or a step, at the slowest rank, in seconds."""
        return max((link.seconds for link in self.links), default=0.0)

    @property
    def held_tokens(self) -> int:
        """Token capacity of the allocated blocks at all ranks."""
        return BLOCK * sum(link.settings.attach.blocks - self._free_blocks(link) for link in self.links if link.ready)

    @property
    def interval(self) -> int:
        """Steps between two selections of a request."""
        return self._method.compressor.every

    def _current(self, link: RankLink) -> KeyLeases | None:
        """Leases at the running process, or None if it has none."""
        leases = self._leases.get(link)
        return None if leases is None or leases.epoch != link.epoch else leases

    def _free_blocks(self, link: RankLink) -> int:
        leases = self._current(link)
        return link.settings.attach.blocks if leases is None else leases.free_blocks

    def _free_lanes(self, link: RankLink) -> int:
        leases = self._current(link)
        return link.settings.attach.shape.lanes if leases is None else leases.free_lanes

    def free_blocks(self) -> FreeBlocks:
        """See :meth:`RowSender.free_blocks`."""
        ready = [link for link in self.links if link.ready]
        return FreeBlocks([*map(self._free_blocks, ready)], BLOCK, [*map(self._free_lanes, ready)])

    def has_request(self, row: int) -> bool:
        """See :meth:`RowSender.has_request`."""
        request = self._requests.get(row)
        return request is not None and not request.has_lost_rank

    def _select_rank(self) -> KeyLeases:
        """Return the leases of the rank with the most free blocks, preferring ranks with a free lane.

        Raises:
            RankUnavailable: No rank is ready.
        """
        ready = [link for link in self.links if link.ready]
        if not ready:
            raise RankUnavailable(self.links[0].down_reason)
        for link in ready:
            if self._current(link) is None:
                self._leases[link] = KeyLeases(link, self.buffers)
        return max((self._leases[link] for link in ready), key=lambda each: (each.free_lanes > 0, each.free_blocks))

    def _due_rows(self, compressed_kv: CompressedKVCache, ends: dict[int, int], every: int, verified: bool) -> dict[int, int]:
        """Return the requests of ``ends`` that are due for a selection request.

        If steps are verified, the selection interval is counted in steps across rounds. A round may have fewer steps than the interval, and
        rejected drafts reset positions. A selection requested in one round may be applied in a later one, if the compressed KV covers the
        same tokens.
        """
        self._steps += 1
        if not verified:
            return {row: end for row, end in ends.items() if not (end - compressed_kv.get(row).covered) % every}
        due = {row: end for row, end in ends.items() if row not in self._last_due_step or self._steps - self._last_due_step[row] >= every}
        self._last_due_step.update(dict.fromkeys(due, self._steps))
        return due

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

    def _send_missing_keys(self, compressed_kv: CompressedKVCache, row: int) -> None:
        """Send keys of a request that is not due, as far as staging slots are free."""
        # An earlier request may have taken the last staging slot.
        if self._lacks_keys(compressed_kv, row):
            with suppress(RankUnavailable, MemoryFull):  # counted when it is due
                self._requests[row].extend(self._table[row, : compressed_kv.get(row).covered].long())

    def _hand_over_keys(self, compressed_kv: CompressedKVCache, row: int) -> RankRequest | None:
        """Return the request in ``row`` once its rank has, or is sent, the keys that its compressed KV covers. Before, and if no rank takes
        it, return None and count a missing selection.

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

    def _open_lease(self, compressed_kv: CompressedKVCache, row: int) -> RankRequest:
        leases = self._select_rank()
        lease, namespace = leases.open(), compressed_kv.namespace_of(row)
        # Hashing a long prompt takes time, so it is done only after a rank has granted a lane.
        return RankRequest(leases, lease, () if namespace is None else block_hashes(namespace, compressed_kv.prompt_of(row)))

    def flush(self, row: int) -> None:
        """See :meth:`AsyncSelector.flush`."""
        if row in self._requests:
            self._requests[row].pending.clear()

    def flush_all(self) -> None:
        """See :meth:`AsyncSelector.flush_all`."""
        for row in self._requests:
            self.flush(row)

    def on_compressed(self, row: int, covered: int, kept: torch.Tensor) -> None:
        """See :meth:`AsyncSelector.on_compressed`."""
        self._records[row] = RowRecord(kept.int().contiguous(), covered)

    def extend(self, row: int, slots: torch.Tensor) -> bool:
        """See :meth:`AsyncSelector.extend`."""
        request = self._requests.get(row)
        if request is None or request.has_lost_rank:
            return False
        if request.lease.held < len(slots):
            request.leases.link.wait(0)
            self._launch_keys(request, slots)
        return request.lease.held >= len(slots)

    def _launch_keys(self, request: RankRequest, slots: torch.Tensor) -> None:
        """Send the missing keys of a request at ``slots``, as far as blocks and staging slots are free, and announce them."""
        try:
            request.extend(slots)
        except (RankUnavailable, MemoryFull) as error:
            self.missed[str(error)] += 1
        # Announce the keys now. Otherwise the rank polls until the next selection request.
        self._announce(request.leases.link)

    def _announce(self, link: RankLink) -> None:
        """Announce all writes to a rank's exchange buffer."""
        if link.exchange_buffer.has_unannounced:
            link.exchange_buffer.publish(self._queries.pool, [])

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
        """See :meth:`RowSender.on_slots_freed`."""
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
        if request is not None and not request.has_lost_rank:
            # If the rank accepts no message, its process was ended, and all leases with it.
            with suppress(RankUnavailable):
                request.leases.close(request.lease)

    def forget_all(self) -> None:
        """See :meth:`AsyncSelector.forget_all`."""
        self.flush_all()
        self._records.clear()
        self._last_due_step.clear()
        for row in list(self._requests):
            self._close_lease(row)

    def end(self) -> None:
        """End all rank processes."""
        for link in self.links:
            link.end()
