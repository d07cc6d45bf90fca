"""AsyncSpade: before each step, select the tokens of full KV that the step's predicted query attends to, by layer and KV head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.device import to_device
from sglang_ext.mem_cache.compressors.contracts.compressor import Always, Compressor, ContextKV, LayerKV, Part
from sglang_ext.mem_cache.compressors.contracts.registry import register
from sglang_ext.mem_cache.selection.predictors import CurrentQuery, QueryPredictor
from sglang_ext.mem_cache.selection.scoring import group_attention, mark_always


@register("spade")
@dataclass(frozen=True)
class Spade(Compressor):
    """Scores each key by the attention of the next step's query, as predicted from earlier queries (selection/predictors.py).

    A selection uses what exists before the step begins, including queries of draft tokens, so that no step waits for its own query. The
    first and newest tokens are always kept. On a GPU the selection runs asynchronously to earlier steps (compressed/async_selector.py).

    Attributes:
        predictor: Predicts the next query.
        every: As :attr:`Compressor.every`.
        each_round: As :attr:`Compressor.each_round`. If drafts are verified, queries of full KV replace those of drafts.
        sinks: First tokens kept.
        recent: Newest tokens kept.
        most: As :attr:`Compressor.most`.
    """

    predictor: QueryPredictor = CurrentQuery()
    every: int = 1
    each_round: bool = True
    sinks: int = 4
    recent: int = 32
    most: int = 0
    points: ClassVar[bool] = True
    needs_rotary: ClassVar[bool] = True

    @property
    def window(self) -> int:
        """Number of queries that the predictor reads."""
        return self.predictor.window

    @property
    def always_kept(self) -> int:
        """:attr:`Compressor.always_kept`: the first and the newest tokens."""
        return self.sinks + self.recent

    def always(self, context: ContextKV) -> Always:
        """The first and the newest tokens."""
        return Always(self.sinks, self.recent)

    def select(self, context: ContextKV, parts: Sequence[Part]) -> list[torch.Tensor]:
        """:meth:`Compressor.select`; for whole contexts on a GPU with kernels that read the keys once."""
        whole = all((part.start, part.end) == (0, len(context.slots)) for part in parts)
        if not context.buffers.on_gpu or not len(context.query_positions) or not whole:
            return super().select(context, parts)
        return [self._select_whole(context, part.count) for part in parts]

    def _select_whole(self, context: ContextKV, count: int) -> torch.Tensor:
        """Positions in a whole context, with at least one query: int64 [layers, kv_heads, count], ascending."""
        from sglang_ext.layers.kernels.select_tokens import SelectionContexts
        from sglang_ext.mem_cache.selection.on_gpu import GpuSelector

        tokens, queries = len(context.slots), context.queries.transpose(1, 2)
        numbers = to_device([[0, tokens, count, 0]], context.slots.device)
        asked = SelectionContexts(context.slots.int()[None], numbers, (tokens,), (self.sinks, self.recent))
        choice = GpuSelector(self.predictor, context.buffers, queries.shape[1], context.rotary)
        found = choice.choose(asked, lambda _, layers: queries[None, layers], context.query_positions[None], most=count)
        return found[:, 0].long()

    def scores_all(self, context: ContextKV) -> torch.Tensor:
        """:meth:`scores` of each layer. It reads no values, and predicts the queries of all layers together."""
        if not len(context.query_positions):
            return super().scores_all(context)
        queries = context.queries.transpose(1, 2)[None]
        predicted = self.predictor.predict(queries, context.query_positions[None], context.rotary)
        layers = enumerate(zip(predicted.unbind(1), context.buffers.scaling))
        found = [attention(query, context.buffers.scored(at, context.slots), scaling) for at, (query, scaling) in layers]
        return mark_always(torch.stack(found), self.sinks, self.recent)

    def scores(self, layer: LayerKV) -> torch.Tensor:
        """Attention of the predicted query, mean over the query heads of a KV head: float32 [kv_heads, tokens].

        Infinite for the first and the newest tokens. Without any query, newer tokens have higher scores.
        """
        tokens, kv_heads, _ = layer.keys.shape
        if not len(layer.queries):
            newer = torch.arange(tokens, dtype=torch.float32, device=layer.keys.device)
            return mark_always(newer.expand(kv_heads, -1), self.sinks, self.recent)
        queries = layer.queries.transpose(0, 1)[None, None]
        predicted = self.predictor.predict(queries, layer.query_positions[None], layer.rotary)
        return mark_always(attention(predicted[:, 0], layer.keys, layer.scaling), self.sinks, self.recent)


def attention(query: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attention of one query per head, [1, query_heads, dim], to a layer's keys, [tokens, kv_heads, dim]: float32 [kv_heads, tokens]."""
    return group_attention(query[:, None], keys.transpose(0, 1)[None, None], scaling)[0, 0]
