"""The Gluon kernel over packed blocks: what its assembly makes of registers, its layouts, and which blocks it takes."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_helpers import Gridded, on_gpu, packed_pool, pool_by
from ptx_emulator import registers, run

from sglang_ext.layers.kernels.gluon import fragments
from sglang_ext.layers.kernels.gluon.fragments import PackedFragments
from sglang_ext.layers.kernels.packed import packed_decode
from sglang_ext.mem_cache.compressed.layouts.block_layout import Grid, unpack_codes

WORDS = st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=2).map(lambda words: np.array([words], dtype=np.uint32))


def halves(register):
    """Both float16 numbers of one register, in float64."""
    return torch.from_numpy(register.reshape(1).view(np.int32)).view(torch.float16).double().tolist()


def codes(word, bits):
    """Of the bytes of a word: [4, parts]."""
    return unpack_codes(torch.from_numpy(word.reshape(1).view(np.uint8))[:, None], bits).tolist()


@settings(max_examples=30, deadline=None)
@given(WORDS, st.sampled_from((2, 4, 8)))
def test_codes_become_numbers_that_are_a_power_of_two_less(words, bits):
    first, second = words[0, :1], words[0, 1:]
    keys, values = run(fragments.key_numbers(bits)[0], {2 * 8 // bits: first}), {4 * 8 // bits: first, 4 * 8 // bits + 4: second}
    values = run(fragments.value_numbers(bits)[0], values)
    for part in range(8 // bits):
        scale = 2.0 ** (fragments.SUBNORMAL + bits * part)
        for pair in range(2):
            expected = [codes(first, bits)[2 * pair + place][part] * scale for place in range(2)]
            assert halves(keys[f"${2 * part + pair}"]) == expected
        for byte in range(4):
            expected = [codes(word, bits)[byte][part] * scale for word in (first, second)]
            assert halves(values[f"${4 * part + byte}"]) == expected


def constants():
    """Of all kinds of blocks that the kernel takes."""
    for dim, bits, group, by_channel in itertools.product((64, 128), (2, 4, 8), (4, 16), (False, True)):
        for unit in (dim, 32):
            made = PackedFragments(dim, group, bits, 4 * bits, unit, by_channel)
            if made.value_unit >= 32 and (unit == dim or made.bytes % unit == 0) and made.groups <= 4:
                yield made


LOADS = ("key_layout", "value_layout", "paired_layout", "key_copy", "value_copy", "exact_keys", "exact_values", "exact_paired")
SHARED = ("channel_layout", "score_layout", "weight_layout", "zero_layout", "row_layout")


@pytest.mark.parametrize("name", LOADS)
def test_what_is_loaded_lies_in_one_register_of_one_lane(name):
    for made in constants():
        layout = getattr(made, name)
        assert sorted(registers(layout).flatten()) == sorted(list(range(int(np.prod(layout.shape)))) * repeats(layout)), made


def repeats(layout):
    """Lanes that hold the same: they have nothing else to load."""
    return 2 ** sum(not any(basis) for basis in layout.lane_bases)


@pytest.mark.parametrize("name", SHARED)
def test_what_lanes_share_is_held_by_some(name):
    for made in constants():
        layout = getattr(made, name)
        assert set(registers(layout).flatten()) == set(range(int(np.prod(layout.shape)))), made


def test_blocks_that_no_fragment_fits_stay_with_the_other_kernel(monkeypatch):
    def fragments_of(pool, group):
        return packed_decode.fragments(pool.packing, on_gpu(pool.buffers.keys[0], monkeypatch, (9, 0)), group)

    def taken(name, bits, dim=128, group=4, dtype=torch.bfloat16):
        return fragments_of(packed_pool(name, bits, 1, 1, heads=1, dim=dim, dtype=dtype), group)

    assert taken("kivi", 4) == PackedFragments(128, 4, 4, 16, 32, True)
    assert taken("int8", 8, dim=64, group=16, dtype=torch.float16) == PackedFragments(64, 16, 8, 32, 64, False)
    # Levels of a table, other sizes of heads, pools of float32, many queries a KV head, and scales over parts of a byte.
    assert taken("turboquant", 4) is taken("lynx", 4) is None
    assert taken("int4", 4, dim=80) is None
    assert taken("kivi", 4, dtype=torch.float32) is None
    assert taken("int4", 4, group=17) is None
    assert taken("kivi", 2, dim=64) is None
    # Values that share scales along tokens.
    assert fragments_of(pool_by(Gridded(4, keys=Grid(32, 1), values=Grid(32, 1)), 1, 1, heads=1, dtype=torch.bfloat16), 4) is None


def test_without_tensor_cores_the_other_kernel_reads_all_blocks():
    pool = packed_pool("kivi", 4, 1, 1, heads=1, dim=128, dtype=torch.bfloat16)
    assert packed_decode.fragments(pool.packing, pool.buffers.keys[0], 4) is None
