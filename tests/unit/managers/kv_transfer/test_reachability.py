"""When rooms fail because their receiver does not answer, breaks connections, or takes nothing; and how fast it takes bytes."""

import pytest
import zmq
from link_helpers import header

from sglang_ext.managers.kv_transfer.connection import Connection, Reachability
from sglang_ext.managers.kv_transfer.limits import LinkLimits
from sglang_ext.managers.kv_transfer.wire import FRAME_OVERHEAD, Frame, Stream

LIMITS = LinkLimits(reconnects=2, resume_seconds=10.0, stall_seconds=5.0)


class Told:
    def __init__(self):
        self.links = self.again = 0

    def count(self, name, number):
        assert name in ("kv_links", "kv_link_reconnects")
        if name == "kv_links":
            self.links += number
        else:
            self.again += number


def reachability(told=None):
    return Reachability("ipc://end", LIMITS, told or Told(), _gone_since=100.0, _progressed=100.0)


@pytest.fixture
def clock(monkeypatch):
    """The time, which the test says."""
    now = [100.0]
    monkeypatch.setattr("sglang_ext.managers.kv_transfer.connection.time.monotonic", lambda: now[0])
    return now


def test_a_receiver_is_unreached_from_when_it_left_on(clock):
    told = Told()
    made = reachability(told)
    assert made.unreachable_reason(110.0) is None and "not reached for 10 s: it does not answer" in made.unreachable_reason(111.0)
    made.welcome()
    assert told.links == 1 and told.again == 0 and made.unreachable_reason(200.0) is None
    clock[0] = 200.0
    assert made.count_break(True, "it was lost") is None
    for _ in range(2):
        made.disconnect()
    assert told.links == 0 and made.unreachable_reason(210.0) is None and "it was lost" in made.unreachable_reason(210.1)
    made.welcome()
    assert told.links == 1 and told.again == 1


def test_connections_that_break_fail_rooms_unless_parts_are_taken_between_them(clock):
    made = reachability()
    for acknowledged in (True, True, False):
        made.welcome()
        made.record_progress(acknowledged)
        reason = made.count_break(True, "it was lost")
        assert reason is None
    assert "nothing was acknowledged between them; the last error: it was lost" in made.count_break(True, "it was lost")
    assert made.count_break(False, "no handshake") is None, "they are counted anew"


def test_who_waits_for_a_receiver_that_takes_nothing_fails_and_who_waits_for_nothing_does_not(clock):
    made = reachability()
    assert made.stall_reason(104.0, True) is None and made.stall_reason(109.0, False) is None
    assert made.stall_reason(113.0, True) is None and "acknowledged nothing for 5 s" in made.stall_reason(114.5, True)
    clock[0] = 114.0
    made.record_progress()
    assert made.stall_reason(114.5, True) is None


def test_time_without_bytes_under_way_makes_no_receiver_slow(clock, tmp_path):
    context = zmq.Context()
    connection = Connection(context, f"ipc://{tmp_path}/end", None, 1.0)
    connection.welcome(1 << 20)
    payload = bytes(1000)
    size, frame, found = len(payload) + FRAME_OVERHEAD, Frame(header(1, Stream.ANCHOR, payload), 0), []
    for begun in (105.0, 200.0):
        clock[0] = begun
        connection.send_frame(frame, memoryview(payload))
        for _ in range(9):
            clock[0] += 0.004
            connection.send_frame(frame, memoryview(payload))
            connection.heard = clock[0]
            connection.grant(size)
            found.append(connection.rate)
        connection.grant(size)
        assert not connection.outstanding
    # From when it was measured first.
    assert found[:4] == [0.0] * 4 and found[4:] == [pytest.approx(size / 0.004, rel=0.25)] * 14
    connection.close()
    context.destroy(0)


def test_a_receiver_to_which_one_frame_is_under_way_at_a_time_is_measured_too(clock, tmp_path):
    context = zmq.Context()
    connection = Connection(context, f"ipc://{tmp_path}/end", None, 1.0)
    connection.welcome(1 << 20)
    payload = bytes(1000)
    frame = Frame(header(1, Stream.ANCHOR, payload), 0)
    for _ in range(20):
        connection.send_frame(frame, memoryview(payload))
        clock[0] += 0.002
        connection.heard = clock[0]
        connection.grant(len(payload) + FRAME_OVERHEAD)
        assert not connection.outstanding
    assert connection.rate == pytest.approx((len(payload) + FRAME_OVERHEAD) / 0.002)
    connection.close()
    context.destroy(0)
