"""Control messages are read as they were written, and nothing else is; rooms meet in either order."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from link_helpers import SETTINGS

from sglang_ext.managers.disaggregation import wire
from sglang_ext.managers.disaggregation.progressive import agreement, control, handshakes
from sglang_ext.managers.disaggregation.progressive.control import Abort, Failed, Metadata
from sglang_ext.managers.disaggregation.progressive.handshakes import Handshakes
from sglang_ext.managers.disaggregation.wire import WireError

SIZES = (64, 12)


def metadata(room=7, version=control.VERSION, endpoint="tcp://127.0.0.1:5", settings=SETTINGS, sizes=(*SIZES, 0)):
    return Metadata(version, room, "127.0.0.1", 4, endpoint, wire.encode(settings), sizes, 16, 100, 5)


class Sender:
    def __init__(self, room):
        self.room, self.heard = room, []

    def meet(self, message):
        self.heard.append(message)

    def fail(self, reason):
        self.heard.append(reason)


@pytest.fixture
def refused():
    return []


@pytest.fixture
def rooms(refused):
    return Handshakes(lambda message, reason: refused.append((message.room, reason)))


@pytest.mark.parametrize("message", [metadata(), Abort(7, "a"), Failed(1 << 62, "b")], ids=lambda message: type(message).__name__)
def test_a_message_is_read_as_it_was_written(message):
    assert control.decode(control.encode(message)) == message


@given(st.binary(max_size=300))
def test_other_bytes_are_no_message(data):
    with pytest.raises(WireError, match="no control message"):
        control.decode(data)


def test_a_message_that_is_too_long_is_not_read():
    with pytest.raises(WireError, match="65537 bytes; at most 65536"):
        control.decode(bytes(control.MOST_MESSAGE + 1))


def test_metadata_and_sender_meet_in_either_order(rooms, refused):
    first, second = Sender(1), Sender(2)
    rooms.join(first)
    rooms.take(metadata(1))
    rooms.take(metadata(2))
    rooms.join(second)
    assert first.heard == [metadata(1)] and second.heard == [metadata(2)] and not refused


def test_an_abort_ends_a_sender_now_or_as_soon_as_it_comes(rooms):
    first, second, third = Sender(1), Sender(2), Sender(3)
    rooms.join(first)
    rooms.take(Abort(1, "gone"))
    rooms.take(metadata(2))
    rooms.take(Abort(2, "gone"))
    rooms.join(second)
    rooms.take(Abort(3, "gone"))
    rooms.join(third)
    assert first.heard == second.heard == third.heard == ["the decode side ended it: gone"]


def test_an_abort_of_a_room_that_is_over_does_not_touch_the_next_of_that_number(rooms):
    first, second = Sender(1), Sender(1)
    rooms.join(first)
    rooms.leave(first, None)
    rooms.take(Abort(1, "late"))
    rooms.join(second)
    rooms.leave(first, "of the first")
    rooms.take(metadata(1))
    assert not first.heard and second.heard == [metadata(1)]


def test_metadata_of_a_sender_that_left_is_refused_with_its_reason_once(rooms, refused):
    sender = Sender(1)
    rooms.join(sender)
    rooms.leave(sender, "Aborted by AbortReq.")
    rooms.take(metadata(1))
    assert refused == [(1, "Aborted by AbortReq.")]
    rooms.take(metadata(1))
    rooms.join(again := Sender(1))
    assert again.heard == [metadata(1)] and len(refused) == 1


def test_what_waits_is_bounded_and_the_oldest_is_refused(rooms, refused, monkeypatch):
    monkeypatch.setattr(handshakes, "MOST_WAITING", 3)
    for room in range(5):
        rooms.take(metadata(room))
    assert [room for room, _ in refused] == [0, 1] and "before 3 others" in refused[0][1]


@pytest.mark.parametrize(
    ("message", "keys", "why"),
    [
        (metadata(version=9), True, f"protocol is 9 at the receiver and {control.VERSION} at the sender"),
        (metadata(sizes=(64, 0)), True, r"rows of \(64,\) bytes at the receiver and \(64, 12\) at the sender.*same SGLang"),
        (metadata(endpoint="ipc:///no/such/file"), False, "no such file here: give both servers the same --kv-link-keys"),
        (metadata(endpoint="ipc:///no/such/file"), True, "the prefill server has --kv-link-keys and the decode server has none: give both"),
        (metadata(), False, "the decode server has --kv-link-keys and the prefill server has none: give both servers the same file"),
    ],
    ids=["version", "record", "machine", "keys of prefill", "keys of decode"],
)
def test_a_decode_side_that_does_not_fit_is_refused_by_name(message, keys, why):
    found = agreement.metadata_refusal(message, SETTINGS, SIZES, keys)
    assert found is not None and re.search(why, found)
    assert agreement.metadata_refusal(metadata(), SETTINGS, SIZES, True) is None


def test_settings_that_are_none_are_refused():
    broken = Metadata(control.VERSION, 7, "h", 4, "tcp://127.0.0.1:5", b"\x00", (*SIZES, 0), 0, 1)
    assert "settings are none of this version" in agreement.metadata_refusal(broken, SETTINGS, SIZES, False)
