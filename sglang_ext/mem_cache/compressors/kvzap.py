"""KVzap (Jegou and Jeblick 2026, arXiv 2601.07891): keep what a small network predicts that KVzip would keep."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_ext.mem_cache.compressed.slot_scores import SlotScores
from sglang_ext.mem_cache.compressors.contracts.compressor import Always, Compressor, ContextKV, RequiredFolder, LayerKV
from sglang_ext.mem_cache.compressors.contracts.registry import register
from sglang_ext.mem_cache.compressors.snapkv import SnapKV


@register("kvzap")
@dataclass(frozen=True)
class KVzap(Compressor):
    """Scores were predicted when the KV was computed (``python -m sglang_ext.fit kvzap``), and lie by slot.

    Attributes:
        slots: the scores; None where there are none.
        online: serves contexts with slots whose scores are unknown, as their KV came from host memory; None where no KV
            comes from there.
        sinks: first tokens, always kept; KVzip gives them no score.
        recent: newest tokens, always kept. The paper keeps 128, of a whole cache; here what follows a copy is exact.
    """

    slots: SlotScores | None = None
    online: Compressor | None = SnapKV()
    sinks: int = 4
    recent: int = 32
    comparable: ClassVar[bool] = True
    better_uneven: ClassVar[bool] = True
    reads: ClassVar[RequiredFolder] = RequiredFolder("--kv-predictor", "needs a network fitted to the model", "sglang_ext.fit kvzap")

    @property
    def window(self) -> int:
        """Queries that the online method wants."""
        return 0 if self.online is None else self.online.window

    @property
    def needs_rotary(self) -> bool:
        """Whether the online method does."""
        return self.online is not None and self.online.needs_rotary

    @property
    def held_bytes(self) -> int:
        """Bytes of scores and predictor."""
        return 0 if self.slots is None else self.slots.held_bytes

    def for_context(self, context: ContextKV) -> Compressor:
        """The online method where a score is unknown."""
        return self if self.online is None or (self.slots is not None and self.slots.has_scores(context.slots)) else self.online

    def always(self, context: ContextKV) -> Always:
        """The first tokens; the newest only score far above all others."""
        if self.slots is None and self.online is not None:
            return self.online.always(context)
        return Always(self.sinks)

    def scores(self, layer: LayerKV) -> torch.Tensor:
        """The online method's: a layer's KV alone does not tell its slots.

        Raises:
            ValueError: there is none.
        """
        if self.online is None:
            raise ValueError("kvzap scores contexts by their slots: call scores_all, or give it an online method")
        return self.online.scores(layer)

    def scores_all(self, context: ContextKV) -> torch.Tensor:
        """The predicted ones: float32 [layers, kv_heads, tokens], infinite for the first tokens, far above all for the newest."""
        if self.slots is None:
            return super().scores_all(context)
        scores = self.slots.read(context.slots)
        tokens = scores.shape[-1]
        recent = min(self.recent, tokens)
        # The newer the better: a part of a copy may have no room for all of them.
        scores[..., tokens - recent :] = 1e6 + torch.arange(recent, device=scores.device)
        scores[..., : self.sinks] = float("inf")
        return scores
