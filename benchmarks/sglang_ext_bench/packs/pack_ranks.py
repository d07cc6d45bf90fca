"""A cache rank's process that selects tokens for a pack of layers: it receives the full KV, then selection requests step by step."""

import math
from dataclasses import dataclass
from statistics import median
from time import monotonic, sleep
from typing import NamedTuple

import torch

from sglang_ext.device import Mark, to_device
from sglang_ext.managers.cache_rank.exchange_buffer import DEVICE_COUNTERS, ExchangeBuffer, QueryUpload, SelectionTarget
from sglang_ext.managers.cache_rank.feature import TRAVELING_BYTES
from sglang_ext.managers.cache_rank.leases import KeyLeases
from sglang_ext.managers.cache_rank.protocol import (
    BLOCK,
    DONE,
    MAX_PLACES,
    VERSION,
    Attach,
    BufferShape,
    Lease,
    RotaryParameters,
    SelectionRequest,
)  # fmt: skip
from sglang_ext.managers.cache_rank.rank_link import RankLink
from sglang_ext.mem_cache.compressed.layouts.pointers import Pointers
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors.step_selectors import Spade, attention
from sglang_ext.mem_cache.selection.predictors import query_predictor
from sglang_ext.mem_cache.selection.scoring import top_tokens
from sglang_ext.mem_cache.selection.scoring_keys import EXACT, KeySpec
from sglang_ext_bench.baselines.scorings import overlap
from sglang_ext_bench.packs.pack_layers import LayerPack, Load, QueryStream

# Warm-up cycles, after those that transfer a whole selection.
WARM_UP = 10
# Seconds to wait for a selection. Kernels are compiled before the first one.
PATIENCE = 60.0
# A selection is for the token this many positions after the newest query.
AHEAD = 2
# GPU clocks, about 2 ms, in which the host gets ahead. A server's host launches all steps of a round while the GPU runs the first one.
LAUNCHED_AHEAD = 4_000_000


class RankKind(NamedTuple):
    """Configuration of a cache rank.

    Attributes:
        rows: Whether the rank sends K and V of selected tokens (`lossy`) or positions only (`verified`).
        bits: Bits of the scored keys.
        select_by: Name of the query predictor.
    """

    rows: bool
    bits: int
    select_by: str

    @property
    def name(self) -> str:
        """Name in a table: what is sent, and the bits."""
        return f"{'rows' if self.rows else 'positions'}, {self.bits}"


