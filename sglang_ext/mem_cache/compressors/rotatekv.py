"""RotateKV (Su et al. 2025, arXiv 2501.16383): a Walsh-Hadamard rotation spreads outliers before tokens are quantized."""

from dataclasses import dataclass

import torch

from sglang_ext.mem_cache.compressed.layouts.block_layout import Grid
from sglang_ext.mem_cache.compressors.contracts.quantizer import Quantizer
from sglang_ext.mem_cache.compressors.contracts.registry import register_quantizer


@register_quantizer("rotatekv", bits=(4, 2))
@dataclass(frozen=True)
class RotateKV(Quantizer):
    """Rotated keys and values, asymmetric integers per token and head.

    Each head is rotated separately, after rotary embedding, since the cache stores such keys. The paper rotates keys of several heads
    together, before rotary embedding. The paper's reordering of channels is replaced by the fixed one of :func:`reordering`. It matters
    only if a head has several Hadamard blocks, since one block mixes all channels in any order. Attention sinks are not stored
    separately: each token has its own scale.
    """

    def key_grid(self, dim: int) -> Grid:
        """One token, all channels."""
        return Grid(1, dim)

    value_grid = key_grid

    def rotation(self, dim: int) -> torch.Tensor:
        """Reordering of channels, then Hadamard blocks: float32 [dim, dim], orthogonal."""
        size = dim & -dim
        blocks = torch.block_diag(*[hadamard(size)] * (dim // size))
        return torch.eye(dim)[:, reordering(dim, size)] @ blocks


def hadamard(size: int) -> torch.Tensor:
    """The orthogonal Walsh-Hadamard matrix (Sylvester's): float32 [size, size]; ``size`` is a power of 2."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def reordering(dim: int, size: int) -> torch.Tensor:
    """An order of channels that puts neighbours into different blocks of ``size``: int64 [dim].

    The outliers of keys are in channels of neighbouring frequencies.
    """
    blocks = dim // size
    return torch.arange(dim).view(size, blocks).t().flatten()
