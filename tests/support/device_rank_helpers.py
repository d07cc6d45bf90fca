"""A cache rank with an arena in a process of its own, on a CPU or a GPU, and requests of a made-up model whose steps ask it: with copies of
pointers, or of rows that it sends."""

import queue
import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import torch
from rank_helpers import DIM, GROUP, HEADS, LAYERS, ROTARY, ScriptedRank, attach, pool
from rank_socket import RankSocket, serve

from sglang_ext.core import RequestState
from sglang_ext.mem_cache.prefix_cache.segments import CompressedKV
from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.exchange_buffer import ExchangeBuffer
from sglang_ext.managers.cache_rank.stepwise_client import IntervalTuner
from sglang_ext.managers.cache_rank.layerwise_client import LayerwiseClient, PackTimeline
from sglang_ext.managers.cache_rank.rank_link import RankProcess
from sglang_ext.managers.cache_rank.rank_link import RankLink
from sglang_ext.managers.cache_rank.selection_server import SelectionServer
from sglang_ext.managers.cache_rank.stepwise_client import StepwiseClient
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.layouts.base import PlainSlots
from sglang_ext.mem_cache.compressed.layouts.pointers import Pointers
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.queries import QueryWindows, RecordedRows
from sglang_ext.mem_cache.compressors.step_selectors import Spade, attention
from sglang_ext.mem_cache.selection.scoring_keys import KeySpec, QuantizedKeys
from sglang_ext.mem_cache.selection.predictors import CurrentQuery
from sglang_ext.mem_cache.selection.scoring import mark_always

# Slots of the made-up pool, of contexts; those after them hold pointers, or rows.
CONTEXT_SLOTS, ROW_SLOTS = 800, 1200
# By which questions are put later than ranks are told of them, where GPUs would be apart.
BEHIND_SECONDS = 0.005


def rank_here(arena, apart=False):
    """A rank in this process that was told what it serves, and what it says."""
    socket = RankSocket()
    rank = SelectionServer(socket, arena.begin(1), 1, torch.device("cpu"))
    socket.tell(attach(apart=apart))
    serve(rank)
    return rank, socket


class Later:
    """In the place of a second stream on a CPU: another thread puts what is put, a while after the host went on, as a device that is behind
    does, so that a rank that may is told ahead of it."""

    def __init__(self, arenas):
        self._left = queue.Queue()
        for arena in arenas:
            put = arena._publish
            arena._publish = lambda *given, put=put: self._left.put((put, given))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            put, given = self._left.get()
            time.sleep(BEHIND_SECONDS)
            put(*given)
            self._left.task_done()

    def launch(self, work, read):
        """Begin work; what is reached when it is done."""
        work()
        return self

    def wait(self, done):
        """Until all is put."""
        if done is not None:
            self._left.join()


