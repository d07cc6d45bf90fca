"""A receiver's room: what was expected and nothing else, each part once, and no call of the sink after an abort. Parts from frames."""

import threading
import time

import msgspec
import pytest
from held_entries import held_entries
from hypothesis import given
from hypothesis import strategies as st
from link_helpers import MOST, Sink, expected, header, shape
from waiting import until

from sglang_ext.managers.kv_transfer.connection import ProtocolViolation, SenderConnection
from sglang_ext.managers.kv_transfer.incoming_rooms import ExpectedRoom, IncomingRoom, IncomingRooms
from sglang_ext.managers.kv_transfer.wire import Frame, LayerRange, LinkError, Stream
from sglang_ext.managers.metrics import MetricSet


def room(of=None, sink=None, **others):
    return IncomingRoom(7, expected(of or shape(2), **others), sink or Sink())


def sender():
    return SenderConnection(b"address", b"link", 0)


def write(state, stream, page=0, payload=b"bytes"):
    of = header(7, stream, payload, page)
    return state.write(state.part(of), of, memoryview(payload))


def test_streams_and_the_room_end_once():
    state = room(shape(2))
    for stream, page in ((Stream.ANCHOR, 1), (Stream.ANCHOR, 0), (Stream.AUX, 0), (Stream.RESIDUAL, 0), (Stream.RESIDUAL, 0)):
        assert write(state, stream, page) and not state.finish()
    assert write(state, Stream.RESIDUAL, 1) and state.finish() and not state.finish()
    assert (
        state.sink.streams == [Stream.ANCHOR, Stream.AUX, Stream.RESIDUAL]
        and state.sink.reasons == [None]
        and len(state.sink.content()) == 5
    )
    # It is there, as its sender may want to hear again; nothing is written again.
    assert write(state, Stream.ANCHOR, 0) and len(state.sink.parts) == 5


def test_it_says_what_it_has():
    state = room(shape(9))
    write(state, Stream.ANCHOR, 8)
    write(state, Stream.RESIDUAL, 0)
    write(state, Stream.AUX)
    have = state.have()
    assert (have.room, have.anchors, have.residuals, have.aux) == (7, b"\x00\x01", b"\x01\x00", True)


