"""In which order a peer encodes: no residual while the link waits for anchors, each with its anchor where it has enough to do."""

import time
import weakref
from contextlib import nullcontext
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from waiting import until

from sglang_ext.managers.kv_transfer.progressive.decode_peers import DEPTH, MIN_QUEUED_ANCHORS, DecodePeer, DecodePeers
from sglang_ext.managers.kv_transfer.progressive.page_codec import EncodedPage
from sglang_ext.managers.kv_transfer.progressive.rooms import RoomEncoder
from sglang_ext.managers.kv_transfer.wire import LayerRange, Stream

PAGES, SIZE = 12, 100


class Codec:
    """Says what it is asked for."""

    has_residual, pool = True, SimpleNamespace(use_stream=nullcontext, layer_range=LayerRange(0, 1))

    def __init__(self, held=None, broken=None):
        self.asked, self.finished, self.held, self.broken = [], [], held, broken

    def most_bytes(self, stream):
        return SIZE

    def start(self, page, anchor=True, residual=True):
        self.asked.append(("both" if anchor and residual else "anchor" if anchor else "residual", page.start))
        streams = [memoryview(bytes(SIZE)) if wanted else None for wanted in (anchor, residual)]

        def finish():
            self.finished.append(page.start)
            assert not self.held or self.held.wait(10)
            if page.start == self.broken:
                raise ValueError("a broken page")
            return EncodedPage(*streams)

        return finish


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

    def offer(self, room, stream, payload, page=0, layers=None, prefix_hash=b""):
        self.offered.append(SimpleNamespace(stream=stream, payload=payload, page=page))
        return True

    def close(self, timeout):
        pass


def sent(quick):
    """What was asked of the codec, and offered to the link, for a room of :data:`PAGES`."""
    link, codec, done = FakeLink(quick), Codec(), Event()
    told = SimpleNamespace(succeed=done.set, fail=pytest.fail)
    room = RoomEncoder(1, codec, range(PAGES), [bytes(32)] * PAGES, told)
    peer = DecodePeer(link)
    peer.open(room)
    peer.send(room, tuple(torch.tensor([page]) for page in range(PAGES)), bytes(16))
    assert done.wait(10)
    peer.close()
    return codec.asked, [(part.stream, part.page) for part in link.offered]


def test_a_link_that_waits_gets_all_anchors_before_any_residual_is_encoded():
    asked, offered = sent(quick=True)
    assert asked == [("anchor", page) for page in range(PAGES)] + [("residual", page) for page in range(PAGES)]
    assert offered == [(Stream.ANCHOR, page) for page in range(PAGES)] + [(Stream.AUX, 0)] + [(Stream.RESIDUAL, page) for page in range(PAGES)]


def test_slots_are_kept_until_their_page_is_encoded_and_no_longer():
    held, slots, alive = Event(), [], []

    class Reading(Codec):
        has_residual = False

        def start(self, page, anchor=True, residual=True):
            slots.append(weakref.ref(page.slots))
            self.asked.append(page.start)
            return lambda: held.wait(10) and alive.append(slots[0]() is not None) or EncodedPage(memoryview(bytes(SIZE)), None)

    codec, told = Reading(), SimpleNamespace(succeed=pytest.fail, fail=pytest.fail)
    rooms = [RoomEncoder(number, codec, [0], [bytes(32)], told) for number in range(2)]
    peer = DecodePeer(FakeLink(quick=True))
    peer.send(rooms[0], (torch.tensor([0]),), None)
    until(lambda: codec.asked)
    # The thread that begins goes on with another room.
    peer.send(rooms[1], (torch.tensor([0]),), None)
    until(lambda: len(codec.asked) == 2)
    held.set()
    until(lambda: alive)
    assert alive[0], "a GPU reads slots whose memory is somebody else's"
    until(lambda: slots[0]() is None)
    peer.close()


