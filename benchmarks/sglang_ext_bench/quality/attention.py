"""Relative error of attention outputs on compressed KV, computed with the compressors in this process."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch

from sglang_ext.layers.attention.packed import packed_attention
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.base import PlainSlots
from sglang_ext.mem_cache.compressed.layouts.block_layout import Grid, token_seeds
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors import Compressor, ContextKV, Part, kept_count
from sglang_ext.mem_cache.compressors.catalogue import MethodSpec, method
from sglang_ext.mem_cache.compressors.quantizer import Quantizer
from sglang_ext_bench.prompts import Prompt
from sglang_ext_bench.quality.capture import CapturedModel, LayerAttention
from sglang_ext_bench.quality.named_method import NamedMethod
from sglang_ext_bench.quality.options import Tail

SEED = 0
"""Seed of the noise in the rounding of tail values."""
DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class AttentionError:
    """Relative errors ||o_compressed - o_full|| / ||o_full|| of attention outputs, over all heads of a layer.

    They are measured at the tokens after the prompts.

    Attributes:
        compressor: The method, as in ``--compressor``.
        budget: Share of the tokens that are kept.
        mean_by_layer: Mean over tokens and prompts, by layer.
        worst_by_layer: Largest error of all tokens and prompts, by layer.
        tail: How values that fill no partition are stored.
    """

    compressor: str
    budget: float
    mean_by_layer: tuple[float, ...]
    worst_by_layer: tuple[float, ...]
    tail: Tail = "exact"

    @property
    def mean(self) -> float:
        """Mean over all layers."""
        return statistics.fmean(self.mean_by_layer)

    @property
    def worst(self) -> float:
        """Largest error of all layers."""
        return max(self.worst_by_layer)


def measure_errors(
    model: CapturedModel,
    prompts: Sequence[Prompt],
    compressors: Sequence[str],
    budgets: Sequence[float],
    tokens: int,
    tails: Sequence[Tail] = ("exact",),
) -> Iterator[AttentionError]:
    """Measure the errors of each compressor, budget and tail at the greedy continuation of each prompt.

    Every layer gets the queries of the full KV, so that errors of earlier layers do not add up.

    Args:
        model: The model.
        prompts: The prompts.
        compressors: Methods, as in ``--compressor``.
        budgets: Shares of the tokens to keep.
        tokens: Tokens to generate for each prompt.
        tails: How values that fill no partition are stored. Methods without partitions use only "exact".
    """
    parsed = {name: NamedMethod.parse(name) for name in compressors}
    methods = {name: method(each.compressor, each.bits, each.partition) for name, each in parsed.items()}
    settings = [
        (name, budget, tail)
        for name in compressors
        for budget in parsed[name].budgets(budgets)
        for tail in (tails if has_partitions(methods[name]) else ("exact",))
    ]
    by_setting: dict[tuple[str, float, Tail], list[torch.Tensor]] = {setting: [] for setting in settings}
    for prompt in prompts:
        layers, length = model.attention(model.generate(prompt.input_ids, tokens)), len(prompt.input_ids)
        seeds = token_seeds(prompt.input_ids, length, DEVICE)
        for name, budget, tail in settings:
            found = relative_errors(layers, length, methods[name], budget, model.rotary, tail, seeds)
            by_setting[name, budget, tail].append(found)
    for (name, budget, tail), found in by_setting.items():
        errors = torch.cat(found, dim=1)
        mean, worst = errors.mean(dim=1).tolist(), errors.amax(dim=1).tolist()
        yield AttentionError(name, budget, tuple(mean), tuple(worst), tail)


def has_partitions(chosen: MethodSpec) -> bool:
    """Whether values share scales along partitions of tokens, so that the newest values may not fill a partition."""
    return chosen.quantizer is not None and chosen.quantizer.sums


def relative_errors(
    layers: Sequence[LayerAttention],
    prompt: int,
    chosen: MethodSpec,
    budget: float,
    rotary: Rotary | None = None,
    tail: Tail = "exact",
    seeds: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the errors at the tokens after a prompt.

    The prompt is compressed, except for the first and the newest tokens that a method keeps. These tokens and the tokens after
    the prompt are exact, as in a server.

    Args:
        layers: Queries, keys and values of the prompt and of the tokens after it.
        prompt: Tokens of the prompt.
        chosen: The method.
        budget: Share of the prompt that is kept.
        rotary: The model's rotary embedding, for methods that need it.
        tail: How values after the compressed tokens are stored. Only methods with partitions support a value other than "exact".
        seeds: int32 [prompt]. Seeds of methods with random rounding. None: round to the nearest.

    Returns:
        float32 [layers, tokens after the prompt].
    """
    context = build_context(layers, prompt, chosen.compressor, rotary)
    packing = PlainSlots(1) if chosen.quantizer is None else Packing.for_pool(chosen.quantizer, context.buffers, 1, rotary)
    sinks = packing.sinks
    count = max(0, prompt - packing.recent - sinks) // packing.unit * packing.unit
    covered = sinks + count
    (kept,) = chosen.compressor.select(context, [Part(sinks, covered, kept_count(count, budget, packing.unit))])
    held = packing.held_slots(kept.shape[-1])
    copies = torch.arange(held) + len(layers[0].keys)
    grown = replace(context.buffers, keys=_extend(context.buffers.keys, held), values=_extend(context.buffers.values, held))
    packing.write(grown, kept, context.slots, copies, seeds if chosen.quantizer is not None and chosen.quantizer.stochastic else None)
    row = torch.cat([copies, torch.arange(sinks), torch.arange(covered, len(layers[0].keys))])
    found = []
    for layer, keys, values in zip(layers, grown.keys, grown.values):
        queries = layer.queries[prompt:]
        full = attend(queries, layer.keys, layer.values, layer.scaling)
        if chosen.quantizer is None:
            compressed = attend(queries, keys[row], values[row], layer.scaling)
        elif tail == "exact":
            compressed = packed_attention(packing, queries, keys, values, row, held, layer.scaling)
        else:
            newest = TailValues(chosen.quantizer, layer.values[covered:], tail == "requantized")
            compressed = _attention_by_steps(packing, queries, keys, values, row, held, layer.scaling, newest)
        found.append((compressed - full).flatten(1).norm(dim=1) / full.flatten(1).norm(dim=1))
    return torch.stack(found)


