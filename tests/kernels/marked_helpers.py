"""Tokens that are marked, written down for checks."""

import torch


def written(marked, most=0):
    """Positions, int32 [layers, requests, kv_heads, most], ascending, of each request as many as it has; None where pointers were written."""
    _, _, count, _ = marked.where
    (_, like), out = marked.tables, None
    if marked.contexts.targets is None:
        out = torch.empty(marked.pairs // count, count, like.shape[1], most, dtype=torch.int32, device=like.device)
    marked.write(out)
    return out
