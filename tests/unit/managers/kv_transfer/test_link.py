"""Both ends of a link: what is offered arrives, anchors first, at the rate asked for, and held back by a slow sink."""

import multiprocessing
import os
import threading
import time

import numpy as np
import pytest
from held_entries import held_entries, steady_entries
from link_helpers import QUICK, SETTINGS, Listener, Sink, expected, part, shape
from waiting import tries, until

from sglang_ext.managers.kv_transfer import link_server
from sglang_ext.managers.kv_transfer.limits import LinkLimits, NetworkInterface
from sglang_ext.managers.kv_transfer.link_server import LinkServer
from sglang_ext.managers.kv_transfer.wire import FRAME_OVERHEAD, LinkError, Stream
from sglang_ext.managers.metrics import MetricSet


def fill(link, room, pages, size, streams=tuple(Stream), seed=0):
    """Offer all parts of a room; what they hold."""
    content = {}
    for stream in streams:
        for page in range(1 if stream is Stream.AUX else pages):
            payload = bytes([(seed + page) % 251]) + os.urandom(size if stream is not Stream.AUX else 100)
            content[stream, page] = payload
            assert link.offer(room, *part(stream, payload, page))
    return content


def test_rooms_arrive_whole_and_both_sides_are_told(ends, endpoint):
    server, listener = ends.server(endpoint), Listener()
    link, sinks, content = ends.link(server.endpoint), {}, {}
    for room in (1, 2, (1 << 63) - 1):
        sinks[room] = Sink()
        server.rooms.register(room, expected(shape(3)), sinks[room])
        link.open(room, shape(3), listener)
        content[room] = fill(link, room, 3, 600_000)
    until(lambda: len(listener.reasons) == 3)
    for room, sink in sinks.items():
        assert sink.content() == content[room] and sink.reasons == [None]
        assert sink.streams == [Stream.ANCHOR, Stream.AUX, Stream.RESIDUAL]
    assert set(listener.reasons.values()) == {None} and len(server.rooms) == link.queued_bytes == 0
    until(lambda: link.outstanding_bytes == 0)


def receive_in_process(pipe, endpoint, rooms, of):
    server = LinkServer(endpoint, SETTINGS, QUICK)
    sinks = {room: Sink() for room in rooms}
    for room, sink in sinks.items():
        server.rooms.register(room, expected(of), sink)
    pipe.send(server.endpoint)
    for sink in sinks.values():
        sink.over.wait(20)
    pipe.send({room: (sink.content(), sink.streams, sink.reasons) for room, sink in sinks.items()})
    pipe.recv()
    server.close()


def test_two_processes(ends, endpoint):
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=receive_in_process, args=(there, endpoint, (1, 2), shape(4)))
    process.start()
    link, listener = ends.link(here.recv()), Listener()
    for room in (1, 2):
        link.open(room, shape(4), listener)
    content = {room: fill(link, room, 4, 300_000, seed=room) for room in (1, 2)}
    assert here.poll(20)
    assert here.recv() == {room: (content[room], [Stream.ANCHOR, Stream.AUX, Stream.RESIDUAL], [None]) for room in (1, 2)}
    until(lambda: listener.reasons == {1: None, 2: None})
    here.send("done")
    process.join(10)
    assert process.exitcode == 0


