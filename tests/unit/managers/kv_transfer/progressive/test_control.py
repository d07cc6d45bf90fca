"""Control messages are read as they were written, and nothing else is; rooms meet in either order."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from link_helpers import SETTINGS

from sglang_ext.managers.kv_transfer import wire
from sglang_ext.managers.kv_transfer.progressive import compatibility, handshakes
from sglang_ext.managers.kv_transfer.progressive.handshakes import Handshakes, RoomAbort, RoomFailure, RoomMetadata
from sglang_ext.managers.kv_transfer.wire import WireError

SIZES = (64, 12)


def metadata(
    room=7, version=handshakes.CONTROL_VERSION, endpoint="tcp://127.0.0.1:5", settings=SETTINGS, sizes=(*SIZES, 0), attempt=None, tokens=100
):
    """Of an attempt at a room; without a number it has the room's."""
    attempt = room if attempt is None else attempt
    return RoomMetadata(version, room, "127.0.0.1", 4, endpoint, wire.encode(settings), sizes, 16, tokens, attempt)


class Sender:
    def __init__(self, room, tokens=100):
        self.room, self.tokens, self.heard = room, tokens, []

    def on_metadata(self, message):
        self.heard.append(message)

    def fail(self, reason):
        self.heard.append(reason)


@pytest.fixture
def refused():
    return []


@pytest.fixture
def rooms(refused):
    return Handshakes(lambda message, reason: refused.append((message.room, reason)))


@pytest.mark.parametrize("message", [metadata(), RoomAbort(7, "a", 5), RoomFailure(1 << 62, "b")], ids=lambda message: type(message).__name__)
def test_a_message_is_read_as_it_was_written(message):
    assert handshakes.decode_control(wire.encode(message)) == message


@given(st.binary(max_size=300))
def test_other_bytes_are_no_message(data):
    with pytest.raises(WireError, match="no control message"):
        handshakes.decode_control(data)


def test_a_message_that_is_too_long_is_not_read():
    with pytest.raises(WireError, match="65537 bytes; at most 65536"):
        handshakes.decode_control(bytes(handshakes.MAX_CONTROL_BYTES + 1))


def test_metadata_and_sender_meet_in_either_order(rooms, refused):
    first, second = Sender(1), Sender(2)
    rooms.join(first)
    rooms.take(metadata(1))
    rooms.take(metadata(2))
    rooms.join(second)
    assert first.heard == [metadata(1)] and second.heard == [metadata(2)] and not refused


def test_an_abort_ends_a_sender_now_or_as_soon_as_it_comes(rooms):
    first, second, third, fourth = (Sender(room) for room in (1, 2, 3, 4))
    rooms.join(first)
    rooms.take(RoomAbort(1, "gone", 11))
    rooms.take(metadata(2))
    rooms.take(RoomAbort(2, "gone", 2))
    rooms.join(second)
    rooms.take(RoomAbort(3, "gone", 13))
    rooms.join(third)
    rooms.take(metadata(4))
    rooms.join(fourth)
    rooms.take(RoomAbort(4, "gone", 4))
    assert first.heard == second.heard == third.heard == ["the decode side ended it: gone"]
    assert fourth.heard == [metadata(4), "the decode side ended it: gone"]


def test_late_messages_of_an_attempt_do_not_reach_the_next_at_its_room(rooms, refused):
    first, second = Sender(1), Sender(1)
    rooms.join(first)
    rooms.take(metadata(1, attempt=11))
    rooms.join(second)
    rooms.take(metadata(1, attempt=12))
    rooms.leave(first, "done")
    rooms.take(RoomAbort(1, "late", 11))
    assert first.heard == [metadata(1, attempt=11)] and second.heard == [metadata(1, attempt=12)] and not refused
    rooms.take(RoomAbort(1, "now", 12))
    assert second.heard[1:] == ["the decode side ended it: now"] and len(first.heard) == 1


def test_requests_with_one_room_meet_in_order_and_those_of_equal_prompts_first(rooms):
    senders = [Sender(1, tokens) for tokens in (100, 100, 200)]
    for each in senders:
        rooms.join(each)
    for attempt, tokens in ((11, 200), (12, 100), (13, 100)):
        rooms.take(metadata(1, attempt=attempt, tokens=tokens))
    assert [each.heard[0].link_room for each in senders] == [12, 13, 11]
    for attempt, tokens in ((21, 200), (22, 100)):
        rooms.take(metadata(2, attempt=attempt, tokens=tokens))
    rooms.join(short := Sender(2, 100))
    rooms.join(other := Sender(2, 300))
    assert (short.heard[0].link_room, other.heard[0].link_room) == (22, 21)


def test_a_sender_that_ended_is_not_met_while_another_waits_in_its_room(rooms, refused):
    ended, waiting = Sender(1), Sender(1)
    rooms.join(ended)
    rooms.join(waiting)
    rooms.leave(ended, "no such grammar")
    rooms.take(metadata(1, attempt=11))
    rooms.take(metadata(1, attempt=12))
    assert [each.link_room for each in waiting.heard] == [11] and refused == [(1, "no such grammar")]


def test_metadata_of_a_sender_that_left_is_refused_with_its_reason_once(rooms, refused):
    sender = Sender(1)
    rooms.join(sender)
    rooms.leave(sender, "Aborted by AbortReq.")
    rooms.take(metadata(1))
    assert refused == [(1, "Aborted by AbortReq.")]
    rooms.take(metadata(1, attempt=12))
    rooms.join(again := Sender(1))
    assert again.heard == [metadata(1, attempt=12)] and len(refused) == 1


def test_what_waits_is_bounded_and_the_oldest_is_refused(rooms, refused):
    for room in range(handshakes.MAX_WAITING + 2):
        rooms.take(metadata(room))
    assert [room for room, _ in refused] == [0, 1] and f"before {handshakes.MAX_WAITING} others" in refused[0][1]


@pytest.mark.parametrize(
    ("message", "keys", "why"),
    [
        (metadata(version=9), True, f"protocol is 9 at the receiver and {handshakes.CONTROL_VERSION} at the sender"),
        (metadata(sizes=(64, 0)), True, r"rows of \(64,\) bytes at the receiver and \(64, 12\) at the sender.*same SGLang"),
        (metadata(endpoint="ipc:///no/such/file"), False, "no such file here: give both servers the same --kv-link-keys"),
        (metadata(endpoint="ipc:///no/such/file"), True, "the prefill server has --kv-link-keys and the decode server has none: give both"),
        (metadata(), False, "the decode server has --kv-link-keys and the prefill server has none: give both servers the same file"),
    ],
    ids=["version", "record", "machine", "keys of prefill", "keys of decode"],
)
def test_a_decode_side_that_does_not_fit_is_refused_by_name(message, keys, why):
    found = compatibility.metadata_mismatch(message, SETTINGS, SIZES, keys)
    assert found is not None and re.search(why, found)
    assert compatibility.metadata_mismatch(metadata(), SETTINGS, SIZES, True) is None


def test_settings_that_are_none_are_refused():
    broken = RoomMetadata(handshakes.CONTROL_VERSION, 7, "h", 4, "tcp://127.0.0.1:5", b"\x00", (*SIZES, 0), 0, 1)
    assert "settings are not of this version" in compatibility.metadata_mismatch(broken, SETTINGS, SIZES, False)