@dataclass(frozen=True)
class CycleTimes:
    """Medians of a cache rank's cycles for one load, in seconds and bytes.

    Attributes:
        selection: Seconds of the selection, as the rank measures it.
        cycle: Seconds from the first query to the last selection.
        taking: Seconds in which the inference GPU applies the selections afterwards.
        answers: Groups in which the rank replied to a step's selection requests.
        moved: Share of a selection whose rows were sent; 0 if positions are sent.
        up: Bytes of a cycle to the rank.
        down: Bytes of a cycle from the rank.
        whole: Bytes of K and V of a whole selection.
        agrees: Share of a selection, of one layer of one request, that PyTorch selects by exact keys.
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


class PackRank:
    """A cache rank's process for a pack of layers.

    Args:
        pack: The layers.
        kind: Configuration of the rank.
        device: Device of the rank, as PyTorch names it.
        fresh: Share of a selection whose rows fit into a reply.

    Attributes:
        pack: The layers.
        kind: Configuration of the rank.
        exchange: The exchange buffer.
        link: Connection to the process. The process starts when the link is polled.
        method: Selects the tokens.
        held_bytes: Bytes of full KV on the rank's device.
    """

    def __init__(self, pack: LayerPack, kind: RankKind, device: str, fresh: float) -> None:
        self.pack, self.kind, model, predictor = pack, kind, pack.model, query_predictor(kind.select_by)
        self._warm_up = WARM_UP + math.ceil(1 / fresh)
        dtype, most = pack.buffers.keys[0].dtype, max(load.keep for load in pack.loads)
        self.held_bytes = pack.num_context_slots * KeySpec(pack.count, model.kv_heads, model.dim, dtype, kind.bits, kind.rows).token_bytes
        staged = BLOCK * KeySpec(pack.count, model.kv_heads, model.dim, dtype, EXACT, kind.rows).token_bytes
        shape = BufferShape(
            pack.count, model.query_heads, model.kv_heads, model.dim, str(dtype).removeprefix("torch."), predictor.window,
            lanes=max(load.batch for load in pack.loads), most=most, places=min(MAX_PLACES, max(1, TRAVELING_BYTES // staged)),
            rows=kind.rows, fresh=math.ceil(min(1.0, fresh) * most) if kind.rows else 0,
        )  # fmt: skip
        self.method, self._rotary = Spade(predictor), Rotary(pack.frequencies)
        rotary = RotaryParameters(tuple(self._rotary.frequencies.tolist()), self._rotary.interleaved)
        attach = Attach(
            VERSION, 1, shape, pack.num_context_slots // BLOCK, pack.buffers.scaling, predictor.name, self.method.sinks, self.method.recent,
            rotary, kind.bits,
        )  # fmt: skip
        self.exchange = ExchangeBuffer(shape, pack.device, device)
        self.link = RankLink(attach, self.exchange, PATIENCE)
        self._sequences = [0] * shape.lanes
        self._blocks: tuple[int, ...] = ()

    def send_full_kv(self) -> None:
        """Send the full KV of all contexts, in several batches of staging slots. It has arrived when the first selection arrives.

        Raises:
            RuntimeError: The process is not ready, or it took no KV in time.
        """
        self.check_ready("it did not become ready")
        leases, slots = KeyLeases(self.link, self.pack.buffers), self.pack.context_slots
        lease, no_queries, until = leases.open(), torch.empty(0, device=self.pack.device), monotonic() + PATIENCE
        while not leases.extend(lease, slots):
            self.exchange.publish(no_queries, [])
            self.wait_for_messages(until, "the full KV was not taken")
        self.exchange.publish(no_queries, [])
        self._blocks = tuple(lease.blocks)

    def check_ready(self, problem: str) -> None:
        """Check that the process accepts messages.

        Raises:
            RuntimeError: It does not. The message has ``problem`` and the reason.
        """
        if not self.link.ready:
            raise RuntimeError(f"cache rank of {self.kind.name} bits: {problem}: {self.link.down_reason}")

    def wait_for_messages(self, until: float, problem: str) -> None:
        """Process messages of the rank, waiting up to 0.1 s.

        Raises:
            RuntimeError: The process ended, or ``until``, in ``time.monotonic`` seconds, has passed. The message has ``problem``.
        """
        self.link.wait(0.1)
        self.link.poll()
        self.check_ready(problem)
        if monotonic() > until:
            raise RuntimeError(f"cache rank of {self.kind.name} bits: {problem} after {PATIENCE:g} s")

    def next_sequence(self, lane: int) -> int:
        """Return the sequence number of the next selection request of a lane."""
        self._sequences[lane] += 1
        return self._sequences[lane]

    def predicted_query(self, queries: QueryStream, request: int, layer: int) -> torch.Tensor:
        """Return the query that scores the tokens of a request in a layer, float32 [1, query_heads, dim]."""
        window = queries.pool[layer, queries.places(request)].transpose(0, 1)[None, None]
        positions = torch.tensor([queries.positions], device=window.device)
        return self.method.predictor.predict(window, positions, self._rotary, AHEAD)[:, 0]

    def measure(self, load: Load, persistence: float, cycles: int) -> CycleTimes:
        """Run cycles of a load whose full KV was sent, and return their medians.

        Args:
            load: The requests.
            persistence: Share of a query that the next query keeps.
            cycles: Measured cycles, after the warm-up.
        """
        for lane in range(load.batch):
            self.link.send_message(Lease(lane, 0, self._blocks[lane * load.blocks : (lane + 1) * load.blocks]))
        runner = CycleRunner(self, load, QueryStream(self.pack, load, self.method.window, persistence))
        for _ in range(self._warm_up):
            runner.run()
        found = [runner.run() for _ in range(cycles)]
        cycle, taking, selection, answers, rows = (median(each) for each in zip(*found))
        model, item = self.pack.model, self.pack.buffers.keys[0].itemsize
        query_bytes = load.batch * self.pack.count * self.method.window * model.query_heads * model.dim * item
        pairs = load.batch * self.pack.count * model.kv_heads
        position_bytes, row_bytes = 4 * pairs * load.keep, 2 * model.dim * item
        # A row is sent with its old and new position; each request, layer and head with its number of rows.
        down = rows * (row_bytes + 8) + 4 * pairs if self.kind.rows else position_bytes
        return CycleTimes(
            selection, cycle, taking, answers, rows / (pairs * load.keep), query_bytes + position_bytes * self.kind.rows, down,
            pairs * load.keep * row_bytes, runner.agreement(),
        )  # fmt: skip


class CycleRunner:
    """The compressed KV of a load, and the steps that request its selections.

    Args:
        rank: The cache rank.
        load: The requests.
        queries: Their queries.
    """

    def __init__(self, rank: PackRank, load: Load, queries: QueryStream) -> None:
        self._rank, self._load, self._queries, pack = rank, load, queries, rank.pack
        self._buffers, self._table, self._pointers = pack.buffers, pack.context_table(load), Pointers.for_pool(pack.buffers, 1)
        self._slots: torch.Tensor = pack.compressed_slots(load)[:, : load.keep]
        # Positions of the rows that each request's compressed KV holds; None with pointers.
        self._records: list[torch.Tensor | None] = [None] * load.batch
        if not rank.kind.rows:
            self._slots = self._slots[:, : self._pointers.packed_slots(load.keep)]
            return
        for request in range(load.batch):
            kept = torch.rand(pack.count, pack.model.kv_heads, load.tokens, device=pack.device).topk(load.keep).indices
            self._buffers.copy_kept(kept, self._table[request].long(), self._slots[request])
            self._records[request] = kept.int().contiguous()

    def run(self) -> tuple[float, float, float, int, int]:
        """Run one cycle.

        Returns:
            Seconds until the last selection, of applying the selections, and of selecting; number of reply groups; number of sent rows.

        Raises:
            RuntimeError: The process ended, or a selection is late.
        """
        rank, load, queries, device = self._rank, self._load, self._queries, self._table.device
        exchange, link = rank.exchange, rank.link
        link.replies.clear()
        queries.advance()
        sequences = [rank.next_sequence(lane) for lane in range(load.batch)]
        words = [exchange.word(each) for each in sequences]
        uploads = [QueryUpload(queries.places(lane), lane, word, self._records[lane]) for lane, word in enumerate(words)]
        targets = [
            SelectionTarget(lane, word, lane, load.tokens, load.keep, self._slots[lane], self._records[lane]) for lane, word in enumerate(words)
        ]
        lanes, before = to_device([[*each] for each in enumerate(words)], device), exchange.counters.tolist()
        synchronize(device)
        if device.type == "cuda":
            torch.cuda._sleep(LAUNCHED_AHEAD)
        begun = Mark.now(device)
        number = exchange.reserve_number()
        for lane, sequence in enumerate(sequences):
            numbers = sequence, load.tokens, load.keep
            link.send_message(SelectionRequest(lane, 0, rank.pack.count, *numbers, queries.positions, AHEAD, number, load.batch))
        exchange.publish(queries.pool, uploads)
        wait_for_selections(exchange, lanes)
        arrived = Mark.now(device)
        exchange.apply_selections(targets, self._table, self._buffers, PATIENCE)
        applied = Mark.now(device)
        synchronize(device)
        until = monotonic() + PATIENCE
        while len(link.replies) < load.batch:
            rank.wait_for_messages(until, f"{len(link.replies)} of {load.batch} selection requests were answered")
        counted = dict(zip(DEVICE_COUNTERS, (now - then for now, then in zip(exchange.counters.tolist(), before))))
        if counted["late"] or counted["unasked"]:
            raise RuntimeError(f"cache rank of {rank.kind.name} bits: selections were late: {counted}")
        # Replies of a group have the same seconds.
        times = {answer.seconds for answer in link.replies}
        return begun.until(arrived), arrived.until(applied), sum(times), len(times), counted["rows"]

    def agreement(self) -> float:
        """Return the share of the first request's selection, in the first layer, that PyTorch selects by exact keys.

        Raises:
            RuntimeError: Compressed KV does not hold the rows that its record names.
        """
        rank, load, keys, context = self._rank, self._load, self._buffers.keys[0], self._table[0].long()
        if rank.kind.rows:
            self._check_rows()
            selected = self._records[0][0].long()
        else:
            selected = self._pointers.read(keys, self._slots[0], load.keep) - context[0]
        scores = attention(rank.predicted_query(self._queries, 0, 0), keys[context], rank.pack.scaling)
        expected = top_tokens(scores[None, None], load.keep, rank.method.sinks, rank.method.recent)[0, 0]
        return float(overlap(selected, expected, load.tokens).mean())

    def _check_rows(self) -> None:
        heads = torch.arange(self._buffers.keys[0].shape[1], device=self._table.device)[:, None]
        for request, record in enumerate(self._records):
            for layer, positions in enumerate(record.long()):
                slots = self._table[request].long()[positions]
                for part in (self._buffers.keys[layer], self._buffers.values[layer]):
                    if not torch.equal(part[self._slots[request]].transpose(0, 1), part[slots, heads]):
                        raise RuntimeError(f"compressed KV of request {request} does not hold the rows of its record in layer {layer}")


def wait_for_selections(exchange: ExchangeBuffer, lanes: torch.Tensor) -> None:
    """Let the stream wait until selection requests are done.

    Args:
        exchange: The exchange buffer.
        lanes: Lane and word of each request, int64 [requests, 2].
    """
    if lanes.is_cuda:
        from sglang_ext.layers.kernels import exchange_kernels

        exchange_kernels.wait_for_selections(exchange.heads, lanes, exchange.counters, PATIENCE)
        return
    until = monotonic() + PATIENCE
    while bool((exchange.heads[lanes[:, 0], DONE] < lanes[:, 1]).any()) and monotonic() < until:
        sleep(1e-4)


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle; a CPU is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
