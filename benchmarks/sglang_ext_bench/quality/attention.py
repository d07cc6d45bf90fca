"""Relative error of attention outputs on a compressed copy, with the compressors themselves."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch

from sglang_ext.layers.attention.compressed.packed import packed_attention
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.base import PlainSlots
from sglang_ext.mem_cache.compressed.layouts.block_layout import Grid
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.layouts.rounding import token_seeds
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors import Compressor, ContextKV, Part, kept_count
from sglang_ext.mem_cache.compressors.catalogue import MethodSpec, method
from sglang_ext.mem_cache.compressors.contracts.quantizer import Quantizer
from sglang_ext_bench.prompts import Prompt
from sglang_ext_bench.quality.capture import CapturedModel, LayerAttention
from sglang_ext_bench.quality.config import Tail
from sglang_ext_bench.quality.named import Named

SEED = 0
"""Of the noise that codes of these values are rounded by."""
DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class AttentionError:
    """||o_compressed - o_full|| / ||o_full|| of the tokens after the prompts, over all heads of a layer.

    Attributes:
        mean_by_layer, worst_by_layer: over tokens and prompts, in the order of the layers.
        tail: how values lie that fill no partition.
    """

    compressor: str
    budget: float
    mean_by_layer: tuple[float, ...]
    worst_by_layer: tuple[float, ...]
    tail: Tail = "exact"

    @property
    def mean(self) -> float:
        """Over all layers."""
        return statistics.fmean(self.mean_by_layer)

    @property
    def worst(self) -> float:
        """Of all layers."""
        return max(self.worst_by_layer)


def measure(
    model: CapturedModel,
    prompts: Sequence[Prompt],
    compressors: Sequence[str],
    budgets: Sequence[float],
    tokens: int,
    tails: Sequence[Tail] = ("exact",),
) -> Iterator[AttentionError]:
    """The errors of each compressor and budget, at the greedy continuation of each prompt by ``tokens`` tokens.

    Every layer sees full KV's queries: the errors of the layers before it are not added. ``tails`` are of methods with partitions.
    """
    methods = {name: method(named.compressor, named.bits, named.partition) for name in compressors for named in [Named.of(name)]}
    settings = [
        (name, budget, tail)
        for name in compressors
        for budget in Named.of(name).budgets(budgets)
        for tail in (tails if has_partitions(methods[name]) else ("exact",))
    ]
    by_setting: dict[tuple[str, float, Tail], list[torch.Tensor]] = {setting: [] for setting in settings}
    for prompt in prompts:
        layers, length = model.attention(model.continued(prompt.input_ids, tokens)), len(prompt.input_ids)
        seeds = token_seeds(prompt.input_ids, length, DEVICE)
        for name, budget, tail in settings:
            found = relative_errors(layers, length, methods[name], budget, model.rotary, tail, seeds)
            by_setting[name, budget, tail].append(found)
    for (name, budget, tail), found in by_setting.items():
        errors = torch.cat(found, dim=1)
        mean, worst = errors.mean(dim=1).tolist(), errors.amax(dim=1).tolist()
        yield AttentionError(name, budget, tuple(mean), tuple(worst), tail)


def has_partitions(chosen: MethodSpec) -> bool:
    """Whether values share scales along partitions of tokens, which the newest may not fill."""
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
    """Errors of the tokens after the first ``prompt`` ones: float32 [layers, tokens after them].

    The copy stands for the prompt, but for the first and the newest tokens that a method leaves as they are; these and the
    tokens after the prompt are exact, as they are in a server.

    Args:
        budget: share of the prompt that is kept.
        rotary: the model's, for a method that needs it.
        tail: how values of the tokens behind the copy lie; another than exact of methods with partitions alone.
        seeds: int32 [prompt], what codes are drawn by of methods that round at random; None rounds to the nearest.
    """
    context = context_of(layers, prompt, chosen.compressor, rotary)
    packing = PlainSlots(1) if chosen.quantizer is None else Packing.for_pool(chosen.quantizer, context.buffers, 1, rotary)
    sinks = packing.sinks
    count = max(0, prompt - packing.recent - sinks) // packing.unit * packing.unit
    covered = sinks + count
    (kept,) = chosen.compressor.select(context, [Part(sinks, covered, kept_count(count, budget, packing.unit))])
    held = packing.held_slots(kept.shape[-1])
    copies = torch.arange(held) + len(layers[0].keys)
    grown = replace(context.buffers, keys=_grown(context.buffers.keys, held), values=_grown(context.buffers.values, held))
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
            compressed = _by_steps(packing, queries, keys, values, row, held, layer.scaling, newest)
        found.append((compressed - full).flatten(1).norm(dim=1) / full.flatten(1).norm(dim=1))
    return torch.stack(found)


def _by_steps(
    packing: Packing,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    row: torch.Tensor,
    held: int,
    scaling: float,
    newest: "TailValues",
) -> torch.Tensor:
    """As :func:`packed_attention`, of one token after another: each finds in ``values`` what ``newest`` says, which is written there."""
    found, length = [], len(newest)
    states = islice(newest.after(length - len(queries)), 1, None)
    for query, state in zip(queries, states, strict=True):
        end = len(row) - length + len(state)
        values[row[end - len(state) : end]] = state.to(values.dtype)
        found.append(packed_attention(packing, query[None], keys, values, row[:end], held, scaling))
    return torch.cat(found)


def context_of(
    layers: Sequence[LayerAttention], prompt: int, compressor: Compressor, rotary: Rotary | None = None
) -> ContextKV:
    """The prompt's full KV as a compressor sees it in a server, with its newest queries."""
    buffers = KVBuffers(
        layer_ids=tuple(layer.layer_id for layer in layers),
        scaling=tuple(layer.scaling for layer in layers),
        keys=tuple(layer.keys for layer in layers),
        values=tuple(layer.values for layer in layers),
    )
    first = max(0, prompt - compressor.window)
    queries = torch.stack([layer.queries[first:prompt] for layer in layers])
    return ContextKV(buffers, torch.arange(prompt), queries, torch.arange(first, prompt), rotary)


