"""Which tokens heads keep when they share one budget: the best of all layers and heads (as KVzip does, arXiv 2505.23416)."""

import torch


def best_of_all(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The highest scores wherever they are: int64 [layers * kv_heads * count], places in ``scores.flatten()``, in any order.

    Infinite scores come first, but no head has more than ``count`` of them: what is kept in any case shall not leave others
    without it where the budget is too small for all.

    Args:
        scores: float32 [layers, kv_heads, tokens].
        count: tokens that a head keeps on the average.
    """
    always = scores == float("inf")
    too_many = always & (always.cumsum(dim=-1, dtype=torch.int32) > count)
    ranked = scores.masked_fill(too_many, torch.finfo(scores.dtype).max).flatten()
    return ranked.topk(scores[..., 0].numel() * count, sorted=False).indices


def best_of_each(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` highest scores of each head; arguments and result as :func:`best_of_all`'s."""
    layers, heads, tokens = scores.shape
    firsts = torch.arange(layers * heads, device=scores.device).view(layers, heads, 1) * tokens
    return (scores.topk(count, dim=-1).indices + firsts).flatten()
