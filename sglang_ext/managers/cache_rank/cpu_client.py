"""Inference-side client of the cache ranks on CPUs: hands over keys, publishes queries, and applies selections.

The client hands a request over once its context is long enough. Until the first selection arrives, the request reads its full KV. After
that, each pack of layers publishes its queries as soon as they are computed. The attention of the next step reads the tokens selected with
the previous step's queries. So the rank selects while the rest of the model computes. A step waits at most :data:`WAIT_SECONDS` for late
selections. After that the pack continues with its last selection plus the newest tokens.

Ranks that hold values send K and V of the selected tokens. The compressed KV then stores rows instead of pointers, and receives the rows
that it lacks (row_exchange.py). The request's full KV may be freed (prefix_cache/remote_only.py), and then cannot be read as a whole. If
the rank has no free blocks, the compressed KV keeps its covered tokens. If the process has ended, the request is lost and must be
computed again.
"""

import time
from collections.abc import Sequence

import torch

from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.cpu_requests import CpuRankRequest, PackSelection
from sglang_ext.managers.cache_rank.leases import MemoryFull
from sglang_ext.managers.cache_rank.rank_link import Pack, RankUnavailable, RankLink
from sglang_ext.managers.cache_rank.client import CacheRankClient
from sglang_ext.managers.cache_rank.shared_memory import StaleSelection
from sglang_ext.managers.cache_rank.step_observer import RequestStep, StepObserver
from sglang_ext.managers.cache_rank.timeline import PackTimeline
from sglang_ext.mem_cache.compressed.remote_selector import (
    RemoteSelector,
    LayerObserver,
    ReadQueryWindow,
    StepRequest,
    WriteSelection,
    extend_selection,
)
from sglang_ext.mem_cache.compressed.row_exchange import EMPTY, RowExchange, merge_exchanges
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers

# Reasons of a missing selection. The rank has not started, has ended, is silent, or sends wrong data. It has no blocks or no lane, has
# just received the keys, or is late.
MISSES = ("starting", "ended", "silent", "wrong", "memory-full", "no-lane", "hand-over", "late")
# Maximum wait of one step, over all its packs and requests.
WAIT_SECONDS = 0.02
# Bytes of a position in shared memory.
POSITION_BYTES = 4


