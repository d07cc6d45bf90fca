"""Rooms that are ended, broken bytes, lost connections and peers that are not ours: nobody waits for ever, and nothing wrong is written."""

import dataclasses
import os
import random
import threading
import time

import msgspec
import pytest
import zmq
from held_entries import held_entries, steady_entries
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from link_helpers import QUICK, SETTINGS, Listener, Proxy, RawSender, Sink, expected, header, part, shape
from waiting import until

from sglang_ext.managers.kv_transfer import wire
from sglang_ext.managers.kv_transfer.link_server import LinkServer
from sglang_ext.managers.kv_transfer.wire import LinkError, Stream

ANCHORS = {"residual": False, "aux": False}


def offer_anchors(link, room, pages, size):
    content = {(Stream.ANCHOR, page): os.urandom(size) for page in range(pages)}
    for (stream, page), payload in content.items():
        link.offer(room, *part(stream, payload, page))
    return content


def test_nothing_is_written_once_abort_returned(ends):
    """The memory behind a room is given to others as soon as ``abort`` is back: a late write would change their KV."""
    server, listener = ends.server(), Listener()
    link, of = ends.link(server.endpoint), shape(40, **ANCHORS)
    given_away, late, written = set(), [], [0]

    class Slots(Sink):
        def __init__(self, room):
            super().__init__()
            self.room = room

        def write(self, *_):
            for _ in range(3):
                if self.room in given_away:
                    late.append(self.room)
                time.sleep(0.0002)
            written[0] += 1

        def arrived(self, _):
            if self.room in given_away:
                late.append(self.room)

        def ended(self, reason):
            if self.room in given_away:
                late.append(self.room)

    def abort(room, after):
        time.sleep(after)
        server.rooms.abort(room)
        given_away.add(room)

    dice = random.Random(0)
    for room in range(60):
        server.rooms.register(room, expected(of), Slots(room))
        link.open(room, of, listener)
        offer_anchors(link, room, 40, 2000)
    threads = [threading.Thread(target=abort, args=(room, dice.random() * 0.6)) for room in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: len(listener.reasons) == 60)
    assert not late and written[0] > 40
    # Some were aborted before the sender opened them.
    assert all(reason is None or "the receiver aborted it" in reason or "unknown room" in reason for reason in listener.reasons.values())
    assert sum("aborted" in (reason or "") for reason in listener.reasons.values()) > 10
    until(lambda: link.outstanding_bytes == 0)
    assert len(server.rooms) == link.queued_bytes == 0


def test_cancelled_rooms_end_on_both_sides_and_others_go_on(ends):
    server, listener = ends.server(), Listener()
    link, of, sinks = ends.link(server.endpoint, gbps=0.05), shape(4, **ANCHORS), [Sink(), Sink()]
    for room in range(2):
        server.rooms.register(room, expected(of), sinks[room])
        link.open(room, of, listener)
        # The first is not whole before it is cancelled.
        content = offer_anchors(link, room, 3 + room, 100_000)
    until(lambda: sinks[0].parts)
    link.cancel(0, "the client left")
    link.cancel(0)
    until(lambda: len(listener.reasons) == 2)
    until(lambda: sinks[0].reasons)
    assert listener.reasons == {0: "the sender ended it: the client left", 1: None} and sinks[1].content() == content
    assert sinks[0].reasons == ["the sender ended it: the client left"] and len(sinks[0].parts) < 4
    assert link.offer(0, *part(Stream.ANCHOR, b"a")) is False
    # The number may be used again.
    server.rooms.register(0, expected(of), again := Sink())
    link.open(0, of, second := Listener())
    content = offer_anchors(link, 0, 4, 10)
    until(lambda: second.reasons)
    assert second.reasons == {0: None} and again.content() == content


def test_unknown_rooms_and_other_shapes_fail_alone(ends):
    server, listener, sink = ends.server(), Listener(), Sink()
    link = ends.link(server.endpoint)
    server.rooms.register(2, expected(shape(3)), sink)
    link.open(1, shape(1), listener)
    link.open(2, shape(4), listener)
    until(lambda: len(listener.reasons) == 2)
    assert "unknown room" in listener.reasons[1] and "announces" in listener.reasons[2] and "announces" in sink.reasons[0]


def test_a_room_belongs_to_the_sender_that_opened_it_first(ends):
    server, sink, listener = ends.server(), Sink(), Listener()
    server.rooms.register(1, expected(shape(1, **ANCHORS)), sink)
    first, second = ends.raw(server.endpoint), ends.link(server.endpoint)
    first.hello()
    assert isinstance(first.open(1, shape(1, **ANCHORS)), wire.Have)
    second.open(1, shape(1, **ANCHORS), listener)
    until(lambda: listener.reasons)
    assert "another sender" in listener.reasons[1] and sink.reasons == []


