"""KVzip (Kim et al. 2025, arXiv 2505.23416): keep what the model needs to repeat the context, whatever is asked later."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from sglang_ext.device import sent
from sglang_ext.mem_cache.compressors.contracts.compressor import Always, Compressor, ContextKV, RequiredFolder, LayerKV, Part
from sglang_ext.mem_cache.compressors.contracts.registry import register
from sglang_ext.mem_cache.compressors.snapkv import SnapKV

if TYPE_CHECKING:
    from sglang_ext.mem_cache.scores.index import ScoreIndex


@register("kvzip")
@dataclass(frozen=True)
class KVzip(Compressor):
    """Scores of documents come from files (``python -m sglang_ext.precompress``), all others from an online method.

    Attributes:
        online: Scores contexts that begin with no stored document, and the tokens after a document.
        index: The stored documents; None for none.
        heads: The KV heads of this tensor-parallel rank, among all KV heads.
    """

    online: Compressor = SnapKV()
    index: "ScoreIndex | None" = None
    heads: slice = field(default_factory=lambda: slice(None))
    comparable: ClassVar[bool] = True
    better_uneven: ClassVar[bool] = True
    reads: ClassVar[RequiredFolder] = RequiredFolder("--kv-scores", "reads scores that were computed ahead", "sglang_ext.precompress")

    @property
    def window(self) -> int:
        """Number of queries that the online method needs."""
        return self.online.window

    @property
    def needs_rotary(self) -> bool:
        """Whether the online method needs it."""
        return self.online.needs_rotary

    def for_context(self, context: ContextKV) -> Compressor:
        """Stored scores if the context begins with a document, otherwise the online method."""
        found = None if self.index is None else self.index.match(context.prompt[: len(context.slots)])
        return self.online if found is None else StoredScores(found[:, self.heads], self.online)

    def always(self, context: ContextKV) -> Always:
        """As the online method."""
        return self.online.always(context)

    def scores(self, layer: LayerKV) -> torch.Tensor:
        """As the online method."""
        return self.online.scores(layer)

    def scores_all(self, context: ContextKV) -> torch.Tensor:
        """As the online method."""
        return self.online.scores_all(context)


@dataclass(frozen=True)
class StoredScores(Compressor):
    """A context that begins with a document: each of two methods ranks its own tokens.

    Scores of the two methods do not compare, so each gets a share of the budget. It first gets its always-kept tokens (infinite scores:
    first tokens, the observation window). The rest is shared in proportion to the remaining tokens.

    Attributes:
        stored: float16 [layers, kv_heads, tokens of the document], on the host.
        online: Scores the tokens after the document.
    """

    stored: torch.Tensor
    online: Compressor
    name = KVzip.name
    comparable: ClassVar[bool] = True

    def scores(self, layer: LayerKV) -> torch.Tensor:
        """Stored scores of the document, then the online method's: float32 [kv_heads, tokens]."""
        return self._joined(self.stored[layer.layer_id], self.online.scores(layer))

    def scores_all(self, context: ContextKV) -> torch.Tensor:
        """Stored scores of the document, then the online method's: float32 [layers, kv_heads, tokens]."""
        if self.stored.shape[-1] == len(context.slots):
            return sent(self.stored, context.slots.device).float()
        return self._joined(self.stored, self.online.scores_all(context))

    def _joined(self, stored: torch.Tensor, online: torch.Tensor) -> torch.Tensor:
        return torch.cat([sent(stored, online.device).float(), online[..., stored.shape[-1] :]], dim=-1)

    def cuts(self, context: ContextKV, part: Part) -> list[Part]:
        """Split ``part`` at the end of the document."""
        border = self.stored.shape[-1]
        if not part.start < border < part.end:
            return [part]
        sizes = border - part.start, part.end - border
        # One number for all heads, because they keep equally many tokens.
        first = int(self.stored[..., part.start :].isinf().sum(dim=-1).max())
        second = self.online.always(context).among(border, part.end, len(context.slots))
        left = sizes[0] - first, sizes[1] - second
        share = first + round((part.count - first - second) * left[0] / max(1, sum(left)))
        count = min(max(share, part.count - sizes[1], 0), sizes[0], part.count)
        return [Part(part.start, border, count), Part(border, part.end, part.count - count)]