def _attention_by_steps(
    packing: Packing,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    row: torch.Tensor,
    held: int,
    scaling: float,
    newest: "TailValues",
) -> torch.Tensor:
    """Compute :func:`packed_attention` token by token. Before each token, the state of ``newest`` is written to ``values``."""
    found, length = [], len(newest)
    states = islice(newest.states(length - len(queries)), 1, None)
    for query, state in zip(queries, states, strict=True):
        end = len(row) - length + len(state)
        values[row[end - len(state) : end]] = state.to(values.dtype)
        found.append(packed_attention(packing, query[None], keys, values, row[:end], held, scaling))
    return torch.cat(found)


def build_context(
    layers: Sequence[LayerAttention], prompt: int, compressor: Compressor, rotary: Rotary | None = None
) -> ContextKV:
    """The input of a compressor, as in a server: the full KV of the prompt and its newest queries."""
    buffers = KVBuffers(
        layer_ids=tuple(layer.layer_id for layer in layers),
        scaling=tuple(layer.scaling for layer in layers),
        keys=tuple(layer.keys for layer in layers),
        values=tuple(layer.values for layer in layers),
    )
    first = max(0, prompt - compressor.window)
    queries = torch.stack([layer.queries[first:prompt] for layer in layers])
    return ContextKV(buffers, torch.arange(prompt), queries, torch.arange(first, prompt), rotary)


def _extend(buffers: Sequence[torch.Tensor], slots: int) -> tuple[torch.Tensor, ...]:
    """Append ``slots`` empty slots to each buffer, [slots, kv_heads, head_dim]."""
    return tuple(torch.cat([buffer, buffer.new_zeros(slots, *buffer.shape[1:])]) for buffer in buffers)


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """Causal attention of the newest tokens.

    Args:
        queries: [tokens, query_heads, head_dim]. They belong to the last ``tokens`` keys.
        keys, values: [length, kv_heads, head_dim].
        scaling: Factor of query-key products.

    Returns:
        float32 [tokens, query_heads, head_dim].
    """
    tokens, length, kv_heads = len(queries), *keys.shape[:2]
    grouped = queries.float().unflatten(1, (kv_heads, -1))
    logits = torch.einsum("thgd,khd->hgtk", grouped, keys.float()) * scaling
    visible = torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens)
    weights = logits.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hgtk,khd->thgd", weights, values.float()).flatten(1, 2)


class TailValues:
    """A layer's values after the compressed tokens, while tokens are added. For methods whose values share scales along tokens (HACK).

    With requantization elimination (RQE), values stay exact until they fill a partition. Without RQE, each new value is quantized at
    once. The partition's least and greatest value may change, so that its other values are dequantized and quantized again
    (section 5.3 of arXiv 2502.03589). Errors add up until the partition is full. No server runs without RQE; this class computes it
    for comparison.

    Args:
        quantizer: The quantizer.
        values: [tokens, kv_heads, dim], from the first token that is not compressed.
        requantizes: Quantize values of an incomplete partition, too (without RQE).
    """

    def __init__(self, quantizer: Quantizer, values: torch.Tensor, requantizes: bool) -> None:
        self._quantizer, self._exact, self._requantizes = quantizer, values.float(), requantizes
        self._partition = quantizer.value_grid(values.shape[-1]).tokens
        self._noise = torch.Generator().manual_seed(SEED)

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._exact)

    def states(self, first: int) -> Iterator[torch.Tensor]:
        """The values that attention reads, float32 [tokens so far, kv_heads, dim]: for ``first`` tokens, then for one more each time.

        The first tokens are quantized together, like those of a prompt.
        """
        whole = first // self._partition * self._partition
        known = self._dequantized(self._exact[:whole])
        last = self._exact[whole:first]
        for count in range(first, len(self._exact) + 1):
            if count > first:
                last = torch.cat([last, self._exact[count - 1 : count]])
            if len(last) == self._partition or (self._requantizes and len(last)):
                last = self._dequantized(last)
            if len(last) == self._partition:
                known, last = torch.cat([known, last]), last[:0]
            yield torch.cat([known, last])

    def _dequantized(self, values: torch.Tensor) -> torch.Tensor:
        """Quantize and dequantize ``values``, partition by partition. The last partition may be shorter."""
        starts = range(0, len(values), self._partition)
        return torch.cat([values[:0], *(self._dequantized_group(values[start : start + self._partition]) for start in starts)])

    def _dequantized_group(self, values: torch.Tensor) -> torch.Tensor:
        numbers = values.transpose(0, 1)[:, None]
        noise = (torch.rand(numbers.shape, generator=self._noise),) if self._quantizer.stochastic else ()
        found = self._quantizer.quantize(numbers, Grid(len(values), 1), *noise)
        heads, _, _, dim = numbers.shape
        scale, zero = (part.reshape(heads, 1, 1, dim) for part in (found.scale, found.zero))
        return (found.codes * scale + zero)[:, 0].transpose(0, 1)
