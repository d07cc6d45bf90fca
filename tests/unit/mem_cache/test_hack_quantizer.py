"""HACK's codes: partitions along both products' inner dimensions, their sums, and rounding that is unbiased and the same everywhere."""

from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.block_layout import SEED_PAGE, BlockLayout, lane, noise, token_seeds
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressors import catalogue
from sglang_ext.mem_cache.compressors.integer_quantizers import Hack, stored_below
from sglang_ext.mem_cache.compressors.quantizer import grouped, whole

CPU = torch.device("cpu")
SIZES = [(bits, partition) for bits in (4, 2) for partition in (32, 64, 128)]


def numbers(seed=0, tokens=128, dim=128):
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(2, 1, tokens, dim, generator=noise) * (1 + 4 * torch.rand(dim, generator=noise))


def drawn(seed, like):
    return torch.rand(like.shape, generator=torch.Generator().manual_seed(seed))


def pool(tokens=400, heads=2, first_head=0, layers=(0, 1)):
    """Buffers whose numbers are those of the model's heads and layers, whichever of them a rank holds."""

    def kind(is_value):
        made = []
        for layer in layers:
            all_heads = torch.randn(tokens, 8, 64, generator=torch.Generator().manual_seed(2 * layer + is_value))
            made.append(all_heads[:, first_head : first_head + heads].contiguous())
        return tuple(made)

    return KVBuffers(layers, (1.0,) * len(layers), kind(0), kind(1), first_head)


def packed(buffers, prompt, tokens=128, first=4):
    """Blocks of ``tokens`` tokens from ``first`` on: of each layer, keys and values."""
    packing = Packing.for_pool(Hack(4), buffers, 1)
    kept = torch.arange(first, first + tokens).expand(len(buffers.keys), buffers.keys[0].shape[1], -1)
    slots = torch.arange(300, 300 + packing.held_slots(tokens))
    packing.write(buffers, kept, torch.arange(first + tokens), slots, token_seeds(prompt, first + tokens, CPU))
    kinds = (buffers.keys, packing.keys), (buffers.values, packing.values)
    return [[packing.read(buffer, layout, slots) for buffer in kind] for kind, layout in kinds]


@pytest.mark.parametrize(("bits", "partition"), SIZES)
def test_partitions_of_keys_are_a_tokens_channels_and_of_values_a_channels_tokens(bits, partition):
    packs = catalogue.quantizer("hack", bits, partition)
    assert packs.key_grid(128) == (1, partition) and packs.value_grid(128) == (partition, 1)
    assert packs.block == max(64, partition) and packs.recent == 0


@pytest.mark.parametrize(("bits", "partition"), SIZES)
def test_each_number_lies_between_two_codes_and_gets_one_of_them(bits, partition):
    packs, data = Hack(bits, partition=partition), numbers()
    for grid in (packs.key_grid(128), packs.value_grid(128)):
        block = packs.quantize(data, grid, drawn(1, data))
        scale, zero = (part[:, :, :, None, :, None] for part in (block.scale, block.zero))
        groups = grouped(data, grid)
        assert (zero <= groups).all() and (groups <= (zero + scale * (2**bits - 1)) * (1 + 1e-6) + 1e-6).all()
        off = (grouped(whole(block, grid, None), grid) - groups).abs()
        assert (off <= scale * (1 + 1e-4)).all()
        assert torch.equal(block.sums, grouped(block.codes.long(), grid).sum((3, 5)))


def test_rounding_is_unbiased():
    packs, data = Hack(2), numbers(3, 64, 64)
    grid, draws = packs.value_grid(64), 4000
    total, scale = torch.zeros_like(data), packs.quantize(data, grid).scale
    for draw in range(draws):
        total += whole(packs.quantize(data, grid, drawn(draw, data)), grid, None)
    # A code's deviation is at most half a scale; of a mean of so many, 5 deviations of it.
    bound = scale.repeat_interleave(64, 2) * 0.5 * 5 / draws**0.5
    assert ((total / draws - data).abs() <= bound).all()
    nearest = whole(packs.quantize(data, grid), grid, None)
    assert ((nearest - data).abs() > bound).float().mean() > 0.5, "as rounding to the nearest is not"


def test_noise_is_even_and_of_its_token_lane_and_channel():
    seeds = token_seeds(range(1000), 640, CPU)
    found = noise(seeds.expand(4, -1), torch.tensor([lane(1, head, False) for head in range(4)]), 128)
    assert found.min() >= 0 and found.max() < 1
    assert torch.histc(found, 16, 0, 1).div(found.numel() / 16).sub(1).abs().max() < 0.02
    for other in (found.roll(1, 0), found.roll(1, 1), found.roll(1, 2)):
        assert abs(float(torch.corrcoef(torch.stack([found.flatten(), other.flatten()]))[0, 1])) < 0.01
    lanes = {lane(layer, head, kind) for layer in range(80) for head in range(128) for kind in (False, True)}
    assert len(lanes) == 80 * 128 * 2