class RankWorld:
    """Requests with copies of pointers, or of rows, and the rank that chooses for their steps.

    Args:
        device, rank_device: of the pool, and of the rank.
        patience: seconds that a step waits at most.
        predictor, every: of the method.
        most: steps between two choices at most, where ranks do not keep up; None for ``every``.
        silence: seconds after which a rank that says nothing is ended.
        pack: layers of the packs that are asked for within steps, as on a CPU, 0 for as many as are measured; None for whole steps.
        timeline: of packs.
        start_process: of ranks.
        flags: of what ranks are told, as ``rank_helpers.attach`` takes them; with ``fresh``, of rows of a head that an answer brings at
            most, copies are rows.
    """

    def __init__(
        self, device="cpu", rank_device="cpu", patience=20.0, predictor=CurrentQuery(), every=1, silence=10.0, count=1, most=None,
        pack=None, timeline=None, start_process=RankProcess, **flags
    ):  # fmt: skip
        self.device, self.predictor, self.every = torch.device(device), predictor, every
        self.rows, self.by_packs = flags.get("fresh", 0) > 0, pack is not None
        if self.by_packs:
            flags["packs"] = LAYERS
        told = attach(predictor=predictor.name, window=predictor.window, rows=self.rows, **flags)
        there = pool(0, CONTEXT_SLOTS + ROW_SLOTS)
        self.on_host = there
        keys, values = (tuple(part.to(self.device, copy=True) for part in kind) for kind in (there.keys, there.values))
        self.buffers = KVBuffers(there.layer_ids, there.scaling, keys, values)
        self.pointers = Pointers.for_pool(self.buffers, 1)
        packing = PlainSlots(1) if self.rows else self.pointers
        self.method = CompressionMethod(Spade(predictor, every=every, each_round=False), 0.25, packing)
        self.table = torch.zeros(8, 500, dtype=torch.int32, device=self.device)
        self.queries = QueryWindows(predictor.window, range(LAYERS), max(4, every))
        self.queries.allocate(6, HEADS * GROUP, DIM, torch.empty(0, device=self.device))
        arenas = [ExchangeBuffer(told.shape, self.device, rank_device) for _ in range(count)]
        self.links = [RankLink(told, arena, silence, pack, start_process=start_process) for arena in arenas]
        # Tokens whose keys went to ranks, and the newest question of each rank.
        self.sent, self.newest_requests = 0, {}
        for link in self.links:
            link.send_message = lambda message, link=link, send=link.send_message: self._send(message, link, send)
        self.arenas = arenas
        given = self.links, self.method, self.table, self.buffers, self.queries
        self.steps = LayerwiseClient(*given) if self.by_packs else StepwiseClient(*given)
        if self.by_packs:
            self.steps.timeline = PackTimeline(timeline)
        self.steps.max_wait_seconds = patience
        if flags.get("apart") and self.device.type == "cpu":
            self.steps._side = Later(arenas)
        if not self.by_packs:
            # Steps of tests take no time.
            self.steps.interval_tuner = IntervalTuner(every, every if most is None else most)
        self.copies, self.ends, self.next_slot = {}, {}, CONTEXT_SLOTS
        # Of rows whose full KV was given back, where it was.
        self._given = {}
        # Of rows whose requests begin alike.
        self.prompts, self.namespaces = {}, {}
        self.compressed_kv = SimpleNamespace(
            get=self.copies.get, num_compressions=Counter(), write_selection=self._write_selection,
            state_of=lambda row: RequestState("", row, 0, prompt=self.prompts.get(row, ()), namespace=self.namespaces.get(row, "")),
        )  # fmt: skip

    def _send(self, message, link, send):
        """Count the tokens of a message, or keep a question, once it is on its way."""
        send(message)
        if isinstance(message, protocol.Append):
            self.sent += sum(piece.tokens for piece in message.pieces)
        elif isinstance(message, protocol.SelectionRequest):
            self.newest_requests[link] = message

    @property
    def newest_request(self):
        """The newest question of the only rank; None before there is one."""
        (link,) = self.links
        return self.newest_requests.get(link)

    @property
    def ahead(self):
        """From the newest query to that of the first step that reads what it chooses."""
        return 1 if self.by_packs else self.every + 1

    def _write_selection(self, row, layers, kept):
        """As a cache of compressed KV does."""
        view = self.copies[row]
        self.method.packing.write(self.buffers.of_layers(layers), kept, self.table[row, : view.covered].long(), view.own)
        self.compressed_kv.num_compressions[view.method] += layers.stop == LAYERS

    def until(self, holds, seconds=90.0):
        """Tend the ranks until something holds."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, f"nothing of it after {seconds} s; missed: {dict(self.steps.missed)}"
            self.steps.poll()
            time.sleep(0.01)

    def until_places_are_free(self, seconds=90.0):
        """Tend the ranks until each has taken all keys that were sent."""
        self.until(lambda: all(len(link._free_places) == link.attach.shape.places for link in self.links), seconds)

    def ready(self):
        """Once all ranks can be asked, and kernels are there."""
        self.until(lambda: self.steps.ready == len(self.links))
        self.steps.compile_kernels()
        return self

    def begin(self, row, length, keep, like=None, first=0):
        """A request with a copy that leads to its newest tokens, or holds them; its ``first`` tokens are those of the row ``like``."""
        width = self.table.shape[1]
        self.table[row] = torch.randperm(CONTEXT_SLOTS, generator=torch.Generator().manual_seed(row))[:width].int()
        if like is not None:
            self.table[row, :first] = self.table[like, :first]
        self.prompts[row] = [*self.prompts.get(like, ())][:first] + [1000 * row + token for token in range(first, length)]
        self._given.pop(row, None)
        count = self.method.packing.held_slots(keep)
        own = torch.arange(self.next_slot, self.next_slot + count, device=self.device)
        self.next_slot += count
        packed = self.method.packing.packed_slots(keep)
        self.copies[row] = CompressedKV(own, length, own_tokens=keep, own_packed=packed, back_slots=own[:0], method="spade")
        newest = torch.arange(length - keep, length, device=self.device).expand(LAYERS, HEADS, -1)
        self.method.packing.write(self.buffers, newest, self.table[row, :length].long(), own)
        if self.rows:
            self.steps.on_compressed(row, length, newest)
        self.ends[row] = length

    def renew(self, row, keep):
        """A copy of rows stands for all tokens of its request, and holds ``keep`` of each head; whether its rank was sent them."""
        view, end = self.copies[row], self.ends[row]
        slots = self.table[row, :end].long()
        if not self.steps.extend(row, slots):
            return False
        self.steps.flush(row)
        more = torch.arange(self.next_slot, self.next_slot + keep - len(view.own), device=self.device)
        self.next_slot += len(more)
        view.own, view.covered, view.own_tokens = torch.cat([view.own, more]), end, keep
        self.buffers.move_newest(self.steps.plan_refresh(row, end, keep), slots, view.own)
        return True

    def leave(self, row):
        """A request is gone."""
        self.steps.flush(row), self.steps.forget(row), self.queries.forget(row)
        self.copies.pop(row), self.ends.pop(row)

    def give_back(self, row):
        """Full KV of what a copy stands for is overwritten, as others' would be."""
        self.steps.on_slots_freed(row, is_remote_only=True)
        self._given[row] = self.context(row)[: self.copies[row].covered]
        slots = self.table[row, : self.copies[row].covered].long()
        for part in (*self.buffers.keys, *self.buffers.values):
            part[slots] = float("nan")
        self.table[row, : self.copies[row].covered] = 0

    def step(self, rows=None, following=None):
        """One token of each request: its queries, then what steps do."""
        rows = rows or [*self.copies]
        self.steps.on_round_start(1, 1)
        recorded = tuple(RecordedRows(row, i, i + 1, self.ends[row]) for i, row in enumerate(rows))
        watch = self.steps.observe_step(self.compressed_kv, {row: self.ends[row] + 1 for row in rows}, following)
        with self.queries.recording(recorded, watch):
            for layer in range(LAYERS):
                of_layer = torch.stack([self.query(row, self.ends[row])[layer] for row in rows])
                self.queries.record(layer, of_layer.to(self.device, non_blocking=True))
        for row in rows:
            self.ends[row] += 1
        self.steps.on_step_end(self.compressed_kv, {row: self.ends[row] for row in rows}, following)

    def query(self, row, position):
        """Of a token: [layers, query_heads, dim]."""
        noise = torch.Generator().manual_seed(1000 * row + position)
        return torch.randn(LAYERS, HEADS * GROUP, DIM, generator=noise) * 3

    def led(self, row):
        """Slots to which a copy leads: int64 [layers, kv_heads, keep]."""
        view = self.copies[row]
        if self.rows:
            return self.context(row)[self.positions(row)]
        return torch.stack([self.pointers.read(keys, view.own, view.own_tokens) for keys in self.buffers.keys]).cpu()

    def context(self, row):
        """Where full KV of a request lies, or lay: int64."""
        found, given = self.table[row].long().cpu(), self._given.get(row, ())
        found[: len(given)] = torch.as_tensor(given, dtype=torch.int64)
        return found

    def positions(self, row):
        """Of what a copy of rows holds, ascending: int64 [layers, kv_heads, keep]; each slot holds the row that its record says."""
        view, record = self.copies[row], self.steps._records[row].positions.cpu().long()
        assert all(len(each.unique()) == len(each) for each in record.flatten(0, 1)) and record.min() >= 0
        slots, heads = self.context(row)[record], torch.arange(HEADS)[:, None]
        for there, here in ((self.buffers.keys, self.on_host.keys), (self.buffers.values, self.on_host.values)):
            for layer in range(LAYERS):
                found = there[layer][view.own].cpu().transpose(0, 1)
                assert torch.equal(found, here[layer][slots[layer], heads])
        return record.sort(-1).values

    def scores(self, row, end, begun):
        """Of the tokens of a copy, by the queries from position ``begun`` to before ``end``: float32 [layers, kv_heads, covered]."""
        view = self.copies[row]
        since = max(begun, end - self.predictor.window)
        window = torch.stack([self.query(row, position) for position in range(since, end)], 2)
        (predicted,) = self.predictor.predict(window[None], torch.arange(since, end)[None], ROTARY, self.ahead)
        slots = self.context(row)[: view.covered]
        layers = zip(predicted, self.on_host.keys, self.on_host.scaling)
        found = [attention(query[None], keys[slots], scaling) for query, keys, scaling in layers]
        return mark_always(torch.stack(found), self.method.compressor.sinks, self.method.compressor.recent)

    def score_in_bits(self, bits):
        """Let :meth:`scores` be by what codes of so many bits mean, as a rank holds them."""
        keys = self.on_host.keys
        held, places = QuantizedKeys(KeySpec(LAYERS, HEADS, DIM, keys[0].dtype, bits), len(keys[0])), torch.arange(len(keys[0]))
        held.write(places, torch.stack(keys))
        self.on_host = replace(self.on_host, keys=tuple(held.read(layer, places) for layer in range(LAYERS)))

    def chosen(self, row, end, begun):
        """Slots to which the copy is to lead by these: int64 [layers, kv_heads, keep]."""
        view, scores = self.copies[row], self.scores(row, end, begun)
        kept = scores.topk(view.own_tokens, dim=-1).indices.sort(dim=-1).values
        return self.context(row)[kept]

    def overlap(self, row, end, begun):
        """Share of what the copy leads to that is chosen by the queries before ``end``."""
        wanted, led = self.chosen(row, end, begun), self.led(row)
        return float((led[..., :, None] == wanted[..., None, :]).any(-1).float().mean())


def scripted_world(pack=5, **flags):
    """Requests whose rank answers as a test says, by packs of layers; and that rank, which is ready."""
    world = RankWorld(pack=pack, places=16, patience=0.0, start_process=ScriptedRank, **flags)
    world.steps.poll()
    world.until(lambda: (ScriptedRank.made[-1].hear(), world.steps.ready)[1])
    return world, ScriptedRank.made[-1]
