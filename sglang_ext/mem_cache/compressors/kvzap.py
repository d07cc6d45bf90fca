"""KVzap (Jegou and Jeblick 2026, arXiv 2601.07891): keep the tokens that KVzip would keep, as a small network predicts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from sglang_ext.mem_cache.compressors.attention_scores import SnapKV
from sglang_ext.mem_cache.compressors.compressor import Always, Compressor, ContextKV, LayerKV, RequiredFolder
from sglang_ext.mem_cache.compressors.registry import PREDICTOR_FOLDER, register

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressed.slot_scores import SlotScores


@register("kvzap")
@dataclass(frozen=True)
class KVzap(Compressor):
    """Scores are predicted when the KV is computed (``python -m sglang_ext.fit kvzap``), and stored by slot.

    Attributes:
        slots: The scores; None without a predictor.
        online: Compressor for contexts with unknown scores, whose KV came from host memory; None if no KV comes from there.
        sinks: First tokens, always kept. KVzip does not score them.
        recent: Newest tokens, always kept. The paper keeps 128 of a whole cache; here the tokens after the compressed KV are exact.
    """

    slots: "SlotScores | None" = None
    online: Compressor | None = SnapKV()
    sinks: int = 4
    recent: int = 32
    comparable: ClassVar[bool] = True
    better_uneven: ClassVar[bool] = True
    reads: ClassVar[RequiredFolder] = PREDICTOR_FOLDER

    @property
    def window(self) -> int:
        """Number of queries that the online method needs."""
        return 0 if self.online is None else self.online.window

    @property
    def needs_rotary(self) -> bool:
        """Whether the online method needs it."""
        return self.online is not None and self.online.needs_rotary

    @property
    def held_bytes(self) -> int:
        """Bytes of the scores and the predictor."""
        return 0 if self.slots is None else self.slots.held_bytes

    def for_context(self, context: ContextKV) -> Compressor:
        """The online method if a score is unknown."""
        return self if self.online is None or (self.slots is not None and self.slots.has_scores(context.slots)) else self.online

    def always(self, context: ContextKV) -> Always:
        """The first tokens. The newest ones are not infinite; they only score far above all others."""
        if self.slots is None and self.online is not None:
            return self.online.always(context)
        return Always(self.sinks)

    def scores(self, layer: LayerKV) -> torch.Tensor:
        """Scores of the online method, because a layer's KV alone does not identify its slots.

        Raises:
            ValueError: There is no online method.
        """
        if self.online is None:
            raise ValueError("kvzap scores contexts by their slots: call scores_all, or give it an online method")
        return self.online.scores(layer)

    def scores_all(self, context: ContextKV) -> torch.Tensor:
        """Predicted scores: float32 [layers, kv_heads, tokens], infinite for the first tokens, far above all others for the newest."""
        if self.slots is None:
            return super().scores_all(context)
        scores = self.slots.read(context.slots)
        tokens = scores.shape[-1]
        recent = min(self.recent, tokens)
        # Newer tokens score higher, since a part's count may be too small for all of them.
        scores[..., tokens - recent :] = 1e6 + torch.arange(recent, device=scores.device)
        scores[..., : self.sinks] = float("inf")
        return scores