def _grown(buffers: Sequence[torch.Tensor], slots: int) -> tuple[torch.Tensor, ...]:
    """Layers' buffers, [slots, kv_heads, head_dim], with so many slots more."""
    return tuple(torch.cat([buffer, buffer.new_zeros(slots, *buffer.shape[1:])]) for buffer in buffers)


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """Causal attention of the newest tokens: float32 [tokens, query_heads, head_dim].

    Args:
        queries: [tokens, query_heads, head_dim]; they belong to the last ``tokens`` keys.
        keys, values: [length, kv_heads, head_dim].
        scaling: factor on query-key products.
    """
    tokens, length, kv_heads = len(queries), *keys.shape[:2]
    grouped = queries.float().unflatten(1, (kv_heads, -1))
    logits = torch.einsum("thgd,khd->hgtk", grouped, keys.float()) * scaling
    visible = torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens)
    weights = logits.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hgtk,khd->thgd", weights, values.float()).flatten(1, 2)


class TailValues:
    """A layer's values behind what is packed, as tokens come: of a method whose values share scales along tokens (HACK).

    It leaves those that fill no partition as they are, until they do: requantization elimination, RQE. Without it each new token's
    value is quantized at once, together with what the codes of the partition's others mean, as their least and greatest number may have
    changed (section 5.3 of arXiv 2502.03589): errors add up until the partition is full. No server does so; here it is computed, to
    compare.

    Args:
        quantizer: whose values share scales along tokens.
        values: [tokens, kv_heads, dim], from the first that is not packed on.
        requantizes: whether the last partition is in codes, too.
    """

    def __init__(self, quantizer: Quantizer, values: torch.Tensor, requantizes: bool) -> None:
        self._quantizer, self._exact, self._requantizes = quantizer, values.float(), requantizes
        self._partition = quantizer.value_grid(values.shape[-1]).tokens
        self._noise = torch.Generator().manual_seed(SEED)

    def __len__(self) -> int:
        """Tokens."""
        return len(self._exact)

    def after(self, first: int) -> Iterator[torch.Tensor]:
        """What steps read, float32 [tokens so far, kv_heads, dim]: with ``first`` tokens, then with one more each time, to the last.

        The first ones are quantized together, as a prompt's are.
        """
        whole = first // self._partition * self._partition
        known = self._codes(self._exact[:whole])
        last = self._exact[whole:first]
        for count in range(first, len(self._exact) + 1):
            if count > first:
                last = torch.cat([last, self._exact[count - 1 : count]])
            if len(last) == self._partition or (self._requantizes and len(last)):
                last = self._codes(last)
            if len(last) == self._partition:
                known, last = torch.cat([known, last]), last[:0]
            yield torch.cat([known, last])

    def _codes(self, values: torch.Tensor) -> torch.Tensor:
        """What codes of ``values`` mean, by partitions, of which the last may be shorter."""
        starts = range(0, len(values), self._partition)
        return torch.cat([values[:0], *(self._group(values[start : start + self._partition]) for start in starts)])

    def _group(self, values: torch.Tensor) -> torch.Tensor:
        numbers = values.transpose(0, 1)[:, None]
        noise = (torch.rand(numbers.shape, generator=self._noise),) if self._quantizer.stochastic else ()
        found = self._quantizer.quantize(numbers, Grid(len(values), 1), *noise)
        heads, _, _, dim = numbers.shape
        scale, zero = (part.reshape(heads, 1, 1, dim) for part in (found.scale, found.zero))
        return (found.codes * scale + zero)[:, 0].transpose(0, 1)
