"""Quantizers give the codes that their papers say, and attention over them is attention over what they mean."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_helpers import KINDS, Gridded, attention, attention_over, meant, packed_pool, pool_by

from sglang_ext.layers.attention.packed import packed_attention
from sglang_ext.mem_cache.compressed.layouts.block_layout import Grid
from sglang_ext.mem_cache.compressors.catalogue import code_bits, method, on_gpu, packing, quantizer
from sglang_ext.mem_cache.compressors.integer_quantizers import Kivi, RotateKV, hadamard
from sglang_ext.mem_cache.compressors.attention_scores import SnapKV
from sglang_ext.mem_cache.compressors.level_quantizers import TurboQuant, lloyd_max


def numbers(heads=2, blocks=2, dim=64):
    noise = torch.Generator().manual_seed(dim)
    return torch.randn(heads, blocks, 64, dim, generator=noise) * (1 + 4 * torch.rand(dim, generator=noise))


def test_those_that_say_so_have_blocks_that_kernels_read():
    plain = {name for name in packing() if packed_pool(name, code_bits(name, None), 1, 1).packing.keys.plain}
    assert plain == set(on_gpu())


def test_each_says_how_it_finds_codes_and_none_where_a_kernel_cannot():
    found = {name: quantizer(name, code_bits(name, None)).finding for name in packing()}
    evenly = dict.fromkeys(("int8", "int4", "kivi", "rotatekv"), "evenly")
    assert found == {**evenly, "turboquant": "levels", "lynx": "centred", "hack": "stochastic", "kvquant": None}


def test_codes_of_its_own_are_no_kernels_unless_a_class_says_so():
    class Same(TurboQuant):
        def rotation(self, dim):
            return torch.eye(dim)

    class Own(TurboQuant):
        def quantize(self, numbers, grid):
            return super().quantize(numbers.round(), grid)

    class OfOwn(Own):
        pass

    class Told(Kivi):
        finding = "evenly"

        def quantize(self, numbers, grid):
            return super().quantize(numbers, grid)

    class OfTold(Told):
        def quantize(self, numbers, grid):
            return super().quantize(numbers.round(), grid)

    class Rounding:
        def quantize(self, numbers, grid):
            return super().quantize(numbers.round(), grid)

    class Mixed(Rounding, Kivi):
        pass

    found = [made.finding for made in (Same, Own, OfOwn, Told, OfTold, Mixed)]
    assert found == ["levels", None, None, "evenly", None, None]


def test_a_method_selects_then_packs():
    both, one = method("snapkv+kivi", 2), method("int8")
    assert isinstance(both.compressor, SnapKV) and (type(both.quantizer), both.quantizer.bits) == (Kivi, 2)
    assert one.compressor.keeps_all and one.quantizer.bits == 8 and method("snapkv").quantizer is None


@pytest.mark.parametrize(("name", "bits"), [kind for kind in KINDS if kind[0] in ("int8", "int4", "kivi")])
def test_integers_are_the_nearest_of_their_groups_in_float64(name, bits):
    packs, data = quantizer(name, bits), numbers()
    for grid in (packs.key_grid(64), packs.value_grid(64)):
        found = packs.quantize(data, grid)
        for head, block, first, channel in ((0, 0, 0, 0), (1, 1, 64 - grid.tokens, 64 - grid.channels), (1, 0, 0, 0)):
            group = data[head, block, first : first + grid.tokens, channel : channel + grid.channels].double()
            zero = group.min().half().double()
            scale = ((group.max() - zero) / (2**bits - 1)).half().double()
            where = head, block, first // grid.tokens, channel // grid.channels
            assert (found.scale[where].double(), found.zero[where].double()) == (scale, zero)
            codes = found.codes[head, block, first : first + grid.tokens, channel : channel + grid.channels].double()
            exact = ((group - zero) / scale).clamp(0, 2**bits - 1)
            assert ((codes - exact).abs() <= 0.5 + 1e-4).all()


def test_kivi_shares_scales_of_keys_along_tokens_and_of_values_along_channels():
    packs = quantizer("kivi", 4)
    assert packs.recent == 128
    assert packs.key_grid(64) == (32, 1) and packs.value_grid(64) == (1, 32) and packs.value_grid(80) == (1, 16)


@pytest.mark.parametrize("name", packing())
def test_equal_and_huge_numbers_stay_finite(name):
    packs = quantizer(name, code_bits(name, None))
    data = torch.cat([torch.zeros(1, 1, 64, 64), torch.full((1, 1, 64, 64), 7.0), torch.full((1, 1, 64, 64), -3e6)], 1)
    for grid in (packs.key_grid(64), packs.value_grid(64)):
        found = packs.quantize(data, grid)
        assert found.scale.isfinite().all() and found.zero.isfinite().all()
        back = meant(found, packs.levels(64), None).view(3, 64, 64)
        assert back[0].abs().max() == 0
        if packs.levels(64) is None:
            assert (back[1] == 7).all()


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("name", ["rotatekv", "turboquant"])
def test_rotations_keep_products(name, dim):
    rotation = quantizer(name, 4).rotation(dim)
    assert torch.allclose(rotation @ rotation.t(), torch.eye(dim), atol=1e-6)


def test_a_hadamard_rotation_spreads_one_outlier_over_all_channels():
    data = torch.zeros(64)
    data[5] = 8.0
    assert torch.allclose((data @ RotateKV(bits=4).rotation(64)).abs(), torch.ones(64))
    assert torch.equal(hadamard(4) * 2, torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]).float())


@pytest.mark.parametrize(("bits", "error"), [(2, 0.117), (4, 0.0095)])
def test_turboquant_has_the_papers_error(bits, error):
    packs = TurboQuant(bits=bits)
    unit = torch.nn.functional.normalize(numbers(dim=128) @ packs.rotation(128), dim=-1)
    back = meant(packs.quantize(unit, packs.key_grid(128)), packs.levels(128), None).view_as(unit)
    assert ((back - unit) ** 2).sum(-1).mean() == pytest.approx(error, rel=0.06)


def test_lloyd_max_levels_are_their_cells_means():
    levels = lloyd_max(64, 4)
    points = torch.linspace(-1, 1, 400001, dtype=torch.float64)
    density = (1 - points**2) ** 30.5
    cells = torch.bucketize(points, (levels[1:] + levels[:-1]) / 2)
    means = [float((points * density)[cells == i].sum() / density[cells == i].sum()) for i in range(4)]
    assert levels.tolist() == pytest.approx(means, abs=1e-4)
    assert levels[2] * math.sqrt(64) == pytest.approx(0.4528, rel=0.01), "near those of a normal distribution"


@pytest.mark.parametrize(("name", "bits"), KINDS)
@pytest.mark.parametrize(("group", "count"), [(1, 1), (3, 5)])
def test_attention_on_packed_tokens_is_attention_on_what_they_mean(name, bits, group, count):
    for blocks, exact in ((1, count), (3, 70)):
        pool = packed_pool(name, bits, blocks, exact)
        queries = torch.randn(count, 2 * group, 64, generator=torch.Generator().manual_seed(5))
        keys, values = pool.buffers.keys[0], pool.buffers.values[0]
        found = packed_attention(pool.packing, queries, keys, values, pool.row, pool.packed, 0.125)
        expected = attention_over(pool.packing, blocks * 64, queries, pool.keys, pool.values, 0.125)
        assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


# Of heads of 64 channels; with fewer numbers a block's scales take more room than its tokens did.
GRIDS = [Grid(tokens, channels) for tokens in (1, 2, 16, 32, 64) for channels in (1, 2, 32, 64) if tokens * channels > 8]


@given(
    bits=st.sampled_from([2, 4, 8]),
    block=st.sampled_from([64, 128]),
    grids=st.tuples(st.sampled_from(GRIDS), st.sampled_from(GRIDS)),
)
@settings(max_examples=40, deadline=None)
def test_keys_and_values_may_share_scales_over_any_grid_that_divides_a_block(bits, block, grids):
    pool = pool_by(Gridded(bits, block, keys=grids[0], values=grids[1]), 2, 5)
    queries = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(bits))
    buffers = pool.buffers.keys[0], pool.buffers.values[0]
    found = packed_attention(pool.packing, queries, *buffers, pool.row, pool.packed, 0.125)
    expected = attention(queries, pool.keys, pool.values, 0.125)
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "bits"), KINDS)
def test_packed_tokens_are_near_what_they_were(name, bits, dtype):
    pool = packed_pool(name, bits, 2, 1, dim=128, dtype=dtype)
    for means, original in zip((pool.keys, pool.values), pool.originals):
        error = (means[:, :128] - original).norm() / original.norm()
        # With 2 bits two of lynx's four levels are the ends of a chunk's range.
        assert error < {8: 0.01, 4: 0.15, 2: 0.7 if name == "lynx" else 0.6}[bits]


@pytest.mark.parametrize("name", ["rotatekv", "turboquant"])
def test_rotations_and_levels_are_moved_to_a_device_once_and_stay_where_they_are(name):
    layout = packed_pool(name, 4, 1, 1).packing
    meta = torch.device("meta")
    for found in (layout.rotations, layout.levels):
        assert all(first is again for first, again in zip(found(meta), found(meta)))
        assert {tensor.device for tensor in found(meta) if tensor is not None} <= {meta}
    assert layout.rotations(meta)[0].shape == (64, 64) and layout.rotations(torch.device("cpu"))[0].device.type == "cpu"
