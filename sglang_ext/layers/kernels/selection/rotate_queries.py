"""Rotates queries (RoPE) to later positions, for many layers and requests in one launch (mem_cache/compressed/rotary.py:advanced)."""

import torch
import triton
import triton.language as tl

# Entries that a program rotates at once.
BLOCK_ENTRIES = 1024


@triton.jit(do_not_specialize=("requests", "of_request", "of_layer", "size"))
def _rotate_queries(
    queries, cos, sin, other, out, requests, of_request, of_layer, size, DIM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Rotate the queries of a layer and request: ``size`` contiguous entries."""
    pair = tl.program_id(0).to(tl.int64)
    source = queries + pair % requests * of_request + pair // requests * of_layer
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, entry = at < size, at % DIM
    partner = at - entry + tl.load(other + entry, mask=inside, other=0)
    found = tl.load(source + at, mask=inside, other=0.0).to(tl.float32) * tl.load(cos + entry, mask=inside, other=0.0)
    found += tl.load(source + partner, mask=inside, other=0.0).to(tl.float32) * tl.load(sin + entry, mask=inside, other=0.0)
    tl.store(out + pair * size + at, found, mask=inside)


def rotate_queries(queries: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate queries by a number of positions.

    Args:
        queries: float [requests, layers, query_heads, dim]; those of a request and layer are contiguous.
        turn: For each entry the cosine, the signed sine, and the index of its pair's other entry: float32, float32 and int64 [dim].

    Returns:
        float32 [requests, layers, query_heads, dim]; those of a layer are contiguous.
    """
    requests, layers, heads, dim = queries.shape
    out = torch.empty(layers, requests, heads, dim, device=queries.device)
    _rotate_queries[(layers * requests, triton.cdiv(heads * dim, BLOCK_ENTRIES))](
        queries, *turn, out, requests, queries.stride(0), queries.stride(1), heads * dim, DIM=dim, BLOCK=BLOCK_ENTRIES
    )
    return out.transpose(0, 1)