@pytest.mark.parametrize(
    "of, why",
    [(header(7, Stream.ANCHOR, b"x", 2), "expected is"),
     (msgspec.structs.replace(header(7, Stream.ANCHOR, b"x"), layers=LayerRange(0, 29)), "expected is"),
     (msgspec.structs.replace(header(7, Stream.ANCHOR, b"x"), size=(1 << 24) + 1), "at most 16777216"),
     (header(7, Stream.AUX, bytes(65537)), "at most 65536"),
     (header(7, Stream.ANCHOR, b"x", 1, prefix_hash=b"\1" * 32), "that of the prompt is '0202")],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_what_is_not_expected_is_named(of, why):
    state = room(prefix_hashes=(b"\1" * 32, b"\2" * 32))
    with pytest.raises(LinkError, match=why):
        state.part(of)
    assert state.part(header(7, Stream.RESIDUAL, b"x", 1, prefix_hash=b"\2" * 32)) == 1


def test_expectations_that_do_not_fit_are_refused():
    with pytest.raises(LinkError, match="most_bytes of residual is 0"):
        ExpectedRoom(shape(1), {Stream.ANCHOR: 1, Stream.AUX: 1})
    with pytest.raises(LinkError, match="1 prefix hashes of 2 pages"):
        ExpectedRoom(shape(2), MOST, (bytes(32),))


def test_a_sink_that_raises_is_named():
    class Broken(Sink):
        def write(self, *_):
            raise RuntimeError("no slot")

    with pytest.raises(LinkError, match="sink's write raised RuntimeError..no slot"):
        write(room(sink=Broken()), Stream.ANCHOR)


def test_an_abort_waits_for_the_call_under_way_and_nothing_follows():
    for _ in range(50):
        sink = Sink(delay=0.002)
        state = room(shape(64, residual=False, aux=False), sink)
        began, aborted = threading.Event(), threading.Event()

        def write_all():
            for page in range(64):
                if page == 32:
                    assert aborted.wait(10)
                began.set()
                write(state, Stream.ANCHOR, page)
            state.finish()

        writer = threading.Thread(target=write_all)
        writer.start()
        began.wait()
        time.sleep(0.001)
        state.abort()
        seen = len(sink.parts)
        aborted.set()
        writer.join()
        assert len(sink.parts) == seen < 64 and sink.reasons == [] and sink.streams == []


def test_an_abort_waits_for_the_call_under_way_of_a_room_that_fails_meanwhile():
    class Slow(Sink):
        def write(self, of, payload):
            writing.set()
            assert go_on.wait(10)
            super().write(of, payload)

    said: list[tuple] = []
    rooms, sink, (writing, go_on) = IncomingRooms("here", 4, lambda *told: said.append(told), MetricSet()), Slow(), (threading.Event(), threading.Event())
    rooms.register(7, expected(shape(1)), sink)
    state = rooms.open(7, b"link")
    aborted = threading.Event()
    threads = [threading.Thread(target=run) for run in (
        lambda: write(state, Stream.ANCHOR), lambda: rooms.fail(state, "cancelled"), lambda: (rooms.abort(7), aborted.set())
    )]  # fmt: skip
    for thread, begun in zip(threads, (writing.is_set, lambda: said, lambda: True)):
        thread.start()
        until(begun)
    assert not aborted.wait(0.2), "its slots may be given to others, and are written to"
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert aborted.is_set() and len(sink.parts) == 1 and not rooms
    assert held_entries(rooms) == held_entries(IncomingRooms("here", 4, lambda *_: None, MetricSet()))


def test_a_sink_may_abort_its_own_room():
    class Aborting(Sink):
        def write(self, of, payload):
            super().write(of, payload)
            state.abort()

    state = room(shape(1, residual=False, aux=False), Aborting())
    write(state, Stream.ANCHOR)
    assert not state.finish() and state.sink.streams == [] and state.sink.reasons == []


@given(
    st.lists(st.tuples(st.sampled_from(list(Stream)), st.binary(max_size=40)), max_size=6),
    st.integers(1, 10),
    st.randoms(use_true_random=False),
)
def test_parts_of_streams_interleave_and_come_out_whole(parts, frame_bytes, random):
    frames = {stream: [] for stream in Stream}
    for page, (stream, payload) in enumerate(parts):
        of = header(7, stream, payload, page)
        for offset in range(0, max(1, len(payload)), frame_bytes):
            frames[stream].append((Frame(of, offset), payload[offset : offset + frame_bytes]))
    assembly, out = sender(), {}
    while any(frames.values()):
        stream = random.choice([stream for stream in Stream if frames[stream]])
        frame, payload = frames[stream].pop(0)
        if (whole := assembly.assemble(frame, memoryview(payload))) is not None:
            assert whole.has_valid_checksum() and frame.header.page not in out
            out[frame.header.page] = stream, bytes(whole.content)
    assert out == dict(enumerate(parts))


@given(st.binary(min_size=2, max_size=40), st.data())
def test_a_changed_byte_is_found(payload, data):
    of = header(7, Stream.ANCHOR, payload)
    place = data.draw(st.integers(0, len(payload) - 1))
    changed = payload[:place] + bytes([payload[place] ^ data.draw(st.integers(1, 255))]) + payload[place + 1 :]
    assembly = sender()
    assert assembly.assemble(Frame(of, 0), memoryview(changed[:1])) is None
    whole = assembly.assemble(Frame(of, 1), memoryview(changed[1:]))
    assert not whole.has_valid_checksum() and bytes(whole.content) == changed


def test_frames_that_do_not_follow_are_refused():
    of = header(7, Stream.ANCHOR, b"abcdef")
    other = header(7, Stream.ANCHOR, b"ABCDEF")
    for frame, payload in (
        (Frame(of, 3), b"d"),
        (Frame(other, 2), b"c"),
        (Frame(of, 2), b"cdefg"),
        (Frame(of, 2), b""),
        (Frame(of, 0), b"abcdefg"),
    ):
        assembly = sender()
        assembly.assemble(Frame(of, 0), memoryview(b"ab"))
        with pytest.raises(ProtocolViolation, match="does not follow"):
            assembly.assemble(frame, memoryview(payload))
    assembly = sender()
    assembly.assemble(Frame(of, 0), memoryview(b"ab"))
    assembly.drop(Stream.ANCHOR)
    with pytest.raises(ProtocolViolation, match="does not follow"):
        assembly.assemble(Frame(of, 2), memoryview(b"c"))
