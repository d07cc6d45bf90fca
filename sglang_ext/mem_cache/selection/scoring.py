"""Scores of how much each KV head needs each token in the next step, by one query per head.

One batched product serves all attention types (AsyncSpade, section 4.3 and Figure 8). The query heads of a KV head are the rows of a
matrix. It has one row if each head has its own keys (MHA), and all rows if heads share keys (MQA).

:func:`top_tokens` selects the tokens with the highest scores, and always the first and the newest.
"""

import torch


def page_scores(query: torch.Tensor, keys: torch.Tensor, page: int) -> torch.Tensor:
    """Upper bound of the products of the query with the keys of a page (Quest, Tang et al. 2024, arXiv 2406.10774).

    The bound is the mean over the query heads of a KV head. All tokens of a page of ``page`` tokens have the page's bound. Arguments and
    result as :func:`group_attention`'s.
    """
    tokens = keys.shape[-2]

    def paged(fill: float) -> torch.Tensor:
        """The keys by page, the last page completed with ``fill``: float32 [..., pages, page, dim]."""
        return torch.nn.functional.pad(keys.float(), (0, 0, 0, -tokens % page), value=fill).unflatten(-2, (-1, page))

    query = grouped(query, keys)
    # The larger bound per channel: negative entries of a query are multiplied with the smallest keys, others with the largest.
    low, high = paged(float("inf")).amin(dim=-2), paged(float("-inf")).amax(dim=-2)
    bound = query.clamp(min=0) @ high.transpose(-1, -2) + query.clamp(max=0) @ low.transpose(-1, -2)
    return bound.mean(dim=-2).repeat_interleave(page, dim=-1)[..., :tokens]


def group_attention(queries: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attention of one query per head to all tokens, mean over the query heads of a KV head.

    Args:
        queries: float [requests, layers, query_heads, dim], rotary embedding applied.
        keys: float [requests, layers, kv_heads, tokens, dim], rotary embedding applied.
        scaling: Factor on query-key products before softmax.

    Returns:
        float32 [requests, layers, kv_heads, tokens].
    """
    logits = grouped(queries, keys) @ keys.float().transpose(-1, -2) * scaling
    return logits.softmax(dim=-1).mean(dim=-2)


def grouped(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Group queries, float [..., query_heads, dim], by KV head of ``keys``: float32 [..., kv_heads, query heads per KV head, dim]."""
    heads, kv_heads = queries.shape[-2], keys.shape[-3]
    if heads % kv_heads:
        raise ValueError(
            f"there are {heads} query heads; allowed: a multiple of the {kv_heads} KV heads. Pass the heads of one rank, all of them"
        )
    return queries.float().unflatten(-2, (kv_heads, heads // kv_heads))


def mark_always(scores: torch.Tensor, sinks: int, newest: int) -> torch.Tensor:
    """Set the scores, float32 [..., tokens], of the first and the newest tokens to infinity."""
    tokens = scores.shape[-1]
    places = torch.arange(tokens, device=scores.device)
    return scores.masked_fill((places < sinks) | (places >= tokens - newest), float("inf"))


def top_tokens(scores: torch.Tensor, count: int, sinks: int, newest: int) -> torch.Tensor:
    """Positions of the ``count`` tokens that each KV head reads, first and newest ones before others: int64 [..., count], ascending.

    ``scores`` are float32 [..., tokens].

    Raises:
        ValueError: ``count`` is below 1 or above the number of tokens.
    """
    tokens = scores.shape[-1]
    if not 1 <= count <= tokens:
        raise ValueError(
            f"{count} tokens are to be selected; allowed: 1 to the {tokens} of the context. Select fewer, or read the context whole"
        )
    return mark_always(scores, sinks, newest).topk(count, dim=-1).indices.sort(dim=-1).values
