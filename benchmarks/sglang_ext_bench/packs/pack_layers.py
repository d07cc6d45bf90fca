"""Some layers of a model with random weights and full KV of contexts, for pack_cycles.py: how long they take, and queries of steps."""

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from sglang_ext_bench.packs.decoder_layer import Norms, activated, add_normalized, store, turn_heads
from sglang_ext_bench.kernels.graph_time import seconds
from torch.nn.functional import linear, scaled_dot_product_attention

from sglang_ext.layers.attention.compressed.per_head import pointer_split_counts
from sglang_ext.layers.kernels.pointer_decode import pointer_decode
from sglang_ext.managers.cache_rank.protocol import BLOCK
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.pointers import PointerLayout, Pointers
from sglang_ext.mem_cache.compressors.spade import Spade, attention
from sglang_ext.mem_cache.selection.top_tokens import overlap, top_tokens

# Tokens after a copy.
AFTER = 36


class Model(NamedTuple):
    """Shapes of a layer; ``packs``: layers of those that are measured where the command line names none."""

    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    dim: int
    packs: tuple[int, ...]

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Queries, keys and values; what joins heads; both that widen, and the one that narrows."""
        heads, joined = self.query_heads * self.dim, (self.query_heads + 2 * self.kv_heads) * self.dim
        return (self.hidden, joined), (heads, self.hidden), (self.hidden, 2 * self.intermediate), (self.intermediate, self.hidden)


MODELS = {
    "qwen3-8b": Model(4096, 12288, 32, 8, 128, (6, 12)),
    "qwen3-32b": Model(5120, 25600, 64, 8, 128, (4, 8)),
    "tiny": Model(64, 96, 6, 2, 16, (2,)),
}


class Load(NamedTuple):
    """Requests at once, tokens of each, and how many of them each KV head selects."""

    batch: int
    tokens: int
    keep: int

    @classmethod
    def of(cls, text: str) -> "Load":
        """Of what the command line says; raises ArgumentTypeError where it is none."""
        numbers = text.split(":")
        if len(numbers) != 3 or not all(each.isdecimal() for each in numbers):
            raise ArgumentTypeError(f"{text}: requests, tokens of each, and tokens that a head selects, as in 8:32768:2048")
        found = cls(*map(int, numbers))
        if not found.batch or not 0 < found.keep <= found.tokens:
            raise ArgumentTypeError(f"{text}: of each request a head selects 1 to all of its tokens")
        return found

    @property
    def blocks(self) -> int:
        """That a rank has of a request."""
        return -(-self.tokens // BLOCK)


class Layers:
    """Some layers of a model: full KV of contexts, and slots for copies after it.

    Args:
        name: of the model.
        count: of layers.
        loads: of requests.
        device: where all lies; on a GPU in bfloat16, on a CPU in float32.

    Attributes:
        model: its shapes.
        buffers: slot 0 is nobody's, then contexts follow one another, each of whole blocks, then copies.
        contexts: tokens for which there are slots.
    """

    def __init__(self, name: str, count: int, loads: Sequence[Load], device: torch.device):
        self.name, self.model, self.count, self.loads, self.device = name, MODELS[name], count, loads, device
        self.like = {"dtype": torch.bfloat16 if device.type == "cuda" else torch.float32, "device": device}
        self.contexts = max(load.batch * load.blocks * BLOCK for load in self.loads)
        slots = 1 + self.contexts + max(load.batch * (load.keep + AFTER) for load in self.loads)
        keys, values = (
            tuple(torch.randn(slots, self.model.kv_heads, self.model.dim, **self.like) for _ in range(count)) for _ in "kv"
        )
        self.scaling = self.model.dim**-0.5
        self.buffers = KVBuffers(tuple(range(count)), (self.scaling,) * count, keys, values)
        # As large as numbers stay from layer to layer.
        self._weights = [[torch.randn(out, width, **self.like) / width**0.5 for width, out in self.model.matrices] for _ in range(count)]

    @property
    def frequencies(self) -> torch.Tensor:
        """Of rotary embedding: float32 [dim / 2]."""
        pairs = self.model.dim // 2
        return 1e6 ** -(torch.arange(pairs, device=self.device) / pairs)

    @property
    def context_slots(self) -> torch.Tensor:
        """Of all contexts: int64."""
        return torch.arange(1, 1 + self.contexts, device=self.device)

    def table(self, load: Load) -> torch.Tensor:
        """Where contexts lie: int32 [batch, tokens]."""
        slots = self.context_slots[: load.batch * load.blocks * BLOCK]
        return slots.view(load.batch, -1)[:, : load.tokens].int().contiguous()

    def copies(self, load: Load) -> torch.Tensor:
        """Where copies lie, and the tokens after them: int64 [batch, keep + AFTER]."""
        first = 1 + self.contexts
        return torch.arange(first, first + load.batch * (load.keep + AFTER), device=self.device).view(load.batch, -1)

    def drop_weights(self) -> None:
        """Their memory is free from now on."""
        self._weights = []

    def inference(self, load: Load) -> float:
        """Seconds of a step of these layers: of all that a decoder layer computes, and queries that it leaves for the rank."""
        model, table = self.model, self.copies(load).int()
        hidden, residual = (torch.randn(load.batch, model.hidden, **self.like) for _ in range(2))
        norms = Norms(*(torch.ones(width, **self.like) for width in (model.hidden, model.hidden, model.dim, model.dim)))
        turns = torch.arange(load.tokens + 1, device=self.device)[:, None] * self.frequencies
        angles, positions = torch.cat([turns.cos(), turns.sin()], -1), torch.full((load.batch,), load.tokens, device=self.device)
        heads, newest = (model.query_heads, model.kv_heads, model.kv_heads), table[:, -1].long()
        left = torch.zeros(load.batch, model.query_heads, model.dim, **self.like)
        # As copies of rows are attended to (SentRowsDecode): they begin with no pointers.
        begins, rows = PointerLayout.for_table(Pointers.for_pool(self.buffers, 1), table), torch.arange(load.batch, device=self.device)
        lengths, splits = torch.full_like(rows, table.shape[1]), (1, sum(pointer_split_counts(load.batch * model.kv_heads)) - 1)

        def attended(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            if self.device.type == "cuda":
                return pointer_decode(begins, queries, keys, values, table, rows, lengths, self.scaling, splits)
            read = (part[table.long()].transpose(1, 2) for part in (keys, values))
            return scaled_dot_product_attention(queries[:, :, None], *read, enable_gqa=True)

        def step() -> None:
            given = hidden
            for (joined, out, wide, narrow), *kv in zip(self._weights, self.buffers.keys, self.buffers.values):
                add_normalized(given, residual, norms.attention)
                queries, *new = linear(given, joined).view(load.batch, -1, model.dim).split(heads, 1)
                turn_heads(queries, new[0], norms, angles, positions)
                store(*new, *kv, newest)
                left.index_copy_(0, rows, queries)
                given = linear(attended(queries, *kv).reshape(load.batch, -1), out)
                add_normalized(given, residual, norms.feed_forward)
                given = linear(activated(linear(given, wide)), narrow)

        return timed(step, self.device)

    def persistence(self, load: Load, stay: float, samples: int = 16) -> float:
        """How much of a query the next one has, so that so much of a selection stays: found on some queries of the first context."""
        keys, method = self.buffers.keys[0][1 : 1 + load.tokens], Spade()
        before, noise = (torch.randn(samples, self.model.query_heads, self.model.dim, **self.like) for _ in range(2))

        def kept(queries: torch.Tensor) -> torch.Tensor:
            scores = torch.stack([attention(each[None].to(keys.dtype), keys, self.scaling) for each in queries])
            return top_tokens(scores[None], load.keep, method.sinks, method.recent)

        low, high, at_first = 0.0, 1.0, kept(before)
        for _ in range(12):
            middle = (low + high) / 2
            stays = overlap(kept(next_query(before, noise, middle)), at_first, load.tokens).mean() > stay
            low, high = (low, middle) if stays else (middle, high)
        return high


class Queries:
    """Of each request the newest queries, which change from step to step.

    Args:
        layers: whose they are.
        load: requests.
        window: that a choice reads.
        persistence: as :meth:`Layers.persistence` has it.

    Attributes:
        pool: [layers, places, query_heads, dim].
        step: of the newest.
    """

    def __init__(self, layers: Layers, load: Load, window: int, persistence: float):
        self._window, self._persistence, self.step = window, persistence, load.tokens - 1
        of_all = layers.count, load.batch * window, layers.model.query_heads, layers.model.dim
        self.pool = torch.randn(of_all, **layers.like)
        self._newest = self.pool[:, ::window].clone()
        for _ in range(window):
            self.next()

    def next(self) -> None:
        """Those of the next step."""
        self.step += 1
        self._newest = next_query(self._newest, torch.randn_like(self._newest), self._persistence)
        self.pool[:, self.step % self._window :: self._window] = self._newest

    @property
    def positions(self) -> tuple[int, ...]:
        """Of those of each request, oldest first."""
        return tuple(range(self.step - self._window + 1, self.step + 1))

    def places(self, request: int) -> list[int]:
        """In the pool, oldest first."""
        return [request * self._window + position % self._window for position in self.positions]


def next_query(query: torch.Tensor, noise: torch.Tensor, persistence: float) -> torch.Tensor:
    """Of the same size."""
    return (persistence * query.float() + math.sqrt(1 - persistence**2) * noise.float()).to(query.dtype)


def timed(run: Callable[[], None], device: torch.device) -> float:
    """Seconds, of a graph on a GPU."""
    if device.type == "cuda":
        return seconds(run)
    run()
    times = []
    for _ in range(5):
        begun = perf_counter()
        run()
        times.append(perf_counter() - begun)
    return median(times)
