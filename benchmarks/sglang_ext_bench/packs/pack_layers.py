"""Layers of a model with random weights and the full KV of contexts: the time of a decode step, and the queries of successive steps.

On a GPU, a layer computes what SGLang computes in a Qwen3 decoder layer, with SGLang's kernels. On a CPU, PyTorch computes the same.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from sglang_ext.layers.attention.per_head import pointer_split_counts
from sglang_ext.layers.kernels.per_head_decode import pointer_decode
from sglang_ext.managers.cache_rank.protocol import BLOCK
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.pointers import PointerLayout, Pointers
from sglang_ext.mem_cache.compressors.step_selectors import Spade, attention
from sglang_ext.mem_cache.selection.scoring import top_tokens
from sglang_ext.tools import CommandError
from sglang_ext_bench.baselines.scorings import overlap
from sglang_ext_bench.kernels.options import parse_group, positive_int
from sglang_ext_bench.kernels.timing import graph_seconds, wall_seconds

# Exact tokens after the selected ones.
TAIL = 36
EPSILON = 1e-6
CPU_REPEATS = 5
# Halvings of the interval in which the persistence of queries is searched, and queries for which it is tried.
SEARCH_STEPS, SEARCH_QUERIES = 12, 16


class LayerShape(NamedTuple):
    """Shapes of a model's layers.

    Attributes:
        hidden: Width of the hidden states.
        intermediate: Width of the feed-forward network.
        query_heads: Query heads of a layer.
        kv_heads: KV heads of a layer.
        dim: Channels of a head.
        packs: Default numbers of layers in a pack.
    """

    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    dim: int
    packs: tuple[int, ...]

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Input and output widths of the QKV projection, the output projection, the gate and up projection, and the down projection."""
        heads, qkv = self.query_heads * self.dim, (self.query_heads + 2 * self.kv_heads) * self.dim
        return (self.hidden, qkv), (heads, self.hidden), (self.hidden, 2 * self.intermediate), (self.intermediate, self.hidden)


MODELS = {
    "qwen3-8b": LayerShape(4096, 12288, 32, 8, 128, (6, 12)),
    "qwen3-32b": LayerShape(5120, 25600, 64, 8, 128, (4, 8)),
    "tiny": LayerShape(64, 96, 6, 2, 16, (2,)),
}