def test_anchors_that_come_late_overtake_residuals_of_other_rooms(ends):
    """At 0.2 Gbit/s, 8 MB of residuals take 320 ms; an anchor of 50 kB offered meanwhile takes one frame and itself, some ms."""
    server, listener = ends.server(), Listener()
    link, first, late = ends.link(server.endpoint, gbps=0.2), Sink(), Sink()
    server.rooms.register(1, expected(shape(8, aux=False)), first)
    server.rooms.register(2, expected(shape(1, aux=False)), late)
    link.open(1, shape(8, aux=False), listener)
    link.open(2, shape(1, aux=False), listener)
    fill(link, 1, 8, 1_000_000, (Stream.RESIDUAL,))
    fill(link, 1, 8, 1000, (Stream.ANCHOR,))
    until(lambda: sum(stream is Stream.RESIDUAL for stream, *_ in first.parts) >= 2)
    before = link.queued_bytes
    fill(link, 2, 1, 50_000, (Stream.RESIDUAL, Stream.ANCHOR))
    until(lambda: len(listener.reasons) == 2)
    anchors = [when for stream, _, _, when in first.parts if stream is Stream.ANCHOR]
    residuals = [when for stream, _, _, when in first.parts if stream is Stream.RESIDUAL]
    assert max(anchors) < min(residuals) and before > 3_000_000
    anchor, residual = (next(when for stream, _, _, when in late.parts if stream is kind) for kind in (Stream.ANCHOR, Stream.RESIDUAL))
    # It left most of the residuals behind it, and its room's own residual comes after all that were queued before.
    assert sum(when > anchor for when in residuals) >= 3 and residual > max(residuals)


def test_links_of_one_interface_share_its_rate_and_an_anchor_of_one_overtakes_residuals_of_another(ends):
    """At 0.05 Gbit/s, 6.8 MB take 1.1 s, whichever of two servers they are for."""
    servers, interface, sinks, listener = [ends.server(), ends.server()], NetworkInterface(0.05), [Sink(), Sink()], Listener()
    links = [ends.link(server.endpoint, interface=interface) for server in servers]
    until(lambda: all(link.connected for link in links))
    begin = time.monotonic()
    for room, (server, link, sink, pages) in enumerate(zip(servers, links, sinks, (8, 4))):
        server.rooms.register(room, expected(shape(pages, aux=False)), sink)
        link.open(room, shape(pages, aux=False), listener)
    fill(links[0], 0, 8, 1000, (Stream.ANCHOR,))
    fill(links[0], 0, 8, 500_000, (Stream.RESIDUAL,))
    until(lambda: any(stream is Stream.RESIDUAL for stream, *_ in sinks[0].parts))
    # All anchors of the second link go before the first link's other residuals.
    fill(links[1], 1, 4, 700_000, (Stream.ANCHOR,))
    fill(links[1], 1, 4, 1000, (Stream.RESIDUAL,))
    until(lambda: len(listener.reasons) == 2)
    took = time.monotonic() - begin
    assert set(listener.reasons.values()) == {None}
    anchors = [when for stream, _, _, when in sinks[1].parts if stream is Stream.ANCHOR]
    residuals = [when for stream, _, _, when in sinks[0].parts if stream is Stream.RESIDUAL]
    # Of eight one had arrived, and some went before the anchors were offered. In turn, at most two would be left.
    assert sum(when > max(anchors) for when in residuals) >= 4
    assert took > 0.9 * 6_800_000 * 8 / 0.05e9


def test_a_link_whose_receiver_takes_no_more_anchors_leaves_the_interface_to_others(ends):
    stuck, free, interface = ends.server(limits=QUICK), ends.server(), NetworkInterface()
    first, second = (ends.link(each.endpoint, interface=interface) for each in (stuck, free))
    listener, slow, sink = Listener(), Sink(delay=1.0), Sink()
    stuck.rooms.register(1, expected(shape(12, residual=False, aux=False)), slow)
    first.open(1, shape(12, residual=False, aux=False), listener)
    fill(first, 1, 12, 8_000_000, (Stream.ANCHOR,))
    free.rooms.register(2, expected(shape(2, aux=False)), sink)
    second.open(2, shape(2, aux=False), listener)
    fill(second, 2, 2, 1000, (Stream.ANCHOR, Stream.RESIDUAL))
    until(lambda: 2 in listener.reasons, seconds=20)
    # The other link has not sent all of its anchors.
    assert listener.reasons == {2: None} and first.unsent(Stream.ANCHOR)


