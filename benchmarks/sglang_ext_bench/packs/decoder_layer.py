"""What SGLang computes of a decoder layer of Qwen3 beside products and attention, for pack_layers.py: by its kernels, or on a CPU by PyTorch."""

from typing import NamedTuple

import torch
from torch.nn.functional import rms_norm, silu

EPSILON = 1e-6


class Norms(NamedTuple):
    """Weights: [hidden] before attention and before the feed-forward network, [dim] of each query's and key's head."""

    attention: torch.Tensor
    feed_forward: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor


def add_normalized(hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    """Add ``hidden``, [tokens, width], to ``residual``, and let it be that, normalized."""
    if hidden.is_cuda:
        # As RMSNorm.forward_cuda launches it.
        from sglang.srt.layers.layernorm import fused_add_rmsnorm

        fused_add_rmsnorm(hidden, residual, weight, EPSILON)
        return
    residual += hidden
    hidden.copy_(rms_norm(residual, weight.shape, weight, EPSILON))


def turn_heads(queries: torch.Tensor, keys: torch.Tensor, norms: Norms, angles: torch.Tensor, positions: torch.Tensor) -> None:
    """Normalize heads, [tokens, heads, dim], and rotate them: float32 [positions, dim] are cosines and sines behind them."""
    if queries.is_cuda:
        from sglang.kernels.ops.attention.rope import (
            apply_rope_with_cos_sin_cache_inplace,
        )
        from sglang.kernels.ops.layernorm.norm import fused_inplace_qknorm

        fused_inplace_qknorm(queries, keys, norms.queries, norms.keys, EPSILON)
        apply_rope_with_cos_sin_cache_inplace(queries, keys, angles, positions, is_neox=True)
        return
    cosines, sines = angles[positions, None].chunk(2, -1)
    for part, weight in ((queries, norms.queries), (keys, norms.keys)):
        first, second = rms_norm(part, weight.shape, weight, EPSILON).chunk(2, -1)
        part.copy_(torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1))


def store(keys: torch.Tensor, values: torch.Tensor, key_buffer: torch.Tensor, value_buffer: torch.Tensor, slots: torch.Tensor) -> None:
    """Write K and V of tokens, [tokens, heads, dim], to their slots."""
    if keys.is_cuda:
        from sglang.kernels.ops.kvcache.kvcache import store_cache

        store_cache(*(part.flatten(1) for part in (keys, values, key_buffer, value_buffer)), slots)
        return
    key_buffer[slots], value_buffer[slots] = keys, values


def activated(both: torch.Tensor) -> torch.Tensor:
    """Of [tokens, 2 width] the first half through SiLU, times the second."""
    if both.is_cuda:
        from sglang.kernels.ops.activation import silu_and_mul

        return silu_and_mul(both)
    gate, up = both.chunk(2, -1)
    return silu(gate) * up