def test_a_link_with_enough_to_do_has_residuals_encoded_with_their_anchors():
    asked, _ = sent(quick=False)
    # What is offered at this moment may count twice.
    count = sum(kind == "anchor" for kind, _ in asked)
    assert count in (MIN_QUEUED_ANCHORS - 1, MIN_QUEUED_ANCHORS)
    alone = [("anchor", page) for page in range(count)]
    both = [("both", page) for page in range(count, PAGES)]
    assert asked == alone + both + [("residual", page) for page in range(count)]


def test_where_too_much_waits_residuals_are_put_off_all_the_same():
    link, codec = FakeLink(quick=False), Codec()
    told = SimpleNamespace(succeed=pytest.fail, fail=pytest.fail)
    room = RoomEncoder(1, codec, range(PAGES), [bytes(32)] * PAGES, told)
    peer = DecodePeer(link, most_before_residuals=(MIN_QUEUED_ANCHORS + 2) * SIZE)
    peer.send(room, tuple(torch.tensor([page]) for page in range(PAGES)), bytes(16))
    until(lambda: any(part.stream is Stream.AUX for part in link.offered))
    peer.close()
    assert len([page for kind, page in codec.asked if kind == "both"]) in (1, 2)


def test_a_few_pages_are_begun_while_the_first_is_waited_for():
    link, held = FakeLink(quick=True), Event()
    codec, told = Codec(held), SimpleNamespace(succeed=Event(), fail=pytest.fail)
    room = RoomEncoder(1, codec, range(PAGES), [bytes(32)] * PAGES, SimpleNamespace(succeed=told.succeed.set, fail=pytest.fail))
    peer = DecodePeer(link)
    peer.send(room, tuple(torch.tensor([page]) for page in range(PAGES)), bytes(16))
    until(lambda: len(codec.asked) == DEPTH and codec.finished == [0])
    time.sleep(0.1)
    assert len(codec.asked) == DEPTH and codec.finished == [0] and not link.offered
    held.set()
    assert told.succeed.wait(10)
    peer.close()
    assert [part.page for part in link.offered if part.stream is Stream.ANCHOR] == list(range(PAGES))


def test_a_page_that_breaks_fails_its_room_and_others_go_on(caplog):
    link, reasons, done = FakeLink(quick=True), [], Event()
    link.cancel = lambda room, reason: reasons.append((room, reason))
    peer = DecodePeer(link)
    for number, broken, told in (
        (1, 3, SimpleNamespace(succeed=pytest.fail, fail=reasons.append)),
        (2, None, SimpleNamespace(succeed=done.set, fail=pytest.fail)),
    ):
        room = RoomEncoder(number, Codec(broken=broken), range(PAGES), [bytes(32)] * PAGES, told)
        peer.send(room, tuple(torch.tensor([page]) for page in range(PAGES)), bytes(16))
    assert done.wait(10)
    peer.close()
    assert reasons == ["it cannot be sent: a broken page", (1, "a broken page")] and "a broken page" in caplog.text


def test_all_peers_together_hold_no_more_than_their_limit_and_each_gets_a_part():
    class Whole(Codec):
        has_residual = False

        def start(self, page, anchor=True, residual=True):
            return super().start(page, anchor, residual=False)

    limit, links = 10 * SIZE, {}
    peers = DecodePeers(lambda endpoint: links.setdefault(endpoint, FakeLink(quick=False)), most_in_all=limit)
    told = SimpleNamespace(succeed=lambda: None, fail=pytest.fail)
    opened = []

    def send(endpoint):
        room = RoomEncoder(len(links), Whole(), range(PAGES), [bytes(32)] * PAGES, told)
        opened.append(peers.open(endpoint, room))
        opened[-1].send(room, tuple(torch.tensor([page]) for page in range(PAGES)), None)

    def rests():
        """Whether no peer encodes any more, at least for the moment."""
        before = [len(link.offered) for link in links.values()]
        time.sleep(0.1)
        return before == [len(link.offered) for link in links.values()] and min(before) > 0

    for count in (1, 2, 3):
        send(f"rank {count}")
        until(lambda: len(links) == count and rests())
        assert peers.free_bytes() >= 0
    # The first took half of all while it was alone.
    held = [len(link.offered) for link in links.values()]
    assert held[0] == 5 and min(held) >= 1
    for each in opened:
        each.close()
