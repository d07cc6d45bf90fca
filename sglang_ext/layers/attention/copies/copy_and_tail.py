"""Attention of a request's newest tokens over what each head keeps of a context, and over all tokens after it, in PyTorch."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend(
    queries: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor],
    own: torch.Tensor,
    tail: tuple[torch.Tensor, torch.Tensor],
    scaling: float | None,
) -> torch.Tensor:
    """Causal in the tail: the last of the queries is its last token's.

    Args:
        queries: [count, heads, head_dim], of the last ``count`` tokens.
        kept: keys and values, [kv_heads, longest, head_dim].
        own: bool [kv_heads, longest], which of them a head keeps; the others pad it to the longest.
        tail: keys and values, [tokens, kv_heads, head_dim].
        scaling: factor on query-key products; None for ``head_dim ** -0.5``.

    Returns:
        [count, heads, head_dim], in the dtype of ``queries``.
    """
    (count, heads), (kv_heads, length) = queries.shape[:2], (len(own), len(tail[0]))
    joined = (torch.cat([far, near.transpose(0, 1)], dim=1)[None].to(queries.dtype) for far, near in zip(kept, tail))
    newest = torch.arange(length - count, length, device=queries.device)
    before = torch.arange(length, device=queries.device) <= newest[:, None]
    seen = torch.cat([own[:, None].expand(-1, count, -1), before.expand(kv_heads, -1, -1)], dim=-1)
    result = scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        *joined,
        attn_mask=seen.repeat_interleave(heads // kv_heads, dim=0)[None],
        scale=scaling,
        enable_gqa=heads != kv_heads,
    )
    return result[0].transpose(0, 1)
