"""What cache ranks choose for the requests of an inference rank: keys are handed over, queries published, answers committed.

A request is handed over once its context is long enough; until the first answer it is read whole. From then on each pack of layers leaves
its queries as soon as it has computed them, and reads what was chosen for it by those of the step before when the next step comes to it:
choosing goes on while the rest of the model computes. What has not come by then is not waited for longer than :data:`WAIT_SECONDS` in a
step: the pack goes on with the last tokens that were chosen for it and the newest ones.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.leases import KeyLease, KeyLeases, MemoryFull
from sglang_ext.managers.cache_rank.link import Pack, RankDown, RankLink
from sglang_ext.managers.cache_rank.shared_memory import StaleAnswer
from sglang_ext.managers.cache_rank.timeline import PackTimeline
from sglang_ext.mem_cache.compressed.chosen_elsewhere import ChosenElsewhere, LayerWatch, ReadQueries, Stepping, WriteChosen, carried
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers

# Why a choice was not there: its rank does not run (yet, any more, in time, as it should), has no room, has just got the keys, or is late.
MISSES = ("starting", "ended", "silent", "wrong", "memory-full", "no-lane", "hand-over", "late")
# That a step waits at most, over all its packs and requests.
WAIT_SECONDS = 0.02
# Of a position in shared memory.
POSITION_BYTES = 4


@dataclass
class PackChoice:
    """What is known of one pack of a request's layers.

    Attributes:
        pack: which.
        asked: questions without an answer: covered tokens and tokens to keep, by sequence.
        sequence: of the newest question that was answered; 0 before.
        covered: tokens among which :attr:`kept` was chosen.
        kept: int64 [pack layers, kv_heads, count], positions; None before the first answer.
        written: sequence of what the copy leads to.
    """

    pack: Pack
    asked: dict[int, tuple[int, int]] = field(default_factory=dict)
    sequence: int = 0
    covered: int = 0
    kept: torch.Tensor | None = None
    written: int = 0

    def may_ask(self, sequence: int) -> bool:
        """Whether both places of that parity are free: what was asked there was answered."""
        return all((sequence - each) % 2 for each in self.asked)


@dataclass
class HandedOver:
    """A request whose keys a cache rank has, or is given.

    Attributes:
        leases: of the process that has them.
        lease: its own.
        packs: of its layers.
    """

    leases: KeyLeases
    lease: KeyLease
    packs: list[PackChoice]

    @property
    def complete(self) -> bool:
        """Whether something was ever chosen for all its layers."""
        return all(each.kept is not None for each in self.packs)

    @property
    def void(self) -> bool:
        """Whether the process that had its keys is gone."""
        return not self.leases.link.ready or self.leases.epoch != self.leases.link.epoch


class RankChoices(ChosenElsewhere):
    """The requests of one inference rank, each at one of its cache ranks.

    Args:
        links: to the ranks.
        buffers: the layers of SGLang's pool.
        timeline: is told of each pack of each step; None for nobody.

    Attributes:
        missed: choices that were not there, by reason: one for each request and step, or round where it is read whole.
        waited: seconds that steps have waited.
    """

    def __init__(self, links: Sequence[RankLink], buffers: KVBuffers, timeline: PackTimeline | None = None):
        self.links = tuple(links)
        self.buffers = buffers
        self.missed: Counter[str] = Counter()
        self.waited = 0.0
        self._timeline = timeline
        self._leases: dict[RankLink, KeyLeases] = {}
        self._requests: dict[int, HandedOver] = {}
        self._lanes: dict[tuple[RankLink, int], HandedOver] = {}
        for link in self.links:
            link.tend()

    @property
    def _token_bytes(self) -> int:
        """Of K and V of one token and head."""
        return 2 * self.buffers.keys[0].shape[-1] * self.buffers.keys[0].element_size()

    @property
    def ready(self) -> int:
        """Ranks that can be asked."""
        return sum(link.ready for link in self.links)

    @property
    def starts(self) -> int:
        """Processes that were started."""
        return sum(link.starts for link in self.links)

    @property
    def held_tokens(self) -> int:
        """Tokens for which blocks are taken, at all ranks."""
        leases = [self._leases[link] for link in self.links if link.ready and link in self._leases]
        return protocol.BLOCK * sum(each.link.settings.attach.blocks - each.free_blocks for each in leases)

    @property
    def slowest(self) -> float:
        """Seconds that the last pack took to choose, at the rank where it took longest."""
        return max((link.seconds for link in self.links), default=0.0)

    def prepare(self, row: int, slots: torch.Tensor, keep: int, queries: torch.Tensor, positions: torch.Tensor) -> bool:
        """As :meth:`ChosenElsewhere.prepare`."""
        request = self._requests.get(row)
        for link in self.links:
            link.tend()
        self._hear()
        try:
            if request is not None and request.void:
                self._lose(row)
                request = None
            if request is None:
                request = self._requests[row] = self._hand_over(len(slots))
            if request.leases.extend(request.lease, slots):
                self._ask_all(request, len(slots), keep, queries, positions)
        except (RankDown, MemoryFull) as error:
            self.missed[str(error)] += 1
            self.forget(row)
            return False
        if not request.complete:
            self.missed["hand-over"] += 1
        return request.complete

    def _hand_over(self, tokens: int) -> HandedOver:
        """Begin a request at the rank with the most room.

        Raises:
            RankDown: none is ready.
            MemoryFull: that one has no lane.
        """
        ready = [link for link in self.links if link.ready]
        if not ready:
            raise RankDown(self.links[0].why)
        for link in ready:
            if link not in self._leases or self._leases[link].epoch != link.epoch:
                self._leases[link] = KeyLeases(link, self.buffers)
        leases = max((self._leases[link] for link in ready), key=lambda each: each.free_blocks)
        lease = leases.open()
        request = HandedOver(leases, lease, [PackChoice(pack) for pack in leases.link.packs])
        self._lanes[leases.link, lease.lane] = request
        return request

    def _ask_all(self, request: HandedOver, covered: int, keep: int, queries: torch.Tensor, positions: torch.Tensor) -> None:
        """Ask anew for all packs, as a copy is made or renewed."""
        request.lease.sequence += 1
        for each in request.packs:
            self._ask(request, each, covered, keep, queries[each.pack.layers], positions)

    def _ask(
        self, request: HandedOver, choice: PackChoice, covered: int, keep: int, queries: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Publish the queries of a pack, [pack layers, window, query_heads, dim]; nothing where two questions are open."""
        sequence, lane, link = request.lease.sequence, request.lease.lane, request.leases.link
        if not choice.may_ask(sequence):
            return
        choice.asked[sequence] = covered, keep
        link.memory.put_queries(lane, sequence, choice.pack.first, queries)
        if self._timeline is not None:
            self._timeline.note("asked", choice.pack, lane, sequence, size=queries.nbytes)
        link.say(protocol.Ask(lane, *choice.pack, sequence, covered, keep, tuple(positions.tolist())))

    def kept(self, row: int, covered: int, keep: int) -> torch.Tensor:
        """As :meth:`ChosenElsewhere.kept`."""
        request = self._requests[row]
        for each in request.packs:
            each.written = each.sequence
        return torch.cat([carried(each.kept, each.covered, covered, keep) for each in request.packs])

    def step(self, requests: Sequence[Stepping], read: ReadQueries, write: WriteChosen) -> LayerWatch:
        """As :meth:`ChosenElsewhere.step`."""
        known = ((each, self._requests.get(each.row)) for each in requests)
        parts = [StepOf(each, request, request.lease.sequence) for each, request in known if request is not None]
        return StepWatch(self, parts, read, write)

    def commit(self, part: "StepOf", pack: int, deadline: float, write: WriteChosen) -> bool:
        """Let a copy lead to what was chosen for the next layers of a step, where it is there in time; whether it is.

        Args:
            part: the request in the step.
            pack: place of its pack.
            deadline: until when is waited.
            write: writes the copy.
        """
        request, (covered, keep) = part.request, (part.told.covered, part.told.keep)
        choice = request.packs[pack]
        self._await(request, choice, part.expected, deadline)
        if choice.sequence > choice.written:
            choice.written = choice.sequence
            write(part.told.row, choice.pack.layers, carried(choice.kept, choice.covered, covered, keep))
            if self._timeline is not None:
                size = choice.kept.numel() * self._token_bytes
                self._timeline.note("written", choice.pack, request.lease.lane, choice.sequence, size=size)
        return choice.sequence >= part.expected

    def _await(self, request: HandedOver, choice: PackChoice, sequence: int, deadline: float) -> None:
        """Until a question was answered, where it was asked; not beyond the deadline."""
        begun, link = time.monotonic(), request.leases.link
        link.wait(0)
        self._hear()
        while sequence in choice.asked and not request.void and (left := deadline - time.monotonic()) > 0:
            # Whole milliseconds are waited.
            link.wait(max(left, 1e-3))
            self._hear()
        self.waited += time.monotonic() - begun

    def ask(self, part: "StepOf", pack: int, read: ReadQueries) -> None:
        """Publish the queries that a step's layers have just left, for the next step."""
        request, told = part.request, part.told
        if request.void:
            return
        request.lease.sequence = part.expected + 1
        choice = request.packs[pack]
        try:
            self._ask(request, choice, told.covered, told.keep, *read(told.row, told.end, choice.pack.layers))
        except RankDown:
            return  # told when its answer is missed

    def reach(self, layer: int, packs: Sequence[PackChoice]) -> None:
        """A step's attention comes to a layer, of which ``packs`` are a request's."""
        if self._timeline is not None:
            for choice in packs:
                if choice.pack.first == layer:
                    self._timeline.note("reached", choice.pack)

    def miss(self, part: "StepOf", pack: Pack) -> None:
        """A step goes on with what was chosen before, first in ``pack``."""
        if self._timeline is not None:
            self._timeline.note("missed", pack, part.request.lease.lane, part.expected)
        self.missed[part.request.leases.link.why if part.request.void else "late"] += 1

    def _hear(self) -> None:
        """Take the answers that have come; those to questions that are not open are of no use."""
        for link in self.links:
            answers, link.answers = link.answers, []
            for answer in answers:
                request = self._lanes.get((link, answer.lane))
                if request is not None and not request.void:
                    self._take(request, answer)

    def _take(self, request: HandedOver, answer: protocol.Answer) -> None:
        choice = next((each for each in request.packs if each.pack == (answer.first, answer.count)), None)
        if choice is None or answer.sequence not in choice.asked:
            return
        covered, keep = choice.asked.pop(answer.sequence)
        if not answer.chosen or answer.sequence <= choice.sequence:
            return
        memory, lane = request.leases.link.memory, request.lease.lane
        try:
            kept = memory.get_chosen(request.leases.epoch, lane, answer.sequence, choice.pack.layers, covered, keep)
        except StaleAnswer:
            self.missed["wrong"] += 1
            return
        choice.sequence, choice.covered, choice.kept = answer.sequence, covered, kept
        if self._timeline is not None:
            size = kept.numel() * POSITION_BYTES
            self._timeline.note("chosen", choice.pack, lane, answer.sequence, answer.at, answer.seconds, size)

    def forget(self, row: int) -> None:
        """As :meth:`ChosenElsewhere.forget`."""
        request = self._lose(row)
        if request is None or request.void:
            return
        try:
            request.leases.close(request.lease)
        except RankDown:
            # With the process all its leases went.
            return

    def _lose(self, row: int) -> HandedOver | None:
        request = self._requests.pop(row, None)
        if request is not None:
            self._lanes.pop((request.leases.link, request.lease.lane), None)
        return request

    def forget_all(self) -> None:
        """As :meth:`ChosenElsewhere.forget_all`."""
        for row in list(self._requests):
            self.forget(row)

    def end(self) -> None:
        """End all ranks."""
        for link in self.links:
            link.end()


