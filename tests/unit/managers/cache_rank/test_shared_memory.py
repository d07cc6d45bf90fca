"""Memory that two processes map: what is written arrives, and answers to other questions are told from those that are due."""

import os

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_helpers import DIM, GROUP, HEADS, LAYERS, attach, queries

from sglang_ext.managers.cache_rank.shared_memory import StaleSelection, allocate, map_memory, shared_memory_bytes

SHAPE = attach(window=3, most=16).shape


def both():
    """The two sides' views of new memory."""
    descriptor = allocate(SHAPE)
    try:
        return map_memory(SHAPE, descriptor), map_memory(SHAPE, descriptor)
    finally:
        os.close(descriptor)


def chosen(covered, keep, seed):
    """Positions of each layer and head."""
    noise = torch.rand(LAYERS, HEADS, covered, generator=torch.Generator().manual_seed(seed))
    return noise.topk(keep, dim=-1).indices.sort(dim=-1).values


def test_memory_has_no_name_and_takes_what_is_written():
    descriptor = allocate(SHAPE)
    assert os.fstat(descriptor).st_size == shared_memory_bytes(SHAPE) and os.fstat(descriptor).st_nlink == 0
    assert os.fstat(descriptor).st_blocks == 0
    assert not os.get_inheritable(descriptor)
    larger = msgspec.structs.replace(SHAPE, lanes=SHAPE.lanes + 1)
    with pytest.raises(ValueError, match=f"{shared_memory_bytes(SHAPE)} bytes, and this shape {shared_memory_bytes(larger)}: both sides must be of one version"):
        map_memory(larger, descriptor)
    os.close(descriptor)


def test_where_rows_travel_what_a_copy_holds_goes_one_way_and_what_it_lacks_the_other():
    descriptor = allocate(rows := attach(window=3, most=16, rows=True).shape)
    here, there = map_memory(rows, descriptor), map_memory(rows, descriptor)
    os.close(descriptor)
    assert shared_memory_bytes(rows) > shared_memory_bytes(SHAPE) and both()[0].values.numel() == 0
    held, layers = chosen(100, 12, 1), slice(1, 3)
    here.put_held(2, 5, 1, held[layers])
    here.put_held(2, 6, 1, chosen(100, 12, 2)[layers])
    assert torch.equal(there.get_held(2, 5, layers, 12), held[layers])
    fresh = chosen(100, 12, 3) > 50
    for part, value in zip(there.rows(2, 5), (1.0, 2.0)):
        part[layers][:, :, :12][fresh[layers]] = value
    there.put_fresh(2, 5, 1, fresh[layers])
    assert torch.equal(here.get_fresh(2, 5, layers, 12), fresh[layers]) and not here.get_fresh(2, 6, layers, 12).any()
    for part, value in zip(here.rows(2, 5), (1.0, 2.0)):
        assert part[layers][:, :, :12][fresh[layers]].eq(value).all() and part[0].eq(0).all()
    here.values[3, 1, 0, 1] = 7.0
    assert there.values[3, 1, 0, 1].eq(7).all() and there.keys[3, 1, 0, 1].eq(0).all()


def test_keys_and_queries_of_each_place_are_their_own():
    here, there = both()
    for place in range(SHAPE.places):
        here.keys[place] = place
    assert [int(part.unique()) for part in there.keys] == list(range(SHAPE.places))
    asked = {sequence: queries(2, sequence) for sequence in (4, 5)}
    for sequence, of_all in asked.items():
        for first, count in ((0, 2), (2, 3)):
            here.put_queries(1, sequence, first, of_all[first : first + count])
    for sequence, of_all in asked.items():
        assert torch.equal(there.get_queries(1, sequence, slice(0, LAYERS), 2), of_all)
    assert asked[4].shape == (LAYERS, 2, HEADS * GROUP, DIM)
    assert not there.queries[0].any() and not there.queries[2:].any(), "other lanes' are as they were"


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3), st.booleans()), min_size=1, max_size=12))
def test_an_answer_is_read_for_its_own_question_alone_in_any_order_of_writing(written):
    """Of each parity what was written last is there: with its sequence, epoch and lane it is read, with others it is stale."""
    here, there = both()
    last = {}
    for sequence, epoch, longer in written:
        covered, keep = (40, 16) if longer else (30, 8)
        kept = chosen(covered, keep, seed=sequence)
        there.put_selection(epoch, 2, sequence, 0, covered, kept)
        last[sequence % 2] = (sequence, epoch, covered, keep, kept)
    for sequence in range(1, 7):
        for epoch in range(1, 4):
            for covered, keep in ((40, 16), (30, 8)):
                found = last.get(sequence % 2)
                if found is not None and found[:4] == (sequence, epoch, covered, keep):
                    assert torch.equal(here.get_selection(epoch, 2, sequence, slice(0, LAYERS), covered, keep), found[4])
                else:
                    with pytest.raises(StaleSelection, match="were asked for"):
                        here.get_selection(epoch, 2, sequence, slice(0, LAYERS), covered, keep)
    with pytest.raises(StaleSelection):
        here.get_selection(written[-1][1], 1, written[-1][0], slice(0, LAYERS), 30, 8)


def test_a_pack_of_another_step_is_stale_although_others_have_come():
    here, there = both()
    kept = chosen(30, 8, 1)
    there.put_selection(1, 0, 2, 0, 30, kept[:2])
    assert torch.equal(here.get_selection(1, 0, 2, slice(0, 2), 30, 8), kept[:2])
    with pytest.raises(StaleSelection):
        here.get_selection(1, 0, 2, slice(0, LAYERS), 30, 8)


@pytest.mark.parametrize("wrong", [[0, 1, 30], [-1, 2, 3], [3, 3, 4], [5, 4, 6]])
def test_positions_that_are_none_of_the_context_never_lead_a_copy(wrong):
    here, there = both()
    there.put_selection(1, 0, 1, 0, 30, torch.tensor(wrong).expand(LAYERS, HEADS, 3))
    with pytest.raises(StaleSelection, match="not ascending from 0 to below 30"):
        here.get_selection(1, 0, 1, slice(0, LAYERS), 30, 3)
