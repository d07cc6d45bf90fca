"""When rooms fail because their receiver does not answer, breaks connections, or takes nothing."""

import pytest

from sglang_ext.managers.disaggregation.connection import Reachability
from sglang_ext.managers.disaggregation.limits import LinkLimits

LIMITS = LinkLimits(reconnects=2, resume_seconds=10.0, stall_seconds=5.0)


class Told:
    def __init__(self):
        self.links = self.again = 0

    def add_links(self, count):
        self.links += count

    def count_reconnect(self):
        self.again += 1


def reachability(told=None):
    return Reachability("ipc://end", LIMITS, told or Told(), _gone_since=100.0, _progressed=100.0)


@pytest.fixture
def clock(monkeypatch):
    """The time, which the test says."""
    now = [100.0]
    monkeypatch.setattr("sglang_ext.managers.disaggregation.connection.time.monotonic", lambda: now[0])
    return now


def test_a_receiver_is_unreached_from_when_it_left_on(clock):
    told = Told()
    made = reachability(told)
    assert made.unreached(110.0) is None and "not reached for 10 s: it does not answer" in made.unreached(111.0)
    made.welcome()
    assert told.links == 1 and told.again == 0 and made.unreached(200.0) is None
    clock[0] = 200.0
    assert made.broke(True, "it was lost") is None
    for _ in range(2):
        made.leave()
    assert told.links == 0 and made.unreached(210.0) is None and "it was lost" in made.unreached(210.1)
    made.welcome()
    assert told.links == 1 and told.again == 1


def test_connections_that_break_fail_rooms_unless_parts_are_taken_between_them(clock):
    made = reachability()
    for acknowledged in (True, True, False):
        made.welcome()
        made.progress(acknowledged)
        reason = made.broke(True, "it was lost")
        assert reason is None
    assert "nothing was acknowledged between them; the last: it was lost" in made.broke(True, "it was lost")
    assert made.broke(False, "no handshake") is None, "they are counted anew"


def test_who_waits_for_a_receiver_that_takes_nothing_fails_and_who_waits_for_nothing_does_not(clock):
    made = reachability()
    assert made.stalled(104.0, True) is None and made.stalled(109.0, False) is None
    assert made.stalled(113.0, True) is None and "acknowledged nothing for 5 s" in made.stalled(114.5, True)
    clock[0] = 114.0
    made.progress()
    assert made.stalled(114.5, True) is None
