"""Predicted scores of tokens, indexed by the KV pool slot of their KV.

The forward that writes KV also writes the scores, to the same slots, whichever request computes it. A prefix hit therefore finds them.
Slots of rejected drafts, or of freed tokens, are overwritten together with their KV. Drafts and padding also write KV and scores; nothing reads
those. Everything happens on the device, so that CUDA graphs capture it.
"""

import inspect
from collections.abc import Sequence
from functools import partial

import torch

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.scores import Predictor


class SlotScores:
    """Scores of all slots, computed by one predictor for the KV heads of this rank.

    Attributes:
        layer_ids: Indices of the model's attention layers, in the order of :attr:`table`.
        table: float16 [layers, kv_heads, slots]; NaN where the score is unknown. Empty before :meth:`allocate`.
    """

    def __init__(self, predictor: Predictor, layer_ids: Sequence[int]) -> None:
        self.predictor = predictor
        self.layer_ids = tuple(layer_ids)
        self.table = torch.empty(len(self.layer_ids), predictor.kv_heads, 0, dtype=torch.float16)
        self._has_unknown = False

    def allocate(self, slots: int, device: torch.device | str, dtype: torch.dtype) -> None:
        """Allocate scores for ``slots`` slots. The predictor computes in ``dtype``, the model's."""
        self.predictor = self.predictor.to(device, dtype)
        self.table = torch.full((*self.table.shape[:2], slots), torch.nan, dtype=torch.float16, device=device)

    def planned_bytes(self, slots: int) -> int:
        """Upper bound of :attr:`held_bytes` with ``slots`` slots."""
        return len(self.layer_ids) * self.predictor.kv_heads * slots * self.table.element_size() + self.predictor.held_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the scores and of the predictor, outside the KV pool."""
        return self.table.numel() * self.table.element_size() + self.predictor.held_bytes

    def write(self, index: int, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Score the tokens of a forward with KV in ``slots``, int64 [tokens], in the layer with this index in :attr:`table`.

        ``states``, [tokens, hidden_size], are the input of the attention module.
        """
        found = self.predictor(self.layer_ids[index], states)
        self.table[index].index_copy_(1, slots, found.t().to(self.table.dtype))

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Scores of ``slots``, int64 [tokens]: float32 [layers, kv_heads, tokens]."""
        return self.table[..., slots].float()

    def forget(self, slots: torch.Tensor) -> None:
        """Mark the scores of ``slots``, int64 [tokens], as unknown, because their KV was not computed here."""
        self._has_unknown = True
        self.table[..., slots] = torch.nan

    def has_scores(self, slots: torch.Tensor) -> bool:
        """Whether all of ``slots``, int64 [tokens], have a score. Waits for the device only after :meth:`forget` was called."""
        return not self._has_unknown or not bool(self.table[0, 0, slots].isnan().any())

    def watch(self, model: torch.nn.Module) -> None:
        """Register hooks so that the forwards of ``model`` write scores.

        Raises:
            OptionError: The model does not expose the input of its attention modules.
        """
        for index, owner in enumerate(attention_owners(model, self.layer_ids)):
            owner.register_forward_pre_hook(partial(self._record, index, inspect.signature(owner.forward)), with_kwargs=True)

    def _record(self, index: int, signature: inspect.Signature, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        given = signature.bind(*args, **kwargs).arguments
        self.write(index, given["forward_batch"].out_cache_loc, given["hidden_states"])


def attention_owners(model: torch.nn.Module, layer_ids: Sequence[int]) -> list[torch.nn.Module]:
    """The modules that hold SGLang's attention layers, in the order of ``layer_ids``, checked as :meth:`SlotScores.watch` says."""
    from sglang.srt.layers.radix_attention import RadixAttention

    found = {
        child.layer_id: module for module in model.modules() for child in module.children() if isinstance(child, RadixAttention)
    }
    for layer_id in layer_ids:
        owner = found.get(layer_id)
        parameters = () if owner is None else tuple(inspect.signature(owner.forward).parameters)
        if not {"hidden_states", "forward_batch"} <= set(parameters):
            what = "no module" if owner is None else f"{type(owner).__name__}, called with {', '.join(parameters) or 'nothing'}"
            raise OptionError(
                f"--kv-compressor kvzap reads the hidden_states of the module that holds an attention layer; in this model layer "
                f"{layer_id} belongs to {what}. Use --kv-compressor snapkv for this model."
            )
    return [found[layer_id] for layer_id in layer_ids]
