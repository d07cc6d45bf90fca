"""An end that is killed, and a network that delays: rooms end with a reason, memory is given back, and the next room is served."""

import contextlib
import dataclasses
import gc
import multiprocessing
import os
import random
import signal
import threading
import time
import weakref

import numpy as np
import pytest
from link_helpers import QUICK, SETTINGS, CountedMetrics, Listener, Proxy, Sink, expected, part, shape
from waiting import until

from sglang_ext.managers.kv_transfer.limits import NetworkInterface
from sglang_ext.managers.kv_transfer.link import Link
from sglang_ext.managers.kv_transfer.link_server import LinkServer
from sglang_ext.managers.kv_transfer.wire import Stream

LIMITS = dataclasses.replace(QUICK, silence_seconds=0.5, resume_seconds=1.0)
# Gbit/s at which a room's anchors take a second, and its residuals another.
SLOW, PAGES, SIZE = 0.01, 4, 300_000


def offer(link, room, size=SIZE):
    """A whole room; what it holds, and references to the memory of its residuals."""
    parts = [(stream, page) for stream in (Stream.ANCHOR, Stream.RESIDUAL) for page in range(PAGES)]
    held = {each: np.frombuffer(os.urandom(size), np.uint8).copy() for each in parts}
    for stream in Stream:
        for page in range(PAGES if stream is not Stream.AUX else 1):
            link.offer(room, *part(stream, b"first token" if stream is Stream.AUX else memoryview(held[stream, page]), page))
    return {key: payload.tobytes() for key, payload in held.items()}, [weakref.ref(payload) for payload in held.values()]


@contextlib.contextmanager
def apart(run, *arguments):
    """A process that runs ``run(pipe, *arguments)``, and this side's end of the pipe."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=run, args=(there, *arguments))
    process.start()
    yield process, here
    process.kill()
    process.join(10)


def receive(pipe):
    server = LinkServer("tcp://127.0.0.1:0", SETTINGS, LIMITS)
    server.rooms.register(1, expected(shape(PAGES)), sink := Sink())
    pipe.send(server.endpoint)
    until(lambda: Stream.AUX in sink.streams)
    pipe.send("decoding")
    time.sleep(60)


def send(pipe, endpoint):
    link = Link(endpoint, SETTINGS, LIMITS, NetworkInterface(SLOW))
    link.open(1, shape(PAGES), Listener())
    offer(link, 1)
    time.sleep(60)


def test_a_decode_server_killed_while_a_residual_travels_costs_no_memory_and_the_next_is_served(ends):
    with apart(receive) as (process, pipe):
        link = ends.link(pipe.recv(), LIMITS, SLOW)
        link.open(1, shape(PAGES), failed := Listener())
        _, memory = offer(link, 1)
        assert pipe.poll(15) and pipe.recv() == "decoding"
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: failed.reasons, seconds=10)
    assert f"not reached for {LIMITS.resume_seconds:g} s" in failed.reasons[1]
    assert link.queued_bytes == link.outstanding_bytes == 0 and not link.connected
    gc.collect()
    until(lambda: not any(reference() is not None for reference in memory), seconds=5)
    server = ends.server(limits=LIMITS)
    server.rooms.register(3, expected(shape(PAGES)), sink := Sink())
    ends.link(server.endpoint, LIMITS).open(3, shape(PAGES), listener := Listener())
    content, _ = offer(ends.made[-1], 3, 1000)
    until(lambda: listener.reasons == {3: None} and sink.reasons == [None])
    assert {key: value for key, value in sink.content().items() if key in content} == content


def test_a_prefill_server_killed_after_its_anchors_fails_its_rooms_and_the_next_is_served(ends):
    server = ends.server(limits=LIMITS)
    server.rooms.register(1, expected(shape(PAGES)), sink := Sink())
    with apart(send, server.endpoint) as (process, _):
        until(lambda: Stream.AUX in sink.streams)
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: sink.reasons, seconds=10)
    assert sink.reasons == [f"its sender is silent for {LIMITS.resume_seconds:g} s"] and Stream.RESIDUAL not in sink.streams
    until(lambda: not server.rooms)
    # What the request's slots are given to is written to by the next room alone.
    seen = len(sink.parts)
    server.rooms.register(1, expected(shape(PAGES)), again := Sink())
    ends.link(server.endpoint, LIMITS).open(1, shape(PAGES), listener := Listener())
    offer(ends.made[-1], 1, 1000)
    until(lambda: listener.reasons == {1: None} and again.reasons == [None])
    assert len(sink.parts) == seen


@pytest.mark.parametrize("cuts", [0, 2])
def test_a_network_that_delays_by_chance_and_reorders_what_rooms_send_changes_nothing(ends, cuts):
    """Each connection has its own delays, so that rooms of two links overtake each other; after a cut parts come again in another order."""
    dice = random.Random(cuts)
    server, listeners, sinks, contents = ends.server(), {}, {}, {}
    proxies = [Proxy(server.endpoint, lambda: dice.random() * 0.03) for _ in range(2)]
    ends.made += proxies
    links = [ends.link(proxy.endpoint) for proxy in proxies]
    for room in range(6):
        link = links[room % 2]
        server.rooms.register(room, expected(shape(PAGES)), sinks.setdefault(room, Sink()))
        link.open(room, shape(PAGES), listeners.setdefault(room, Listener()))
        contents[room], _ = offer(link, room, 30_000)
    for cut in range(cuts):
        until(lambda: sum(len(sink.parts) for sink in sinks.values()) > 8 * (cut + 1))
        proxies[cut].cut()
    until(lambda: all(listeners[room].reasons == {room: None} and sinks[room].reasons == [None] for room in sinks), seconds=30)
    for room, sink in sinks.items():
        assert {key: value for key, value in sink.content().items() if key[0] is not Stream.AUX} == contents[room]
        assert sink.streams == [Stream.ANCHOR, Stream.AUX, Stream.RESIDUAL]
    assert len(server.rooms) == sum(link.queued_bytes for link in links) == 0


class Held(Sink):
    """Writes nothing before it may."""

    def __init__(self):
        super().__init__()
        self.may = threading.Event()

    def write(self, *given):
        assert self.may.wait(60)
        super().write(*given)


@pytest.mark.parametrize(("size", "gbps"), [(1000, None), (SIZE, SLOW)], ids=["quick", "slow"])
def test_a_sender_hears_of_a_room_that_is_finished_by_parts_of_a_connection_that_broke(ends, size, gbps):
    metrics = CountedMetrics()
    server, listener, sink = ends.server(metrics=metrics), Listener(), Held()
    ends.made.append(proxy := Proxy(server.endpoint))
    of, link = shape(PAGES, residual=False, aux=False), ends.link(proxy.endpoint, gbps=gbps)
    server.rooms.register(1, expected(of), sink)
    link.open(1, of, listener)
    for page in range(PAGES):
        link.offer(1, *part(Stream.ANCHOR, os.urandom(size), page))
    # All have come whole, and wait for the sink, which holds the first.
    until(lambda: metrics.sums["kv_link_received_bytes"] == PAGES * size)
    proxy.cut()
    # What was not written when it connected anew is sent again.
    until(lambda: metrics.sums["kv_link_reconnects"])
    sink.may.set()
    until(lambda: listener.reasons == {1: None} and sink.reasons == [None])
    assert len(sink.parts) == PAGES and link.queued_bytes == 0
