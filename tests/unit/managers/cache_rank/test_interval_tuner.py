"""Cache ranks get selection requests as often as they keep up with steps, and not more often than the requested interval."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.managers.cache_rank.stepwise_client import BESIDE_SECONDS, MOST_STEPS, IntervalTuner


def run(pace, steps, step, cost, requests, waits=True, begun=0.0):
    """Steps of so many seconds beside a rank that needs ``cost`` seconds a request; each waits for its choice. When the last began."""
    now, waited = begun, 0.0
    for _ in range(steps):
        pace.record_round(now, waited, 1)
        every = pace.record_step(requests)
        late = max(0.0, requests * cost - every * step) / every if waits else 0.0
        pace.record_replies(requests * cost, requests)
        now, waited = now + step + late, waited + late
    return now


@pytest.mark.parametrize(("requests", "every"), [(1, 1), (7, 1), (8, 2), (16, 2), (17, 3), (32, 4)])
def test_a_choice_for_all_requests_has_as_many_steps_as_it_takes(requests, every):
    pace = IntervalTuner(1)
    run(pace, 60, 8e-3, 0.93e-3, requests)
    assert pace.every == every


def test_what_is_asked_for_is_the_least_and_a_number_of_steps_the_most():
    slow, rare, fixed = IntervalTuner(1), IntervalTuner(5), IntervalTuner(1, 1)
    for pace in (slow, rare, fixed):
        run(pace, 60, 1e-3, 1e-3, 100)
    assert (slow.every, fixed.every) == (MOST_STEPS, 1)
    run(rare, 60, 1.0, 1e-3, 1)
    assert rare.every == 5


def test_it_is_asked_more_often_again_when_requests_have_gone_and_does_not_go_to_and_fro():
    pace = IntervalTuner(1)
    now = run(pace, 60, 8e-3, 0.93e-3, 32)
    now = run(pace, 60, 8e-3, 0.93e-3, 4, begun=now)
    assert pace.every == 1
    # Close to one step: whichever it is, it stays.
    seen = set()
    for number in range(200):
        now = run(pace, 1, 8e-3, (8e-3 * (1 + 0.05 * (-1) ** number) - BESIDE_SECONDS) / 8, 8, begun=now)
        seen.add(pace.every)
    assert len(seen) <= 2 and pace.every == 2


def test_a_prefill_between_two_steps_and_a_kernel_that_is_compiled_say_nothing():
    pace, now = IntervalTuner(1), 0.0
    for number in range(100):
        now += 0.6 if number % 10 == 0 else 8e-3
        pace.record_replies(20.0 if number == 0 else 14e-3, 16)
        pace.record_round(now, 0.0, 1)
        every = pace.record_step(16)
    assert every == 2


@pytest.mark.parametrize(("steps", "verifications"), [(4, 0), (16, 1), (1, 1)])
def test_steps_that_the_host_launches_at_once_take_as_long_as_the_device_takes_for_them(steps, verifications):
    pace, now = IntervalTuner(1), 0.0
    for _ in range(40):
        pace.record_round(now, 0.0, steps + verifications)
        for _ in range(steps):
            pace.record_replies(14e-3, 16)
            every = pace.record_step(16)
        now += 8e-3 * (steps + verifications)
    assert pace.step_seconds == pytest.approx(8e-3) and every == 2


@given(st.floats(1e-4, 1.0), st.floats(1e-6, 0.1), st.integers(1, 64), st.integers(1, 8))
def test_a_choice_that_fits_is_never_waited_for(step, cost, requests, least):
    pace = IntervalTuner(least)
    run(pace, 80, step, cost, requests)
    assert least <= pace.every <= max(least, MOST_STEPS)
    assert pace.every == max(least, MOST_STEPS) or pace.every * step >= requests * cost * 0.99


def test_without_requests_or_answers_nothing_changes():
    pace = IntervalTuner(3)
    for number in range(50):
        pace.record_round(number * 1e-4, 0.0, 1)
        assert pace.record_step(5) == 3
    pace.record_replies(1.0, 1)
    for number in range(50):
        pace.record_replies(1.0, 1)
        pace.record_round(number, 0.0, 1)
        assert pace.record_step(0) == 3


def test_one_slow_answer_for_many_requests_at_the_start_does_not_set_the_pace():
    pace, now = IntervalTuner(1), 0.0
    for number in range(9):
        now += 8e-3
        pace.record_round(now, 0.0, 1)
        pace.record_replies(20.0 if number == 0 else 1e-3, 16)
        assert pace.record_step(16) == 1
