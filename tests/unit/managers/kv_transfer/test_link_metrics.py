"""What links tell on ``/metrics``: bytes by stream, rooms, links, what was refused and what was waited for."""

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from link_helpers import LAYERS, QUICK, Listener, Proxy, Sink, expected, header, part, shape
from prometheus_client import CollectorRegistry
from waiting import until

from sglang_ext.managers.kv_transfer import wire
from sglang_ext.managers.kv_transfer.limits import LinkLimits
from sglang_ext.managers.kv_transfer.transfer_metrics import LINK_COUNTERS, LINK_GAUGES, link_metrics
from sglang_ext.managers.kv_transfer.wire import Stream

ROOT = Path(__file__).parents[4]
ARGS = SimpleNamespace(served_model_name="m", model_path="p", enable_metrics=True)
ANCHORS = {"residual": False, "aux": False}


class Told:
    """A server's metrics in a registry of their own, and what they say."""

    def __init__(self, role):
        self.registry = CollectorRegistry()
        self.metrics = link_metrics(ARGS, role, self.registry)

    def of(self, name, **labels):
        return self.registry.get_sample_value(f"sglang_ext:{name}", {"model_name": "m", **labels})

    def sums(self, name, by):
        found = [each for metric in self.registry.collect() for each in metric.samples if each.name == f"sglang_ext:{name}"]
        return {each.labels[by]: each.value for each in found}


@pytest.fixture
def sending():
    return Told("prefill")


@pytest.fixture
def receiving():
    return Told("decode")


def test_all_series_begin_at_zero_and_each_role_has_its_own(sending, receiving):
    zero = dict.fromkeys(("anchor", "residual", "whole", "aux"), 0.0)
    assert sending.sums("kv_link_sent_bytes_total", "stream") == receiving.sums("kv_link_received_bytes_total", "stream") == zero
    assert sending.sums("kv_link_wait_seconds_total", "reason") == {"credit": 0.0, "rate": 0.0, "priority": 0.0}
    assert receiving.sums("kv_link_refused_frames_total", "reason") == {"checksum": 0.0, "bounds": 0.0, "protocol": 0.0}
    assert not sending.sums("kv_link_refused_frames_total", "reason") and not receiving.sums("kv_link_wait_seconds_total", "reason")
    for told in (sending, receiving):
        assert [told.of(name) for name in ("kv_links", "kv_link_rooms", "kv_link_reconnects_total")] == [0.0, 0.0, 0.0]


def test_without_enable_metrics_nothing_is_defined_and_counting_does_nothing():
    registry = CollectorRegistry()
    metrics = link_metrics(SimpleNamespace(**vars(ARGS) | {"enable_metrics": False}), "prefill", registry)
    metrics.count("kv_link_sent_bytes", 1, "anchor")
    metrics.count("kv_link_rooms", 1)
    assert not list(registry.collect())


def test_each_metric_stands_in_the_manual():
    page = (ROOT / "docs/metrics.md").read_text()
    counters = [f"{name}_total" for role in LINK_COUNTERS.values() for name in role]
    assert not [name for name in (*LINK_GAUGES, *counters) if f"`{name}" not in page]


def test_bytes_go_by_stream_and_rooms_are_there_while_they_are_open(ends, sending, receiving):
    server = ends.server(metrics=receiving.metrics)
    link, listener = ends.link(server.endpoint, metrics=sending.metrics), Listener()
    split, whole = shape(2), shape(1, residual=False)
    for room, of in ((1, split), (2, whole)):
        server.rooms.register(room, expected(of), Sink())
        link.open(room, of, listener)
    until(lambda: sending.of("kv_links") == receiving.of("kv_links") == 1)
    assert sending.of("kv_link_rooms") == receiving.of("kv_link_rooms") == 2
    for page in range(2):
        link.offer(1, *part(Stream.ANCHOR, bytes(3000), page))
        link.offer(1, *part(Stream.RESIDUAL, bytes(5000), page))
    link.offer(1, *part(Stream.AUX, bytes(10)))
    link.offer(2, *part(Stream.ANCHOR, bytes(700_000)))
    link.offer(2, *part(Stream.AUX, bytes(20)))
    until(lambda: listener.reasons == {1: None, 2: None})
    moved = {"anchor": 6000.0, "residual": 10_000.0, "whole": 700_000.0, "aux": 30.0}
    assert sending.sums("kv_link_sent_bytes_total", "stream") == receiving.sums("kv_link_received_bytes_total", "stream") == moved
    assert sending.of("kv_link_rooms") == receiving.of("kv_link_rooms") == 0
    link.close()
    assert sending.of("kv_links") == 0
    server.close()
    assert receiving.of("kv_links") == 0 and receiving.of("kv_link_reconnects_total") == 0


