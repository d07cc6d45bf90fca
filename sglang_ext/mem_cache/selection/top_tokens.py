"""The tokens that each KV head reads: those of the highest scores, the first and the newest in any case."""

import torch


def mark_always(scores: torch.Tensor, sinks: int, newest: int, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """Scores in which the first and the newest tokens of each context are infinite, and places that are no token's minus infinity.

    Args:
        scores: float32 [requests, ..., tokens].
        sinks, newest: tokens at either end.
        lengths: int64 [requests], tokens of each context; None where all have as many as there are scores.
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
        count: tokens that a head reads.
        sinks, newest: tokens that all heads read, the first and the last, as far as ``count`` goes.
        lengths: as :func:`mark_always`'s; reads nothing of them on the host, so that contexts shorter than ``count`` are the caller's.

    Raises:
        ValueError: no token is to be read, or more than there are.
    """
    tokens = scores.shape[-1]
    if not 1 <= count <= tokens:
        raise ValueError(
            f"{count} tokens are to be selected; allowed: 1 to the {tokens} of the context. Select fewer, or read the context whole"
        )
    return mark_always(scores, sinks, newest, lengths).topk(count, dim=-1).indices.sort(dim=-1).values


def overlap(chosen: torch.Tensor, others: torch.Tensor, tokens: int) -> torch.Tensor:
    """Share of ``chosen`` that is among ``others``, by head (equation 1 of AsyncSpade): float32 [...].

    Args:
        chosen, others: int64 [..., count], positions below ``tokens``, each once.
        tokens: of the context.
    """
    among = torch.zeros(*others.shape[:-1], tokens, dtype=torch.bool, device=others.device).scatter_(-1, others, True)
    return among.gather(-1, chosen).float().mean(dim=-1)