def test_residuals_go_while_other_anchors_of_their_room_are_computed(ends):
    server, listener, sink = ends.server(), Listener(), Sink()
    link = ends.link(server.endpoint)
    server.rooms.register(1, expected(shape(2)), sink)
    link.open(1, shape(2), listener)
    for stream in (Stream.RESIDUAL, Stream.ANCHOR):
        link.offer(1, *part(stream, b"12345"))
    until(lambda: (Stream.RESIDUAL, 0) in sink.content())
    for stream, page in ((Stream.RESIDUAL, 1), (Stream.AUX, 0), (Stream.ANCHOR, 1)):
        link.offer(1, *part(stream, b"12345", page))
    until(lambda: listener.reasons == {1: None})


class Metered(NetworkInterface):
    """Keeps when what was sent, and how many bytes its link then had under way."""

    def __init__(self, gbps=None):
        super().__init__(gbps)
        self.taken, self.outstanding, self.link = [], [], None

    def take(self, size, now):
        self.taken.append((now, size))
        if self.link is not None:
            self.outstanding.append(self.link.outstanding_bytes)
        super().take(size, now)


@pytest.mark.parametrize("gbps, size", [(0.05, 9_000_000), (1.0, 200_000_000)])
def test_the_rate_is_kept_within_5_percent(ends, gbps, size):
    pages, payload, rate, interface = 100, bytes(size // 100), gbps * 1e9 / 8, Metered(gbps)
    server, taken = ends.server(), interface.taken
    link = ends.link(server.endpoint, interface=interface)
    # Other work on the machine may hold up a room, which is slower then; none is faster.
    for room in tries(10, "a room of this rate"):
        begun, of, sink = len(taken), shape(pages, residual=False, aux=False), Sink()
        server.rooms.register(room, expected(of), sink)
        link.open(room, of, Listener())
        for page in range(pages):
            link.offer(room, *part(Stream.ANCHOR, payload, page))
        assert sink.over.wait(60)
        times, sizes = np.array(taken[begun:]).T
        # From each message to each later one no more than the rate gives in that time, a burst and a message.
        sent = np.cumsum(sizes)
        ahead = sent - rate * times - np.minimum.accumulate(sent - sizes - rate * times)
        assert sent[-1] >= size and ahead.max() <= interface.burst + sizes.max() + 2
        if sent[-1] > 0.95 * rate * (times[-1] - times[0]):
            break


def metered(ends, server, limits):
    """A link, and the bytes that it had under way after each frame."""
    interface = Metered()
    interface.link = ends.link(server.endpoint, limits, interface=interface)
    return interface.link, interface.outstanding


def test_a_slow_sink_holds_its_sender_back(ends):
    limits = LinkLimits(frame_bytes=1 << 16, window_bytes=1 << 18, ping_seconds=0.1)
    server = ends.server(limits=limits)
    (link, outstanding), sink, listener = metered(ends, server, limits), Sink(delay=0.01), Listener()
    of = shape(40, residual=False, aux=False)
    server.rooms.register(1, expected(of), sink)
    link.open(1, of, listener)
    content = fill(link, 1, 40, 100_000, (Stream.ANCHOR,))
    until(lambda: listener.reasons)
    assert (1 << 18) - 2 * (1 << 16) < max(outstanding) <= 1 << 18
    assert sink.content() == content and listener.reasons == {1: None}


def test_what_waits_for_a_sink_is_bounded_and_comes_in_order(ends):
    """While a sink does not return, frames of later parts are read, but no more than a window and a half in all."""
    limits = LinkLimits(frame_bytes=1 << 16, window_bytes=1 << 20, ping_seconds=0.1)
    held, count = threading.Event(), 60

    class Held(Sink):
        def write(self, header, payload):
            assert held.wait(10)
            super().write(header, payload)

    taken = []
    server = ends.server(limits=limits, take=lambda size: taken.append(size) or bytearray(size))
    link, sink, listener = ends.link(server.endpoint, limits), Held(), Listener()
    of = shape(count, residual=False, aux=False)
    server.rooms.register(1, expected(of), sink)
    link.open(1, of, listener)
    content = fill(link, 1, count, 100_000, (Stream.ANCHOR,))
    until(lambda: sum(taken) > (1 << 20) // 2)
    before = -1
    while before != len(taken):
        before = len(taken)
        time.sleep(0.2)
    assert (1 << 20) // 2 < sum(taken) <= 3 * (1 << 20) // 2 + 100_001 and not sink.parts
    # Other rooms' messages are read meanwhile.
    link.open(2, of, listener)
    until(lambda: 2 in listener.reasons)
    held.set()
    until(lambda: 1 in listener.reasons)
    assert sink.content() == content and [page for _, page, *_ in sink.parts] == list(range(count)) and listener.reasons[1] is None
    until(lambda: link.outstanding_bytes == 0)


class BrokenMetrics(MetricSet):
    """Cannot count the first room that ends."""

    ended = 0

    def count(self, name, amount, *label):
        self.ended += name == "kv_link_rooms" and amount < 0
        if self.ended == 1 and amount < 0:
            raise OSError("no such thing")


def test_a_thread_that_writes_fails_a_room_and_goes_on(ends, caplog):
    server, listener, sinks = ends.server(metrics=BrokenMetrics()), Listener(), [Sink(), Sink()]
    link, of = ends.link(server.endpoint), shape(1, residual=False, aux=False)
    for room, sink in enumerate(sinks):
        server.rooms.register(room, expected(of), sink)
        link.open(room, of, listener)
        fill(link, room, 1, 1000, (Stream.ANCHOR,))
    until(lambda: len(listener.reasons) == 2)
    assert "an internal error" in listener.reasons[0] and listener.reasons[1] is None and sinks[1].reasons == [None]
    assert "no such thing" in caplog.text and not server.rooms


def test_residuals_under_way_are_few(ends):
    limits = LinkLimits(frame_bytes=1 << 16, window_bytes=1 << 22, residual_bytes=1 << 17, residual_seconds=0.0, ping_seconds=0.1)
    server = ends.server(limits=limits)
    (link, outstanding), sink, listener = metered(ends, server, limits), Sink(delay=0.005), Listener()
    of = shape(20, aux=False)
    server.rooms.register(1, expected(of), sink)
    link.open(1, of, listener)
    fill(link, 1, 20, 10, (Stream.ANCHOR,))
    until(lambda: sink.streams == [Stream.ANCHOR] and link.outstanding_bytes == 0)
    outstanding.clear()
    fill(link, 1, 20, 100_000, (Stream.RESIDUAL,))
    until(lambda: listener.reasons)
    assert 0 < max(outstanding) <= (1 << 17) + (1 << 16) + FRAME_OVERHEAD and listener.reasons == {1: None}


def test_more_residuals_are_under_way_to_a_receiver_that_takes_more(ends):
    limits = LinkLimits(frame_bytes=1 << 14, window_bytes=1 << 21, residual_bytes=1 << 14, residual_seconds=1.0)
    server = ends.server(limits=limits)
    # Parts wait to be written, and so are not granted again.
    (link, outstanding), sink, listener = metered(ends, server, limits), Sink(delay=0.01), Listener()
    of = shape(40, aux=False)
    server.rooms.register(1, expected(of), sink)
    link.open(1, of, listener)
    fill(link, 1, 40, 500_000, (Stream.ANCHOR, Stream.RESIDUAL))
    until(lambda: sink.streams == [Stream.ANCHOR])
    outstanding.clear()
    until(lambda: listener.reasons)
    assert max(outstanding) > 4 << 14 and listener.reasons == {1: None}


def test_residuals_do_not_wait_for_a_quiet_moment_where_the_window_is_large(ends, monkeypatch):
    monkeypatch.setattr(link_server, "POLL_SECONDS", 60.0)
    limits = LinkLimits(frame_bytes=1 << 12, window_bytes=1 << 20, residual_bytes=1 << 13, ping_seconds=20, silence_seconds=30)
    server = ends.server(limits=limits)
    link, sink, listener, of = ends.link(server.endpoint, limits), Sink(), Listener(), shape(20, aux=False)
    server.rooms.register(1, expected(of), sink)
    link.open(1, of, listener)
    fill(link, 1, 20, 10_000, (Stream.ANCHOR, Stream.RESIDUAL))
    until(sink.over.is_set, seconds=30)


def test_too_many_queued_bytes_are_refused(ends):
    server = ends.server()
    server.rooms.register(1, expected(shape(2)), Sink())
    link = ends.link(server.endpoint, LinkLimits(queued_bytes=1000))
    link.open(1, shape(2), Listener())
    link.offer(1, *part(Stream.RESIDUAL, bytes(900)))
    with pytest.raises(LinkError, match="900 bytes are queued .* and 200 more exceed queued_bytes, 1000"):
        link.offer(1, *part(Stream.RESIDUAL, bytes(200), 1))


def test_an_empty_room_and_empty_parts_arrive(ends):
    server, listener, sinks = ends.server(), Listener(), [Sink(), Sink(), Sink()]
    link = ends.link(server.endpoint)
    for room, of in enumerate((shape(0, aux=False), shape(0), shape(2, aux=False))):
        server.rooms.register(room, expected(of), sinks[room])
        link.open(room, of, listener)
    link.offer(1, *part(Stream.AUX, b"token"))
    for page in range(2):
        link.offer(2, *part(Stream.ANCHOR, b"", page))
        link.offer(2, *part(Stream.RESIDUAL, b"", page))
    until(lambda: listener.reasons == {0: None, 1: None, 2: None})
    assert all(sink.reasons == [None] for sink in sinks) and len(sinks[2].parts) == 4


def test_thousands_of_rooms_leave_nothing(ends):
    limits = LinkLimits(finished_rooms=50, ping_seconds=0.1)
    server, listener = ends.server(limits=limits), Listener()
    link, of = ends.link(server.endpoint, limits), shape(1)
    for begin in range(0, 3000, 500):
        for room in range(begin, begin + 500):
            server.rooms.register(room, expected(of), Sink())
            link.open(room, of, listener)
            for stream in Stream:
                link.offer(room, *part(stream, b"1234"))
        until(lambda: len(listener.reasons) == begin + 500)
        until(lambda: link.outstanding_bytes == 0)
        assert len(server.rooms) == link.queued_bytes == 0
        if not begin:
            # The finished rooms that it keeps, and what it holds for any link.
            held = steady_entries(link, server)
            assert held < 500
    assert set(listener.reasons.values()) == {None}
    until(lambda: held_entries(link, server) == held)


def test_a_sender_made_first_waits_for_its_receiver(ends, tmp_path):
    listener, sink = Listener(), Sink()
    link = ends.link(f"ipc://{tmp_path}/link")
    link.open(1, shape(1), listener)
    content = fill(link, 1, 1, 1000)
    assert not link.connected
    # The receiver knows the room before the sender can reach it, as one whose room came from there.
    server = ends.server(f"ipc://{tmp_path}/elsewhere")
    server.rooms.register(1, expected(shape(1)), sink)
    (tmp_path / "elsewhere").rename(tmp_path / "link")
    until(lambda: listener.reasons)
    assert listener.reasons == {1: None} and sink.content() == content


def test_only_one_server_listens_on_an_endpoint(ends):
    server = ends.server()
    with pytest.raises(LinkError, match="no link can listen on"):
        LinkServer(server.endpoint, SETTINGS)


def test_a_closed_link_takes_nothing(ends):
    server = ends.server()
    link = ends.link(server.endpoint)
    link.close()
    server.close()
    with pytest.raises(LinkError, match="takes no rooms"):
        link.open(1, shape(1), Listener())
    with pytest.raises(LinkError, match="takes no rooms"):
        server.rooms.register(1, expected(shape(1)), Sink())
    assert link.offer(1, *part(Stream.ANCHOR, b"a")) is False
    link.cancel(1)
    server.rooms.abort(1)
    assert not link.connected
