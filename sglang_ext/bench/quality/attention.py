"""Relative error of attention outputs on a compressed copy, with the compressors themselves."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sglang_ext.bench.prompts import Prompt
from sglang_ext.bench.quality.capture import CapturedModel, LayerAttention
from sglang_ext.mem_cache.compressors import Compressor, ContextKV, Part, create, kept_count
from sglang_ext.mem_cache.kv_buffers import KVBuffers


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
    settings = [(name, budget) for name in compressors for budget in budgets]
    by_setting: dict[tuple[str, float], list[torch.Tensor]] = {setting: [] for setting in settings}
    for prompt in prompts:
        layers = model.attention(model.continued(prompt.input_ids, tokens))
        for name, budget in settings:
            by_setting[name, budget].append(relative_errors(layers, len(prompt.input_ids), create(name), budget))
    for (name, budget), found in by_setting.items():
        errors = torch.cat(found, dim=1)
        mean, worst = errors.mean(dim=1).tolist(), errors.amax(dim=1).tolist()
        yield AttentionError(name, budget, tuple(mean), tuple(worst))


def relative_errors(
    layers: Sequence[LayerAttention], prompt: int, compressor: Compressor, budget: float
) -> torch.Tensor:
    """Errors of the tokens after the first ``prompt`` ones: float32 [layers, tokens after them].

    The copy stands for the prompt; the tokens after it are exact, as they are in a server.
    """
    (kept,) = compressor.select(context_of(layers, prompt, compressor), [Part(0, prompt, kept_count(prompt, budget, 1))])
    return torch.stack([_layer_errors(layer, prompt, of_layer) for layer, of_layer in zip(layers, kept)])


def context_of(layers: Sequence[LayerAttention], prompt: int, compressor: Compressor) -> ContextKV:
    """The prompt's full KV as a compressor sees it in a server, with its newest queries."""
    buffers = KVBuffers(
        layer_ids=tuple(layer.layer_id for layer in layers),
        scaling=tuple(layer.scaling for layer in layers),
        keys=tuple(layer.keys for layer in layers),
        values=tuple(layer.values for layer in layers),
    )
    first = max(0, prompt - compressor.window)
    queries = torch.stack([layer.queries[first:prompt] for layer in layers])
    return ContextKV(buffers, torch.arange(prompt), queries, torch.arange(first, prompt))


def _layer_errors(layer: LayerAttention, prompt: int, kept: torch.Tensor) -> torch.Tensor:
    """Errors of one layer, whose copy keeps ``kept``, int64 [kv_heads, count]: float32 [tokens after the prompt]."""
    heads = torch.arange(kept.shape[0])
    keys, values = (
        torch.cat([tensor[:prompt][kept.t(), heads], tensor[prompt:]]) for tensor in (layer.keys, layer.values)
    )
    full = attend(layer.queries[prompt:], layer.keys, layer.values, layer.scaling)
    compressed = attend(layer.queries[prompt:], keys, values, layer.scaling)
    return (compressed - full).flatten(1).norm(dim=1) / full.flatten(1).norm(dim=1)


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
