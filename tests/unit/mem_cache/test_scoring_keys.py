"""Keys that are held for scoring: as they are, or in few bits, whose bytes and errors are what they say."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.mem_cache.selection.scoring import group_attention, top_tokens
from sglang_ext.mem_cache.selection.scoring_keys import SCORE_BITS, KeySpec, QuantizedKeys
from sglang_ext_bench.baselines.scorings import overlap


def keys_of(tokens, layers=2, heads=3, dim=64, seed=0):
    """Keys whose channels differ in size, [layers, tokens, heads, dim]."""
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(layers, tokens, heads, dim, generator=noise) * (1 + 3 * torch.rand(dim, generator=noise))


@given(st.sampled_from(SCORE_BITS[1:]), st.sampled_from([(64, 32), (8, 8), (80, 80)]), st.integers(1, 50))
@settings(deadline=None, max_examples=30)
def test_keys_come_back_within_half_a_step_of_their_group(bits, sizes, tokens):
    dim, group = sizes
    held = QuantizedKeys(KeySpec(2, 3, dim, torch.float32, bits), 64)
    keys = keys_of(tokens, dim=dim, seed=tokens)
    held.write(torch.arange(tokens) + 3, keys)
    for layer in range(2):
        places = torch.arange(tokens).flip(0) + 3
        found, expected = held.read(layer, places), keys[layer].flip(0)
        groups = expected.unflatten(-1, (-1, group))
        step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / (2**bits - 1)
        off = (found.unflatten(-1, (-1, group)) - groups).abs()
        # Scales and zero points are float16.
        assert (off <= 0.5 * step + 2e-3 * groups.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize(("dtype", "bits", "share"), [
    (torch.bfloat16, 16, 1.0), (torch.bfloat16, 8, 9 / 16), (torch.bfloat16, 4, 5 / 16), (torch.float32, 8, 9 / 32)])  # fmt: skip
def test_bytes_are_those_that_the_pool_counts(dtype, bits, share):
    sizes = KeySpec(4, 2, 128, dtype, bits)
    assert sizes.token_bytes == share * KeySpec(4, 2, 128, dtype).token_bytes
    held = sizes.empty(192, torch.device("cpu")) if bits == 16 else QuantizedKeys(sizes, 192)
    assert held.nbytes == 192 * sizes.token_bytes


def test_what_is_chosen_by_codes_is_nearly_what_is_chosen_by_exact_keys_and_more_bits_choose_better():
    sizes, keys = KeySpec(1, 2, 64, torch.float32), keys_of(1000, layers=1, heads=2)
    query = torch.randn(1, 1, 6, 64, generator=torch.Generator().manual_seed(5))
    chosen, places = {}, torch.arange(1000)
    for bits in SCORE_BITS:
        stored = keys[0]
        if bits < 16:
            held = QuantizedKeys(KeySpec(*(sizes.layers, sizes.kv_heads, sizes.dim, sizes.dtype), bits), 1000)
            held.write(places, keys)
            stored = held.read(0, places)
        scores = group_attention(query, stored.transpose(0, 1)[None, None], 0.125)
        chosen[bits] = top_tokens(scores, 125, 4, 32)
    same = {bits: float(overlap(chosen[16], chosen[bits], 1000).mean()) for bits in SCORE_BITS}
    assert same[8] > 0.97 and 0.6 < same[4] < same[8] < same[16] == 1.0
