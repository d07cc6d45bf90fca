"""Verifications are placed so that the link brings full KV in time and memory holds it (VeriCache, Algorithm 1)."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.managers.kv_offload.verification_scheduler import VerificationScheduler, VerificationSlot

W = 24
EPSILON = 1e-6


def state(admission):
    return [(admission.link.reserved(i), admission.memory.reserved(i)) for i in range(admission.link.horizon)]


def check(admission):
    """Neither the link nor the memory is promised twice."""
    for seconds, tokens in state(admission):
        assert seconds <= admission.link.capacity + EPSILON and tokens <= admission.memory.capacity + EPSILON


class Link:
    """One transfer at a time, first come first served; each takes as long as it was said."""

    def __init__(self):
        self.free, self.ends = 0.0, {}

    def load(self, key, seconds, now):
        self.free = max(self.free, now) + seconds
        self.ends[key] = self.free


LOADS = st.tuples(st.floats(0, 4.0), st.floats(0, 6.0), st.integers(1, 30))


@given(st.lists(st.one_of(st.integers(0, 60), LOADS), max_size=50))
@settings(max_examples=150, deadline=None)
def test_a_link_that_takes_as_long_as_promised_is_never_late_and_memory_suffices(steps):
    """Integers end a request, or, where there is none, an iteration; its loads have to be there when they are due."""
    admission, link, now, keys, loads = VerificationScheduler(1.0, 10.0, W), Link(), 0, 0, {}
    for step in [*steps, *[60] * (W + 5)]:
        if isinstance(step, tuple):
            slot = admission.admit(keys, *step)
            if slot:
                needed = max(1, -(-step[0] // 1)) if step[0] or step[1] else 1
                assert needed <= slot.due <= W - 1 and 0 <= slot.start
                assert slot.start <= slot.due - needed if step[0] else True
                loads[keys] = (step[0], step[1], now + slot.start, now + slot.due)
            keys += 1
        elif step < 10 and loads:
            gone = sorted(loads)[step % len(loads)]
            # A load that runs cannot be called back from a link.
            if loads[gone][2] > now:
                admission.cancel(gone)
                del loads[gone]
        else:
            for key in admission.loads_to_start():
                link.load(key, loads[key][0], now)
            now += 1
            admission.advance()
            due = admission.due()
            assert sorted(due) == sorted(key for key, load in loads.items() if load[3] == now)
            assert all(link.ends.get(key, 0) <= now + EPSILON for key in due)
            held = sum(load[1] for load in loads.values() if load[2] <= now <= load[3])
            assert held <= 10 + EPSILON and held == pytest.approx(state(admission)[0][1])
            loads = {key: load for key, load in loads.items() if load[3] > now}
        check(admission)
    assert state(admission) == [(0, 0)] * W, "at the end all is given back"


@given(st.lists(LOADS, min_size=1, max_size=20), st.integers(0, 5))
@settings(deadline=None)
def test_cancelling_restores_what_was_there_and_equal_calls_give_equal_places(steps, rounds):
    def run():
        admission = VerificationScheduler(1.0, 10.0, W)
        slots = [admission.admit(i, *step) for i, step in enumerate(steps[:-1])]
        for _ in range(rounds):
            admission.advance()
        return admission, slots

    (first, slots), (second, again) = run(), run()
    assert slots == again
    before = state(first)
    place = first.admit("last", *steps[-1])
    assert place == second.admit("last", *steps[-1])
    first.cancel("last")
    assert state(first) == before
    first.cancel("last")
    assert state(first) == before, "there is nothing more to give back"


def test_the_search_goes_from_what_is_wanted_outward():
    admission = VerificationScheduler(1.0, 100.0, 8)
    dues = [admission.admit(i, 1.0, 1, 4).due for i in range(7)]
    assert dues == [4, 5, 3, 6, 2, 7, 1]
    assert admission.admit("more", 1.0, 1, 4) is None and admission.refused == 1 and admission.admitted == 7
    assert VerificationScheduler(1.0, 100.0, 8).admit(0, 1.0, 1, 99) == VerificationSlot(6, 7), "what is wanted is clamped to the horizon"
    assert VerificationScheduler(1.0, 100.0, 8).admit(0, 2.5, 1, 1) == VerificationSlot(0, 3), "and to the time that the load takes"


def test_loads_share_the_iterations_at_both_ends_so_that_the_link_is_not_idle():
    admission = VerificationScheduler(1.0, 100.0, 12)
    slots = [admission.admit(i, 0.7, 1, 11) for i in range(20)]
    placed = [slot for slot in slots if slot]
    assert len(placed) == int(11 / 0.7), "a load for each 0.7 seconds, though an iteration has room for one alone"
    assert max(slot.due - slot.start for slot in placed) == 2


def test_where_memory_is_scarcer_than_the_link_loads_do_not_begin_early_to_join_others():
    for memory, start in ((20.0, 10), (1000.0, 9)):
        admission = VerificationScheduler(1.0, memory, 24)
        assert admission.admit("a", 0.7, 8, 10) == VerificationSlot(9, 10)
        assert admission.admit("b", 0.7, 8, 11) == VerificationSlot(start, 11)


def test_a_load_is_not_placed_inside_a_longer_one():
    admission = VerificationScheduler(1.0, 100.0, 12)
    admission.link.reserve(0.2, 4, 4)
    assert admission.admit("long", 3.6, 1, 6) == VerificationSlot(2, 6)
    admission.link.release(0.2, 4, 4)
    # Iteration 4 has 0.2 seconds left, but a link that began with the long load brings this one only in iteration 5.
    assert admission.link.free(4) == pytest.approx(0.2)
    assert admission.admit("short", 0.2, 1, 5) == VerificationSlot(6, 7)


def test_memory_is_held_from_the_start_of_a_load_until_its_verification():
    admission = VerificationScheduler(1.0, 10.0, 12)
    admission.admit("a", 2.0, 6, 5)
    assert [tokens for _, tokens in state(admission)] == [0, 0, 0, 6, 6, 6, 0, 0, 0, 0, 0, 0]
    assert admission.memory.peak == 6
    assert admission.admit("b", 0.1, 6, 5) == VerificationSlot(6, 7), "beside it there is no room, though the link is free"
    for _ in range(5):
        admission.advance()
    assert admission.due() == ["a"] and (admission.link.occupancy(), admission.memory.occupancy()) == (0, 0.6)
    admission.advance()
    assert admission.due() == [] and state(admission)[0] == (0.1, 6)


def test_loads_begin_in_the_order_in_which_they_are_due():
    admission = VerificationScheduler(1.0, 100.0, 12)
    admission.admit("later", 1.8, 1, 4)
    admission.admit("sooner", 0.2, 1, 3)
    for _ in range(2):
        assert admission.loads_to_start() == []
        admission.advance()
    assert admission.loads_to_start() == ["sooner", "later"]


@pytest.mark.parametrize(("wanted", "least", "most"), [(8, 6, 10), (16, 12, 20), (3, 3, 3), (1, 1, 1), (99, 18, 23)])
def test_without_loads_verifications_spread_around_what_is_wanted(wanted, least, most):
    admission = VerificationScheduler(1.0, 0.0, W)
    count = 3 * (most - least + 1)
    dues = [admission.admit(i, 0, 0, wanted).due for i in range(count)]
    assert dues[0] == min(wanted, W - 1)
    assert all(dues.count(due) == 3 for due in range(least, most + 1)) and admission.refused == 0


def test_many_requests_verify_in_equal_numbers_in_the_long_run():
    admission, counts, noise = VerificationScheduler(1.0, 0.0, W), [], random.Random(0)
    for key in range(40):
        admission.admit(key, 0, 0, noise.randint(1, 10))
    for _ in range(200):
        admission.advance()
        counts.append(len(admission.due()))
        for key in admission.due():
            admission.admit(key, 0, 0, 10)
    assert max(counts[50:]) <= 5 and min(counts[50:]) >= 3, "40 requests, every 10 iterations: about 4 in each"


def test_without_tolerance_requests_verify_together():
    admission = VerificationScheduler(1.0, 0.0, W, tolerance=0.0)
    assert {admission.admit(i, 0, 0, 8) for i in range(9)} == {VerificationSlot(8, 8)}


def due_now(admission, iterations):
    for _ in range(iterations):
        admission.advance()
    return admission.due()


def test_a_late_load_keeps_its_memory_and_is_due_in_the_next_iteration():
    admission = VerificationScheduler(1.0, 10.0, 8)
    admission.admit("a", 1.0, 6, 2)
    assert due_now(admission, 2) == ["a"]
    assert admission.late("a") == [] and admission.due() == [] and admission.num_postponed == 1
    assert [tokens for _, tokens in state(admission)][:3] == [6, 6, 0]
    assert due_now(admission, 1) == ["a"]
    assert admission.late("a") == [] and admission.num_postponed == 2
    admission.cancel("a")
    assert state(admission) == [(0, 0)] * 8


def test_loads_that_have_not_begun_give_way_to_a_late_one_in_the_order_in_which_they_would_have_begun():
    admission = VerificationScheduler(1.0, 10.0, 12)
    admission.admit("late", 1.0, 4, 2)
    later = [admission.admit("running", 1.0, 4, 3), admission.admit("fits", 0.5, 2, 4), admission.admit("large", 0.4, 4, 4)]
    assert due_now(admission, 2) == ["late"]
    assert [slot.start - 2 for slot in later] == [0, 1, 1]
    assert admission.late("late") == ["fits", "large"]
    check(admission)
    assert admission.admit("fits", 0.5, 2, 2) < admission.admit("large", 0.1, 4, 2)
    check(admission)


def test_a_request_may_take_its_next_place_while_it_verifies():
    admission = VerificationScheduler(1.0, 10.0, 8)
    admission.admit("a", 1.0, 6, 2)
    assert due_now(admission, 2) == ["a"]
    assert admission.admit("a", 1.0, 6, 1) == VerificationSlot(1, 2), "memory for both at once there is not"
    assert admission.due() == ["a"]
    with pytest.raises(AssertionError, match="'a' is due in 2 iterations: cancel it first"):
        admission.admit("a", 1.0, 6, 1)
    with pytest.raises(AssertionError, match="'a' was admitted again"):
        admission.late("a")
    admission.cancel("a")
    assert admission.due() == [] and state(admission) == [(0, 0)] * 8


def test_measured_times_change_what_fits_and_lose_nothing():
    admission = VerificationScheduler(1.0, 10.0, 8)
    admission.admit("a", 1.6, 4, 4)
    before = state(admission)
    admission.link.capacity, admission.memory.capacity = 2.0, 5.0
    assert state(admission) == before
    assert admission.admit("b", 3.0, 1, 4) == VerificationSlot(1, 4), "each iteration has 2 seconds, of which a takes 0.6 and 1"
    admission.rescale_link(2.0)
    assert sum(seconds for seconds, _ in state(admission)) == pytest.approx(2 * 4.6)
    admission.cancel("a")
    admission.cancel("b")
    assert state(admission) == [(0, 0)] * 8


@pytest.mark.parametrize("numbers", [(-1, 0, 1), (0, -1, 1), (0, 0, 0), (float("nan"), 1, 1), (1, float("inf"), 1)])
def test_numbers_out_of_range_are_named(numbers):
    with pytest.raises(AssertionError, match="'a': "):
        VerificationScheduler(1.0, 10.0, 8).admit("a", *numbers)
