"""The order in which a sender sends: anchors of all rooms before residuals, each part once, and missing parts after a reconnect."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from link_helpers import LAYERS, Listener, part, shape

from sglang_ext.managers.kv_transfer.outgoing_queue import OutgoingQueue
from sglang_ext.managers.kv_transfer.wire import Have, LayerRange, LinkError, Stream

FRAME = 10
NOTHING = {"anchors": b"", "residuals": b"", "aux": False}


def queue_of(*rooms, pages=2, **of):
    queue = OutgoingQueue("lynx", 0)
    for room in rooms:
        queue.open(room, shape(pages, **of), Listener())
        queue.confirm(Have(room, **NOTHING))
    return queue


def offer(queue, room, part, layers=LAYERS):
    stream, payload, page, _ = part
    payload = memoryview(payload)
    return queue.offer(queue.header(room, stream, payload, page, layers, b""), payload)


def send(queue):
    """One frame: (room, stream, page, offset), or None."""
    sending = queue.next()
    if sending is None:
        return None
    sent = sending.header.room, sending.header.stream, sending.header.page, sending.offset
    queue.advance(sending, len(sending.payload[sending.offset : sending.offset + FRAME]))
    return sent


def send_all(queue):
    return list(iter(lambda: send(queue), None))


def test_anchors_of_all_rooms_go_before_any_residual_and_the_record_between():
    queue = queue_of(1, 2)
    for room in (1, 2):
        for stream in (Stream.RESIDUAL, Stream.AUX, Stream.ANCHOR):
            for page in range(1 if stream is Stream.AUX else 2):
                assert offer(queue, room, part(stream, b"12345", page))
    sent = [(room, stream.value) for room, stream, _, _ in send_all(queue)]
    first = [(1, "anchor")] * 2 + [(1, "aux")] + [(2, "anchor")] * 2 + [(2, "aux")]
    assert sent == first + [(1, "residual")] * 2 + [(2, "residual")] * 2


def test_what_did_not_go_whole_is_unsent_whether_or_not_its_room_was_confirmed():
    queue = queue_of(1, pages=2, aux=False)
    queue.open(2, shape(1), Listener())
    for room, page in ((1, 0), (1, 1), (2, 0)):
        offer(queue, room, part(Stream.ANCHOR, bytes(2 * FRAME), page))
    assert queue.unsent(Stream.ANCHOR) == 3 and queue.unsent(Stream.RESIDUAL) == 0
    send(queue)
    assert queue.unsent(Stream.ANCHOR) == 3
    send(queue)
    assert queue.unsent(Stream.ANCHOR) == 2
    queue.end(2)
    assert queue.unsent(Stream.ANCHOR) == 1


def test_an_anchor_that_comes_late_waits_for_one_frame_and_the_residual_goes_on_after_it():
    queue = queue_of(1, 2, pages=1, aux=False)
    offer(queue, 1, part(Stream.ANCHOR, b"a"))
    offer(queue, 1, part(Stream.RESIDUAL, bytes(3 * FRAME)))
    assert [send(queue)[1:] for _ in range(2)] == [("anchor", 0, 0), ("residual", 0, 0)]
    offer(queue, 2, part(Stream.ANCHOR, b"late"))
    assert [(room, offset) for room, _, _, offset in send_all(queue)] == [(2, 0), (1, FRAME), (1, 2 * FRAME)]


def test_residuals_wait_for_their_rooms_record_and_the_record_for_all_anchors():
    queue = queue_of(1)
    offer(queue, 1, part(Stream.AUX, b"x"))
    offer(queue, 1, part(Stream.RESIDUAL, b"r", 0))
    offer(queue, 1, part(Stream.ANCHOR, b"a", 1))
    assert [sent[1] for sent in send_all(queue)] == ["anchor"]
    offer(queue, 1, part(Stream.ANCHOR, b"a", 0))
    assert [sent[1] for sent in send_all(queue)] == ["anchor", "aux", "residual"]


def test_residuals_whose_anchors_went_may_be_hurried_where_other_anchors_are_still_to_come():
    queue = queue_of(1, pages=3)
    for stream in (Stream.RESIDUAL, Stream.ANCHOR):
        for page in range(2):
            offer(queue, 1, part(stream, bytes(2 * FRAME), page))
    assert queue.next_early_residual() is None
    assert [sent[1:3] for sent in send_all(queue)] == 2 * [("anchor", 0)] + 2 * [("anchor", 1)]
    assert queue.next_early_residual() is queue.next() and send(queue)[1:] == ("residual", 0, 0)
    offer(queue, 1, part(Stream.ANCHOR, b"late", 2))
    offer(queue, 1, part(Stream.AUX, b"x"))
    first = [("anchor", 2, 0), ("aux", 0, 0)]
    assert [sent[1:] for sent in send_all(queue)] == [*first, ("residual", 0, FRAME), ("residual", 1, 0), ("residual", 1, FRAME)]
    offer(queue, 1, part(Stream.RESIDUAL, b"r", 2))
    assert [sent[1:3] for sent in send_all(queue)] == [("residual", 2)] and queue.next_early_residual() is None


def test_a_residual_that_the_receiver_has_is_not_hurried_after_a_break():
    """Its acknowledgement was lost with the connection."""
    queue = queue_of(1)
    for page in range(2):
        offer(queue, 1, part(Stream.RESIDUAL, b"r", page))
    offer(queue, 1, part(Stream.ANCHOR, b"a", 0))
    assert [send(queue)[1:3], queue.next_early_residual().number, send(queue)[1:3]] == [("anchor", 0), 0, ("residual", 0)]
    queue.pause()
    queue.confirm(Have(1, b"\x01", b"\x01", False))
    assert queue.next_early_residual() is None and queue.next() is None
    offer(queue, 1, part(Stream.ANCHOR, b"a", 1))
    assert send(queue)[1:3] == ("anchor", 1) and queue.next_early_residual().number == 1


def test_nothing_goes_before_the_receiver_said_what_it_has():
    queue = OutgoingQueue("lynx", 0)
    queue.open(1, shape(2, aux=False), Listener())
    for page in range(2):
        offer(queue, 1, part(Stream.ANCHOR, b"a", page))
        offer(queue, 1, part(Stream.RESIDUAL, b"r", page))
    assert queue.next() is None
    queue.confirm(Have(1, b"\x03", b"\x01", False))
    assert [sent[1:3] for sent in send_all(queue)] == [("residual", 1)] and queue.queued == 1
    assert not queue.rooms[1].complete
    queue.arrived(1, Stream.RESIDUAL, 1)
    assert queue.rooms[1].complete and queue.queued == 0


@given(st.data())
def test_after_any_breaks_all_arrives_once_in_order(data):
    """A model of both ends: parts are offered, sent, lost with the connection, acknowledged late, asked for again."""
    rooms = {room: shape(data.draw(st.integers(0, 3)), data.draw(st.booleans()), data.draw(st.booleans())) for room in (1, 2, 3)}
    queue = OutgoingQueue("lynx", 0)
    offers = []
    for room, of in rooms.items():
        queue.open(room, of, Listener())
        offers += [(room, stream, page) for stream in Stream for page in range(of.parts(stream))]
    offers = data.draw(st.permutations(offers))
    have = {room: {stream: set() for stream in Stream} for room in rooms}
    unacked, sent_whole = [], {}

    def connect():
        queue.pause()
        unacked.clear()
        sent_whole.clear()
        for room, state in queue.rooms.items():
            if not state.confirmed:
                bits = {stream: sum(1 << number for number in have[room][stream]).to_bytes(1, "little") for stream in Stream}
                queue.confirm(Have(room, bits[Stream.ANCHOR], bits[Stream.RESIDUAL], 0 in have[room][Stream.AUX]))

    connect()
    repeats = 0
    while offers or queue.next() or unacked:
        action = data.draw(st.sampled_from(["offer", "send", "send", "ack", "break", "again"]))
        if action == "offer" and offers:
            room, stream, page = offers.pop()
            offer(queue, room, part(stream, bytes(data.draw(st.sampled_from([0, 1, FRAME, 25]))), page))
        elif action == "send" and (sending := queue.next() or queue.next_early_residual()):
            room, stream, page, _ = send(queue)
            gone = {each: have[room][each] | sent_whole.get((room, each), set()) for each in Stream}
            if stream is Stream.RESIDUAL:
                # Another may be hurried.
                assert page in gone[Stream.ANCHOR]
            elif stream is Stream.AUX:
                assert len(gone[Stream.ANCHOR]) == rooms[room].parts(Stream.ANCHOR)
            if sending.offset >= len(sending.payload):
                sent_whole.setdefault((room, stream), set()).add(page)
                unacked.append((room, stream, page))
        elif action == "ack" and unacked:
            room, stream, page = unacked.pop(0)
            assert page not in have[room][stream]
            have[room][stream].add(page)
            queue.arrived(room, stream, page)
        elif action == "again" and unacked and repeats < 5:
            repeats += 1
            room, stream, page = unacked.pop(0)
            sent_whole[room, stream].discard(page)
            queue.retransmit(room, stream, page, most=5)
            # What was released after the part goes before it comes again; the receiver has both streams apart.
            sent_whole[room, stream].add(page)
        elif action == "break" and data.draw(st.booleans()):
            connect()
    assert all(state.complete for state in queue.rooms.values()) and queue.queued == 0
    assert all(len(have[room][stream]) == of.parts(stream) for room, of in rooms.items() for stream in Stream)


def test_a_part_comes_again_before_others_but_not_between_the_frames_of_one():
    queue = queue_of(1, pages=3, aux=False, residual=False)
    for page in range(3):
        offer(queue, 1, part(Stream.ANCHOR, bytes(2 * FRAME), page))
    assert [send(queue)[2:] for _ in range(3)] == [(0, 0), (0, FRAME), (1, 0)]
    queue.retransmit(1, Stream.ANCHOR, 0, most=1)
    assert [sent[2:] for sent in send_all(queue)] == [(1, FRAME), (0, 0), (0, FRAME), (2, 0), (2, FRAME)]
    with pytest.raises(LinkError, match="wrong checksum 2 times"):
        queue.retransmit(1, Stream.ANCHOR, 0, most=1)


def test_a_part_that_is_not_under_way_is_not_sent_again():
    queue = queue_of(1)
    with pytest.raises(LinkError, match="not under way"):
        queue.retransmit(1, Stream.ANCHOR, 1, most=2)
    queue.retransmit(2, Stream.ANCHOR, 1, most=2)


def test_a_room_that_ended_leaves_nothing_behind():
    queue = queue_of(1, 2, aux=False)
    for room in (1, 2):
        offer(queue, room, part(Stream.ANCHOR, bytes(2 * FRAME)))
        offer(queue, room, part(Stream.RESIDUAL, b"r"))
    sending = queue.next()
    queue.end(1)
    queue.advance(sending, FRAME)
    assert [sent[0] for sent in send_all(queue)] == [2, 2] and queue.queued == 2 * FRAME + 1
    queue.arrived(1, Stream.ANCHOR, 0)
    assert offer(queue, 1, part(Stream.ANCHOR, b"a", 1)) is False and queue.end(1) is None


def test_what_a_room_has_not_or_had_before_is_refused():
    queue = queue_of(1, aux=False)
    offer(queue, 1, part(Stream.ANCHOR, b"a"))
    for wrong, why in (
        (part(Stream.ANCHOR, b"a"), "offered before"),
        (part(Stream.ANCHOR, b"a", 2), "has no anchor"),
        (part(Stream.AUX, b"a"), "has no aux"),
    ):
        with pytest.raises(LinkError, match=why):
            offer(queue, 1, wrong)
    with pytest.raises(LinkError, match="is open on this link"):
        queue.open(1, shape(2), Listener())


def test_a_receiver_that_has_more_than_there_is_is_not_believed():
    queue = OutgoingQueue("lynx", 0)
    queue.open(1, shape(2, residual=False, aux=False), Listener())
    for wrong in (Have(1, b"\x04", b"", False), Have(1, b"", b"\x01", False), Have(1, b"", b"", True)):
        with pytest.raises(LinkError, match="says it has part"):
            queue.confirm(wrong)


def test_ranges_of_layers_are_parts_of_their_own_and_headers_say_which():
    queue = OutgoingQueue("lynx", 3)
    ranges = LayerRange(0, 10), LayerRange(10, 20)
    queue.open(9, shape(1, aux=False).__class__(1, ranges, residual=False, aux=False), Listener())
    queue.confirm(Have(9, **NOTHING))
    offer(queue, 9, part(Stream.ANCHOR, b"abc"), ranges[1])
    header = queue.next().header
    assert (header.room, header.layers, header.rank, header.codec, header.size) == (9, ranges[1], 3, "lynx", 3)
    digest = header.digest()
    digest.update(b"abc")
    assert header.checksum == digest.intdigest() and LAYERS not in ranges
