"""The Gluon kernel that multiplies packed blocks as integers: what its assembly makes of registers, its layouts, which blocks it takes."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_helpers import on_gpu, packed_pool, pool_by
from ptx_emulator import registers, run

from sglang_ext.layers.kernels.gluon import fragments
from sglang_ext.layers.kernels.gluon.integer_fragments import IntegerFragments
from sglang_ext.layers.kernels.packed import packed_decode
from sglang_ext.mem_cache.compressed.layouts.block_layout import unpack_codes
from sglang_ext.mem_cache.compressors.catalogue import quantizer

WORDS = st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4).map(lambda words: np.array([words], dtype=np.uint32))
LANES = np.arange(32)


def codes(word, bits):
    """Of the bytes of a word: int [4, parts]."""
    return unpack_codes(torch.from_numpy(word.reshape(1).view(np.uint8))[:, None], bits).numpy().astype(int)


def bytes_of(register):
    return register.reshape(1).view(np.int8).astype(int)


@settings(max_examples=30, deadline=None)
@given(WORDS, st.sampled_from(((4, 1), (4, 2), (2, 2), (2, 4))))
def test_codes_of_keys_become_int8_that_a_partition_shares_a_power_of(words, kind):
    bits, together = kind
    parts, word = 8 // bits, words[0, :1]
    found = run(fragments.key_codes(bits, together)[0], {parts: word})
    for part in range(parts):
        lowest = bits * (part // together * together)
        less = 128 if fragments.is_signed(bits, lowest) else 0
        assert (bytes_of(found[f"${part}"]) == codes(word, bits)[:, part] * 2**lowest - less).all()


@settings(max_examples=30, deadline=None)
@given(WORDS, st.sampled_from((4, 2)))
def test_codes_of_values_become_int8_of_four_tokens(words, bits):
    parts = 8 // bits
    found = run(fragments.value_codes(bits)[0], {4 * parts + 4 * token: words[0, token : token + 1] for token in range(4)})
    for part, byte in itertools.product(range(parts), range(4)):
        less = 128 if part == parts - 1 else 0
        expected = [codes(words[0, token : token + 1], bits)[byte, part] * 2 ** (bits * part) - less for token in range(4)]
        assert bytes_of(found[f"${4 * part + byte}"]).tolist() == expected


@pytest.mark.parametrize("streams", [1, 2])
def test_codes_of_weights_become_the_other_side_of_a_product(streams):
    """A lane gets four tokens of one query, and of two streams the lanes of the mask those of the first."""
    table = np.random.default_rng(streams).integers(-128, 128, (16, 8))
    row, column = LANES // 4, LANES % 4 * 2
    places = [(row, column), (row, column + 1), (row + 8, column), (row + 8, column + 1)]
    numbers = [(table[place] + np.float32(fragments.BIAS)).astype(np.float32).view(np.uint32)[:, None] for place in places]
    inputs = {streams + number: part for number, part in enumerate(numbers)}
    mask = np.where(LANES // 4 < 4, 0xFFFFFFFF, 0).astype(np.uint32)[:, None]
    found = run(fragments.weight_codes(streams)[0], inputs | ({6: mask} if streams == 2 else {}))
    for lane in range(32):
        query, first = lane // 4, lane % 4 * 2
        expected = [table[first, query], table[first + 8, query], table[first + 1, query], table[first + 9, query]]
        for stream in range(streams):
            mine = streams == 1 or query // 4 == stream
            assert bytes_of(found[f"${stream}"][lane]).tolist() == (expected if mine else [0] * 4)


def test_sums_of_integers_are_float32_without_a_conversion():
    """The bits of an integer and BIASED are BIAS more, and a scale without its lowest bits times BIAS is exact."""
    sums = np.array([-(2**22) + 1, -7, 0, 5, 64 * 240 * 128, 2**22 - 1])
    bits = (sums + fragments.BIASED).astype(np.uint32)
    assert (bits.view(np.float32).astype(float) - fragments.BIAS == sums).all()
    scale = np.array([0.1, 3e-7, 1234.5], dtype=np.float32).view(np.uint32)
    rounded = run(fragments.ROUNDED_DOWN[0], {1: scale})["$0"].view(np.float32)
    assert (np.float32(fragments.BIAS) * rounded).astype(float).tolist() == (fragments.BIAS * rounded.astype(float)).tolist()
    assert (np.abs(rounded / scale.view(np.float32) - 1) < 2**-21).all()


def test_small_integers_become_float16():
    numbers = np.array([0, 1, 3, 960, 1022, 1023], dtype=np.int16)
    found = run(fragments.SMALL_INTEGERS[0], {1: numbers.view(np.uint32)[:, None]})["$0"]
    assert torch.from_numpy(found.view(np.int32)).view(torch.float16).flatten().tolist() == numbers.tolist()


def test_larger_integers_become_float32():
    numbers = np.array([0, 1, 1023, 1024, 1920, 32767], dtype=np.int16)
    found = run(fragments.LARGER_INTEGERS[0], {2: numbers.view(np.uint32)[:, None]})
    assert np.stack([found["$0"], found["$1"]], 1).view(np.float32).flatten().tolist() == numbers.tolist()


def constants():
    """Of all kinds of blocks that the kernel takes."""
    plain = [IntegerFragments(dim, group, bits, 4 * bits) for dim, bits in packed_decode.INTEGERS for group in (1, 4, 5, 8)]
    return plain + [IntegerFragments(128, group, bits, 4 * bits, 128) for bits in (4, 2) for group in (1, 4)]


@pytest.mark.parametrize("name", ["key_layout", "value_layout", "quartet_layout", "scale_copy", "sum_copy"])
def test_what_is_loaded_lies_in_one_register_of_one_lane(name):
    for made in constants():
        layout = getattr(made, name)
        repeats = 2 ** sum(not any(basis) for basis in layout.lane_bases)
        assert sorted(registers(layout).flatten()) == sorted(list(range(int(np.prod(layout.shape)))) * repeats), made


@pytest.mark.parametrize("name", ["key_numbers", "value_numbers", "wide_tokens", "wide_channels", "wide_rows"])
def test_what_lanes_share_is_held_by_some(name):
    for made in constants():
        layout = getattr(made, name)
        assert set(registers(layout).flatten()) == set(range(int(np.prod(layout.shape)))), made


def test_a_lane_has_the_scales_of_its_own_block():
    """Columns from the fourth on are the second of a step's blocks."""
    made = IntegerFragments(128, 4, 2, 8)
    for layout, size in ((made.key_numbers, 128), (made.value_numbers, 32)):
        assert (registers(layout) // size == (LANES % 4 // 2)[:, None]).all()
    assert (registers(IntegerFragments(128, 8, 2, 8).key_numbers) < 128).all()


def hack(bits, partition=64, dim=128, dtype=torch.bfloat16):
    return pool_by(quantizer("hack", bits, partition), 1, 1, heads=1, dim=dim, dtype=dtype)


def test_blocks_that_no_fragment_fits_stay_with_the_other_kernel(monkeypatch):
    def taken(pool, group, capability=(9, 0)):
        return packed_decode.integer_fragments(pool.packing, on_gpu(pool.buffers.keys[0], monkeypatch, capability), group)

    assert taken(hack(4), 4, None) is taken(hack(4), 4, (7, 5)) is None, "no tensor cores"
    assert taken(hack(4), 4) == IntegerFragments(128, 4, 4, 16)
    assert taken(hack(2, dtype=torch.float16), 8) == IntegerFragments(128, 8, 2, 8)
    assert taken(hack(4, dim=64), 1) == IntegerFragments(64, 1, 4, 16)
    assert taken(hack(4, partition=128), 4) == IntegerFragments(128, 4, 4, 16, 128)
    assert taken(hack(2, partition=128), 1) == IntegerFragments(128, 1, 2, 8, 128)
    # Half a word of a value for a lane, other partitions and sizes of heads, pools of float32, many queries a KV head, and no sums.
    assert taken(hack(2, dim=64), 4) is taken(hack(4, partition=32), 4) is taken(hack(4, partition=128), 5) is None
    assert taken(hack(4, dim=192), 4) is taken(hack(4, dtype=torch.float32), 4) is taken(hack(4), 9) is None
    assert taken(packed_pool("kivi", 4, 1, 1, heads=1, dim=128, dtype=torch.bfloat16), 4) is None
