"""A link with keys serves who has them, and tells the others why it does not."""

import dataclasses
import logging
import time

import pytest
from link_helpers import QUICK, CountedMetrics, Listener, Sink, expected, part, shape
from waiting import until

from sglang_ext.managers.kv_transfer.connection import Connection
from sglang_ext.managers.kv_transfer.endpoints import LinkKeys
from sglang_ext.managers.kv_transfer.wire import MAX_FRAME_BYTES, Stream

ANCHORS = {"residual": False, "aux": False}


@pytest.mark.parametrize("pause", [0, 0.3], ids=["at once", "after the handshake failed"])
def test_only_who_has_the_keys_connects(ends, tmp_path, caplog, monkeypatch, pause):
    made = Connection.__init__
    monkeypatch.setattr(Connection, "__init__", lambda *given: (made(*given), time.sleep(pause))[0])
    LinkKeys.generate().write(tmp_path / "keys")
    keys, listener, sink = LinkKeys.read(tmp_path / "keys"), Listener(), Sink()
    metrics = CountedMetrics()
    server = ends.server(keys=keys, metrics=metrics)
    server.rooms.register(1, expected(shape(1, **ANCHORS)), sink)
    limits = dataclasses.replace(QUICK, resume_seconds=0.5)
    other = LinkKeys.generate()
    # The receiver's public key is known to it, and its own pair is not the deployment's.
    impostor = dataclasses.replace(keys, secret=other.secret)
    with caplog.at_level(logging.ERROR):
        for wrong in (None, other, impostor):
            failing = [Listener() for _ in range(3)]
            for each in failing:
                ends.link(server.endpoint, limits, keys=wrong).open(1, shape(1, **ANCHORS), each)
            until(lambda: all(each.reasons for each in failing), seconds=20)
            assert all("not reached for 0.5 s: no handshake: this side has" in each.reasons[1] for each in failing)
            for _ in failing:
                ends.made.pop().close()
    assert "kv_links" not in metrics.sums and sink.reasons == [] and caplog.text.count("no handshake: this side has") == 9, "once a link"
    link = ends.link(server.endpoint, keys=keys)
    link.open(1, shape(1, **ANCHORS), listener)
    link.offer(1, *part(Stream.ANCHOR, b"secret"))
    until(lambda: listener.reasons == {1: None} and sink.reasons == [None])


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES - 1, MAX_FRAME_BYTES, 3 * MAX_FRAME_BYTES + 1])
def test_frames_of_the_largest_size_pass_encrypted(ends, size):
    keys, listener, sink = LinkKeys.generate(), Listener(), Sink()
    server = ends.server(keys=keys)
    server.rooms.register(1, expected(shape(1, **ANCHORS)), sink)
    link = ends.link(server.endpoint, keys=keys)
    link.open(1, shape(1, **ANCHORS), listener)
    link.offer(1, *part(Stream.ANCHOR, bytes(size)))
    until(lambda: listener.reasons and sink.reasons)
    assert listener.reasons == {1: None} and sink.reasons == [None]
