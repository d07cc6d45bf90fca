"""A page's checksum notices what can go wrong on the way to the host and back."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.host_tier.tier import FIRST_TOKEN, PageChecksums, odd_weights
from sglang_ext.mem_cache.host_tier.host_pool import as_words

LAYERS, SLOTS, HEADS, DIM, PAGE = 2, 12, 2, 8, 4


def kv_buffers(dtype=torch.bfloat16, dim=DIM, seed=0):
    """Layers of random bits."""
    noise = torch.Generator().manual_seed(seed)
    shape = SLOTS, HEADS, dim * dtype.itemsize
    keys, values = (
        tuple(torch.randint(0, 256, shape, generator=noise, dtype=torch.uint8).view(dtype) for _ in range(LAYERS)) for _ in "kv"
    )
    return KVBuffers(tuple(range(LAYERS)), (1.0,) * LAYERS, keys, values)


def by_hand(buffers, slots, page_size, width):
    """The definition, word by word."""
    sums = []
    row = buffers.keys[0][0].numel() * buffers.keys[0].element_size()
    columns = odd_weights(0, row // width).tolist()
    tokens = odd_weights(FIRST_TOKEN, LAYERS * 2 * page_size).view(LAYERS, 2, page_size).tolist()
    for first in range(0, len(slots), page_size):
        total = 0
        for token, slot in enumerate(slots[first : first + page_size]):
            for layer, pair in enumerate(zip(buffers.keys, buffers.values)):
                for kind, buffer in enumerate(pair):
                    raw = bytes(buffer[slot].flatten().view(torch.uint8).tolist())
                    for column in range(row // width):
                        word = int.from_bytes(raw[column * width : (column + 1) * width], sys.byteorder, signed=True)
                        total += word * columns[column] * tokens[layer][kind][token]
        sums.append((total + 2**63) % 2**64 - 2**63)
    return sums


@pytest.mark.parametrize(
    ("dtype", "dim", "width"),
    [
        (torch.float32, 8, 4),
        (torch.float16, 8, 4),
        (torch.bfloat16, 1, 4),
        (torch.uint8, 3, 2),
        (torch.float8_e4m3fn, 8, 4),
        (torch.float8_e5m2, 1, 2),
    ],
)
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_the_sum_is_the_one_defined(dtype, dim, width, page_size):
    buffers = kv_buffers(dtype, dim)
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(page_size))
    found = PageChecksums(buffers, page_size).of(slots)
    assert found.tolist() == by_hand(buffers, slots.tolist(), page_size, width)


def test_words_are_a_view_as_wide_as_divides_a_row():
    buffer = torch.zeros(5, 3, 1, dtype=torch.float16)
    words = as_words(buffer, 8)
    assert words.dtype == torch.int16 and words.shape == (5, 3) and words.data_ptr() == buffer.data_ptr()
    assert as_words(torch.zeros(5, 3, 1, dtype=torch.uint8), 8).dtype == torch.int8
    assert as_words(torch.zeros(5, 2, 8, dtype=torch.bfloat16), 8).shape == (5, 4)


def test_weights_are_odd_and_differ():
    weights = torch.cat([odd_weights(0, 4096), odd_weights(FIRST_TOKEN, 4096)])
    assert bool((weights % 2 == 1).all()) and len(weights.unique()) == 8192
    assert odd_weights(3, 2).tolist() == odd_weights(0, 5)[3:].tolist()
    assert int(odd_weights(0, 1)) % 2**64 == 0xE220A8397B1DCDAF, "SplitMix64's first number for seed 0"


SLOT = st.integers(0, PAGE - 1)
LAYER = st.integers(0, LAYERS - 1)


def sums_around(change, seed=0):
    """Checksums of three pages before and after a change."""
    buffers = kv_buffers(seed=seed)
    checksums, slots = PageChecksums(buffers, PAGE), torch.arange(SLOTS)
    before = checksums.of(slots)
    change(buffers)
    return before, checksums.of(slots)


@given(st.integers(0, SLOTS - 1), LAYER, st.booleans(), st.integers(0, HEADS * DIM * 16 - 1))
def test_any_flipped_bit_changes_the_page_it_is_in_and_no_other(slot, layer, of_keys, bit):
    def flip(buffers):
        row = (buffers.keys if of_keys else buffers.values)[layer][slot].view(torch.uint8).view(-1)
        row[bit // 8] ^= 1 << bit % 8

    before, after = sums_around(flip)
    assert [page for page in range(3) if before[page] != after[page]] == [slot // PAGE]


@given(SLOT, SLOT, LAYER, st.sampled_from(["token", "token of a layer", "layers", "kv"]), st.integers(0, 1000))
def test_what_changed_places_is_noticed(one, other, layer, what, seed):
    def exchange(buffers):
        if what == "token":
            for buffer in (*buffers.keys, *buffers.values):
                buffer[[one, other]] = buffer[[other, one]]
        elif what == "token of a layer":
            buffers.keys[layer][[one, other]] = buffers.keys[layer][[other, one]]
        else:
            first = buffers.keys[0][one]
            second = (buffers.keys[1] if what == "layers" else buffers.values[0])[one]
            saved = first.clone()
            first.copy_(second)
            second.copy_(saved)

    before, after = sums_around(exchange, seed)
    same_place = what.startswith("token") and one == other
    assert bool(before[0] != after[0]) != same_place
    assert torch.equal(before[1:], after[1:])


@given(SLOT, SLOT, st.integers(0, HEADS * DIM - 1), st.sampled_from([15, 14, 0]))
def test_the_same_bit_flipped_in_two_tokens_is_noticed(one, other, column, bit):
    def flip(buffers):
        words = buffers.keys[0].view(torch.int16).view(SLOTS, -1)
        for slot in {one, other}:
            words[slot, column] ^= torch.tensor(1 << bit, dtype=torch.int32).short()

    before, after = sums_around(flip)
    assert before[0] != after[0]
