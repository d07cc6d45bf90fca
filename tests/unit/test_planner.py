"""The planner drafts, verifies and falls back at the right moments."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.core import FALLBACK_REASONS, CompressedView, RequestState
from sglang_ext.managers.planner import MIN_CONTEXT, RENEW_AFTER, Planner, copy_is_near, renew_at, spread


class FakeViews:
    """Copies of a quarter, as many as ``room`` allows."""

    recent, window = 0, 32

    def method(self, row):
        compressor = SimpleNamespace(each_round=False, window=self.window)
        return SimpleNamespace(recent=self.recent, least=1, unit=16, compressor=compressor)

    def __init__(self, room=1 << 30):
        self.copies, self.room, self.made, self.queried, self.lacking = {}, room, [], 1 << 30, set()

    def is_refused(self, row):
        return False

    def has_queries(self, row):
        return row not in self.lacking

    def get(self, row):
        return self.copies.get(row)

    def draft_row(self, row):
        return row + 100

    def reach(self, row, tokens):
        return min(tokens, self.queried)

    def compress(self, row, tokens, headroom, prefix=None):
        if tokens // 4 > self.room:
            return False
        self.made.append((row, tokens))
        self.copies[row] = CompressedView(torch.zeros(tokens // 4, dtype=torch.int64), tokens)
        return True

    def write_tail(self, row, end):
        pass


def request(left=1000, **more):
    params = SimpleNamespace(max_new_tokens=left, ignore_eos=True, stop_token_ids=None)
    fields = {"sampling_params": params, "output_ids": [], "to_finish": None, "grammar": None, **more}
    return SimpleNamespace(eos_token_ids={2}, tokenizer=None, **fields)


def state(row=1):
    return RequestState(rid=f"r{row}", row=row, seed=0, bonus=7)


def test_a_round_drafts_then_verifies_all_drafts_on_the_full_row():
    planner, req, one = Planner(FakeViews(), 4, False), request(), state()
    for drafted in range(4):
        (step,) = planner.plan([req], [one], [400])
        assert (step.row, step.emits, step.length) == (101, False, 100 + drafted + 1)
        assert step.position == 400 + drafted and len(step.tokens) == 1
        one.drafts.append(50 + drafted)
    (step,) = planner.plan([req], [one], [400])
    assert (step.row, step.emits, step.length) == (1, True, 405)
    assert step.tokens == [7, 50, 51, 52, 53] and step.position == 400


def test_a_short_context_is_served_with_full_kv_until_it_grows():
    planner, one = Planner(FakeViews(), 4, False), state()
    (step,) = planner.plan([request()], [one], [MIN_CONTEXT - 1])
    assert step.emits and step.row == 1 and FALLBACK_REASONS[one.fallback] == "short-context"
    planner.plan([request()], [one], [MIN_CONTEXT])
    assert one.fallback == 0


def test_a_context_is_short_while_most_of_it_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(FakeViews, "recent", 100)
    planner, one = Planner(FakeViews(), 4, False), state()
    assert planner.plan([request()], [one], [227])[0].emits and FALLBACK_REASONS[one.fallback] == "short-context"
    assert not planner.plan([request()], [one], [228])[0].emits and one.fallback == 0


def test_no_free_slots_is_served_with_full_kv():
    planner, one = Planner(FakeViews(room=10), 4, False), state()
    (step,) = planner.plan([request()], [one], [400])
    assert step.emits and step.tokens == [7] and FALLBACK_REASONS[one.fallback] == "no-free-slots"


def test_a_copy_taken_away_mid_round_verifies_what_was_drafted():
    planner, one = Planner(views := FakeViews(), 4, False), state()
    planner.plan([request()], [one], [400])
    one.drafts.append(9)
    views.copies.clear()
    (step,) = planner.plan([request()], [one], [400])
    assert step.emits and step.tokens == [7, 9] and step.row == 1


def test_the_copy_is_renewed_when_the_exact_tail_grew():
    planner, one = Planner(views := FakeViews(), 4, False), state()
    planner.plan([request()], [one], [400])
    planner.plan([request()], [one], [400 + RENEW_AFTER])
    planner.plan([request()], [one], [401 + RENEW_AFTER])
    assert views.made == [(1, 400), (1, 401 + RENEW_AFTER)]


def test_a_copy_is_not_renewed_for_tokens_whose_queries_nobody_kept():
    planner, one = Planner(views := FakeViews(), 4, False), state()
    planner.plan([request()], [one], [400])
    views.queried = 400 + RENEW_AFTER
    planner.plan([request()], [one], [2000])
    assert views.made == [(1, 400)]
    views.queried += 1
    planner.plan([request()], [one], [2000])
    assert len(views.made) == 2


def test_without_queries_no_copy_is_made_and_none_renewed_until_they_are_there():
    planner, one = Planner(views := FakeViews(), 4, False), state()
    views.lacking.add(1)
    (step,) = planner.plan([request()], [one], [400])
    assert step.emits and step.row == 1 and FALLBACK_REASONS[one.fallback] == "no-queries" and not views.made
    views.lacking.clear()
    assert not planner.plan([request()], [one], [401])[0].emits and views.made == [(1, 401)]
    views.lacking.add(1)
    assert not planner.plan([request()], [one], [2000])[0].emits and one.fallback == 0, "the old copy serves on"
    assert views.made == [(1, 401)]
    views.lacking.clear()
    planner.plan([request()], [one], [2000])
    assert views.made == [(1, 401), (1, 2000)]


@pytest.mark.parametrize(
    ("fallback", "window", "end", "expected"),
    [
        ("none", 32, MIN_CONTEXT - 49, False),
        ("none", 32, MIN_CONTEXT - 48, True),
        ("none", 32, 4000, True),
        ("no-queries", 32, 4000, True),
        ("slower", 32, 4000, True),
        ("penalty", 32, 4000, False),
        ("hidden-states", 32, 4000, False),
        ("none", 0, 4000, False),
    ],
)
def test_queries_are_kept_of_who_can_be_drafted_once_a_first_copy_is_near(monkeypatch, fallback, window, end, expected):
    monkeypatch.setattr(FakeViews, "window", window)
    one = state()
    one.fallback = FALLBACK_REASONS.index(fallback)
    assert copy_is_near(FakeViews(), one, end) == expected


def test_queries_of_who_has_a_copy_are_kept_again_before_it_is_renewed():
    planner, one = Planner(views := FakeViews(), 4, False), state()
    planner.plan([request()], [one], [400])
    due = 401 + RENEW_AFTER
    assert [copy_is_near(views, one, end) for end in (401, due - 49, due - 48, due)] == [False, False, True, True]


def test_drafts_never_pass_the_end_of_the_output():
    planner, one = Planner(FakeViews(), 16, False), state()
    planner.plan([request(left=3)], [one], [400])
    assert one.target == 2
    last = state(2)
    (step,) = planner.plan([request(left=1)], [last], [400])
    assert last.target == 0 and step.emits


def test_a_drafted_end_token_or_an_abort_verifies_at_once():
    for more, drafts in (({}, [2]), ({"to_finish": object()}, [9])):
        planner, one, req = Planner(FakeViews(), 8, False), state(), request(**more)
        req.sampling_params.ignore_eos = False
        one.target, one.drafts = 8, drafts
        planner.views.compress(1, 400, 0)
        (step,) = planner.plan([req], [one], [400])
        assert step.emits and step.tokens == [7, *drafts]


def test_requests_that_start_together_verify_apart():
    planner = Planner(FakeViews(), 8, False)
    states = [state(row) for row in range(4)]
    planner.plan([request() for _ in states], states, [400] * 4)
    assert len({one.target for one in states}) == 4


@given(st.integers(-3, 40), st.lists(st.integers(1, 40)))
def test_spread_stays_between_half_and_all_of_the_longest(longest, others):
    length = spread(longest, Counter(others))
    assert length == max(0, longest) if longest <= 1 else longest // 2 < length <= longest


def test_lossy_emits_each_token_from_the_draft_row():
    planner, one = Planner(FakeViews(), 8, True), state()
    (step,) = planner.plan([request()], [one], [400])
    assert step.emits and step.row == 101 and step.length == 101 and len(step.tokens) == 1


@pytest.mark.parametrize("reason", ["penalty", "grammar", "min-p"])
def test_an_ineligible_request_never_gets_a_copy(reason):
    planner, one = Planner(views := FakeViews(), 8, False), state()
    one.fallback = FALLBACK_REASONS.index(reason)
    (step,) = planner.plan([request()], [one], [4000])
    assert step.emits and step.row == 1 and not views.made


def test_a_draft_that_ends_the_grammar_is_verified_at_once():
    planner, req, one = Planner(FakeViews(), 4, False), request(grammar=SimpleNamespace(is_terminated=lambda: False)), state()
    planner.plan([req], [one], [400])
    one.drafts, one.closed = [50], True
    (step,) = planner.plan([req], [one], [400])
    assert step.emits and step.tokens == [7, 50]


def test_nothing_is_drafted_after_a_grammar_has_ended():
    planner, req = Planner(FakeViews(), 4, False), request(grammar=SimpleNamespace(is_terminated=lambda: True))
    (step,) = planner.plan([req], [state()], [400])
    assert step.emits and step.tokens == [7]


@given(
    st.lists(st.integers(1, 17), min_size=200, max_size=200), st.integers(200, 2000), st.sampled_from([1, 16]),
    st.integers(1, 17),
)  # fmt: skip
def test_verifications_near_a_renewal_leave_all_queries_that_it_scores_by(accepted, length, unit, width):
    views, one = FakeViews(), state()
    views.method = lambda row: SimpleNamespace(
        recent=0, least=1, unit=unit, compressor=SimpleNamespace(each_round=False, window=32)
    )
    views.compress(1, length // unit * unit, 0)
    due, kept = renew_at(views.get(1)), set()
    for count in accepted:
        if length >= due:
            break
        if copy_is_near(views, one, length + width):
            kept |= set(range(length, length + min(count, width)))
        length += min(count, width)
    covered = length // unit * unit
    assert length < due or set(range(covered - 32, covered)) <= kept
