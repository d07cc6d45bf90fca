"""A ring never promises more than its capacity, and gives back exactly what was taken."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.managers.kv_offload.verification_scheduler import ROUNDING, ReservationRing

HORIZON = 6
SPANS = st.tuples(st.integers(0, HORIZON - 1), st.integers(0, HORIZON - 1)).map(sorted)
AMOUNTS = st.floats(0, 1.5)


def totals(ring):
    return [ring.reserved(i) for i in range(ring.horizon)]


@given(st.lists(st.one_of(st.none(), st.tuples(AMOUNTS, SPANS), st.integers(0, 20)), max_size=40))
@settings(max_examples=150, deadline=None)
def test_no_iteration_is_above_the_capacity_whatever_is_asked(steps):
    ring, kept = ReservationRing(1.0, HORIZON), []
    for step in steps:
        if step is None:
            ring.advance()
            kept = [(amount, first - 1, last - 1) for amount, first, last in kept]
        elif isinstance(step, int):
            if kept:
                amount, first, last = kept.pop(step % len(kept))
                if last >= 0:
                    ring.release(amount, max(0, first), last)
        else:
            amount, (first, last) = step
            room = all(ring.reserved(i) + amount <= 1 + ROUNDING for i in range(first, last + 1))
            assert ring.fits(amount, first, last) == room
            if room:
                ring.reserve(amount, first, last)
                kept.append((amount, first, last))
        assert all(total <= 1 + ROUNDING for total in totals(ring))
        expected = [sum(a for a, first, last in kept if first <= i <= last) for i in range(HORIZON)]
        assert totals(ring) == pytest.approx(expected)


@given(st.lists(st.tuples(st.floats(0, 0.1), SPANS), min_size=1, max_size=9), st.randoms())
def test_released_in_any_order_a_ring_is_as_it_was_to_the_last_bit(reservations, random):
    ring = ReservationRing(1.0, HORIZON)
    ring.reserve(0.1, 0, 3)
    before = totals(ring)
    for amount, span in reservations:
        ring.reserve(amount, *span)
    random.shuffle(reservations)
    for amount, span in reservations:
        ring.release(amount, *span)
    assert totals(ring) == before


def test_what_is_not_there_cannot_be_released():
    ring = ReservationRing(1.0, 4)
    ring.reserve(0.5, 1, 2)
    ring.release(0.5, 1, 2)
    assert totals(ring) == [0, 0, 0, 0]
    with pytest.raises(ValueError):
        ring.release(0.5, 1, 2)


def test_advancing_slides_all_and_adds_an_empty_iteration():
    ring = ReservationRing(1.0, 3)
    for i in range(3):
        ring.reserve((i + 1) / 4, i, i)
    ring.advance()
    assert totals(ring) == [0.5, 0.75, 0]
    assert ring.occupancy() == 0.5 and ring.free(1) == 0.25 and ring.peak == 0.75


def test_a_lower_capacity_keeps_what_is_reserved_and_takes_no_more():
    ring = ReservationRing(1.0, 2)
    ring.reserve(0.8, 0, 1)
    ring.capacity = 0.5
    assert totals(ring) == [0.8, 0.8] and ring.free(0) == 0 and ring.occupancy() == 1
    assert not ring.fits(0.01, 0, 0)
    ring.reserve(0.2, 0, 0)
    assert ring.reserved(0) == 1.0, "what is in use anyway is counted above the capacity"


def test_scaled_amounts_are_released_scaled():
    ring = ReservationRing(1.0, 2)
    ring.reserve(0.3, 0, 1)
    ring.scale(1.1)
    ring.release(0.3 * 1.1, 0, 1)
    assert totals(ring) == [0, 0]


@pytest.mark.parametrize("span", [(-1, 0), (0, 3), (2, 1)])
def test_a_span_outside_the_horizon_is_refused(span):
    for call in (ReservationRing(1.0, 3).fits, ReservationRing(1.0, 3).reserve, ReservationRing(1.0, 3).release):
        with pytest.raises(AssertionError, match="of 3"):
            call(0.0, *span)
