"""In which order a peer encodes: no residual while the link waits for anchors, each with its anchor where it has enough to do."""

from contextlib import nullcontext
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from sglang_ext.managers.disaggregation.progressive.page_codec import EncodedPage
from sglang_ext.managers.disaggregation.progressive.peer import AHEAD, Peer
from sglang_ext.managers.disaggregation.progressive.sent_room import SentRoom
from sglang_ext.managers.disaggregation.wire import LayerRange, Stream

PAGES, SIZE = 12, 100


class Codec:
    """Says what it is asked for."""

    has_residual, pool = True, SimpleNamespace(current=nullcontext)

    def __init__(self):
        self.asked = []

    def most_bytes(self, stream, layers):
        return SIZE

    def encode(self, page, layers):
        self.asked.append(("both", page.start))
        return EncodedPage(memoryview(bytes(SIZE)), memoryview(bytes(SIZE)))

    def encode_anchor(self, page, layers):
        self.asked.append(("anchor", page.start))
        return memoryview(bytes(SIZE))

    def encode_residual(self, page, layers):
        self.asked.append(("residual", page.start))
        return memoryview(bytes(SIZE))


class FakeLink:
    """Sends parts as they come, or none."""

    endpoint, connected, refusal = "nowhere", True, None

    def __init__(self, quick):
        self.quick, self.offered = quick, []

    @property
    def queued_bytes(self):
        return 0 if self.quick else sum(len(part.payload) for part in self.offered)

    def unsent(self, stream):
        return 0 if self.quick else sum(part.stream is stream for part in self.offered)

    def open(self, room, shape, listener):
        pass

    def offer(self, room, part):
        self.offered.append(part)
        return True

    def close(self, timeout):
        pass


def sent(quick):
    """What was asked of the codec, and offered to the link, for a room of :data:`PAGES`."""
    link, codec, done = FakeLink(quick), Codec(), Event()
    told = SimpleNamespace(succeed=done.set, fail=pytest.fail)
    room = SentRoom(1, codec, LayerRange(0, 1), range(PAGES), [bytes(32)] * PAGES, told)
    peer = Peer(link)
    peer.open(room)
    peer.send(room, tuple(torch.tensor([page]) for page in range(PAGES)), bytes(16))
    assert done.wait(10)
    peer.close()
    return codec.asked, [(part.stream, part.page) for part in link.offered]


def test_a_link_that_waits_gets_all_anchors_before_any_residual_is_encoded():
    asked, offered = sent(quick=True)
    assert asked == [("anchor", page) for page in range(PAGES)] + [("residual", page) for page in range(PAGES)]
    assert offered == [(Stream.ANCHOR, page) for page in range(PAGES)] + [(Stream.AUX, 0)] + [(Stream.RESIDUAL, page) for page in range(PAGES)]


def test_a_link_with_enough_to_do_has_residuals_encoded_with_their_anchors():
    asked, _ = sent(quick=False)
    alone = [("anchor", page) for page in range(AHEAD)]
    both = [("both", page) for page in range(AHEAD, PAGES)]
    assert asked == alone + both + [("residual", page) for page in range(AHEAD)]


def test_where_too_much_waits_residuals_are_put_off_all_the_same():
    link, codec, recorded = FakeLink(quick=False), Codec(), Event()
    told = SimpleNamespace(succeed=pytest.fail, fail=pytest.fail)
    room = SentRoom(1, codec, LayerRange(0, 1), range(PAGES), [bytes(32)] * PAGES, told)
    room.send_record = lambda link, record: recorded.set()
    peer = Peer(link, most_before_residuals=(AHEAD + 2) * SIZE)
    peer.send(room, tuple(torch.tensor([page]) for page in range(PAGES)), bytes(16))
    assert recorded.wait(10)
    peer.close()
    assert [page for kind, page in codec.asked if kind == "both"] == [AHEAD]
