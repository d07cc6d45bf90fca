"""Rows of blocks are cut so that programs of a warp fill a GPU once, or several times without a remainder."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.layers.attention.decode_backend import FEWEST_PARTS, MOST_PARTS as MOST_OF_A_ROW
from sglang_ext.layers.attention.per_head import pointer_split_counts
from sglang_ext.layers.kernels.packed.packed_decode import MOST_PARTS, choose_splits

# Of an H200, with 132 multiprocessors.
ROOM = 132 * 8


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_batch_of_eight_fills_the_gpu_once_and_one_request_has_the_most_parts(bits):
    assert choose_splits(64, ROOM, bits) == (15, 1)
    assert sum(choose_splits(8, ROOM, bits)) == MOST_PARTS - 1


def test_sixteen_requests_have_a_second_turn_of_programs_where_computing_decides():
    assert 128 * sum(choose_splits(128, ROOM, 2)) > ROOM >= 128 * sum(choose_splits(128, ROOM, 4))


@given(st.integers(1, 5000), st.integers(1, 2000), st.sampled_from([2, 4, 8]))
def test_no_other_number_of_parts_leaves_fewer_rounds_of_shorter_parts(rows, room, bits):
    packed, exact = choose_splits(rows, room, bits)
    assert packed >= 1 <= exact and packed + exact <= MOST_PARTS
    rounds = -(-rows * (packed + exact) // room)
    for parts in range(2, MOST_PARTS + 1):
        others = parts - max(1, parts // 16)
        if -(-rows * parts // room) <= rounds:
            assert others <= packed, "more parts in as many rounds would be shorter"


@given(st.integers(1, 5000))
def test_parts_of_pointers_and_of_what_follows_them_are_a_power_of_two_and_few_rows_have_more_of_the_first(rows):
    pointed, exact = pointer_split_counts(rows)
    parts = pointed + exact
    assert parts & (parts - 1) == 0 and FEWEST_PARTS <= parts <= MOST_OF_A_ROW and pointed >= exact >= 1
    assert pointer_split_counts(64) == (7, 1) and pointer_split_counts(128) == (4, 4)
