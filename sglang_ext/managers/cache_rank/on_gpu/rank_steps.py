"""What cache ranks on other GPUs choose for the steps of an inference rank: AsyncSpade across GPUs, where full KV stays with the model.

After a step in which a request's turn has come, its queries, and the keys that its rank lacks, are written to that rank's arena on a second
stream, while the next steps run. When its turn comes again, as many steps later, a kernel waits for the answer, no longer than
:data:`WAIT_SECONDS` in a step, and the copy leads to what was chosen; where nothing came it goes on to lead to what it led to. Whether it
came the device alone knows: the host launches and goes on, and counts misses when the device has told them.

Copies themselves are made here, by the keys of this GPU, and anew when many exact tokens follow them: until a rank has a request's keys,
and whenever it has none, the request reads what was chosen then.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from sglang_ext.device import SideStream
from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.leases import KeyLease, KeyLeases, MemoryFull
from sglang_ext.managers.cache_rank.link import RankDown, RankLink
from sglang_ext.managers.cache_rank.linked_ranks import LinkedRanks
from sglang_ext.managers.cache_rank.on_gpu.arena import COUNTERS, Arena, Asked, Copy
from sglang_ext.mem_cache.compressed.chosen_beside import BesideSteps
from sglang_ext.mem_cache.compressed.compressed_views import CompressedViews
from sglang_ext.mem_cache.compressed.copy_method import CopyMethod
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.query_window import QueryWindows

# That the device waits at most in a step, over all ranks and requests.
WAIT_SECONDS = 0.02


@dataclass(frozen=True)
class Question:
    """What was asked last for a request: by which number of its lane, among how many tokens, and how many of them for each head."""

    sequence: int
    covered: int
    keep: int


@dataclass
class AtRank:
    """A request at a rank.

    Attributes:
        leases: of the process that has its keys.
        lease: its own.
        asked: the question whose answer its copy shall lead to; None where none is open.
    """

    leases: KeyLeases
    lease: KeyLease
    asked: Question | None = None

    @property
    def void(self) -> bool:
        """Whether the process that had its keys is gone."""
        return not self.leases.link.ready or self.leases.epoch != self.leases.link.epoch


class RankSteps(LinkedRanks, BesideSteps):
    """The requests of one inference rank, each at one of its cache ranks.

    Args:
        links: to the ranks.
        arenas: of each, in the same order.
        method: of all copies; its compressor is :class:`~sglang_ext.mem_cache.compressors.spade.Spade`.
        token_table: int32, SGLang's with the draft rows.
        buffers: the layers of SGLang's pool.
        queries: the newest queries of each request.
        patience: seconds that the device waits at most in a step.

    Attributes:
        missed: choices that were not there, by reason: one for each request and turn.
        waited: seconds that steps have waited on the device.
        rows: 0: no K and V come.
    """

    in_place = True

    def __init__(
        self, links: Sequence[RankLink], arenas: Sequence[Arena], method: CopyMethod, token_table: torch.Tensor, buffers: KVBuffers,
        queries: QueryWindows, patience: float = WAIT_SECONDS,
    ):  # fmt: skip
        super().__init__(links, buffers)
        self._arenas = dict(zip(links, arenas))
        self._method, self._table, self._queries, self._patience = method, token_table, queries, patience
        self._side, self._launched = SideStream(token_table.device), None
        self._requests: dict[int, AtRank] = {}
        self._told = {arena: DeviceCounts(arena.counters) for arena in arenas}
        self._name = ""
        self._made: Counter[str] | None = None

    def compile_kernels(self) -> None:
        """As :meth:`BesideSteps.compile_kernels`: by questions that no lane has room for, before any request."""
        slots = torch.zeros(1, dtype=torch.int64, device=self._table.device)
        window = self._method.compressor.window
        for arena in self._arenas.values():
            word = arena.word(1 << 31)
            arena.put_keys(0, self.buffers, slots)
            arena.publish(self._queries.pool, [Asked([0] * window, 0, word)])
            arena.take([Copy(0, word, 0, 1, 1, slots)], self._table, self.buffers, 0.0)
            arena.counters.zero_()

    def tend(self) -> None:
        """As :meth:`BesideSteps.tend`; takes what the device has counted, too."""
        for link in self.links:
            link.tend()
            link.answers.clear()
        for counts in self._told.values():
            grown = counts.look()
            self.missed["late"] += grown["late"] + grown["unasked"]
            self.waited += grown["waited"] / 1e9
            if self._made is not None and grown["taken"]:
                self._made[self._name] += grown["taken"]

    def stepped(self, views: CompressedViews, ends: dict[int, int], following: int | None) -> None:
        """As :meth:`BesideSteps.stepped`."""
        every, self._made = self._method.compressor.every, views.made
        due = {row: end for row, end in ends.items() if not (end - views.get(row).covered) % every}
        # First, or the rank would look at the newer question alone.
        self._take(views, self._open_questions(views, due))
        # Where that is never taken before verification, places of its queries could be written meanwhile.
        if due and (following is None or following >= every):
            for link in self.links:
                link.wait(0)
            # What that makes is made on the second stream; tables, buffers and pools stay.
            self._launched = self._side.launch(lambda: self._ask(views, due, every), ())
        if following == 0:
            self._settle()

    def _open_questions(self, views: CompressedViews, rows: Iterable[int]) -> list[tuple[int, AtRank, Question]]:
        """Of some requests what was asked for them, of the copies that they still have; none is open afterwards."""
        found = []
        for row in rows:
            request, view = self._requests.get(row), views.get(row)
            if request is None:
                continue
            asked, request.asked = request.asked, None
            if asked is not None and not request.void and (asked.covered, asked.keep) == (view.covered, view.own_tokens):
                found.append((row, request, asked))
        return found

    def _ask(self, views: CompressedViews, due: dict[int, int], every: int) -> None:
        """Write keys and queries of some requests to arenas, and tell their ranks."""
        asked: dict[Arena, list[Asked]] = {arena: [] for arena in self._arenas.values()}
        for row, end in due.items():
            try:
                request = self._with_keys(views, row)
                if request is not None and (question := self._question(views, row, request, end, every)):
                    asked[self._arenas[request.leases.link]].append(question)
            except RankDown as error:
                self.missed[str(error)] += 1
            except MemoryFull as error:
                self.missed[str(error)] += 1
                self.forget(row)
        for arena, questions in asked.items():
            if arena.unsaid:
                arena.publish(self._queries.pool, questions)

    def _with_keys(self, views: CompressedViews, row: int) -> AtRank | None:
        """The request in ``row``, once its rank has, or is sent, the keys that its copy stands for; None before.

        Raises:
            RankDown: no rank is ready, or it takes no messages.
            MemoryFull: none has room.
        """
        request, covered = self._requests.get(row), views.get(row).covered
        if request is not None and request.void:
            del self._requests[row]
            request = None
        if request is None:
            request = self._requests[row] = self._opened()
        if request.lease.held < covered and not request.leases.extend(request.lease, self._table[row, :covered].long()):
            self.missed["hand-over"] += 1
            return None
        return request

    def _opened(self) -> AtRank:
        leases = self._roomiest()
        lease = leases.open()
        # Which slots its blocks came from is not known on the host: they are nobody else's.
        lease.alone = True
        return AtRank(leases, lease)

    def _question(self, views: CompressedViews, row: int, request: AtRank, end: int, every: int) -> Asked | None:
        """Tell a rank of the queries before ``end``, which are to be put; None where there are none."""
        view, lease, arena = views.get(row), request.lease, self._arenas[request.leases.link]
        places, positions = self._queries.newest_places(row, end, self._method.compressor.window)
        if not places:
            return None
        lease.sequence += 1
        ask = protocol.Ask(
            lease.lane, 0, arena.shape.layers, lease.sequence, view.covered, view.own_tokens, tuple(positions),
            ahead=end + every - positions[-1], number=arena.next_number(),
        )  # fmt: skip
        request.leases.link.say(ask)
        request.asked, self._name = Question(lease.sequence, view.covered, view.own_tokens), view.method
        return Asked(places, lease.lane, arena.word(lease.sequence))

    def _take(self, views: CompressedViews, questions: Sequence[tuple[int, AtRank, Question]]) -> None:
        """Let copies lead to what was chosen for them, where it is there in time."""
        if questions:
            # What was not put yet would not be waited for.
            self._settle()
        by_arena: dict[Arena, list[Copy]] = {}
        for row, request, asked in questions:
            arena, view = self._arenas[request.leases.link], views.get(row)
            copy = Copy(request.lease.lane, arena.word(asked.sequence), row, asked.covered, asked.keep, view.own[view.sinks :])
            by_arena.setdefault(arena, []).append(copy)
        for arena, copies in by_arena.items():
            arena.take(copies, self._table, self.buffers, self._patience / len(by_arena))

    def _settle(self) -> None:
        self._side.wait(self._launched)
        self._launched = None

    def settle(self, row: int) -> None:
        """As :meth:`BesideSteps.settle`: full KV and queries are read on the second stream."""
        self._settle()
        if row in self._requests:
            self._requests[row].asked = None

    def settle_all(self) -> None:
        """As :meth:`BesideSteps.settle_all`."""
        self._settle()
        for request in self._requests.values():
            request.asked = None

    def forget(self, row: int) -> None:
        """As :meth:`BesideSteps.forget`: its rank has room for others."""
        request = self._requests.pop(row, None)
        if request is None:
            return
        if not request.void:
            try:
                request.leases.close(request.lease)
            except RankDown:
                # With the process all its leases went.
                return

    def forget_all(self) -> None:
        """As :meth:`BesideSteps.forget_all`."""
        self.settle_all()
        for row in list(self._requests):
            self.forget(row)


class DeviceCounts:
    """By how much counters on a device have grown, as far as that is known without waiting for it.

    Args:
        counters: int64 [counters], on the device, in the order of :data:`COUNTERS`.
    """

    def __init__(self, counters: torch.Tensor):
        self._counters, self._seen, self._coming = counters, dict.fromkeys(COUNTERS, 0), None
        self._read = torch.zeros(len(counters), dtype=torch.int64, pin_memory=counters.is_cuda)

    def look(self) -> dict[str, int]:
        """Since the last time, by name; what the device has not told yet comes later."""
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