def test_rooms_that_are_aborted_cancelled_or_closed_are_not_open(ends, sending, receiving):
    server = ends.server(metrics=receiving.metrics)
    link, listener, of = ends.link(server.endpoint, metrics=sending.metrics), Listener(), shape(1, **ANCHORS)
    for room in range(4):
        server.rooms.register(room, expected(of), Sink())
        link.open(room, of, listener)
    server.rooms.abort(0)
    server.rooms.abort(0)
    link.cancel(1)
    link.cancel(1)
    until(lambda: sending.of("kv_link_rooms") == receiving.of("kv_link_rooms") == 2)
    link.close()
    until(lambda: sending.of("kv_link_rooms") == receiving.of("kv_link_rooms") == 0)


def test_a_link_that_broke_is_counted_once_it_is_there_again(ends, sending, receiving):
    server = ends.server(metrics=receiving.metrics)
    proxy, limits = Proxy(server.endpoint), dataclasses.replace(QUICK, silence_seconds=0.4)
    try:
        link, listener, of = ends.link(proxy.endpoint, limits, metrics=sending.metrics), Listener(), shape(1, **ANCHORS)
        for times in range(3):
            until(lambda: link.connected)
            assert [told.of("kv_link_reconnects_total") for told in (sending, receiving)] == [times, times]
            assert [told.of("kv_links") for told in (sending, receiving)] == [1, 1]
            server.rooms.register(times, expected(of), Sink())
            link.open(times, of, listener)
            link.offer(times, *part(Stream.ANCHOR, b"whole"))
            until(lambda: times in listener.reasons)
            # It is not there again before this test has seen that it is gone.
            proxy.mute = True
            proxy.cut()
            until(lambda: sending.of("kv_links") == 0)
            proxy.mute = False
    finally:
        proxy.close()


def refusing(ends, receiving, of):
    """A sender that says whatever a test wants, with a room open."""
    server = ends.server(metrics=receiving.metrics)
    server.rooms.register(1, expected(of), Sink())
    sender = ends.raw(server.endpoint)
    assert isinstance(sender.hello(), wire.Welcome) and isinstance(sender.open(1, of), wire.Have)
    return sender


def test_changed_bytes_unexpected_parts_and_nonsense_are_refused_by_reason(ends, receiving):
    sender = refusing(ends, receiving, shape(2, **ANCHORS))
    whole = header(1, Stream.ANCHOR, b"whole")
    sender.say(wire.Frame(whole, 0), b"wHole")
    sender.hear_of(wire.Retransmit)
    sender.say(wire.Frame(header(1, Stream.ANCHOR, b"whole", 2), 0), b"whole")
    assert "expected is" in sender.hear_of(wire.Ended).reason
    sender.socket.send(b"nonsense")
    sender.hear_of(wire.HelloFirst)
    refused = receiving.sums("kv_link_refused_frames_total", "reason")
    assert refused == {"checksum": 1.0, "bounds": 1.0, "protocol": 1.0}
    # What came is counted, whatever became of it.
    assert receiving.of("kv_link_received_bytes_total", stream="whole") == 10


def test_parts_of_another_codec_are_beyond_bounds(ends, receiving):
    sender = refusing(ends, receiving, shape(1, **ANCHORS))
    other = wire.PageHeader(1, Stream.ANCHOR, 0, LAYERS, 0, "raw", 5).sealed(b"whole")
    sender.say(wire.Frame(other, 0), b"whole")
    assert "agreed on" in sender.hear_of(wire.Ended).reason
    assert receiving.sums("kv_link_refused_frames_total", "reason")["bounds"] == 1


def test_a_paced_sender_waits_for_its_rate_and_an_idle_one_for_nothing(ends, sending):
    server, listener, of = ends.server(), Listener(), shape(10, **ANCHORS)
    link = ends.link(server.endpoint, gbps=0.05, metrics=sending.metrics)
    server.rooms.register(1, expected(of), Sink())
    link.open(1, of, listener)
    begun = time.monotonic()
    # At 6.25 MB/s this takes 0.32 s, but for what a burst may hold.
    for page in range(10):
        link.offer(1, *part(Stream.ANCHOR, bytes(200_000), page))
    until(lambda: listener.reasons)
    took, waited = time.monotonic() - begun, sending.sums("kv_link_wait_seconds_total", "reason")
    assert 0.1 < waited["rate"] <= took and waited["credit"] < 0.1
    time.sleep(0.3)
    assert sending.sums("kv_link_wait_seconds_total", "reason") == waited


def test_a_sender_waits_for_a_slow_receivers_credit(ends, sending):
    limits = LinkLimits(frame_bytes=1 << 16, window_bytes=1 << 18, ping_seconds=0.1)
    server, listener, of = ends.server(limits=limits), Listener(), shape(20, **ANCHORS)
    link = ends.link(server.endpoint, limits, metrics=sending.metrics)
    server.rooms.register(1, expected(of), Sink(delay=0.02))
    link.open(1, of, listener)
    for page in range(20):
        link.offer(1, *part(Stream.ANCHOR, bytes(100_000), page))
    until(lambda: listener.reasons)
    waited = sending.sums("kv_link_wait_seconds_total", "reason")
    # The receiver takes 0.4 s, of which its window hides a part.
    assert waited["credit"] > 0.1 and waited["rate"] == 0