@dataclass
class StepOf:
    """A request in one step.

    Attributes:
        told: what of it the step reads.
        request: what its rank has.
        expected: sequence of the question whose answer is due.
        late: whether one was not there.
    """

    told: Stepping
    request: HandedOver
    expected: int
    late: bool = False


class StepWatch(LayerWatch):
    """One step: what is chosen for each pack is written as the forward reaches it, and asked for anew as it has passed.

    After the first that is missed nothing is waited for in the step any more.
    """

    def __init__(self, choices: RankChoices, parts: list[StepOf], read: ReadQueries, write: WriteChosen):
        self._choices = choices
        self._parts = parts
        self._read = read
        self._write = write
        self._left = WAIT_SECONDS

    def reached(self, layer: int) -> None:
        """As :meth:`LayerWatch.reached`."""
        if self._parts:
            self._choices.reach(layer, self._parts[0].request.packs)
        for part in self._parts:
            for place, choice in enumerate(part.request.packs):
                if choice.pack.first == layer:
                    self._commit(part, place)

    def _commit(self, part: StepOf, pack: int) -> None:
        begun = time.monotonic()
        if not self._choices.commit(part, pack, begun + self._left, self._write) and not part.late:
            part.late, self._left = True, 0.0
            self._choices.miss(part, part.request.packs[pack].pack)
        self._left = max(0.0, self._left - (time.monotonic() - begun))

    def recorded(self, layer: int) -> None:
        """As :meth:`LayerWatch.recorded`."""
        for part in self._parts:
            for place, choice in enumerate(part.request.packs):
                if part.told.asks and choice.pack.layers.stop == layer + 1:
                    self._choices.ask(part, place, self._read)
