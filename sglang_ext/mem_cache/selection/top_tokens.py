"""The tokens that each KV head reads: those with the highest scores, and always the first and the newest."""

import torch


def mark_always(scores: torch.Tensor, sinks: int, newest: int, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """Set the scores of each context's first and newest tokens to infinity, and of places without a token to minus infinity.

    Args:
        scores: float32 [requests, ..., tokens].
        sinks, newest: Number of first and of newest tokens.
        lengths: int64 [requests], tokens of each context; None if all have as many as there are scores.
    """
    tokens = scores.shape[-1]
    places = torch.arange(tokens, device=scores.device)
    if lengths is None:
        return scores.masked_fill((places < sinks) | (places >= tokens - newest), float("inf"))
    ends = lengths.view(-1, *(1,) * (scores.dim() - 1))
    marked = scores.masked_fill((places < sinks) | (places >= ends - newest), float("inf"))
    return marked.masked_fill(places >= ends, float("-inf"))


def top_tokens(scores: torch.Tensor, count: int, sinks: int, newest: int, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """Positions that each KV head reads: int64 [requests, layers, kv_heads, count], ascending.

    Args:
        scores: float32 [requests, layers, kv_heads, tokens].
        count: Tokens that a head reads.
        sinks, newest: First and newest tokens that all heads read, up to ``count``.
        lengths: As in :func:`mark_always`. The host does not read it, so that callers must handle contexts shorter than ``count``.

    Raises:
        ValueError: ``count`` is below 1 or above the number of tokens.
    """
    tokens = scores.shape[-1]
    if not 1 <= count <= tokens:
        raise ValueError(
            f"{count} tokens are to be selected; allowed: 1 to the {tokens} of the context. Select fewer, or read the context whole"
        )
    return mark_always(scores, sinks, newest, lengths).topk(count, dim=-1).indices.sort(dim=-1).values


def overlap(chosen: torch.Tensor, others: torch.Tensor, tokens: int) -> torch.Tensor:
    """Share of ``chosen`` that is also in ``others``, by head (equation 1 of AsyncSpade): float32 [...].

    Args:
        chosen, others: int64 [..., count], distinct positions below ``tokens``.
        tokens: Tokens of the context.
    """
    among = torch.zeros(*others.shape[:-1], tokens, dtype=torch.bool, device=others.device).scatter_(-1, others, True)
    return among.gather(-1, chosen).float().mean(dim=-1)
