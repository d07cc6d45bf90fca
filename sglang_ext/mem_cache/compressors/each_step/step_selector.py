"""Common frame of methods that select tokens for each step: pointers by layer and KV head, as spade.py's."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.mem_cache.compressors.contracts.compressor import Always, Compressor, ContextKV, LayerKV
from sglang_ext.mem_cache.selection.scoring import Scoring, ScoringInputs, mark_always


@dataclass(frozen=True)
class StepSelector(Compressor):
    """Scores each key of full KV for one step with :attr:`scoring`. The first and newest tokens are always kept.

    Attributes:
        scoring: Scores how much each KV head needs each token.
        every: As :attr:`Compressor.every`.
        each_round: As :attr:`Compressor.each_round`.
        sinks: First tokens kept.
        recent: Newest tokens kept.
        most: As :attr:`Compressor.most`.
    """

    scoring: ClassVar[Scoring]
    window: ClassVar[int] = 1
    points: ClassVar[bool] = True
    every: int = 1
    each_round: bool = True
    sinks: int = 4
    recent: int = 32
    most: int = 0

    @property
    def always_kept(self) -> int:
        """:attr:`Compressor.always_kept`: the first and the newest tokens."""
        return self.sinks + self.recent

    def always(self, context: ContextKV) -> Always:
        """The first and the newest tokens."""
        return Always(self.sinks, self.recent)

    def scores(self, layer: LayerKV) -> torch.Tensor:
        """Scores by the newest query: float32 [kv_heads, tokens], infinite for the first and the newest tokens.

        Without any query, newer tokens have higher scores.
        """
        tokens, kv_heads, _ = layer.keys.shape
        if not len(layer.queries):
            newer = torch.arange(tokens, dtype=torch.float32, device=layer.keys.device)
            return mark_always(newer.expand(kv_heads, -1), self.sinks, self.recent)
        queries, keys = layer.queries.transpose(0, 1)[None, None], layer.keys.transpose(0, 1)[None, None]
        found = self.scoring.scores(ScoringInputs(queries, layer.query_positions[None], keys, layer.scaling))[0, 0]
        return mark_always(found, self.sinks, self.recent)
