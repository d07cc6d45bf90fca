"""A cache rank's process that chooses for a pack of layers, for pack_cycles.py: full KV goes there, then it is asked step by step."""

import math
from dataclasses import dataclass
from statistics import median
from time import monotonic, sleep
from typing import NamedTuple

import torch
from sglang_ext_bench.packs.pack_layers import Layers, Load, Queries

from sglang_ext.device import Mark, to_device
from sglang_ext.managers.cache_rank.leases import KeyLeases
from sglang_ext.managers.cache_rank.on_gpu.exchange_buffer import (
    COUNTERS,
    DONE,
    ExchangeBuffer,
    QueryUpload,
    SelectionTarget,
)
from sglang_ext.managers.cache_rank.on_gpu.gpu_launch import (
    TRAVELING_BYTES,
    connect_rank,
)
from sglang_ext.managers.cache_rank.protocol import (
    BLOCK,
    MAX_PLACES,
    VERSION,
    Attach,
    BufferShape,
    Lease,
    RotaryParameters,
    SelectionRequest,
)
from sglang_ext.mem_cache.compressed.layouts.pointers import Pointers
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors.spade import Spade, attention
from sglang_ext.mem_cache.selection.predictors import query_predictor
from sglang_ext.mem_cache.selection.scoring_keys import EXACT, KeySpec
from sglang_ext.mem_cache.selection.top_tokens import overlap, top_tokens

# Cycles before those that count, after those that bring a whole selection; seconds that one is waited for, in the first of which kernels are
# compiled.
WARM_UP, PATIENCE = 10, 60.0
# For which token after the newest query's a step asks: that after the next.
AHEAD = 2
# Clocks of a GPU in which its host gets ahead of it, about 2 ms: servers' hosts launch all steps of a round while the device runs the first.
LAUNCHED_AHEAD = 4_000_000


class Kind(NamedTuple):
    """Of a rank: whether rows travel, bits of the keys by which it chooses, and who says by which query."""

    rows: bool
    bits: int
    select_by: str

    @property
    def name(self) -> str:
        """What comes back, and the bits."""
        return f"{'rows' if self.rows else 'positions'}, {self.bits}"


@dataclass(frozen=True)
class Cycle:
    """Medians of a rank's cycles for one load; seconds and bytes.

    Attributes:
        selection: that the rank says.
        cycle: from the first question to the last answer.
        taking: after it, of the first GPU.
        answers: groups in which the rank answered a step's questions.
        moved: share of a selection whose rows travelled; 0 where none do.
        up, down: bytes of a cycle, to the rank and back.
        whole: bytes of K and V of a selection.
        agrees: share of what one layer of a request is led to that PyTorch chooses by exact keys.
    """

    selection: float
    cycle: float
    taking: float
    answers: float
    moved: float
    up: int
    down: float
    whole: int
    agrees: float


