"""A cache rank with an arena in a process of its own, on a CPU or a GPU, and requests of a made-up model whose steps ask it."""

import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import torch
from rank_helpers import DIM, GROUP, HEADS, LAYERS, ROTARY, attach, pool

from sglang_ext.core import CompressedView
from sglang_ext.managers.cache_rank.on_gpu.arena import Arena
from sglang_ext.managers.cache_rank.on_gpu.device_start import linked
from sglang_ext.managers.cache_rank.on_gpu.rank_steps import RankSteps
from sglang_ext.mem_cache.compressed.copy_method import CopyMethod
from sglang_ext.mem_cache.compressed.formats.slot_pointers import Pointers
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.query_window import QueryWindows, Recorded
from sglang_ext.mem_cache.compressors.spade import Spade, attention
from sglang_ext.mem_cache.selection.held_keys import KeySizes, held_keys
from sglang_ext.mem_cache.selection.predictors import Current
from sglang_ext.mem_cache.selection.top_tokens import mark_always

# Slots of the made-up pool, of contexts; those after them hold pointers.
CONTEXT_SLOTS = 800


class RankWorld:
    """Requests with copies of pointers, and the rank that chooses for their steps.

    Args:
        device, rank_device: of the pool, and of the rank.
        patience: seconds that a step waits at most.
        predictor, every: of the method.
        silence: seconds after which a rank that says nothing is ended.
        flags: of what ranks are told, as ``rank_helpers.attach`` takes them.
    """

    def __init__(
        self, device="cpu", rank_device="cpu", patience=20.0, predictor=Current(), every=1, silence=10.0, count=1, **flags
    ):
        self.device, self.predictor, self.every = torch.device(device), predictor, every
        told = attach(predictor=predictor.name, window=predictor.window, **flags)
        there = pool()
        self.on_host = there
        keys, values = (tuple(part.to(self.device, copy=True) for part in kind) for kind in (there.keys, there.values))
        self.buffers = KVBuffers(there.layer_ids, there.scaling, keys, values)
        self.pointers = Pointers.of(self.buffers, 1)
        self.method = CopyMethod(Spade(predictor, every, each_round=False), 0.25, self.pointers)
        self.table = torch.zeros(8, 500, dtype=torch.int32, device=self.device)
        self.queries = QueryWindows(predictor.window, range(LAYERS), max(4, every))
        self.queries.allocate(6, HEADS * GROUP, DIM, torch.empty(0, device=self.device))
        arenas = [Arena(told.shape, self.device, rank_device) for _ in range(count)]
        self.links = [linked(told, arena, silence) for arena in arenas]
        self.arenas = arenas
        self.steps = RankSteps(self.links, arenas, self.method, self.table, self.buffers, self.queries, patience)
        self.copies, self.ends, self._free = {}, {}, CONTEXT_SLOTS
        self.views = SimpleNamespace(get=self.copies.get, made=Counter())

    def until(self, holds, seconds=90.0):
        """Tend the ranks until something holds."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, f"nothing of it after {seconds} s; missed: {dict(self.steps.missed)}"
            self.steps.tend()
            time.sleep(0.01)

    def ready(self):
        """Once all ranks can be asked, and kernels are there."""
        self.until(lambda: self.steps.ready == len(self.links))
        self.steps.compile_kernels()
        return self

    def begin(self, row, length, keep):
        """A request with a copy that leads to its newest tokens."""
        self.table[row, :length] = torch.randperm(CONTEXT_SLOTS, generator=torch.Generator().manual_seed(row))[:length].int()
        count = self.pointers.packed_slots(keep)
        own = torch.arange(self._free, self._free + count, device=self.device)
        self._free += count
        self.copies[row] = CompressedView(own, length, own_tokens=keep, own_packed=count, spare=own[:0], method="spade")
        newest = torch.arange(length - keep, length, device=self.device).expand(LAYERS, HEADS, -1)
        self.pointers.write(self.buffers, newest, self.table[row, :length].long(), own)
        self.ends[row] = length

    def step(self, rows=None, following=None):
        """One token of each request: its queries, then what steps do."""
        rows = rows or [*self.copies]
        recorded = tuple(Recorded(row, i, i + 1, self.ends[row]) for i, row in enumerate(rows))
        with self.queries.recording(recorded):
            for layer in range(LAYERS):
                of_layer = torch.stack([self.query(row, self.ends[row])[layer] for row in rows])
                self.queries.record(layer, of_layer.to(self.device, non_blocking=True))
        for row in rows:
            self.ends[row] += 1
        self.steps.stepped(self.views, {row: self.ends[row] for row in rows}, following)

    def query(self, row, position):
        """Of a token: [layers, query_heads, dim]."""
        noise = torch.Generator().manual_seed(1000 * row + position)
        return torch.randn(LAYERS, HEADS * GROUP, DIM, generator=noise) * 3

    def led(self, row):
        """Slots to which a copy leads: int64 [layers, kv_heads, keep]."""
        view = self.copies[row]
        return torch.stack([self.pointers.read(keys, view.own, view.own_tokens) for keys in self.buffers.keys]).cpu()

    def scores(self, row, end, begun):
        """Of the tokens of a copy, by the queries from position ``begun`` to before ``end``: float32 [layers, kv_heads, covered]."""
        view = self.copies[row]
        since = max(begun, end - self.predictor.window)
        window = torch.stack([self.query(row, position) for position in range(since, end)], 2)
        (predicted,) = self.predictor.predict(window[None], torch.arange(since, end)[None], ROTARY, self.every + 1)
        slots = self.table[row, : view.covered].long().cpu()
        layers = zip(predicted, self.on_host.keys, self.on_host.scaling)
        found = [attention(query[None], keys[slots], scaling) for query, keys, scaling in layers]
        return mark_always(torch.stack(found), self.method.compressor.sinks, self.method.compressor.recent)

    def score_in_bits(self, bits):
        """Let :meth:`scores` be by what codes of so many bits mean, as a rank holds them."""
        keys = self.on_host.keys
        held, places = held_keys(KeySizes(LAYERS, HEADS, DIM, keys[0].dtype, bits), len(keys[0])), torch.arange(len(keys[0]))
        held.write(0, torch.stack(keys))
        self.on_host = replace(self.on_host, keys=tuple(held.read(layer, places) for layer in range(LAYERS)))

    def chosen(self, row, end, begun):
        """Slots to which the copy is to lead by these: int64 [layers, kv_heads, keep]."""
        view, scores = self.copies[row], self.scores(row, end, begun)
        kept = scores.topk(view.own_tokens, dim=-1).indices.sort(dim=-1).values
        return self.table[row].long().cpu()[kept]

    def overlap(self, row, end, begun):
        """Share of what the copy leads to that is chosen by the queries before ``end``."""
        wanted, led = self.chosen(row, end, begun), self.led(row)
        return float((led[..., :, None] == wanted[..., None, :]).any(-1).float().mean())