def raw_room(ends, of, sink=None, **limits):
    server = ends.server(limits=dataclasses.replace(QUICK, **limits))
    server.rooms.register(1, expected(of), sink := sink or Sink())
    sender = ends.raw(server.endpoint)
    assert isinstance(sender.hello(), wire.Welcome) and isinstance(sender.open(1, of), wire.Have)
    return server, sender, sink


def test_a_changed_part_is_asked_for_again_and_the_room_fails_after_two_repeats(ends):
    _, sender, sink = raw_room(ends, shape(2, **ANCHORS))
    whole = header(1, Stream.ANCHOR, b"whole", 1)
    for _ in range(2):
        sender.say(wire.Frame(whole, 0), b"wHole")
        assert sender.hear_of(wire.Retransmit) == wire.Retransmit(1, Stream.ANCHOR, 1)
    sender.say(wire.Frame(whole, 0), b"whole")
    until(lambda: sink.parts)
    other = header(1, Stream.ANCHOR, b"other", 0)
    for _ in range(3):
        sender.say(wire.Frame(other, 0), b"oTher")
    assert "anchor of page 0 was received with a wrong checksum 3 times" in sender.hear_of(wire.Ended).reason
    assert sink.content() == {(Stream.ANCHOR, 1): b"whole"} and "wrong checksum 3 times" in sink.reasons[0]


class RawReceiver:
    """A receiver that grants, and that says what a test wants of parts."""

    def __init__(self):
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.address, self.asked = b"", []

    def say(self, message):
        self.socket.send_multipart([self.address, wire.encode(message)])

    def hear_of(self, kind, seconds=5.0):
        end = time.monotonic() + seconds
        while self.socket.poll(max(0, 1000 * (end - time.monotonic()))):
            self.address, *frames = self.socket.recv_multipart()
            message = wire.decode_from_sender(frames[0])
            if isinstance(message, kind):
                return message, *frames[1:]
            if isinstance(message, wire.Ping):
                self.say(wire.Pong())
        raise AssertionError(f"no {kind}")

    def welcome(self, window=1 << 20):
        self.hear_of(wire.Hello)
        self.say(wire.Welcome(window))
        self.say(wire.Have(self.hear_of(wire.Open)[0].room, b"", b"", False))

    def close(self):
        self._context.destroy(0)


def test_a_sender_repeats_what_it_is_asked_for_and_gives_up_in_the_end(ends):
    ends.made.append(receiver := RawReceiver())
    link, listener = ends.link(receiver.endpoint), Listener()
    link.open(1, shape(1, **ANCHORS), listener)
    link.offer(1, *part(Stream.ANCHOR, b"bytes"))
    receiver.welcome()
    for _ in range(3):
        frame, payload = receiver.hear_of(wire.Frame)
        assert payload == b"bytes" and frame.header == header(1, Stream.ANCHOR, b"bytes")
        receiver.say(wire.Retransmit(1, Stream.ANCHOR, 0))
    assert "wrong checksum 3 times" in receiver.hear_of(wire.Cancel)[0].reason
    until(lambda: listener.reasons)
    assert "wrong checksum 3 times" in listener.reasons[1]


def test_a_receiver_that_acknowledges_nothing_fails_the_room_in_time(ends):
    ends.made.append(receiver := RawReceiver())
    link, listener = ends.link(receiver.endpoint, dataclasses.replace(QUICK, stall_seconds=0.5)), Listener()
    link.open(1, shape(1, **ANCHORS), listener)
    link.offer(1, *part(Stream.ANCHOR, b"bytes"))
    receiver.welcome()
    with pytest.raises(AssertionError):
        receiver.hear_of(wire.Hello, 1.0)
    until(lambda: listener.reasons, seconds=2)
    assert "acknowledged nothing for 0.5 s" in listener.reasons[1]


@pytest.mark.parametrize("answer", [b"", b"\xff" * 30, wire.encode(wire.HelloFirst("again"))], ids=["empty", "random", "hello-first"])
def test_a_receiver_that_says_nonsense_is_left_after_a_few_connections(ends, answer):
    ends.made.append(receiver := RawReceiver())
    link, listener = ends.link(receiver.endpoint, dataclasses.replace(QUICK, reconnects=2)), Listener()
    link.open(1, shape(1, **ANCHORS), listener)
    for _ in range(3):
        receiver.welcome()
        receiver.socket.send_multipart([receiver.address, answer])
    until(lambda: listener.reasons)
    assert "nothing was acknowledged between them" in listener.reasons[1]


