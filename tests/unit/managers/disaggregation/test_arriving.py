"""Requests that decode on anchors: what ranks agree on, and that nothing is written to slots that were given back."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.managers.disaggregation.arriving import Arriving
from sglang_ext.ranks import Ranks


@dataclass
class Rest:
    complete: bool = False
    failure: str | None = None
    cancelled: int = 0

    def cancel(self):
        self.cancelled += 1


class Two(Ranks):
    """This rank, and another one that sees something else."""

    def __init__(self, others):
        object.__setattr__(self, "others", others)

    def gather(self, value):
        return [value, self.others(value)]


def test_a_request_is_early_until_its_drafts_are_verified():
    turns, rest = Arriving(), Rest()
    assert not turns.is_early(3)
    turns.expect(3, rest)
    turns.begin({}, None)
    assert turns.is_early(3) and not turns.is_here(3)
    rest.complete = True
    assert not turns.is_here(3), "a round sees one state from its beginning to its end"
    turns.begin({}, None)
    assert turns.is_early(3) and turns.is_here(3) and not turns.is_lost(3)
    turns.settle(3)
    assert not turns.is_early(3) and turns.arrival(3) is None


@pytest.mark.parametrize("end", ["forget", "settle"])
def test_who_is_gone_is_written_to_no_more(end):
    turns, rest = Arriving(), Rest(complete=end == "settle")
    turns.expect(3, rest)
    turns.begin({}, None)
    getattr(turns, end)(3)
    assert rest.cancelled == 1
    turns.forget(3)
    assert rest.cancelled == 1


def test_a_row_that_is_used_again_begins_anew():
    turns = Arriving()
    turns.expect(3, Rest(failure="cut"))
    turns.begin({}, None)
    assert turns.is_lost(3)
    turns.forget(3)
    turns.expect(3, Rest())
    turns.begin({}, None)
    assert turns.is_early(3) and not turns.is_lost(3) and not turns.is_here(3)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_ranks_decide_alike(seen):
    """Here is what came at all ranks; lost what failed at one."""
    mine = [Rest(complete=c, failure="cut" if f else None) for c, f, _, _ in seen]
    theirs = [(c, f) for _, _, c, f in seen]
    turns = Arriving(Two(lambda value: theirs))
    for row, rest in enumerate(mine):
        turns.expect(row, rest)
    turns.begin({}, None)
    for row, (c, f, other_c, other_f) in enumerate(seen):
        assert turns.is_lost(row) == (f or other_f)
        assert turns.is_here(row) == (c and other_c and not (f or other_f))
