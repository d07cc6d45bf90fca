"""KVQuant packs keys as they were before rotary embedding, by the levels and outliers that it says."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_helpers import attention, frequencies, meant, packed_pool, turned

from sglang_ext.layers.attention.packed import packed_attention
from sglang_ext.mem_cache.compressed.layouts.block_layout import Grid, BlockLayout
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors.catalogue import method, quantizer
from sglang_ext.mem_cache.compressors.level_quantizers import farthest, greatest, levels_of, nearest

TOKENS, HEADS, DIM = 128, 2, 64


def scattered(bits, dtype=torch.float32):
    """Packing, buffers, and slots of 128 tokens, kept by each head at positions of its own, of a context of 4,000."""
    noise = torch.Generator().manual_seed(bits)
    spread = 1 + 3 * torch.rand(DIM, generator=noise)
    before = torch.randn(HEADS, 4000, DIM, generator=noise) * spread + spread
    keys = torch.zeros(4060, HEADS, DIM, dtype=dtype)
    keys[:4000] = turned(before, torch.arange(4000), frequencies(DIM)).transpose(0, 1).to(dtype)
    values = torch.randn(4060, HEADS, DIM, generator=noise).to(dtype)
    buffers = KVBuffers((0,), (0.1,), (keys,), (values,))
    packing = Packing.for_pool(quantizer("kvquant", bits), buffers, 1, Rotary(frequencies(DIM)))
    kept = torch.stack([torch.randperm(4000, generator=noise)[:TOKENS].sort().values for _ in range(HEADS)])
    slots = torch.arange(4000, 4000 + packing.packed_slots(TOKENS))
    packing.write(buffers, kept[None], torch.arange(4000), slots)
    return packing, buffers, kept, slots


def plain_codes(numbers, tokens, channels, bits):
    """Codes, scales, zero points and places of outliers of a block, float64 [64, dim], in plain loops."""
    dim, count = numbers.shape[-1], 2**bits
    end = math.erf(0.7 / math.sqrt(6))
    inverse = torch.erfinv(torch.linspace(-end, end, count, dtype=torch.float64))
    levels = (inverse / inverse[-1] + 1) / 2
    groups = [
        (slice(t, t + tokens), slice(c, c + channels)) for t in range(0, 64, tokens) for c in range(0, dim, channels)
    ]
    distances, codes, parameters = torch.zeros(64, dim, dtype=torch.float64), torch.zeros(64, dim).long(), []
    for where in groups:
        group = numbers[where]
        distances[where] = (group - group.mean()).abs() / group.std()
    out = torch.zeros(64 * dim, dtype=torch.bool)
    out[distances.flatten().argsort(descending=True)[:dim]] = True
    for where in groups:
        rest = numbers[where][~out.view(64, dim)[where]]
        zero = rest.min().half().double()
        scale = (rest.max() - zero).half().double()
        codes[where] = ((numbers[where] - zero)[..., None] - scale * levels).abs().argmin(-1)
        parameters.append((scale, zero))
    scale, zero = torch.tensor(parameters).t()
    return codes, scale, zero, out.nonzero().flatten()


@pytest.mark.parametrize("bits", [4, 2])
def test_codes_scales_and_outliers_are_those_of_a_plain_formula_at_random_positions(bits):
    packing, buffers, kept, slots = scattered(bits)
    heads = torch.arange(HEADS)[:, None]
    original = [kind[0][kept, heads].double() for kind in (buffers.keys, buffers.values)]
    original[0] = turned(original[0], -kept, frequencies(DIM))
    for numbers, kind, layout in zip(original, (buffers.keys, buffers.values), (packing.keys, packing.values)):
        found = packing.read(kind[0], layout, slots)
        for head, block in ((0, 0), (1, 1)):
            exact = numbers[head, 64 * block : 64 * block + 64]
            codes, scale, zero, places = plain_codes(exact, *layout.grid, bits)
            assert (found.codes[head, block] == codes).double().mean() > 0.999, "but where float32 rounds to the other side"
            torch.testing.assert_close(found.scale[head, block].flatten().double(), scale, rtol=2e-3, atol=0)
            torch.testing.assert_close(found.zero[head, block].flatten().double(), zero, rtol=2e-3, atol=1e-4)
            assert found.outliers.places[head, block].sort().values.tolist() == places.tolist()
            back = meant(found, packing.levels(slots.device)[0], None)[head, 64 * block : 64 * block + 64]
            error = (back - exact).flatten()
            assert error[places].abs().max() < 0.01, "outliers are exact, but for rounding"
            assert error.abs().max() < scale.max() * levels_of(2**bits).diff().max() / 2 + 0.01
    assert torch.equal(packing.read(buffers.keys[0], packing.keys, slots).positions.flatten(1), kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 2])
def test_attention_turns_each_key_to_its_own_position(bits, dtype):
    packing, buffers, kept, slots = scattered(bits, dtype)
    row = torch.cat([slots, torch.arange(10)])
    queries = torch.randn(3, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(1))
    found = packed_attention(packing, queries, buffers.keys[0], buffers.values[0], row, len(slots), 0.125)
    levels = packing.levels(slots.device)[0]
    keys = turned(meant(packing.read(buffers.keys[0], packing.keys, slots), levels, None), kept, frequencies(DIM))
    values = meant(packing.read(buffers.values[0], packing.values, slots), levels, None)
    exact = [kind[0][:10].transpose(0, 1).double() for kind in (buffers.keys, buffers.values)]
    expected = attention(queries, torch.cat([keys, exact[0]], 1), torch.cat([values, exact[1]], 1), 0.125)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-3 * float(expected.abs().max()))


def test_levels_cover_the_range_and_lie_denser_in_its_middle():
    for count in (4, 16):
        levels = levels_of(count)
        gaps = levels.diff()
        assert levels[0] == 0 and levels[-1] == 1 and torch.allclose(levels + levels.flip(0), torch.ones(count))
        assert (gaps > 0).all() and gaps.argmin() == count // 2 - 1 and gaps.argmax() in (0, count - 2)


def test_one_huge_number_costs_its_group_nothing():
    packs, data = quantizer("kvquant", 4), torch.randn(1, 1, 64, DIM, generator=torch.Generator().manual_seed(0))
    data[0, 0, 5, 7] = 3000.0
    for grid in (packs.key_grid(DIM), packs.value_grid(DIM)):
        back = meant(packs.quantize(data, grid), packs.levels(DIM), None)
        assert (back - data[0].double()).abs().max() < 1


def test_an_outlier_costs_four_bytes_and_a_position_as_many():
    pool = packed_pool("kvquant", 4, 1, 1)
    keys, values = pool.packing.keys, pool.packing.values
    assert keys.parameter_bytes == 64 * 4 + 64 * 4 + 64 * 4 and values.parameter_bytes == 64 * 2 * 4 + 64 * 4
    assert pool.packing.block_slots == 11


def test_what_cannot_be_packed_so_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match="before rotary embedding.*pass the model's"):
        replace(packed_pool("kvquant", 4, 1, 1).packing, rotary=None)
    with pytest.raises(ValueError, match="64 tokens of 1024 channels.*at most 32 tokens"):
        BlockLayout(4, 64, 1024, 2048, Grid(1, 1024), outliers=8)


def test_only_methods_that_read_rotary_embedding_ask_for_the_models():
    needing = {name: method(name).needs_rotary for name in ("kvquant", "snapkv+kvquant", "expected-attention", "kivi", "snapkv")}
    assert needing == {"kvquant": True, "snapkv+kvquant": True, "expected-attention": True, "kivi": False, "snapkv": False}


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**30), st.integers(1, 50), st.sampled_from([8, 64, 512]))
def test_of_equals_the_first_are_the_greatest(seed, values, count):
    numbers = torch.randint(values, (2, 3, 512), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    order = torch.sort(numbers, stable=True, dim=-1, descending=True).indices[..., :count].sort(-1).values
    assert torch.equal(greatest(numbers, count), order)


@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_is_apart_and_a_block_has_as_many_outliers_as_ever(broken):
    numbers = torch.randn(1, 2, 64, DIM, generator=torch.Generator().manual_seed(0))
    numbers[0, 1, 7, 3] = broken
    for grid in (Grid(64, 1), Grid(1, DIM // 2)):
        found = farthest(numbers, grid, 64)
        assert found.shape == (1, 2, 64) and (found.diff(dim=-1) > 0).all()
        assert 7 * DIM + 3 in found[0, 1].tolist()


@pytest.mark.parametrize("count", [4, 16])
def test_each_share_of_a_range_gets_the_code_of_the_nearest_level(count):
    shares = torch.rand(20000, generator=torch.Generator().manual_seed(count))
    shares[:3] = torch.tensor([0.0, 1.0, 0.5])
    levels = levels_of(count).double()
    expected = (shares.double()[:, None] - levels).abs()
    codes = nearest(shares, levels_of(count))
    assert (expected.gather(1, codes.long()[:, None])[:, 0] <= expected.amin(1) + 1e-6).all()
