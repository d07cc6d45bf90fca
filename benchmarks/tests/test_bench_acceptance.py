"""Acceptance by draft position."""

from bench_helpers import STATS
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext_bench.client import VerifyStats
from sglang_ext_bench.comparing.acceptance import (
    Acceptance,
    acceptance,
    add_up,
    assumed_offers,
    at_least,
)


class TestAcceptance:
    def test_example_by_hand(self) -> None:
        # Four verifications accept 0, 1, 1, 2 of 2, 2, 2, 1 draft tokens.
        curve = acceptance(STATS, draft_length=2)
        assert curve == Acceptance(verifies=4, offered=(4, 3), accepted=(3, 1))
        assert curve.by_position == (3 / 4, 1 / 3)
        assert curve.accept_length == 2.0
        assert curve.rate == 4 / 7

    def test_offers_of_the_server_win_over_the_assumption(self) -> None:
        stats = VerifyStats(3, 4, 2, 5 / 3, (1, 2, 0), offered_histogram=(0, 2, 1))
        assert acceptance(stats, draft_length=2).offered == (3, 1)

    def test_verifies_without_drafts_count_as_one_token_each(self) -> None:
        curve = acceptance(VerifyStats(3, 0, 0, 1.0, (3,)), draft_length=4)
        assert (curve.accept_length, curve.rate, curve.by_position) == (1.0, None, ())

    def test_no_request_has_no_rates(self) -> None:
        empty = add_up([], 4)
        assert (empty.accept_length, empty.rate, empty.by_position) == (None, None, ())

    @given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    def test_sum_over_positions_is_the_sum_of_accepted_drafts(self, histogram: list[int]) -> None:
        assert sum(at_least(histogram)) == sum(k * count for k, count in enumerate(histogram))

    @given(st.integers(0, 20), st.integers(0, 8), st.data())
    def test_assumed_offers_add_up_and_fall(self, verifies: int, length: int, data: st.DataObject) -> None:
        drafts = data.draw(st.integers(0, verifies * length))
        offered = assumed_offers(verifies, drafts, length)
        assert sum(offered) == drafts
        assert list(offered) == sorted(offered, reverse=True)
        assert all(count <= verifies for count in offered)

    @given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), max_size=4))
    def test_summed_rates_stay_shares(self, histograms: list[list[int]]) -> None:
        stats = []
        for counts in histograms:
            accepted = sum(k * count for k, count in enumerate(counts))
            stats.append(VerifyStats(sum(counts), accepted, accepted, 0.0, tuple(counts)))
        total = add_up(stats, draft_length=4)
        assert all(0 <= share <= 1 for share in total.by_position)
        assert sum(total.accepted) == sum(each.accepted for each in stats)
