"""A link's rate is exact over time, and bursts are bounded; a scheduler that asks without end lets other threads run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.managers.kv_transfer.limits import LEAST_FRAME, PAUSE, NetworkInterface, PollThrottle

RATES = st.floats(1e3, 1e9)
SIZES = st.lists(st.integers(1, 1 << 20), min_size=1, max_size=30)


@given(RATES, SIZES, st.data())
def test_no_interval_has_more_than_burst_rate_and_one_message(rate, sizes, data):
    bucket, now, sent = NetworkInterface(rate * 8e-9), 0.0, []
    for size in sizes:
        now += data.draw(st.floats(0, 0.2)) + bucket.wait(now)
        while (wait := bucket.wait(now)) > 0:
            now += wait
        bucket.take(size, now)
        sent.append((now, size))
    for first in range(len(sent)):
        for last in range(first, len(sent)):
            taken = sum(size for _, size in sent[first:last])
            assert taken <= bucket.burst + rate * (sent[last][0] - sent[first][0]) + max(sizes) + 2


@given(RATES, SIZES)
def test_who_never_pauses_gets_the_whole_rate_even_in_messages_beyond_the_burst(rate, sizes):
    bucket, now = NetworkInterface(rate * 8e-9), 0.0
    for size in sizes:
        while (wait := bucket.wait(now)) > 0:
            now += wait
        bucket.take(size, now)
    # What is sent last is not waited for.
    assert now == pytest.approx(sum(sizes[:-1]) / rate, rel=1e-6, abs=2 / rate)


def test_lateness_is_made_up_for_within_the_burst():
    bucket = NetworkInterface(8e-6)
    bucket.take(100, 0.0)
    assert bucket.wait(0.0) == pytest.approx(0.1)
    # 40 ms late: 40 bytes more may go at once.
    assert bucket.wait(0.14) == 0
    bucket.take(40, 0.14)
    assert bucket.wait(0.14) == 0
    bucket.take(2, 0.14)
    assert bucket.wait(0.14) == pytest.approx(0.002)


def test_without_a_limit_nobody_waits():
    bucket = NetworkInterface()
    bucket.take(1 << 40, 0.0)
    assert bucket.wait(0.0) == 0 and bucket.frame_bytes(1 << 18) == 1 << 18


def test_slow_links_have_short_frames():
    assert NetworkInterface(0.01).frame_bytes(1 << 18) == LEAST_FRAME
    assert NetworkInterface(0.1).frame_bytes(1 << 18) == 25000
    assert NetworkInterface(10).frame_bytes(1 << 18) == 1 << 18


def test_a_loop_without_work_pauses_once_however_many_rooms_it_asks_for():
    clock, pauses = [10.0], []

    def pause(seconds):
        pauses.append(seconds)
        clock[0] += seconds

    polls = PollThrottle(lambda: clock[0], pause)
    for _ in range(4):
        for room in (7, 8, 9):
            polls.asked(room)
            clock[0] += 2e-5
    assert pauses == [PAUSE] * 3
    for _ in range(4):
        clock[0] += 5e-3
        polls.asked(8)
    assert len(pauses) == 3, "a step runs between them"
    polls.asked(8)
    polls.asked(9)
    assert len(pauses) == 4, "the first room is over, and another is that of the loop"


def test_ranks_of_a_host_share_its_rate_equally():
    ranks = [NetworkInterface(0.03, 3) for _ in range(3)]
    for each in ranks:
        each.take(12_500, 0.0)
    # A third of 0.03 Gbit/s are 1.25 MB/s.
    assert [each.wait(0.0) for each in ranks] == pytest.approx([0.01] * 3, rel=0.01)
    assert NetworkInterface(None, 3).wait(0.0) == 0.0