class Rank:
    """A cache rank's process, and what it is told.

    Args:
        layers: its pack.
        kind: of rank.
        device: its own.
        fresh: share of a selection for whose rows an answer has room.

    Attributes:
        arena, link: to the process, which starts when the link is tended.
        method: by which it chooses.
        held_bytes: of full KV, on its GPU.
    """

    def __init__(self, layers: Layers, kind: Kind, device: str, fresh: float):
        self.layers, self.kind, model, predictor = layers, kind, layers.model, query_predictor(kind.select_by)
        self._warm_up = WARM_UP + math.ceil(1 / fresh)
        dtype, most = layers.buffers.keys[0].dtype, max(load.keep for load in layers.loads)
        sizes = KeySpec(layers.count, model.kv_heads, model.dim, dtype, kind.bits, kind.rows)
        self.held_bytes = layers.contexts * sizes.token_bytes
        traveling = BLOCK * KeySpec(layers.count, model.kv_heads, model.dim, dtype, EXACT, kind.rows).token_bytes
        shape = BufferShape(
            layers.count, model.query_heads, model.kv_heads, model.dim, str(dtype).removeprefix("torch."), predictor.window,
            lanes=max(load.batch for load in layers.loads), most=most, places=min(MAX_PLACES, max(1, TRAVELING_BYTES // traveling)),
            rows=kind.rows, fresh=math.ceil(min(1.0, fresh) * most) if kind.rows else 0,
        )  # fmt: skip
        self.method, self._rotary = Spade(predictor), Rotary(layers.frequencies)
        turning = RotaryParameters(tuple(self._rotary.frequencies.tolist()), self._rotary.interleaved)
        told = Attach(
            VERSION, 1, shape, layers.contexts // BLOCK, layers.buffers.scaling, predictor.name, self.method.sinks, self.method.recent,
            turning, kind.bits,
        )  # fmt: skip
        self.arena = ExchangeBuffer(shape, layers.device, device)
        self.link = connect_rank(told, self.arena, PATIENCE)
        self._sequences = [0] * shape.lanes
        self._blocks: tuple[int, ...] = ()

    def hand_over(self) -> None:
        """Send full KV of all contexts, in as many turns as it takes; it is there when the first question is answered."""
        self.check("it did not become ready")
        leases, slots = KeyLeases(self.link, self.layers.buffers), self.layers.context_slots
        lease, nobody, until = leases.open(), torch.empty(0, device=self.layers.device), monotonic() + PATIENCE
        # What its slots are is not looked at.
        lease.is_remote_only = True
        while not leases.extend(lease, slots):
            self.arena.publish(nobody, [])
            self.hear(until, "full KV was not taken")
        self.arena.publish(nobody, [])
        self._blocks = tuple(lease.blocks)

    def check(self, otherwise: str) -> None:
        """Raises RuntimeError where the process cannot be asked."""
        if not self.link.ready:
            raise RuntimeError(f"cache rank of {self.kind.name} bits: {otherwise}: {self.link.down_reason}")

    def hear(self, until: float, otherwise: str) -> None:
        """What it says, soon; raises RuntimeError where it is gone, or too late."""
        self.link.wait(0.1)
        self.link.poll()
        self.check(otherwise)
        if monotonic() > until:
            raise RuntimeError(f"cache rank of {self.kind.name} bits: {otherwise} after {PATIENCE:g} s")

    def lease(self, load: Load) -> None:
        """Let each lane of a load have its context."""
        for lane in range(load.batch):
            self.link.send_message(Lease(lane, 0, self._blocks[lane * load.blocks : (lane + 1) * load.blocks]))

    def next_sequence(self, lane: int) -> int:
        """Of a question of a lane."""
        self._sequences[lane] += 1
        return self._sequences[lane]

    def predicted(self, queries: Queries, request: int, layer: int) -> torch.Tensor:
        """By which is chosen: float32 [1, query_heads, dim]."""
        window = queries.pool[layer, queries.places(request)].transpose(0, 1)[None, None]
        positions = torch.tensor([queries.positions], device=window.device)
        return self.method.predictor.predict(window, positions, self._rotary, AHEAD)[:, 0]

    def measure(self, load: Load, persistence: float, cycles: int) -> Cycle:
        """Cycles of a load, of which full KV is there; each query has so much of the last one."""
        self.lease(load)
        asking = Asking(self, load, Queries(self.layers, load, self.method.window, persistence))
        for _ in range(self._warm_up):
            asking.cycle()
        found = [asking.cycle() for _ in range(cycles)]
        cycle, taking, selection, answers, rows = (median(each) for each in zip(*found))
        model, item = self.layers.model, self.layers.buffers.keys[0].itemsize
        up = load.batch * self.layers.count * self.method.window * model.query_heads * model.dim * item
        pairs = load.batch * self.layers.count * model.kv_heads
        record, row = 4 * pairs * load.keep, 2 * model.dim * item
        # With each row its move; each pair says how many come.
        down = rows * (row + 8) + 4 * pairs if self.kind.rows else record
        return Cycle(
            selection, cycle, taking, answers, rows / (pairs * load.keep), up + record * self.kind.rows, down, pairs * load.keep * row,
            asking.agreement(),
        )  # fmt: skip


class Asking:
    """The copies of a load, and the steps that ask for them.

    Args:
        rank: that is asked.
        load: requests.
        queries: of these.
    """

    def __init__(self, rank: Rank, load: Load, queries: Queries):
        self._rank, self._load, self._queries, layers = rank, load, queries, rank.layers
        self._buffers, self._table, self._pointers = layers.buffers, layers.table(load), Pointers.for_pool(layers.buffers, 1)
        self._slots: torch.Tensor = layers.copies(load)[:, : load.keep]
        self._records: list[torch.Tensor | None] = [None] * load.batch
        if not rank.kind.rows:
            self._slots = self._slots[:, : self._pointers.packed_slots(load.keep)]
            return
        for request in range(load.batch):
            kept = torch.rand(layers.count, layers.model.kv_heads, load.tokens, device=layers.device).topk(load.keep).indices
            self._buffers.copy_kept(kept, self._table[request].long(), self._slots[request])
            self._records[request] = kept.int().contiguous()

    def cycle(self) -> tuple[float, float, float, int, int]:
        """One step: seconds until the last answer, of taking what came, and of selection; groups of answers; rows that came.

        Raises:
            RuntimeError: the rank is gone, or an answer is too late.
        """
        rank, load, queries, device = self._rank, self._load, self._queries, self._table.device
        arena, link = rank.arena, rank.link
        link.replies.clear()
        queries.next()
        sequences = [rank.next_sequence(lane) for lane in range(load.batch)]
        words = [arena.word(each) for each in sequences]
        questions = [QueryUpload(queries.places(lane), lane, word, self._records[lane]) for lane, word in enumerate(words)]
        copies = [
            SelectionTarget(lane, word, lane, load.tokens, load.keep, self._slots[lane], self._records[lane]) for lane, word in enumerate(words)
        ]
        there, before = to_device([[*each] for each in enumerate(words)], device), arena.counters.tolist()
        wait_for(device)
        if device.type == "cuda":
            torch.cuda._sleep(LAUNCHED_AHEAD)
        begun = Mark.now(device)
        number = arena.reserve_number()
        for lane, sequence in enumerate(sequences):
            numbers = sequence, load.tokens, load.keep
            link.send_message(SelectionRequest(lane, 0, rank.layers.count, *numbers, queries.positions, AHEAD, number, load.batch))
        arena.publish(queries.pool, questions)
        see_answers(arena, there)
        seen = Mark.now(device)
        arena.apply_selections(copies, self._table, self._buffers, PATIENCE)
        taken = Mark.now(device)
        wait_for(device)
        until = monotonic() + PATIENCE
        while len(link.replies) < load.batch:
            rank.hear(until, f"{len(link.replies)} of {load.batch} questions were answered")
        grown = dict(zip(COUNTERS, (now - then for now, then in zip(arena.counters.tolist(), before))))
        if grown["late"] or grown["unasked"]:
            raise RuntimeError(f"answers of {rank.kind.name} bits were not there: {grown}")
        # Those that were answered together say the same seconds.
        times = {answer.seconds for answer in link.replies}
        return begun.until(seen), seen.until(taken), sum(times), len(times), grown["rows"]

    def agreement(self) -> float:
        """Of the first request's first layer, the share of what its copy leads to that PyTorch chooses by exact keys.

        Raises:
            RuntimeError: copies do not hold the rows that their records name.
        """
        rank, load, keys, places = self._rank, self._load, self._buffers.keys[0], self._table[0].long()
        if rank.kind.rows:
            self._check_rows()
            led = self._records[0][0].long()
        else:
            led = self._pointers.read(keys, self._slots[0], load.keep) - places[0]
        scores = attention(rank.predicted(self._queries, 0, 0), keys[places], rank.layers.scaling)
        wanted = top_tokens(scores[None, None], load.keep, rank.method.sinks, rank.method.recent)[0, 0]
        return float(overlap(led, wanted, load.tokens).mean())

    def _check_rows(self) -> None:
        heads = torch.arange(self._buffers.keys[0].shape[1], device=self._table.device)[:, None]
        for request, record in enumerate(self._records):
            for layer, positions in enumerate(record.long()):
                slots = self._table[request].long()[positions]
                for part in (self._buffers.keys[layer], self._buffers.values[layer]):
                    if not torch.equal(part[self._slots[request]].transpose(0, 1), part[slots, heads]):
                        raise RuntimeError(f"the copy of request {request} does not hold what its record names in layer {layer}")


def see_answers(arena: ExchangeBuffer, lanes: torch.Tensor) -> None:
    """Let the stream wait until questions are done with: int64 [requests, 2], lane and word."""
    if lanes.is_cuda:
        from sglang_ext.layers.kernels.exchange_kernels import wait_for_selections

        wait_for_selections(arena.heads, lanes, arena.counters, PATIENCE)
        return
    until = monotonic() + PATIENCE
    while bool((arena.heads[lanes[:, 0], DONE] < lanes[:, 1]).any()) and monotonic() < until:
        sleep(1e-4)


def wait_for(device: torch.device) -> None:
    """Until it has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
