"""Attention functions for transformers models, in which each KV head reads its own part of the prompt."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sglang_ext_bench.acceptance.inputs import DEFAULT_ATTENTION

AttentionOutput = tuple[torch.Tensor, None]
"""Output [batch, tokens, heads, head_dim]. Attention weights are not returned."""


def register_attention(name: str, function: Callable[..., AttentionOutput]) -> None:
    """Make an attention function available to ``set_attn_implementation`` under a name."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)


@contextmanager
def use_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Use a registered attention function inside this context."""
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(DEFAULT_ATTENTION)


def keep_best(scores: torch.Tensor, budget: float, shared_axes: tuple[int, ...]) -> torch.Tensor:
    """Keep the entries with the highest scores.

    Args:
        scores: [layers, kv_heads, tokens].
        budget: Share of the entries to keep.
        shared_axes: The last axes of ``scores``. Entries along them share a budget.

    Returns:
        bool [layers, kv_heads, tokens].
    """
    flat = scores.flatten(scores.dim() - len(shared_axes))
    best = flat.topk(int(flat.shape[-1] * budget), dim=-1).indices
    return torch.zeros_like(flat, dtype=torch.bool).scatter_(-1, best, True).view_as(scores)


class KeptTokensAttention:
    """An attention function in which each KV head reads only its kept tokens of the context, and all newer tokens.

    Attributes:
        kept: bool [layers, kv_heads, context tokens]. None to read all tokens.
    """

    kept: torch.Tensor | None = None

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> AttentionOutput:
        """Attention of one sequence; tensors are [1, heads, tokens, head_dim]."""
        if self.kept is not None:
            kept, count = self.kept[module.layer_idx], query.shape[2]
            newer = key.shape[2] - kept.shape[1]
            causal = torch.ones(count, newer, dtype=torch.bool).tril(newer - count)
            per_query_head = kept.repeat_interleave(query.shape[1] // len(kept), 0)[:, None].expand(-1, count, -1)
            attention_mask = torch.cat([per_query_head, causal.expand(len(per_query_head), -1, -1)], dim=-1)[None]
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
