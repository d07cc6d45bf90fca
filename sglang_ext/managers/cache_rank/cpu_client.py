"""What cache ranks choose for the requests of an inference rank: keys are handed over, queries published, answers committed.

A request is handed over once its context is long enough; until the first answer it is read whole. From then on each pack of layers leaves
its queries as soon as it has computed them, and reads what was chosen for it by those of the step before when the next step comes to it:
choosing goes on while the rest of the model computes. What has not come by then is not waited for longer than :data:`WAIT_SECONDS` in a
step: the pack goes on with the last tokens that were chosen for it and the newest ones.

Where ranks have values, too, K and V of what was chosen come with it, and a copy is rows, not pointers: it takes those that it lacks
(row_exchange.py), and the request's full KV may be given back (prefix_cache/remote_only.py). It cannot be read whole then: where its rank
has no room, the copy stands for what it stood for; where the process is gone, the request is lost, and is to be computed again.
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

# Why a choice was not there: its rank does not run (yet, any more, in time, as it should), has no room, has just got the keys, or is late.
MISSES = ("starting", "ended", "silent", "wrong", "memory-full", "no-lane", "hand-over", "late")
# That a step waits at most, over all its packs and requests.
WAIT_SECONDS = 0.02
# Of a position in shared memory.
POSITION_BYTES = 4


class CpuRankClient(CacheRankClient, RemoteSelector):
    """The requests of one inference rank, each at one of its cache ranks.

    Args:
        links: to the ranks.
        buffers: the layers of SGLang's pool.
        timeline: is told of each pack of each step; None for nobody.

    Attributes:
        missed: choices that were not there, by reason: one for each request and step, or round where it is read whole.
        waited: seconds that steps have waited.
        sends_rows: whether K and V of what is chosen come with it.
        rows: of one layer and KV head each, that came so and were taken.
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
        """Of K and V of one token and head."""
        return 2 * self.buffers.keys[0].shape[-1] * self.buffers.keys[0].element_size()

    @property
    def _known(self) -> dict[int, CpuRankRequest]:
        return self._requests

    def poll(self) -> None:
        """As :meth:`RemoteSelector.poll`."""
        for link in self.links:
            link.poll()
        self._hear()

    def prepare(self, row: int, slots: torch.Tensor, keep: int, queries: torch.Tensor, positions: torch.Tensor) -> bool:
        """As :meth:`RemoteSelector.prepare`."""
        request = self._requests.get(row)
        self.poll()
        if request is not None and request.has_lost_rank:
            if request.lease.alone:
                # Lost: of what another rank would need there are no slots.
                self.missed[request.leases.link.down_reason] += 1
                return False
            self._lose(row)
            request = None
        try:
            if request is None:
                request = self._requests[row] = self._hand_over(len(slots))
            whole = request.leases.extend(request.lease, slots)
            if whole:
                self._ask_all(request, len(slots), keep, queries, positions)
        except (RankUnavailable, MemoryFull) as error:
            self.missed[str(error)] += 1
            if request is None or not request.holds_rows:
                self.forget(row)
            return False
        if not request.complete:
            self.missed["hand-over"] += 1
        return request.complete and (whole or not self.sends_rows)

    def _hand_over(self, tokens: int) -> CpuRankRequest:
        """Begin a request at the rank with the most room.

        Raises:
            RankUnavailable: none is ready.
            MemoryFull: that one has no lane.
        """
        leases = self._select_rank()
        lease = leases.open()
        request = CpuRankRequest(leases, lease, [PackSelection(pack) for pack in leases.link.packs])
        self._lanes[leases.link, lease.lane] = request
        return request

    def _ask_all(self, request: CpuRankRequest, covered: int, keep: int, queries: torch.Tensor, positions: torch.Tensor) -> None:
        """Ask anew for all packs, as a copy is made or renewed."""
        request.lease.sequence += 1
        for each in request.packs:
            self._ask(request, each, covered, keep, queries[each.pack.layers], positions)

    def _ask(
        self, request: CpuRankRequest, choice: PackSelection, covered: int, keep: int, queries: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Publish the queries of a pack, [pack layers, window, query_heads, dim]; nothing where two questions are open."""
        sequence, lane, link = request.lease.sequence, request.lease.lane, request.leases.link
        if not choice.can_ask(sequence, self.sends_rows):
            return
        choice.asked[sequence] = covered, keep
        link.memory.put_queries(lane, sequence, choice.pack.first, queries)
        if self.sends_rows:
            # An answer that was not taken yet may lie where this one's is expected.
            choice.written = choice.sequence
            held = choice.base(covered, keep)
            shape = choice.pack.count, link.memory.shape.kv_heads, keep
            link.memory.put_held(lane, sequence, choice.pack.first, torch.full(shape, EMPTY) if held is None else held)
        if self._timeline is not None:
            self._timeline.add_event("asked", choice.pack, lane, sequence, size=queries.nbytes)
        link.send_message(protocol.SelectionRequest(lane, *choice.pack, sequence, covered, keep, tuple(positions.tolist())))

    def kept(self, row: int, covered: int, keep: int) -> torch.Tensor:
        """As :meth:`RemoteSelector.kept`."""
        request = self._requests[row]
        for each in request.packs:
            each.written = each.sequence
        return torch.cat([extend_selection(each.kept, each.covered, covered, keep) for each in request.packs])

    def moved(self, row: int, covered: int, keep: int, renewed: bool) -> RowExchange:
        """As :meth:`RemoteSelector.moved`."""
        found = []
        for each in self._requests[row].packs:
            found.append(each.moved(covered, keep, renewed))
            each.held, each.stands_for, each.written = found[-1].held, covered, each.sequence
        return merge_exchanges(found)

    def holds(self, row: int) -> int:
        """As :meth:`RowSender.holds`."""
        request = self._requests.get(row)
        return 0 if request is None or request.has_lost_rank or not request.holds_rows else request.lease.held

    def leave_slots(self, row: int, alone: bool) -> None:
        """As :meth:`RowSender.leave_slots`."""
        request = self._requests.get(row)
        if request is not None:
            request.lease.alone |= alone
            request.leases.leave_slots(request.lease)

    def is_lost(self, row: int) -> bool:
        """As :meth:`RowSender.is_lost`."""
        request = self._requests.get(row)
        return request is not None and request.lease.alone and request.has_lost_rank

    def step(self, requests: Sequence[StepRequest], read: ReadQueryWindow, write: WriteSelection) -> LayerObserver:
        """As :meth:`RemoteSelector.step`."""
        known = ((each, self._requests.get(each.row)) for each in requests)
        parts = [RequestStep(each, request, request.lease.sequence) for each, request in known if request is not None]
        return StepObserver(self, parts, read, write, WAIT_SECONDS)

    def commit(self, part: RequestStep, pack: int, deadline: float, write: WriteSelection) -> bool:
        """Let a copy lead to what was chosen for the next layers of a step, where it is there in time; whether it is.

        Args:
            part: the request in the step.
            pack: place of its pack.
            deadline: until when is waited.
            write: writes the copy.
        """
        choice = part.request.packs[pack]
        self._await(part.request, choice, part.expected, deadline)
        self._write(part, choice, write)
        return choice.sequence >= part.expected

    def _write(self, part: RequestStep, choice: PackSelection, write: WriteSelection) -> None:
        """Let a copy have the newest answer, where it has not."""
        if choice.sequence <= choice.written:
            return
        request, (covered, keep) = part.request, (part.step.covered, part.step.keep)
        choice.written, size = choice.sequence, choice.kept.numel() * self._token_bytes
        if choice.covered > covered or (self.sends_rows and request.has_lost_rank):
            # Asked for as a round began, whose copy then found no slots to stand for so many; or its rows went with the process.
            return
        self.taken += choice.pack.layers.stop == len(self.buffers.keys)
        if self.sends_rows:
            found = choice.arrived(request.leases.link.memory, request.lease.lane, covered, keep)
            write(part.step.row, choice.pack.layers, found)
            choice.held, choice.stands_for = found.exchange.held, covered
            self.rows += len(found.keys)
            size = found.keys.nbytes + found.values.nbytes
        else:
            write(part.step.row, choice.pack.layers, extend_selection(choice.kept, choice.covered, covered, keep))
        if self._timeline is not None:
            self._timeline.add_event("written", choice.pack, request.lease.lane, choice.sequence, size=size)

    def _await(self, request: CpuRankRequest, choice: PackSelection, sequence: int, deadline: float) -> None:
        """Until a question was answered, where it was asked; not beyond the deadline. Where rows come back, one of before, too."""
        begun, link = time.monotonic(), request.leases.link
        link.wait(0)
        self._hear()
        while (choice.asked if self.sends_rows else sequence in choice.asked) and not request.has_lost_rank:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            # Whole milliseconds are waited.
            link.wait(max(left, 1e-3))
            self._hear()
        self.waited += time.monotonic() - begun

    def ask(self, part: RequestStep, pack: int, read: ReadQueryWindow, write: WriteSelection) -> None:
        """Publish the queries that a step's layers have just left, for the next step."""
        request, told, choice = part.request, part.step, part.request.packs[pack]
        if request.has_lost_rank:
            return
        if self.sends_rows:
            # What has come since the layers attended: the next answer shall be of what it leaves.
            request.leases.link.wait(0)
            self._hear()
            if request.has_lost_rank:
                return
            self._write(part, choice, write)
        request.lease.sequence = part.expected + 1
        try:
            self._ask(request, choice, told.covered, told.keep, *read(told.row, told.end, choice.pack.layers))
        except RankUnavailable:
            return  # told when its answer is missed

    def reach(self, layer: int, packs: Sequence[PackSelection]) -> None:
        """A step's attention comes to a layer, of which ``packs`` are a request's."""
        if self._timeline is not None:
            for choice in packs:
                if choice.pack.first == layer:
                    self._timeline.add_event("reached", choice.pack)

    def miss(self, part: RequestStep, pack: Pack) -> None:
        """A step goes on with what was chosen before, first in ``pack``."""
        if self._timeline is not None:
            self._timeline.add_event("missed", pack, part.request.lease.lane, part.expected)
        self.missed[part.request.leases.link.down_reason if part.request.has_lost_rank else "late"] += 1

    def _hear(self) -> None:
        """Take the answers that have come; those to questions that are not open are of no use."""
        for link in self.links:
            answers, link.answers = link.answers, []
            for answer in answers:
                request = self._lanes.get((link, answer.lane))
                if request is not None and not request.has_lost_rank:
                    self._take(request, answer)

    def _take(self, request: CpuRankRequest, answer: protocol.SelectionReply) -> None:
        choice = next((each for each in request.packs if each.pack == (answer.first, answer.count)), None)
        if choice is None or answer.sequence not in choice.asked:
            return
        covered, keep = choice.asked.pop(answer.sequence)
        if not answer.chosen or answer.sequence <= choice.sequence:
            return
        memory, lane = request.leases.link.memory, request.lease.lane
        try:
            kept = memory.get_selection(request.leases.epoch, lane, answer.sequence, choice.pack.layers, covered, keep)
        except StaleSelection:
            self.missed["wrong"] += 1
            return
        choice.sequence, choice.covered, choice.kept = answer.sequence, covered, kept
        if self._timeline is not None:
            size = kept.numel() * POSITION_BYTES
            self._timeline.add_event("chosen", choice.pack, lane, answer.sequence, answer.at, answer.seconds, size)

    def forget(self, row: int) -> None:
        """As :meth:`RemoteSelector.forget`."""
        request = self._lose(row)
        if request is None or request.has_lost_rank:
            return
        try:
            request.leases.close(request.lease)
        except RankUnavailable:
            # With the process all its leases went.
            return

    def _lose(self, row: int) -> CpuRankRequest | None:
        request = self._requests.pop(row, None)
        lane = None if request is None else (request.leases.link, request.lease.lane)
        if request is not None and self._lanes.get(lane) is request:
            # Else it is another's, at a process that was started since.
            del self._lanes[lane]
        return request

    def forget_all(self) -> None:
        """As :meth:`RemoteSelector.forget_all`."""
        for row in list(self._requests):
            self.forget(row)