class CpuRankClient(CacheRankClient, RemoteSelector):
    """Client of one inference rank; each request is at one of the ranks.

    Args:
        links: Connections to the ranks.
        buffers: Layers of SGLang's KV pool.
        timeline: Records the events of each pack of each step; None to record nothing.

    Attributes:
        missed: Missing selections by reason: one per request and step, or per round while the request reads its full KV.
        waited: Seconds that steps have waited.
        sends_rows: The ranks send K and V of selected tokens.
        rows: Received and applied rows, each of one layer and KV head.
    """

    def __init__(self, links: Sequence[RankLink], buffers: KVBuffers, timeline: PackTimeline | None = None):
        super().__init__(links, buffers)
        self.sends_rows = self.links[0].settings.attach.shape.rows
        self._timeline = timeline
        self._requests: dict[int, CpuRankRequest] = {}
        self._lanes: dict[tuple[RankLink, int], CpuRankRequest] = {}
        for link in self.links:
            link.poll()

    @property
    def _token_bytes(self) -> int:
        """Bytes of K and V of one token and head."""
        return 2 * self.buffers.keys[0].shape[-1] * self.buffers.keys[0].element_size()

    @property
    def _known(self) -> dict[int, CpuRankRequest]:
        return self._requests

    def poll(self) -> None:
        """See :meth:`RemoteSelector.poll`."""
        for link in self.links:
            link.poll()
        self._process_replies()

    def request_selection(self, row: int, slots: torch.Tensor, keep: int, queries: torch.Tensor, positions: torch.Tensor) -> bool:
        """See :meth:`RemoteSelector.request_selection`."""
        request = self._requests.get(row)
        self.poll()
        if request is not None and request.has_lost_rank:
            if request.lease.is_remote_only:
                # The request is lost: its tokens have no slots to send to another rank.
                self.missed[request.leases.link.down_reason] += 1
                return False
            self._remove(row)
            request = None
        try:
            if request is None:
                request = self._requests[row] = self._hand_over(len(slots))
            whole = request.leases.extend(request.lease, slots)
            if whole:
                self._request_all_packs(request, len(slots), keep, queries, positions)
        except (RankUnavailable, MemoryFull) as error:
            self.missed[str(error)] += 1
            if request is None or not request.holds_rows:
                self.forget(row)
            return False
        if not request.complete:
            self.missed["hand-over"] += 1
        return request.complete and (whole or not self.sends_rows)

    def _hand_over(self, tokens: int) -> CpuRankRequest:
        """Open a lease for a new request at the rank with the most free blocks.

        Raises:
            RankUnavailable: No rank is ready.
            MemoryFull: That rank has no free lane.
        """
        leases = self._select_rank()
        lease = leases.open()
        request = CpuRankRequest(leases, lease, [PackSelection(pack) for pack in leases.link.packs])
        self._lanes[leases.link, lease.lane] = request
        return request

    def _request_all_packs(self, request: CpuRankRequest, covered: int, keep: int, queries: torch.Tensor, positions: torch.Tensor) -> None:
        """Publish selection requests for all packs when compressed KV is created or refreshed."""
        request.lease.sequence += 1
        for each in request.packs:
            self._ask(request, each, covered, keep, queries[each.pack.layers], positions)

    def _ask(
        self, request: CpuRankRequest, choice: PackSelection, covered: int, keep: int, queries: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Publish the queries of a pack, [pack layers, window, query_heads, dim]. Do nothing if the slot still has an open selection
        request."""
        sequence, lane, link = request.lease.sequence, request.lease.lane, request.leases.link
        if not choice.can_ask(sequence, self.sends_rows):
            return
        choice.asked[sequence] = covered, keep
        link.memory.put_queries(lane, sequence, choice.pack.first, queries)
        if self.sends_rows:
            # A reply that was not applied yet may be in the slot of this selection request's reply.
            choice.written = choice.sequence
            held = choice.base(covered, keep)
            shape = choice.pack.count, link.memory.shape.kv_heads, keep
            link.memory.put_held(lane, sequence, choice.pack.first, torch.full(shape, EMPTY) if held is None else held)
        if self._timeline is not None:
            self._timeline.add_event("asked", choice.pack, lane, sequence, size=queries.nbytes)
        link.send_message(protocol.SelectionRequest(lane, *choice.pack, sequence, covered, keep, tuple(positions.tolist())))

    def last_selection(self, row: int, covered: int, keep: int) -> torch.Tensor:
        """See :meth:`RemoteSelector.last_selection`."""
        request = self._requests[row]
        for each in request.packs:
            each.written = each.sequence
        return torch.cat([extend_selection(each.kept, each.covered, covered, keep) for each in request.packs])

    def plan_row_copies(self, row: int, covered: int, keep: int, renewed: bool) -> RowExchange:
        """See :meth:`RemoteSelector.plan_row_copies`."""
        found = []
        for each in self._requests[row].packs:
            found.append(each.moved(covered, keep, renewed))
            each.held, each.held_covered, each.written = found[-1].held, covered, each.sequence
        return merge_exchanges(found)

    def num_held_tokens(self, row: int) -> int:
        """See :meth:`RowSender.num_held_tokens`."""
        request = self._requests.get(row)
        return 0 if request is None or request.has_lost_rank or not request.holds_rows else request.lease.held

    def on_slots_freed(self, row: int, is_remote_only: bool) -> None:
        """See :meth:`RowSender.on_slots_freed`."""
        request = self._requests.get(row)
        if request is not None:
            request.lease.is_remote_only |= is_remote_only
            request.leases.leave_slots(request.lease)

    def is_lost(self, row: int) -> bool:
        """See :meth:`RowSender.is_lost`."""
        request = self._requests.get(row)
        return request is not None and request.lease.is_remote_only and request.has_lost_rank

    def step(self, requests: Sequence[StepRequest], read: ReadQueryWindow, write: WriteSelection) -> LayerObserver:
        """See :meth:`RemoteSelector.step`."""
        known = ((each, self._requests.get(each.row)) for each in requests)
        parts = [RequestStep(each, request, request.lease.sequence) for each, request in known if request is not None]
        return StepObserver(self, parts, read, write, WAIT_SECONDS)

    def commit(self, part: RequestStep, pack: int, deadline: float, write: WriteSelection) -> bool:
        """Apply the selection of a step's next pack if it arrives in time. Return whether it did.

        Args:
            part: The request in the step.
            pack: Index of the pack.
            deadline: Latest time to wait until, ``time.monotonic`` seconds.
            write: Writes the compressed KV.
        """
        choice = part.request.packs[pack]
        self._await(part.request, choice, part.expected, deadline)
        self._write(part, choice, write)
        return choice.sequence >= part.expected

    def _write(self, part: RequestStep, choice: PackSelection, write: WriteSelection) -> None:
        """Write the newest selection to the compressed KV if it is not written yet."""
        if choice.sequence <= choice.written:
            return
        request, (covered, keep) = part.request, (part.step.covered, part.step.keep)
        choice.written, size = choice.sequence, choice.kept.numel() * self._token_bytes
        if choice.covered > covered or (self.sends_rows and request.has_lost_rank):
            # The selection covers more tokens than the compressed KV, which got no slots after the request; or its rows were lost with
            # the process.
            return
        self.taken += choice.pack.layers.stop == len(self.buffers.keys)
        if self.sends_rows:
            found = choice.arrived(request.leases.link.memory, request.lease.lane, covered, keep)
            write(part.step.row, choice.pack.layers, found)
            choice.held, choice.held_covered = found.exchange.held, covered
            self.rows += len(found.keys)
            size = found.keys.nbytes + found.values.nbytes
        else:
            write(part.step.row, choice.pack.layers, extend_selection(choice.kept, choice.covered, covered, keep))
        if self._timeline is not None:
            self._timeline.add_event("written", choice.pack, request.lease.lane, choice.sequence, size=size)

    def _await(self, request: CpuRankRequest, choice: PackSelection, sequence: int, deadline: float) -> None:
        """Wait until a selection request is answered, if one is open, at most until the deadline. With rows, wait for older open requests
        too."""
        begun, link = time.monotonic(), request.leases.link
        link.wait(0)
        self._process_replies()
        while (choice.asked if self.sends_rows else sequence in choice.asked) and not request.has_lost_rank:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            # `wait` rounds down to whole milliseconds.
            link.wait(max(left, 1e-3))
            self._process_replies()
        self.waited += time.monotonic() - begun

    def ask(self, part: RequestStep, pack: int, read: ReadQueryWindow, write: WriteSelection) -> None:
        """Publish the queries that a step's layers have just computed, for the next step."""
        request, told, choice = part.request, part.step, part.request.packs[pack]
        if request.has_lost_rank:
            return
        if self.sends_rows:
            # Apply replies received since these layers attended. The next reply is relative to the result.
            request.leases.link.wait(0)
            self._process_replies()
            if request.has_lost_rank:
                return
            self._write(part, choice, write)
        request.lease.sequence = part.expected + 1
        try:
            self._ask(request, choice, told.covered, told.keep, *read(told.row, told.end, choice.pack.layers))
        except RankUnavailable:
            return  # counted when the selection is missing

    def on_layer_reached(self, layer: int, packs: Sequence[PackSelection]) -> None:
        """Record that a step's attention reaches a layer; ``packs`` are those of one request."""
        if self._timeline is not None:
            for choice in packs:
                if choice.pack.first == layer:
                    self._timeline.add_event("reached", choice.pack)

    def count_missed(self, part: RequestStep, pack: Pack) -> None:
        """Count a missing selection: the step continues with the previous selection, first in ``pack``."""
        if self._timeline is not None:
            self._timeline.add_event("missed", pack, part.request.lease.lane, part.expected)
        self.missed[part.request.leases.link.down_reason if part.request.has_lost_rank else "late"] += 1

    def _process_replies(self) -> None:
        """Process received replies. Replies to selection requests that are no longer open are ignored."""
        for link in self.links:
            replies, link.replies = link.replies, []
            for reply in replies:
                request = self._lanes.get((link, reply.lane))
                if request is not None and not request.has_lost_rank:
                    self._process_reply(request, reply)

    def _process_reply(self, request: CpuRankRequest, reply: protocol.SelectionReply) -> None:
        choice = next((each for each in request.packs if each.pack == (reply.first, reply.count)), None)
        if choice is None or reply.sequence not in choice.asked:
            return
        covered, keep = choice.asked.pop(reply.sequence)
        if not reply.chosen or reply.sequence <= choice.sequence:
            return
        memory, lane = request.leases.link.memory, request.lease.lane
        try:
            kept = memory.get_selection(request.leases.epoch, lane, reply.sequence, choice.pack.layers, covered, keep)
        except StaleSelection:
            self.missed["wrong"] += 1
            return
        choice.sequence, choice.covered, choice.kept = reply.sequence, covered, kept
        if self._timeline is not None:
            size = kept.numel() * POSITION_BYTES
            self._timeline.add_event("chosen", choice.pack, lane, reply.sequence, reply.at, reply.seconds, size)

    def forget(self, row: int) -> None:
        """See :meth:`RemoteSelector.forget`."""
        request = self._remove(row)
        if request is None or request.has_lost_rank:
            return
        try:
            request.leases.close(request.lease)
        except RankUnavailable:
            # All leases ended with the process.
            return

    def _remove(self, row: int) -> CpuRankRequest | None:
        request = self._requests.pop(row, None)
        lane = None if request is None else (request.leases.link, request.lease.lane)
        if request is not None and self._lanes.get(lane) is request:
            # Otherwise the lane belongs to another request, at a process that started later.
            del self._lanes[lane]
        return request

    def forget_all(self) -> None:
        """See :meth:`RemoteSelector.forget_all`."""
        for row in list(self._requests):
            self.forget(row)