WRONG = {
    "not expected": (header(1, Stream.ANCHOR, b"x", 5), b"x", "expected is"),
    "too large": (header(1, Stream.AUX, bytes(70000)), b"x", "at most 65536"),
    "other codec": (msgspec.structs.replace(header(1, Stream.ANCHOR, b"x"), codec="plain"), b"x", "codec 'plain'"),
    "other rank": (msgspec.structs.replace(header(1, Stream.ANCHOR, b"x"), rank=1), b"x", "rank 1"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_parts_that_were_not_agreed_on_fail_their_room(ends, wrong):
    _, sender, sink = raw_room(ends, shape(1))
    of, payload, why = WRONG[wrong]
    sender.say(wire.Frame(of, 0), payload)
    assert why in sender.hear_of(wire.Ended).reason
    until(lambda: sink.reasons)
    assert why in sink.reasons[0] and not sink.parts


BROKEN = {
    "frame without bytes": [wire.encode(wire.Frame(header(1, Stream.ANCHOR, b"x"), 0))],
    "three frames": [wire.encode(wire.Frame(header(1, Stream.ANCHOR, b"x"), 0)), b"x", b"x"],
    "ping with bytes": [wire.encode(wire.Ping()), b"x"],
    "middle of a part": [wire.encode(wire.Frame(header(1, Stream.ANCHOR, b"xyz"), 1)), b"y"],
    "more than the part": [wire.encode(wire.Frame(header(1, Stream.ANCHOR, b"x"), 0)), b"xy"],
    "random": [b"\x93\x01\x02"],
    "empty": [b""],
    "a receiver's": [wire.encode(wire.Pong())],
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_sender_that_cannot_be_followed_connects_anew_and_goes_on(ends, broken):
    _, sender, sink = raw_room(ends, shape(2, **ANCHORS))
    sender.say(wire.Frame(header(1, Stream.ANCHOR, b"one", 1), 0), b"one")
    until(lambda: sink.parts)
    sender.socket.send_multipart(BROKEN[broken])
    assert sender.hear_of(wire.HelloFirst).reason
    assert isinstance(sender.hello(), wire.Welcome)
    assert sender.open(1, shape(2, **ANCHORS)).anchors == b"\x02"
    sender.say(wire.Frame(header(1, Stream.ANCHOR, b"two", 0), 0), b"two")
    until(lambda: sink.reasons)
    assert sink.reasons == [None] and sink.content() == {(Stream.ANCHOR, 1): b"one", (Stream.ANCHOR, 0): b"two"}


def test_who_sends_more_than_was_granted_is_dropped(ends):
    server = ends.server(limits=dataclasses.replace(QUICK, frame_bytes=1000, window_bytes=4000))
    server.rooms.register(1, expected(shape(9, **ANCHORS)), sink := Sink())
    sender = ends.raw(server.endpoint)
    assert sender.hello() == wire.Welcome(4000)
    sender.open(1, shape(9, **ANCHORS))
    sender.say(wire.Frame(header(1, Stream.ANCHOR, bytes(5000)), 0), bytes(5000))
    assert "were granted" in sender.hear_of(wire.HelloFirst).reason
    assert sink.parts == []


def test_a_peer_with_other_settings_or_version_is_refused_by_name(ends, tmp_path, caplog):
    endpoint, listener = f"ipc://{tmp_path}/link/rank0", Listener()
    link = ends.link(endpoint, settings=msgspec.structs.replace(SETTINGS, page_size=128))
    link.open(1, shape(1), listener)
    # The receiver comes when a room waits already: the room is told, and so is who comes after.
    server = ends.server(endpoint)
    until(lambda: listener.reasons)
    assert "page_size is 256 at the receiver and 128 at the sender; install the same" in listener.reasons[1]
    with pytest.raises(LinkError, match="page_size is 256 at the receiver"):
        link.open(2, shape(1), listener)
    ours, theirs = wire.VERSION, wire.VERSION + 1
    assert f"protocol is {ours} at the receiver and {theirs} at the sender" in ends.raw(server.endpoint).hello(protocol=theirs).reason
    assert "page_size is 256" in caplog.text


def test_who_did_not_say_hello_is_asked_to(ends):
    server = ends.server()
    sender = ends.raw(server.endpoint)
    sender.say(wire.Open(1, shape(1)))
    assert "no Hello" in sender.hear().reason


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(st.lists(st.binary(max_size=60), min_size=1, max_size=4), min_size=1, max_size=5), greeted=st.booleans())
def test_random_bytes_end_nothing(fuzzed, messages, greeted):
    server, sender = fuzzed
    if greeted:
        sender.hello()
    for frames in messages:
        sender.socket.send_multipart(frames)
    assert any(thread.name == f"kv-links of {server.endpoint}" for thread in threading.enumerate())


@pytest.fixture
def fuzzed(ends):
    server = ends.server()
    sender = ends.raw(server.endpoint)
    yield server, FuzzedHello(sender)
    # It still serves.
    server.rooms.register(1, expected(shape(1, **ANCHORS)), sink := Sink())
    ends.link(server.endpoint).open(1, shape(1, **ANCHORS), listener := Listener())
    ends.made[-1].offer(1, *part(Stream.ANCHOR, b"a"))
    until(lambda: listener.reasons == {1: None} and sink.reasons == [None])


class FuzzedHello:
    """A raw sender whose answers nobody waits for in order."""

    def __init__(self, sender: RawSender):
        self._sender, self.socket = sender, sender.socket

    def hello(self):
        while self.socket.poll(0):
            self.socket.recv()
        self._sender.say(wire.Hello(wire.VERSION, self._sender.link, wire.encode(SETTINGS)))


def test_after_a_cut_only_what_is_missing_goes_again(ends):
    server, listener, sink = ends.server(), Listener(), Sink()
    ends.made.append(proxy := Proxy(server.endpoint))
    link, of = ends.link(proxy.endpoint, gbps=0.4), shape(40, aux=False)
    server.rooms.register(1, expected(of), sink)
    link.open(1, of, listener)
    content = offer_anchors(link, 1, 40, 100_000)
    for page in range(40):
        content[Stream.RESIDUAL, page] = os.urandom(100_000)
        link.offer(1, *part(Stream.RESIDUAL, content[Stream.RESIDUAL, page], page))
    for parts in (10, 50):
        until(lambda: len(sink.parts) >= parts)
        proxy.cut()
    until(lambda: listener.reasons)
    assert listener.reasons == {1: None} and sink.reasons == [None] and sink.content() == content
    # 8 MB, and of each of the two connections at most what was under way, here what 50 ms hold.
    assert proxy.passed < 8_000_000 * 1.8
    # Anchors first, over all connections.
    streams = [stream for stream, *_ in sink.parts]
    assert streams == sorted(streams)


def test_a_silent_network_is_noticed_and_rooms_go_on_when_it_is_back(ends):
    server, listener, sink = ends.server(), Listener(), Sink()
    ends.made.append(proxy := Proxy(server.endpoint))
    link = ends.link(proxy.endpoint, dataclasses.replace(QUICK, silence_seconds=0.4))
    server.rooms.register(1, expected(shape(2, **ANCHORS)), sink)
    link.open(1, shape(2, **ANCHORS), listener)
    link.offer(1, *part(Stream.ANCHOR, b"one", 0))
    until(lambda: sink.parts)
    proxy.mute = True
    link.offer(1, *part(Stream.ANCHOR, b"two", 1))
    until(lambda: not link.connected)
    proxy.mute = False
    until(lambda: listener.reasons)
    assert listener.reasons == {1: None} and sink.content() == {(Stream.ANCHOR, 0): b"one", (Stream.ANCHOR, 1): b"two"}


def test_a_last_acknowledgement_that_was_lost_is_made_up_for(ends):
    server, sender, sink = raw_room(ends, shape(9))
    for stream in Stream:
        for page in range(1 if stream is Stream.AUX else 9):
            sender.say(wire.Frame(header(1, stream, b"x", page), 0), b"x")
    until(lambda: sink.reasons == [None])
    again = ends.raw(server.endpoint)
    assert isinstance(again.hello(), wire.Welcome)
    assert again.open(1, shape(9)) == wire.Have(1, b"\xff\x01", b"\xff\x01", True)
    stranger = ends.raw(server.endpoint, b"another link....")
    stranger.hello()
    assert "unknown room" in stranger.open(1, shape(9)).reason


def test_a_receiver_that_was_restarted_does_not_know_the_room(ends, tmp_path):
    endpoint, listener = f"ipc://{tmp_path}/link/rank0", Listener()
    server = ends.server(endpoint)
    link, sink = ends.link(endpoint), Sink()
    server.rooms.register(1, expected(shape(2, **ANCHORS)), sink)
    link.open(1, shape(2, **ANCHORS), listener)
    link.offer(1, *part(Stream.ANCHOR, b"one", 0))
    until(lambda: sink.parts)
    server.close()
    assert sink.reasons == ["the receiver closed its links"]
    server = ends.server(endpoint)
    until(lambda: listener.reasons)
    assert "unknown room" in listener.reasons[1]
    server.rooms.register(2, expected(shape(1, **ANCHORS)), sink := Sink())
    link.open(2, shape(1, **ANCHORS), listener)
    link.offer(2, *part(Stream.ANCHOR, b"after"))
    until(lambda: listener.reasons.get(2, "") is None)
    assert sink.content() == {(Stream.ANCHOR, 0): b"after"}


def test_rooms_fail_on_both_sides_when_the_other_stays_away(ends):
    limits = dataclasses.replace(QUICK, ping_seconds=0.1, silence_seconds=0.3, resume_seconds=0.6)
    server, listener, sink = ends.server(limits=limits), Listener(), Sink()
    ends.made.append(proxy := Proxy(server.endpoint))
    link = ends.link(proxy.endpoint, limits)
    server.rooms.register(1, expected(shape(1)), sink)
    link.open(1, shape(1), listener)
    until(lambda: link.connected)
    time.sleep(0.1)
    proxy.close()
    until(lambda: listener.reasons and sink.reasons, seconds=5)
    assert "not reached for 0.6 s" in listener.reasons[1] and "silent for 0.6 s" in sink.reasons[0]
    link.open(2, shape(1), listener)
    until(lambda: 2 in listener.reasons, seconds=5)


def test_a_sink_that_raises_fails_its_room_alone(ends):
    class Full(Sink):
        def write(self, *_):
            raise RuntimeError("no slot")

    server, listener, sinks = ends.server(), Listener(), [Full(), Sink()]
    link = ends.link(server.endpoint)
    for room, sink in enumerate(sinks):
        server.rooms.register(room, expected(shape(1, **ANCHORS)), sink)
        link.open(room, shape(1, **ANCHORS), listener)
        link.offer(room, *part(Stream.ANCHOR, b"a"))
    until(lambda: len(listener.reasons) == 2)
    assert "no slot" in listener.reasons[0] and "no slot" in sinks[0].reasons[0] and listener.reasons[1] is None


def test_a_listener_that_raises_is_logged_and_the_link_goes_on(ends, caplog):
    class Rude(Listener):
        def ended(self, room, reason):
            super().ended(room, reason)
            raise RuntimeError("rude")

    server, listener = ends.server(), Rude()
    link = ends.link(server.endpoint)
    for room in range(2):
        server.rooms.register(room, expected(shape(1, **ANCHORS)), Sink())
        link.open(room, shape(1, **ANCHORS), listener)
        link.offer(room, *part(Stream.ANCHOR, b"a"))
    until(lambda: listener.reasons == {0: None, 1: None})
    assert "rude" in caplog.text


@pytest.mark.parametrize("side", ["link", "server"])
def test_closing_while_bytes_flow_ends_in_time_and_tells_everyone(ends, endpoint, side):
    before = threading.active_count()
    server, listener, sink = ends.server(endpoint), Listener(), Sink()
    link, of = ends.link(server.endpoint, gbps=0.2), shape(50, **ANCHORS)
    server.rooms.register(1, expected(of), sink)
    link.open(1, of, listener)
    # It never is whole.
    offer_anchors(link, 1, 49, 100_000)
    until(lambda: sink.parts)
    start = time.monotonic()
    (link if side == "link" else server).close()
    assert time.monotonic() - start < 2
    until(lambda: sink.reasons and listener.reasons, seconds=10)
    assert sink.reasons[0] and listener.reasons[1] and not sink.streams
    seen = len(sink.parts)
    ends.close()
    assert len(sink.parts) == seen and time.monotonic() - start < 12
    until(lambda: threading.active_count() <= before + 1)


def test_peers_that_hang_up_are_forgotten(ends):
    server = LinkServer("tcp://127.0.0.1:0", SETTINGS, dataclasses.replace(QUICK, silence_seconds=0.2, resume_seconds=0.3))
    ends.made.append(server)
    empty = steady_entries(server)
    for number in range(20):
        sender = RawSender(server.endpoint, bytes([number]) * 16)
        sender.hello()
        sender.close()
    until(lambda: held_entries(server) > empty, pause=0.001)
    until(lambda: held_entries(server) == empty)
