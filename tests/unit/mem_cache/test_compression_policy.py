"""Copies are made and renewed at the right moments, or not at all."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.core import FALLBACK_REASONS, MIN_CONTEXT, PLAIN_STEPS, RequestState
from sglang_ext.mem_cache.prefix_cache.segments import CompressedKV
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.policy import REFRESH_AFTER, is_compression_near, ensure_compressed_kv, max_tail, refresh_position
from sglang_ext.mem_cache.compressed.layouts.base import PlainSlots
from sglang_ext.mem_cache.compressors.attention_scores import SinkRecent
from sglang_ext.mem_cache.compressors.step_selectors import Spade


class FakeViews:
    """Copies of a quarter, as many as ``room`` allows."""

    recent, window, async_selector, row_sender = 0, 32, None, None

    def method(self, row):
        compressor = SimpleNamespace(follows_queries=False, window=self.window)
        return SimpleNamespace(recent=self.recent, min_context=MIN_CONTEXT, unit=16, compressor=compressor)

    def __init__(self, room=1 << 30):
        self.copies, self.room, self.made, self.queried, self.lacking = {}, room, [], 1 << 30, set()

    def is_refused(self, row):
        return False

    def has_queries(self, row):
        return row not in self.lacking

    def is_usable_without_refresh(self, row):
        return False

    def get(self, row):
        return self.copies.get(row)

    def draft_row(self, row):
        return row + 100

    def max_covered(self, row, tokens):
        return min(tokens, self.queried)

    def compress(self, row, tokens, headroom, prefix=None):
        if tokens // 4 > self.room:
            return False
        self.made.append((row, tokens))
        self.copies[row] = CompressedKV(torch.zeros(tokens // 4, dtype=torch.int64), tokens)
        return True

    def write_tail(self, row, end):
        pass

    def can_lack_full_kv(self, row):
        return False

    def release_compressed_kv(self, row):
        self.copies.pop(row, None)


def state(row=1):
    return RequestState(rid=f"r{row}", row=row, seed=0)


def ensure(compressed_kv, one, length):
    """Why there is no copy; "none" where there is one."""
    return FALLBACK_REASONS[ensure_compressed_kv(compressed_kv, SimpleNamespace(last_node=None), one, length, headroom=10)]


def test_a_short_context_is_served_with_full_kv_until_it_grows():
    compressed_kv, one = FakeViews(), state()
    assert ensure(compressed_kv, one, MIN_CONTEXT - 1) == "short-context" and not compressed_kv.made
    assert ensure(compressed_kv, one, MIN_CONTEXT) == "none" and compressed_kv.made == [(1, MIN_CONTEXT)]


@pytest.mark.parametrize("page", [1, 16])
def test_no_more_tokens_follow_a_copy_than_is_said_where_full_kv_is_given_back(page):
    method, context = CompressionMethod(Spade(each_round=False), 0.25, PlainSlots(page)), 4096
    none, most, given, view = torch.zeros(0, dtype=torch.int64), 0, None, None
    for length in range(512, context, PLAIN_STEPS):
        if view is not None:
            given = view.covered
        if view is None or length >= refresh_position(view, method.compressor):
            covered = method.covered(length)
            view = CompressedKV(torch.zeros(method.num_kept(covered), dtype=torch.int64), covered, back_slots=none)
        if given is not None:
            # With those that the round writes.
            most = max(most, length + PLAIN_STEPS - given)
    said = max_tail(method, page, context)
    assert said - page - PLAIN_STEPS <= most <= said, "and not much fewer"


def test_where_nothing_can_select_tokens_full_kv_is_read_until_something_can():
    compressed_kv, one, asked = FakeViews(), state(), []
    compressed_kv.async_selector = SimpleNamespace(must_read_full_kv=lambda *given: asked.append(given) or len(asked) in (1, 3))
    assert ensure(compressed_kv, one, MIN_CONTEXT - 1) == "short-context" and not asked
    assert ensure(compressed_kv, one, 400) == "no-selection" and not compressed_kv.copies
    assert ensure(compressed_kv, one, 401) == "none"
    assert ensure(compressed_kv, one, 402) == "no-selection" and not compressed_kv.copies
    assert ensure(compressed_kv, one, 403) == "none" and asked == [(1, length) for length in (400, 401, 402, 403)]
    compressed_kv.can_lack_full_kv = lambda row: True
    asked.clear()
    assert ensure(compressed_kv, one, 404) == "none" and not asked, "it has no full KV here"


def test_no_free_slots_is_served_with_full_kv():
    assert ensure(FakeViews(room=10), state(), 400) == "no-free-slots"


def test_the_copy_is_renewed_when_the_exact_tail_grew():
    compressed_kv, one = FakeViews(), state()
    for length in (400, 400 + REFRESH_AFTER, 401 + REFRESH_AFTER):
        assert ensure(compressed_kv, one, length) == "none"
    assert compressed_kv.made == [(1, 400), (1, 401 + REFRESH_AFTER)]


@pytest.mark.parametrize(("each_round", "every", "expected"), [(True, 0, 401), (True, 8, 401), (False, 8, 408), (False, 0, 401 + REFRESH_AFTER)])
def test_a_choice_is_made_anew_before_each_round_or_after_so_many_steps(each_round, every, expected):
    method = SinkRecent()
    for name, value in {"each_round": each_round, "every": every}.items():
        object.__setattr__(method, name, value)
    assert refresh_position(CompressedKV(torch.zeros(100, dtype=torch.int64), 400), method) == expected


def test_a_copy_is_not_renewed_for_tokens_whose_queries_nobody_kept():
    compressed_kv, one = FakeViews(), state()
    ensure(compressed_kv, one, 400)
    compressed_kv.queried = 400 + REFRESH_AFTER
    ensure(compressed_kv, one, 2000)
    assert compressed_kv.made == [(1, 400)]
    compressed_kv.queried += 1
    ensure(compressed_kv, one, 2000)
    assert len(compressed_kv.made) == 2


def test_without_queries_no_copy_is_made_and_none_renewed_until_they_are_there():
    compressed_kv, one = FakeViews(), state()
    compressed_kv.lacking.add(1)
    assert ensure(compressed_kv, one, 400) == "no-queries" and not compressed_kv.made
    compressed_kv.lacking.clear()
    assert ensure(compressed_kv, one, 401) == "none" and compressed_kv.made == [(1, 401)]
    compressed_kv.lacking.add(1)
    assert ensure(compressed_kv, one, 2000) == "none", "the old copy serves on"
    assert compressed_kv.made == [(1, 401)]
    compressed_kv.lacking.clear()
    ensure(compressed_kv, one, 2000)
    assert compressed_kv.made == [(1, 401), (1, 2000)]


@pytest.mark.parametrize(
    ("fallback", "window", "end", "expected"),
    [
        ("none", 32, MIN_CONTEXT - 49, False),
        ("none", 32, MIN_CONTEXT - 48, True),
        ("none", 32, 4000, True),
        ("no-queries", 32, 4000, True),
        ("slower", 32, 4000, True),
        ("min-p", 32, 4000, False),
        ("hidden-states", 32, 4000, False),
        ("none", 0, 4000, False),
    ],
)
def test_queries_are_kept_of_who_can_be_drafted_once_a_first_copy_is_near(fallback, window, end, expected):
    compressed_kv, one = FakeViews(), state()
    compressed_kv.window, one.fallback = window, FALLBACK_REASONS.index(fallback)
    assert is_compression_near(compressed_kv, one, end) == expected


def test_queries_of_who_has_a_copy_are_kept_again_before_it_is_renewed():
    compressed_kv, one = FakeViews(), state()
    ensure(compressed_kv, one, 400)
    due = 401 + REFRESH_AFTER
    assert [is_compression_near(compressed_kv, one, end) for end in (401, due - 49, due - 48, due)] == [False, False, True, True]


@given(
    st.lists(st.integers(1, 17), min_size=200, max_size=200), st.integers(200, 2000), st.sampled_from([1, 16]),
    st.integers(1, 17),
)  # fmt: skip
def test_verifications_near_a_renewal_leave_all_queries_that_it_scores_by(accepted, length, unit, width):
    compressed_kv, one = FakeViews(), state()
    compressor = SimpleNamespace(follows_queries=False, window=32)
    compressed_kv.method = lambda row: SimpleNamespace(recent=0, min_context=MIN_CONTEXT, unit=unit, compressor=compressor)
    compressed_kv.compress(1, length // unit * unit, 0)
    due, kept = refresh_position(compressed_kv.get(1), compressor), set()
    for count in accepted:
        if length >= due:
            break
        if is_compression_near(compressed_kv, one, length + width):
            kept |= set(range(length, length + min(count, width)))
        length += min(count, width)
    covered = length // unit * unit
    assert length < due or set(range(covered - 32, covered)) <= kept
