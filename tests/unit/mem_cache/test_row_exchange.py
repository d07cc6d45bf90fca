"""Rows of heads in places of a copy: what is wanted comes, what is there stays where it is, and the record says what lies where."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.mem_cache.compressed.row_exchange import missing_mask, plan_exchange, plan_refresh, top_mask

LAYERS, HEADS, DIM, TOKENS = 2, 3, 4, 40


def some(seed, count, tokens=TOKENS):
    """``count`` positions of each head, in no order."""
    noise = torch.Generator().manual_seed(seed)
    return torch.rand(LAYERS, HEADS, tokens, generator=noise).argsort(-1)[..., :count]


def exchanged(held, found):
    """What the places hold after an exchange."""
    after = held.clone()
    after[found.layers, found.heads, found.places] = found.positions
    return after


@given(st.integers(0, 99), st.integers(0, 99), st.integers(1, TOKENS))
def test_a_copy_holds_what_is_wanted_and_nothing_that_stays_is_moved(before, after, count):
    held, wanted = some(before, count), some(after, count).sort(-1).values
    found = plan_exchange(held, wanted, torch.ones_like(wanted, dtype=torch.bool))
    now = exchanged(held, found)
    assert torch.equal(now.sort(-1).values, wanted)
    stays = ~missing_mask(held, wanted)
    assert torch.equal(now[stays], held[stays]) and len(found.positions) == (~stays).sum()
    rows = zip(*(part.tolist() for part in (found.layers, found.heads, found.places, found.positions, found.wanted)))
    for layer, head, place, position, index in rows:
        assert now[layer, head, place] == position == wanted[layer, head, index]
        assert position not in held[layer, head]


@given(st.integers(0, 99), st.integers(1, TOKENS), st.data())
def test_what_is_not_available_leaves_its_place_to_what_is_there(seed, count, data):
    held, wanted = some(seed, count), some(seed + 1, count)
    available = torch.tensor(data.draw(st.lists(st.booleans(), min_size=wanted.numel(), max_size=wanted.numel()))).view_as(wanted)
    found = plan_exchange(held, wanted, available.clone())
    for layer in range(LAYERS):
        for head in range(HEADS):
            was, now = set(held[layer, head].tolist()), exchanged(held, found)[layer, head].tolist()
            asked = {int(each) for each, there in zip(wanted[layer, head], available[layer, head]) if there}
            assert len(set(now)) == count and set(now) <= was | asked
            assert asked | (was & set(wanted[layer, head].tolist())) <= set(now)


@given(st.integers(0, 99), st.integers(1, 30), st.integers(0, 12), st.integers(0, 9), st.integers(0, 12))
def test_a_copy_that_is_renewed_without_a_look_takes_in_the_newest(seed, count, new, more, recent):
    held, keep = some(seed, count).int(), count + min(more, new)
    after, coming = plan_refresh(held, TOKENS, TOKENS + new, keep, recent)
    assert after.shape[-1] == keep and after.dtype == torch.int32 and after.min() >= 0
    many = coming.places.shape[-1]
    assert many == max(keep - count, min(new, recent, keep)) and coming.first == TOKENS + new - many
    for layer in range(LAYERS):
        for head in range(HEADS):
            was, now = held[layer, head].tolist(), after[layer, head].tolist()
            assert len({*now}) == keep and {*now} - {*was} == {*range(coming.first, TOKENS + new)}
            gone = {*was} - {*now}
            assert not gone or min(gone) > max({*was} - gone, default=-1), "the newest of before go"
            assert [now[place] for place in coming.places[layer, head]] == [*range(coming.first, TOKENS + new)]


@given(st.integers(0, 99), st.integers(0, 45))
def test_of_tokens_that_come_those_of_the_highest_scores_are_first_and_of_equal_ones_those_before(seed, most):
    noise = torch.Generator().manual_seed(seed)
    these, scores = torch.rand(2, 3, TOKENS, generator=noise) < 0.7, torch.randint(0, 5, (2, 3, TOKENS), generator=noise)
    found = top_mask(these, scores, most)
    for layer in range(2):
        for head in range(3):
            order = sorted((-int(scores[layer, head, i]), i) for i in range(TOKENS) if these[layer, head, i])
            assert {i for i in range(TOKENS) if found[layer, head, i]} == {i for _, i in order[:most]}
    assert torch.equal(top_mask(these, scores, torch.full((2, 3, 1), most)), found)
