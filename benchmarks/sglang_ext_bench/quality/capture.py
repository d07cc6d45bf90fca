"""Captures queries, keys and values of all layers of a model, with transformers and without a server."""

from dataclasses import dataclass
from typing import Any

import torch

from sglang_ext.mem_cache.compressed.rotary import Rotary

NAME = "sglang_ext_capture"


@dataclass(frozen=True)
class LayerAttention:
    """Inputs of attention in one layer, after the rotary embedding.

    Attributes:
        queries: [tokens, query_heads, head_dim].
        keys, values: [tokens, kv_heads, head_dim].
        scaling: Factor of query-key products before softmax.
        layer_id: Index of the layer.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scaling: float
    layer_id: int


def register_capture(found: list[LayerAttention]) -> None:
    """Register attention :data:`NAME` with transformers. It appends the inputs of each layer to ``found``."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # The tensors of transformers have the shape [batch, heads, tokens, head_dim].
        queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        found.append(LayerAttention(queries, keys, values, factor, module.layer_idx))
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


class CapturedModel:
    """A model in this process whose attention inputs can be captured.

    Args:
        model: Model folder or name.
        dtype: Data type of weights and KV, a value of ``--dtype``.
    """

    def __init__(self, model: str, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def generate(self, input_ids: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """Generate ``tokens`` greedy tokens. Return the prompt and these tokens."""
        ids = torch.tensor([input_ids])
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return tuple(out[0].tolist())

    @property
    def rotary(self) -> Rotary | None:
        """The model's rotary embedding. None if it has none."""
        embedding = getattr(self._model.base_model, "rotary_emb", None)
        return None if embedding is None else Rotary(embedding.inv_freq.float())

    def attention(self, input_ids: tuple[int, ...]) -> list[LayerAttention]:
        """Compute a prompt and return queries, keys and values of all its tokens, by layer."""
        found: list[LayerAttention] = []
        previous = self._model.config._attn_implementation
        register_capture(found)
        with torch.inference_mode():
            self._model.set_attn_implementation(NAME)
            self._model(torch.tensor([input_ids]), use_cache=False)
            self._model.set_attn_implementation(previous)
        return found
