"""Relative error of attention outputs on a compressed copy, with the compressors themselves."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from sglang_ext.bench.prompts import Prompt
from sglang_ext.bench.quality.capture import CapturedModel, LayerAttention
from sglang_ext.bench.quality.named import Named
from sglang_ext.layers.attention.copies.packed import packed_attention
from sglang_ext.mem_cache.compressed.formats.kv_format import Unpacked
from sglang_ext.mem_cache.compressed.formats.packing import Packing
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors import Compressor, ContextKV, Part, kept_count
from sglang_ext.mem_cache.compressors.catalogue import Method, method


@dataclass(frozen=True)
class AttentionError:
    """||o_compressed - o_full|| / ||o_full|| of the tokens after the prompts, over all heads of a layer.

    Attributes:
        mean_by_layer, worst_by_layer: over tokens and prompts, in the order of the layers.
    """

    compressor: str
    budget: float
    mean_by_layer: tuple[float, ...]
    worst_by_layer: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over all layers."""
        return statistics.fmean(self.mean_by_layer)

    @property
    def worst(self) -> float:
        """Of all layers."""
        return max(self.worst_by_layer)


def measure(
    model: CapturedModel, prompts: Sequence[Prompt], compressors: Sequence[str], budgets: Sequence[float], tokens: int
) -> Iterator[AttentionError]:
    """The errors of each compressor and budget, at the greedy continuation of each prompt by ``tokens`` tokens.

    Every layer sees full KV's queries: the errors of the layers before it are not added.
    """
    settings = [(name, budget) for name in compressors for budget in Named.of(name).budgets(budgets)]
    by_setting: dict[tuple[str, float], list[torch.Tensor]] = {setting: [] for setting in settings}
    for prompt in prompts:
        layers = model.attention(model.continued(prompt.input_ids, tokens))
        for name, budget in settings:
            named = Named.of(name)
            chosen = method(named.compressor, named.bits)
            by_setting[name, budget].append(relative_errors(layers, len(prompt.input_ids), chosen, budget, model.rotary))
    for (name, budget), found in by_setting.items():
        errors = torch.cat(found, dim=1)
        mean, worst = errors.mean(dim=1).tolist(), errors.amax(dim=1).tolist()
        yield AttentionError(name, budget, tuple(mean), tuple(worst))


def relative_errors(
    layers: Sequence[LayerAttention], prompt: int, chosen: Method, budget: float, rotary: Rotary | None = None
) -> torch.Tensor:
    """Errors of the tokens after the first ``prompt`` ones: float32 [layers, tokens after them].

    The copy stands for the prompt, but for the first and the newest tokens that a method leaves as they are; these and the
    tokens after the prompt are exact, as they are in a server.

    Args:
        budget: share of the prompt that is kept.
        rotary: the model's, for a method that needs it.
    """
    context = context_of(layers, prompt, chosen.compressor, rotary)
    packing = Unpacked(1) if chosen.quantizer is None else Packing.of(chosen.quantizer, context.buffers, 1, rotary)
    sinks = packing.sinks
    count = max(0, prompt - packing.recent - sinks) // packing.unit * packing.unit
    covered = sinks + count
    (kept,) = chosen.compressor.select(context, [Part(sinks, covered, kept_count(count, budget, packing.unit))])
    held = packing.held_slots(kept.shape[-1])
    copies = torch.arange(held) + len(layers[0].keys)
    grown = replace(context.buffers, keys=_grown(context.buffers.keys, held), values=_grown(context.buffers.values, held))
    packing.write(grown, kept, context.slots, copies)
    row = torch.cat([copies, torch.arange(sinks), torch.arange(covered, len(layers[0].keys))])
    found = []
    for layer, keys, values in zip(layers, grown.keys, grown.values):
        queries = layer.queries[prompt:]
        full = attend(queries, layer.keys, layer.values, layer.scaling)
        if chosen.quantizer is None:
            compressed = attend(queries, keys[row], values[row], layer.scaling)
        else:
            compressed = packed_attention(packing, queries, keys, values, row, held, layer.scaling)
        found.append((compressed - full).flatten(1).norm(dim=1) / full.flatten(1).norm(dim=1))
    return torch.stack(found)


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
