"""Expected attention keeps what coming queries are expected to attend to (Devoto et al. 2025)."""

import torch

from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors import LayerKV, top_positions
from sglang_ext.mem_cache.compressors.attention_scores import ExpectedAttention

TOKENS, HEADS, GROUP, DIM, WINDOW = 40, 2, 3, 8, 12
ROTARY = Rotary(torch.tensor([1.0, 0.3, 0.1, 0.02]))


def rotated(vector, position):
    """One vector, turned pair by pair, in float64."""
    turned = vector.double().clone()
    for pair, frequency in enumerate(ROTARY.frequencies.double()):
        angle = position * frequency
        a, b = vector[pair].double(), vector[pair + DIM // 2].double()
        turned[pair], turned[pair + DIM // 2] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return turned


def layer(first_query=TOKENS - WINDOW):
    """A layer, and its queries before rotary embedding."""
    generator = torch.Generator().manual_seed(1)
    plain = torch.randn(WINDOW, HEADS * GROUP, DIM, generator=generator) + 0.5
    positions = torch.arange(first_query, first_query + WINDOW)
    queries = torch.stack([torch.stack([rotated(q, p) for q in heads]) for heads, p in zip(plain, positions)]).float()
    keys, values = (torch.randn(TOKENS, HEADS, DIM, generator=generator) for _ in range(2))
    return LayerKV(keys, values, queries, positions, DIM**-0.5, 0, ROTARY), plain


def test_scores_match_a_float64_loop_over_heads_and_keys():
    data, plain = layer()
    scores = ExpectedAttention(coming=6, sinks=4, block=16).scores(data)
    rotation = sum(torch.stack([rotated(unit, p) for unit in torch.eye(DIM)], dim=1) for p in range(TOKENS, TOKENS + 6)) / 6
    for head in range(HEADS):
        attention = torch.zeros(GROUP, TOKENS - 4, dtype=torch.float64)
        for member in range(GROUP):
            queries = plain[:, head * GROUP + member].double()
            mean, covariance = rotation @ queries.mean(0), rotation @ queries.t().cov(correction=0) @ rotation.t()
            for place, key in enumerate(data.keys[4:, head].double()):
                attention[member, place] = key @ mean / DIM**0.5 + key @ covariance @ key / (2 * DIM)
        expected = attention.softmax(-1).mean(0) * data.values[4:, head].double().norm(dim=-1)
        torch.testing.assert_close(scores[head, 4:].double(), expected, atol=1e-6, rtol=1e-4)


def test_the_first_tokens_are_kept_and_their_queries_are_not_looked_at():
    data, _ = layer(first_query=0)
    method = ExpectedAttention()
    assert top_positions(method.scores(data), 6)[:, :4].tolist() == [[0, 1, 2, 3]] * HEADS
    changed = data.queries.clone()
    changed[:4] *= 100
    again = method.scores(LayerKV(data.keys, data.values, changed, data.query_positions, data.scaling, 0, ROTARY))
    assert torch.equal(again, method.scores(data))


def test_the_key_that_coming_queries_point_to_is_kept_and_one_without_a_value_is_not():
    data, plain = layer()
    direction = plain.mean(dim=(0, 1))
    # Slow pairs turn little over the coming positions.
    data.keys[20, :, [3, 7]] = 20 * direction[[3, 7]]
    method = ExpectedAttention(coming=1)
    assert all(20 in kept for kept in top_positions(method.scores(data), 5).tolist())
    data.values[20] = 0
    assert all(20 not in kept for kept in top_positions(method.scores(data), 5).tolist())


def test_without_queries_the_first_and_the_newest_are_kept():
    data, _ = layer()
    nothing = LayerKV(data.keys, data.values, data.queries[:0], data.query_positions[:0], data.scaling, 0, ROTARY)
    assert top_positions(ExpectedAttention().scores(nothing), 6).tolist() == [[0, 1, 2, 3, 38, 39]] * HEADS