def test_seeds_follow_from_the_prompt_before_a_tokens_page():
    prompt = list(range(5 * SEED_PAGE))
    whole_prompt = token_seeds(prompt, 5 * SEED_PAGE, CPU)
    assert torch.equal(token_seeds(array("q", prompt), 5 * SEED_PAGE, CPU), whole_prompt)
    for parting in (3 * SEED_PAGE, 3 * SEED_PAGE + 5, 4 * SEED_PAGE - 1):
        for after in ([], [7] * 100):
            shared = token_seeds(prompt[:parting] + after, parting, CPU)
            assert torch.equal(shared, whole_prompt[:parting]), "a shared prefix, wherever it ends and however it goes on"
    changed = token_seeds([9, *prompt[1:]], 5 * SEED_PAGE, CPU)
    assert not (changed == whole_prompt)[SEED_PAGE:].any(), "each page depends on all before it"
    grown, short = token_seeds(prompt[:100], 1000, CPU), token_seeds(prompt[:100], 90, CPU)
    assert torch.equal(grown[:90], short) and len(grown.unique()) == 1000 and grown.dtype == torch.int32
    assert len(token_seeds([], 10, CPU)) == 10


def test_all_ranks_and_servers_draw_the_same_codes():
    prompt = list(range(90, 400))
    everything, again = (packed(pool(heads=8), prompt) for _ in range(2))
    for kind, kind_again in zip(everything, again):
        for block, same in zip(kind, kind_again):
            assert all(torch.equal(getattr(block, part), getattr(same, part)) for part in ("codes", "scale", "zero", "sums"))
    rank = packed(pool(first_head=4), prompt)
    stage = packed(pool(heads=8, layers=(1,)), prompt)
    for kind, of_rank, of_stage in zip(everything, rank, stage):
        assert all(torch.equal(block.codes[4:6], mine.codes) for block, mine in zip(kind, of_rank))
        assert torch.equal(kind[1].codes, of_stage[0].codes)
    other = packed(pool(heads=8), [1, *prompt])
    assert not torch.equal(other[0][0].codes, everything[0][0].codes)


def test_a_token_is_packed_alike_in_whichever_block_it_lies():
    buffers, prompt = pool(), list(range(400))
    early, late = packed(pool(), prompt, 128, 4)[0][0], packed(buffers, prompt, 64, 68)[0][0]
    assert torch.equal(early.codes[:, 1], late.codes[:, 0]) and torch.equal(early.sums[:, 1], late.sums[:, 0])


@given(
    bits=st.sampled_from([2, 4]), partition=st.sampled_from([32, 64, 128]), size=st.sampled_from([2, 4]),
    dim=st.sampled_from([64, 128, 256]), seed=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_sums_lie_in_blocks_behind_zero_points(bits, partition, size, dim, seed):
    packs, data = Hack(bits, partition=partition), numbers(seed, 128, max(dim, partition))
    dim = data.shape[-1]
    for grid in (packs.key_grid(dim), packs.value_grid(dim)):
        layout = BlockLayout(bits, packs.block, dim, dim * size, grid, sums=True)
        given = packs.quantize(data.view(2, -1, packs.block, dim), grid, None)
        found = layout.unpack(layout.pack(given, layout.cells + 1))
        assert all(torch.equal(getattr(found, part), getattr(given, part)) for part in ("codes", "scale", "zero", "sums"))
        plain = BlockLayout(bits, packs.block, dim, dim * size, grid)
        groups = packs.block * dim // partition
        assert layout.parameter_bytes - plain.parameter_bytes == 2 * groups
        assert torch.equal(plain.unpack(layout.pack(given, layout.cells)).codes, given.codes), "who needs no sums reads on"


def test_sums_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="sums of 256 codes of 8 bits do not fit 16 bits.*groups of less than 128"):
        BlockLayout(8, 64, 256, 512, packs_whole_tokens := Hack(8, partition=128).key_grid(256)._replace(channels=256), sums=True)
    assert packs_whole_tokens == (1, 256)


def test_numbers_are_rounded_down_to_the_next_float16():
    data = torch.cat([torch.randn(1000), torch.tensor([0.0, -0.0, 1e-9, -1e-9, 65504.0, -65504.0, 1e9, -1e9, 2.0**-24])])
    found = stored_below(data)
    finite = data.clamp(-65504, 65504)
    assert (found <= finite).all() and torch.equal(found.half().float(), found)
    above = torch.nextafter(found.half(), torch.tensor(float("inf"), dtype=torch.float16)).float()
    assert (above > finite).all()


@pytest.mark.parametrize(
    ("value", "partition", "said"),
    [
        ("hack", 48, "--kv-partition is 48; --kv-compressor hack has partitions of 64 or 32 or 128 numbers. Pass one of these"),
        ("kivi", 64, "--kv-partition is 64; --kv-compressor kivi has none to choose. Pass --kv-compressor hack, or leave it out"),
    ],
)
def test_partitions_that_there_are_not_are_refused_by_name(value, partition, said):
    with pytest.raises(OptionError, match=said):
        catalogue.method(value, None, partition)


def test_the_catalogue_knows_who_has_partitions():
    assert catalogue.partitioned() == ("hack",) and catalogue.QUANTIZERS["hack"].bits == (4, 2)
    assert catalogue.method("snapkv+hack", 2, 32).quantizer == Hack(2, partition=32)
    assert catalogue.method("hack").quantizer == Hack(4, partition=64)
