"""Scores of uneven heads, and what heads keep by them."""

import torch

from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressors import ContextKV
from sglang_ext.mem_cache.compressors.compressor import Compressor


class Given(Compressor):
    """Scores as they are given: float32 [layers, kv_heads, tokens]."""

    comparable = True
    # So that copies end where queries do.
    window = 1

    def __init__(self, given):
        self.given = given

    def scores(self, layer):
        return self.given[layer.layer_id]


def context(layers, heads, tokens):
    """A context of zeros, without queries."""
    zeros = tuple(torch.zeros(tokens, heads, 2) for _ in range(layers))
    buffers = KVBuffers(tuple(range(layers)), (1.0,) * layers, zeros, zeros)
    return ContextKV(buffers, torch.arange(tokens), torch.empty(layers, 0, heads, 2), torch.empty(0, dtype=torch.int64))


def sets(kept):
    """Positions by head."""
    bounds = kept.bounds.tolist()
    return [kept.tokens[a:b].tolist() for a, b in zip(bounds, bounds[1:])]


def scores_of(layers, heads, tokens, seed):
    """Distinct scores, of very different sizes by head."""
    noise = torch.Generator().manual_seed(seed)
    order = torch.randperm(layers * heads * tokens, generator=noise).float().view(layers, heads, tokens)
    return order * torch.rand(layers, heads, 1, generator=noise) ** 3


def check_slots_are_conserved(compressed_kv, steps, page_size, choose, held_of, check):
    """Over copies of row 1 that are made, grown and released: slots that copies hold are those that the pool lacks.

    ``steps``: tokens of the request, and whether its copy is released then; ``choose``: let scores of so many tokens, from a seed,
    decide; ``held_of``: of a copy, slots that it holds; ``check``: what is to hold of a copy besides.
    """
    before = compressed_kv.allocator.available_size()
    for tokens, release in steps:
        covered = tokens // page_size * page_size
        choose(max(covered, 1), tokens)
        assert compressed_kv.compress(1, tokens) == (covered > 0)
        view = compressed_kv.get(1)
        held = held_of(view) if view else 0
        assert compressed_kv.owned_slot_count == held and compressed_kv.allocator.available_size() == before - held
        if view:
            check(held)
        if release:
            compressed_kv.release(1)
    compressed_kv.release(1)
    assert compressed_kv.allocator.available_size() == before
