"""Requests that decode on anchors: what ranks agree on, and that nothing is written to slots that were given back."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.core import TPRanks
from sglang_ext.managers.kv_transfer.feature import ArrivingFullKV


@dataclass
class Rest:
    complete: bool = False
    failure: str | None = None
    cancelled: int = 0

    def cancel(self):
        self.cancelled += 1


class Two(TPRanks):
    """This rank, and another one that sees something else."""

    def __init__(self, others):
        object.__setattr__(self, "others", others)

    def gather(self, value):
        return [value, self.others(value)]


def test_a_request_is_early_until_its_drafts_are_verified():
    full_kv, rest = ArrivingFullKV(), Rest()
    assert not full_kv.is_early(3)
    full_kv.expect(3, rest)
    full_kv.on_round_start([], {}, None)
    assert full_kv.is_early(3) and not full_kv.has_arrived(3)
    rest.complete = True
    assert not full_kv.has_arrived(3), "a round sees one state from its beginning to its end"
    full_kv.on_round_start([], {}, None)
    assert full_kv.is_early(3) and full_kv.has_arrived(3) and not full_kv.is_lost(3)
    full_kv.end_early_decoding(3)
    assert not full_kv.is_early(3) and full_kv.remote_prefill(3) is None


@pytest.mark.parametrize("end", ["forget", "end_early_decoding"])
def test_who_is_gone_is_written_to_no_more(end):
    full_kv, rest = ArrivingFullKV(), Rest(complete=end == "end_early_decoding")
    full_kv.expect(3, rest)
    full_kv.on_round_start([], {}, None)
    getattr(full_kv, end)(3)
    assert rest.cancelled == 1
    full_kv.forget(3)
    assert rest.cancelled == 1


def test_a_row_that_is_used_again_begins_anew():
    full_kv = ArrivingFullKV()
    full_kv.expect(3, Rest(failure="cut"))
    full_kv.on_round_start([], {}, None)
    assert full_kv.is_lost(3)
    full_kv.forget(3)
    full_kv.expect(3, Rest())
    full_kv.on_round_start([], {}, None)
    assert full_kv.is_early(3) and not full_kv.is_lost(3) and not full_kv.has_arrived(3)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_ranks_decide_alike(seen):
    """Here is what came at all ranks; lost what failed at one."""
    mine = [Rest(complete=c, failure="cut" if f else None) for c, f, _, _ in seen]
    theirs = [(c, f) for _, _, c, f in seen]
    full_kv = ArrivingFullKV(Two(lambda value: theirs))
    for row, rest in enumerate(mine):
        full_kv.expect(row, rest)
    full_kv.on_round_start([], {}, None)
    for row, (c, f, other_c, other_f) in enumerate(seen):
        assert full_kv.is_lost(row) == (f or other_f)
        assert full_kv.has_arrived(row) == (c and other_c and not (f or other_f))
