"""Methods that select tokens of full KV for each step, by layer and KV head: Quest and AsyncSpade."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.device import to_device
from sglang_ext.mem_cache.compressors.compressor import Always, Compressor, ContextKV, LayerKV, Part
from sglang_ext.mem_cache.compressors.registry import register
from sglang_ext.mem_cache.selection.predictors import CurrentQuery, QueryPredictor
from sglang_ext.mem_cache.selection.scoring import group_attention, mark_always, page_scores


@dataclass(frozen=True, kw_only=True)
class StepSelector(Compressor):
    """Scores each key of full KV for one step. The first ``sinks`` and the newest ``recent`` tokens are always kept."""

    window: ClassVar[int] = 1
    points: ClassVar[bool] = True
    every: int = 1
    each_round: bool = True
    sinks: int = 4
    recent: int = 32
    most: int = 0

    @property
    def always_kept(self) -> int:
        return self.sinks + self.recent

    def always(self, context: ContextKV) -> Always:
        return Always(self.sinks, self.recent)

    def scores(self, layer: LayerKV) -> torch.Tensor:
        """Scores of one layer: float32 [kv_heads, tokens], infinite for the first and the newest tokens.

        Without any query, newer tokens have higher scores.
        """
        tokens, kv_heads, _ = layer.keys.shape
        if len(layer.queries):
            found = self.query_scores(layer)
        else:
            found = torch.arange(tokens, dtype=torch.float32, device=layer.keys.device).expand(kv_heads, -1)
        return mark_always(found, self.sinks, self.recent)

    @abstractmethod
    def query_scores(self, layer: LayerKV) -> torch.Tensor:
        """Scores by the queries, at least one: float32 [kv_heads, tokens]."""


@register("quest")
@dataclass(frozen=True)
class Quest(StepSelector):
    """Score pages of tokens by the smallest and largest key of each channel, which bound the products with the query.

    Quest (Tang et al. 2024, arXiv 2406.10774). All tokens of a page have the same score: the mean bound over the query heads of a KV head. In
    each layer the step's own query selects, and attention waits for it. In the paper the first two layers read all tokens; here they
    select, too. On a GPU attention itself selects (``in_attention``), by extremes stored beside the pool. No queries are recorded then, and
    the first and newest tokens are kept as whole pages, one and two. A page has :attr:`page` tokens.
    """

    page: ClassVar[int] = 16
    synchronous: ClassVar[bool] = True
    in_attention: bool = False

    @property
    def always_kept(self) -> int:
        sizes = self.sinks, self.recent
        return sum(-(-size // self.page) * self.page for size in sizes) if self.in_attention else super().always_kept

    @property
    def window(self) -> int:
        return 0 if self.in_attention else 1

    def query_scores(self, layer: LayerKV) -> torch.Tensor:
        """Bounds of the newest query's products with the keys of each page."""
        return page_scores(layer.queries[-1][None, None], layer.keys.transpose(0, 1)[None, None], self.page)[0, 0]


@register("spade")
@dataclass(frozen=True)
class Spade(StepSelector):
    """AsyncSpade: scores each key by the attention of the next step's query, as predicted from earlier queries (selection/predictors.py).

    A selection uses what exists before the step begins, including queries of draft tokens, so that no step waits for its own query. If
    drafts are verified, queries of full KV replace those of drafts. On a GPU the selection runs asynchronously to earlier steps
    (compressed/async_selector.py).
    """

    predictor: QueryPredictor = CurrentQuery()
    needs_rotary: ClassVar[bool] = True

    @property
    def window(self) -> int:
        return self.predictor.window

    def select(self, context: ContextKV, parts: Sequence[Part]) -> list[torch.Tensor]:
        """:meth:`Compressor.select`; for whole contexts on a GPU with kernels that read the keys once."""
        whole = all((part.start, part.end) == (0, len(context.slots)) for part in parts)
        if not context.buffers.on_gpu or not len(context.query_positions) or not whole:
            return super().select(context, parts)
        from sglang_ext.layers.kernels.select_tokens import SelectionContexts
        from sglang_ext.mem_cache.selection.on_gpu import GpuSelector

        tokens, queries, kept = len(context.slots), context.queries.transpose(1, 2), []
        selector = GpuSelector(self.predictor, context.buffers, queries.shape[1], context.rotary)
        for part in parts:
            numbers = to_device([[0, tokens, part.count, 0]], context.slots.device)
            asked = SelectionContexts(context.slots.int()[None], numbers, (tokens,), (self.sinks, self.recent))
            found = selector.choose(asked, lambda _, layers: queries[None, layers], context.query_positions[None], most=part.count)
            kept.append(found[:, 0].long())
        return kept

    def scores_all(self, context: ContextKV) -> torch.Tensor:
        """:meth:`scores` of each layer. It reads no values, and predicts the queries of all layers together."""
        if not len(context.query_positions):
            return super().scores_all(context)
        queries = context.queries.transpose(1, 2)[None]
        predicted = self.predictor.predict(queries, context.query_positions[None], context.rotary)
        layers = enumerate(zip(predicted.unbind(1), context.buffers.scaling))
        found = [attention(query, context.buffers.scoring_keys(at, context.slots), scaling) for at, (query, scaling) in layers]
        return mark_always(torch.stack(found), self.sinks, self.recent)

    def query_scores(self, layer: LayerKV) -> torch.Tensor:
        """Attention of the predicted query, mean over the query heads of a KV head: float32 [kv_heads, tokens]."""
        queries = layer.queries.transpose(0, 1)[None, None]
        predicted = self.predictor.predict(queries, layer.query_positions[None], layer.rotary)
        return attention(predicted[:, 0], layer.keys, layer.scaling)


def attention(query: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attention of one query per head, [1, query_heads, dim], to a layer's keys, [tokens, kv_heads, dim]: float32 [kv_heads, tokens]."""
    return group_attention(query[:, None], keys.transpose(0, 1)[None, None], scaling)[0, 0]