class Load(NamedTuple):
    """Requests of a batch.

    Attributes:
        batch: Number of requests.
        tokens: Tokens of each context.
        keep: Tokens that each KV head selects.
    """

    batch: int
    tokens: int
    keep: int

    @classmethod
    def parse(cls, text: str) -> "Load":
        """Parse ``BATCH:TOKENS:SELECTED``, for example ``8:32768:2048``.

        Raises:
            CommandError: The text has another form, or more tokens are selected than there are.
        """
        found = cls(*parse_group(text, "--load", {"batch": positive_int, "tokens": positive_int, "selected": positive_int}, ":"))
        if found.keep > found.tokens:
            raise CommandError(f"--load {text}: {found.keep} tokens are selected of {found.tokens}; pass at most all of them")
        return found

    @property
    def blocks(self) -> int:
        """Blocks that a cache rank holds for a request."""
        return -(-self.tokens // BLOCK)


class Norms(NamedTuple):
    """Weights of a layer's norms.

    Attributes:
        attention: Before attention, [hidden].
        feed_forward: Before the feed-forward network, [hidden].
        queries: Of each query head, [dim].
        keys: Of each key head, [dim].
    """

    attention: torch.Tensor
    feed_forward: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor


class LayerPack:
    """Some layers of a model, the full KV of contexts, and slots for compressed KV.

    Args:
        name: Name of the model, from :data:`MODELS`.
        count: Number of layers.
        loads: Batches for which there are slots.
        device: Device of all tensors. The dtype is bfloat16 on a GPU and float32 on a CPU.

    Attributes:
        name: Name of the model.
        model: Its shapes.
        count: Number of layers.
        loads: The batches.
        device: Device of all tensors.
        options: dtype and device, as keyword arguments for a new tensor.
        num_context_slots: Slots of contexts, in whole blocks.
        scaling: Factor on query-key products.
        buffers: Keys and values. Slot 0 is unused; the contexts follow, then the compressed KV.
    """

    def __init__(self, name: str, count: int, loads: Sequence[Load], device: torch.device) -> None:
        self.name, self.model, self.count, self.loads, self.device = name, MODELS[name], count, loads, device
        self.options = {"dtype": torch.bfloat16 if device.type == "cuda" else torch.float32, "device": device}
        self.num_context_slots = max(load.batch * load.blocks * BLOCK for load in self.loads)
        slots = 1 + self.num_context_slots + max(load.batch * (load.keep + TAIL) for load in self.loads)
        keys, values = (
            tuple(torch.randn(slots, self.model.kv_heads, self.model.dim, **self.options) for _ in range(count)) for _ in "kv"
        )
        self.scaling = self.model.dim**-0.5
        self.buffers = KVBuffers(tuple(range(count)), (self.scaling,) * count, keys, values)
        # The division keeps the size of hidden states equal from layer to layer.
        self._weights = [[torch.randn(out, width, **self.options) / width**0.5 for width, out in self.model.matrices] for _ in range(count)]

    @property
    def frequencies(self) -> torch.Tensor:
        """Frequencies of the rotary embedding, float32 [dim / 2]."""
        pairs = self.model.dim // 2
        return 1e6 ** -(torch.arange(pairs, device=self.device) / pairs)

    @property
    def context_slots(self) -> torch.Tensor:
        """Slots of all contexts, int64."""
        return torch.arange(1, 1 + self.num_context_slots, device=self.device)

    def context_table(self, load: Load) -> torch.Tensor:
        """Return the slots of each context, int32 [batch, tokens]."""
        slots = self.context_slots[: load.batch * load.blocks * BLOCK]
        return slots.view(load.batch, -1)[:, : load.tokens].int().contiguous()

    def compressed_slots(self, load: Load) -> torch.Tensor:
        """Return the slots of each request's compressed KV and of the tokens after it, int64 [batch, keep + TAIL]."""
        first = 1 + self.num_context_slots
        return torch.arange(first, first + load.batch * (load.keep + TAIL), device=self.device).view(load.batch, -1)

    def free_weights(self) -> None:
        """Free the memory of the weights."""
        self._weights = []

    def inference_seconds(self, load: Load) -> float:
        """Return the seconds of a decode step of these layers, including the queries that are stored for the cache rank."""
        model, table = self.model, self.compressed_slots(load).int()
        hidden, residual = (torch.randn(load.batch, model.hidden, **self.options) for _ in range(2))
        norms = Norms(*(torch.ones(width, **self.options) for width in (model.hidden, model.hidden, model.dim, model.dim)))
        angles = torch.arange(load.tokens + 1, device=self.device)[:, None] * self.frequencies
        cos_sin, positions = torch.cat([angles.cos(), angles.sin()], -1), torch.full((load.batch,), load.tokens, device=self.device)
        heads, newest = (model.query_heads, model.kv_heads, model.kv_heads), table[:, -1].long()
        stored_queries = torch.zeros(load.batch, model.query_heads, model.dim, **self.options)
        # With received rows, compressed KV has no pointers (SentRowsDecode).
        layout, rows = PointerLayout.for_table(Pointers.for_pool(self.buffers, 1), table), torch.arange(load.batch, device=self.device)
        lengths, splits = torch.full_like(rows, table.shape[1]), (1, sum(pointer_split_counts(load.batch * model.kv_heads)) - 1)

        def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            if self.device.type == "cuda":
                return pointer_decode(layout, queries, keys, values, table, rows, lengths, self.scaling, splits)
            read = (part[table.long()].transpose(1, 2) for part in (keys, values))
            return scaled_dot_product_attention(queries[:, :, None], *read, enable_gqa=True)

        def step() -> None:
            states = hidden
            for (qkv, out, gate_up, down), *kv in zip(self._weights, self.buffers.keys, self.buffers.values):
                add_and_normalize(states, residual, norms.attention)
                queries, *new_kv = linear(states, qkv).view(load.batch, -1, model.dim).split(heads, 1)
                rotate_heads(queries, new_kv[0], norms, cos_sin, positions)
                store_kv(*new_kv, *kv, newest)
                stored_queries.index_copy_(0, rows, queries)
                states = linear(attend(queries, *kv).reshape(load.batch, -1), out)
                add_and_normalize(states, residual, norms.feed_forward)
                states = linear(gated_silu(linear(states, gate_up)), down)

        return graph_seconds(step) if self.device.type == "cuda" else wall_seconds(step, "cpu", CPU_REPEATS)

    def find_persistence(self, load: Load, stay: float) -> float:
        """Return the share of a query that the next query keeps, so that a share ``stay`` of the selected tokens stays selected.

        It is found by bisection, for some queries of the first context.
        """
        keys, method = self.buffers.keys[0][1 : 1 + load.tokens], Spade()
        before, noise = (torch.randn(SEARCH_QUERIES, self.model.query_heads, self.model.dim, **self.options) for _ in range(2))

        def select(queries: torch.Tensor) -> torch.Tensor:
            scores = torch.stack([attention(each[None].to(keys.dtype), keys, self.scaling) for each in queries])
            return top_tokens(scores[None], load.keep, method.sinks, method.recent)

        low, high, selected = 0.0, 1.0, select(before)
        for _ in range(SEARCH_STEPS):
            middle = (low + high) / 2
            enough = overlap(select(next_query(before, noise, middle)), selected, load.tokens).mean() > stay
            low, high = (low, middle) if enough else (middle, high)
        return high


class QueryStream:
    """The newest queries of each request, which change from step to step.

    Args:
        pack: The layers.
        load: The requests.
        window: Number of queries that a selection reads.
        persistence: Share of a query that the next query keeps, as :meth:`LayerPack.find_persistence` returns it.

    Attributes:
        pool: The queries, [layers, places, query_heads, dim].
        step: Position of the newest query.
    """

    def __init__(self, pack: LayerPack, load: Load, window: int, persistence: float) -> None:
        self._window, self._persistence, self.step = window, persistence, load.tokens - 1
        self.pool = torch.randn(pack.count, load.batch * window, pack.model.query_heads, pack.model.dim, **pack.options)
        self._newest = self.pool[:, ::window].clone()
        for _ in range(window):
            self.advance()

    def advance(self) -> None:
        """Create the queries of the next step."""
        self.step += 1
        self._newest = next_query(self._newest, torch.randn_like(self._newest), self._persistence)
        self.pool[:, self.step % self._window :: self._window] = self._newest

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of each request's queries, oldest first."""
        return tuple(range(self.step - self._window + 1, self.step + 1))

    def places(self, request: int) -> list[int]:
        """Return the places of a request's queries in the pool, oldest first."""
        return [request * self._window + position % self._window for position in self.positions]


def next_query(query: torch.Tensor, noise: torch.Tensor, persistence: float) -> torch.Tensor:
    """Mix queries with noise. The result has the same variance."""
    return (persistence * query.float() + math.sqrt(1 - persistence**2) * noise.float()).to(query.dtype)


def add_and_normalize(hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    """Add ``hidden`` to ``residual`` in place, and set ``hidden`` to the RMS norm of the sum. Both are [tokens, width]."""
    if hidden.is_cuda:
        # RMSNorm.forward_cuda launches this kernel.
        from sglang.srt.layers.layernorm import fused_add_rmsnorm

        fused_add_rmsnorm(hidden, residual, weight, EPSILON)
        return
    residual += hidden
    hidden.copy_(rms_norm(residual, weight.shape, weight, EPSILON))


def rotate_heads(queries: torch.Tensor, keys: torch.Tensor, norms: Norms, cos_sin: torch.Tensor, positions: torch.Tensor) -> None:
    """Normalize heads and apply the rotary embedding, in place.

    Args:
        queries: [tokens, query_heads, dim].
        keys: [tokens, kv_heads, dim].
        norms: Weights of the norms.
        cos_sin: Cosines, then sines, float32 [positions, dim].
        positions: Position of each token, int64 [tokens].
    """
    if queries.is_cuda:
        from sglang.kernels.ops.attention.rope import apply_rope_with_cos_sin_cache_inplace
        from sglang.kernels.ops.layernorm.norm import fused_inplace_qknorm

        fused_inplace_qknorm(queries, keys, norms.queries, norms.keys, EPSILON)
        apply_rope_with_cos_sin_cache_inplace(queries, keys, cos_sin, positions, is_neox=True)
        return
    cosines, sines = cos_sin[positions, None].chunk(2, -1)
    for heads, weight in ((queries, norms.queries), (keys, norms.keys)):
        first, second = rms_norm(heads, weight.shape, weight, EPSILON).chunk(2, -1)
        heads.copy_(torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1))


def store_kv(keys: torch.Tensor, values: torch.Tensor, key_buffer: torch.Tensor, value_buffer: torch.Tensor, slots: torch.Tensor) -> None:
    """Write keys and values of tokens, [tokens, heads, dim], to the slots of their buffers, int64 [tokens]."""
    if keys.is_cuda:
        from sglang.kernels.ops.kvcache.kvcache import store_cache

        store_cache(*(part.flatten(1) for part in (keys, values, key_buffer, value_buffer)), slots)
        return
    key_buffer[slots], value_buffer[slots] = keys, values


def gated_silu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return SiLU of the first half of the columns, [tokens, 2 * width], times the second half."""
    if gate_up.is_cuda:
        from sglang.kernels.ops.activation import silu_and_mul

        return silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up
