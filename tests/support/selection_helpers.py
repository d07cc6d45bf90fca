"""Contexts and queries for tests of selection, and attention by a loop in float64."""

import torch

from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors import LayerKV
from sglang_ext_bench.baselines.scoring_inputs import ScoringInputs

DIM = 16
ROTARY = Rotary(torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003]))
# Kinds of heads: query heads, KV heads.
HEADS = {"MHA": (4, 4), "GQA": (6, 2), "MQA": (3, 1)}


def noise(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seen(seed=0, requests=2, layers=2, heads=(6, 2), window=5, tokens=40, lengths=None, rotary=ROTARY):
    """Contexts whose queries are those of the tokens after them."""
    ends = torch.tensor([tokens] * requests) if lengths is None else lengths
    return ScoringInputs(
        queries=noise(seed, requests, layers, heads[0], window, DIM),
        positions=ends[:, None] + torch.arange(window) - window,
        keys=noise(seed + 1, requests, layers, heads[1], tokens, DIM),
        scaling=0.3,
        rotary=rotary,
        lengths=lengths,
    )


def turned(vector, angle):
    """A vector with its pairs turned by ``angle`` times their frequencies, in float64."""
    first, second = vector.double().chunk(2)
    angles = ROTARY.frequencies.double() * angle
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()])


def attention_by_loop(query, keys, scaling):
    return (keys.double() @ query.double() * scaling).softmax(dim=0)


def random_layer(tokens, heads=2, group=3, dim=8, window=4, rotary=None):
    """Random keys, values and newest queries of a layer, as a compressor gets them."""
    generator = torch.Generator().manual_seed(tokens)
    return LayerKV(
        keys=torch.randn(tokens, heads, dim, generator=generator),
        values=torch.randn(tokens, heads, dim, generator=generator),
        queries=torch.randn(window, heads * group, dim, generator=generator),
        query_positions=torch.arange(tokens - window, tokens),
        scaling=dim**-0.5,
        layer_id=0,
        rotary=rotary,
    )
