"""Requests from a prefill to a decode server: KV arrives bit for bit, in any chunks and orders."""

import random
import threading

import numpy as np
import pytest
import torch
from link_helpers import RawSender
from sglang.srt.disaggregation.base.conn import KVPoll
from transfer_helpers import ADDRESS, PAGE, begun_early, pages_of, prefill_info, rows, send, settled, transfer
from waiting import until

from sglang_ext.managers.kv_transfer.progressive.lynx_codec import LynxCodec
from sglang_ext.managers.kv_transfer.progressive.page_codec import UNIT, PlacedPage, page_hashes
from sglang_ext.managers.kv_transfer.transfer_metrics import TransferTimeline
from sglang_ext.managers.kv_transfer.wire import Frame, PageHeader, Retransmit, RoomShape, Stream
from sglang_ext_bench.timelines import read_timeline

@pytest.mark.parametrize("reference", ["raw", "exact"])
@pytest.mark.parametrize(("tokens", "prefix", "chunks"), [(200, 0, ()), (200, 48, (1, 2, 7)), (129, 0, (5,)), (16, 16, ()), (3, 0, ())])
def test_kv_and_the_record_arrive_whatever_the_chunks(servers, reference, tokens, prefix, chunks):
    both = servers(reference)
    sender, receiver, here, there = transfer(both, 7, list(range(tokens)), prefix, chunks, receiver_first=tokens != 129)
    until(lambda: settled(sender) and settled(receiver))
    assert (sender.poll(), receiver.poll()) == (KVPoll.Success, KVPoll.Success)
    assert receiver.anchor_ready and receiver.complete
    assert torch.equal(rows(both.decode.pool, there), rows(both.prefill.pool, here))
    for ours, theirs in zip(both.decode.pool.args.aux, both.prefill.pool.args.aux, strict=True):
        assert torch.equal(ours[5], theirs[3])
    sender.clear()
    receiver.clear()
    assert not both.decode.links.rooms and not both.prefill.request_status and not both.decode.request_status


def test_the_prefill_side_may_free_kv_while_its_bytes_travel(servers):
    both, freed = servers("exact"), threading.Event()

    class Waiting(LynxCodec):
        def write_residual(self, *residual):
            assert freed.wait(20)
            super().write_residual(*residual)

    both.decode.codec = Waiting(both.decode.pool, "exact", UNIT)
    sender, receiver, here, there = transfer(both, 7, list(range(640)))
    until(lambda: settled(sender))
    assert sender.poll() == KVPoll.Success and receiver.poll() == KVPoll.WaitingForInput
    kept = rows(both.prefill.pool, here)
    for tensor in both.prefill.pool.tensors:
        tensor.zero_()
    sender.clear()
    freed.set()
    until(lambda: settled(receiver))
    assert receiver.poll() == KVPoll.Success and torch.equal(rows(both.decode.pool, there), kept)


def test_kv_is_held_while_residuals_wait_for_space_and_anchors_go_on(servers):
    both = servers("exact", gbps=0.01, most_before_residuals=1)
    sender, receiver, here, there = transfer(both, 7, list(range(640)))
    until(lambda: receiver.anchor_ready)
    assert sender.poll() == KVPoll.WaitingForInput and not receiver.complete
    until(lambda: settled(sender) and settled(receiver))
    assert receiver.poll() == KVPoll.Success
    assert torch.equal(rows(both.decode.pool, there), rows(both.prefill.pool, here))


def test_pages_without_residual_have_none_to_wait_with(servers):
    both = servers("raw", gbps=0.01, most_before_residuals=1 << 15)
    sender, receiver, here, there = transfer(both, 7, list(range(640)))
    until(lambda: settled(sender) and settled(receiver))
    assert receiver.poll() == KVPoll.Success
    assert torch.equal(rows(both.decode.pool, there), rows(both.prefill.pool, here))


def test_who_begins_early_has_success_on_the_anchor_and_the_rest_comes_into_the_same_slots(servers):
    both = servers("exact", gbps=0.01)
    sender, here, there, rest = begun_early(both, list(range(640)))
    assert not rest.complete and rest.failure is None
    assert not torch.equal(rows(both.decode.pool, there), rows(both.prefill.pool, here))
    until(lambda: rest.complete)
    assert torch.equal(rows(both.decode.pool, there), rows(both.prefill.pool, here))
    rest.cancel()
    assert not both.decode.links.rooms and not both.decode.request_status


@pytest.mark.parametrize("ranks", [1, 3])
def test_of_several_ranks_each_hands_on_the_room_though_all_of_it_is_here(servers, ranks):
    # Others may lack some: which of them do is agreed on between rounds, by all or by none.
    both, rest = servers("exact"), []
    both.begin = rest.append
    both.decode.attn_tp_size = ranks
    both.decode.prefill_info_table = {ADDRESS: prefill_info(ranks)}
    sender, receiver, here, there = transfer(both, 7, list(range(200)))
    until(lambda: settled(receiver) and receiver.complete)
    assert receiver.poll() == KVPoll.Success
    receiver.clear()
    assert len(rest) == (ranks > 1) and all(room.complete for room in rest)
    for room in rest:
        room.cancel()
    assert torch.equal(rows(both.decode.pool, there), rows(both.prefill.pool, here))


def test_who_begins_early_and_is_gone_is_written_to_no_more(servers):
    both = servers("exact", gbps=0.02)
    _, _, there, rest = begun_early(both, list(range(640)))
    rest.cancel()
    kept = rows(both.decode.pool, there)
    until(lambda: not both.prefill.made[0].queued_bytes)
    assert torch.equal(rows(both.decode.pool, there), kept) and not rest.complete


def test_a_rest_that_fails_says_why_after_the_request_began(servers):
    both = servers("exact", gbps=0.01)
    sender, _, _, rest = begun_early(both, list(range(640)))
    sender.abort()
    until(lambda: rest.failure is not None)
    assert "Aborted by AbortReq" in rest.failure and not rest.complete


def places(lengths, seed):
    """SGLang's pages and slots of several requests, which share none."""
    pages, _ = pages_of(sum(-(-tokens // PAGE) * PAGE for tokens in lengths), seed)
    split = np.split(pages, np.cumsum([-(-tokens // PAGE) for tokens in lengths])[:-1])
    return [(own, torch.from_numpy((own[:, None] * PAGE + np.arange(PAGE)).ravel()[:tokens])) for own, tokens in zip(split, lengths)]


@pytest.mark.parametrize("lengths", [(200, 200), (200, 330)], ids=["equal", "opposite order"])
def test_requests_with_one_room_are_served_side_by_side(servers, lengths):
    """Those of equal prompts as the answers of one request with ``n`` > 1, others as where two clients chose one number."""
    both = servers("exact", gbps=0.05)
    here, there = places(lengths, 11), places(lengths, 12)
    senders = [both.sender(7, range(tokens)) for tokens in lengths]
    receivers = [both.receiver(7, range(tokens)) for tokens in lengths]
    for which in (1, 0):
        receivers[which].send_metadata(there[which][0], 4 + which, decode_prefix_len=0)
    for sender, (pages, _), tokens in zip(senders, here, lengths, strict=True):
        send(sender, pages, tokens, ())
    ends = [*senders, *receivers]
    until(lambda: all(map(settled, ends)))
    assert {end.poll() for end in ends} == {KVPoll.Success}
    for (_, written), tokens in zip(there, lengths, strict=True):
        # Of equal prompts either sender may have served it.
        sent = [rows(both.prefill.pool, read) for (_, read), each in zip(here, lengths, strict=True) if each == tokens]
        assert any(torch.equal(rows(both.decode.pool, written), each) for each in sent)
    for end in ends:
        end.clear()
    assert not both.prefill.request_status and not both.decode.request_status and not len(both.prefill.handshakes)


def test_a_room_can_be_sent_again_under_its_number(servers):
    both = servers("exact")
    for tokens in (100, 130):
        sender, receiver, here, there = transfer(both, 7, list(range(tokens)))
        until(lambda: settled(sender) and settled(receiver))
        assert torch.equal(rows(both.decode.pool, there), rows(both.prefill.pool, here))
        until(lambda: not both.prefill.made[0].queued_bytes)
        sender.clear()
        receiver.clear()


@pytest.mark.parametrize("reference", ["raw", "exact"])
def test_the_timeline_says_when_kv_was_computed_sent_and_received(servers, reference, tmp_path):
    both = servers(reference)
    both.prefill.timeline = both.decode.timeline = TransferTimeline(tmp_path / "times")
    sender, receiver, _, _ = transfer(both, 7, list(range(200)), chunks=(5,))
    until(lambda: settled(sender) and settled(receiver))
    events = {event.kind: event for event in read_timeline(tmp_path / "times") if event.room == 7}
    order = ["expected", "sending", "computed", "anchor", "complete"]
    assert [events[kind].at for kind in order] == sorted(events[kind].at for kind in order)
    assert events["computed"].at < events["encoded"].at
    sizes = events["anchor"].number, events["complete"].number
    assert sizes[0] == sizes[1] == rows(both.prefill.pool, torch.arange(200)).numel() if reference == "raw" else sizes[0] < sizes[1]


class Counting(LynxCodec):
    """Counts the residuals that it wrote."""

    residuals = 0

    def write_residual(self, *residual):
        super().write_residual(*residual)
        object.__setattr__(self, "residuals", self.residuals + 1)


def test_residuals_that_come_between_chunks_are_none_of_the_anchors_bytes(servers, tmp_path):
    both = servers("exact")
    both.decode.codec = Counting(both.decode.pool, "exact", UNIT)
    both.decode.timeline = TransferTimeline(tmp_path / "times")
    (source, here), (target, there) = pages_of(200, 7), pages_of(200, 8)
    receiver, sender = both.receiver(7, list(range(200))), both.sender(7, list(range(200)))
    receiver.send_metadata(target, 5, decode_prefix_len=0)
    sender.init(len(source), 3)
    sender.send(source[:5], num_kv_tokens=5 * PAGE)
    # The first page, and its residual.
    until(lambda: both.decode.codec.residuals)
    sender.send(source[5:], num_kv_tokens=200 - 5 * PAGE)
    until(lambda: settled(sender) and settled(receiver))
    assert torch.equal(rows(both.decode.pool, there), rows(both.prefill.pool, here))
    codec = both.prefill.codec
    anchors = [codec.encode(PlacedPage(begin, here[begin:][:UNIT])).anchor for begin in range(0, 200, UNIT)]
    events = {event.kind: event for event in read_timeline(tmp_path / "times")}
    assert events["anchor"].number == sum(map(len, anchors)) < events["complete"].number


@pytest.fixture
def raw():
    """Makes a sender of raw messages that the decode side has welcomed."""
    made = []

    def make(both):
        made.append(sender := RawSender(both.decode.links.endpoint))
        sender.hello(both.decode.settings)
        return sender

    yield make
    for each in made:
        each.close()


def parts_of(both, room, prompt, there):
    """A room's parts as a sender would make them: headers and bytes, by stream, what receives them, and what opens it on the link."""
    codec, layers = both.prefill.codec, both.prefill.pool.layer_range
    receiver = both.receiver(room, prompt)
    receiver.send_metadata(there, 5, decode_prefix_len=0)
    room = both.decode.said[-1].link_room
    slots, ends = torch.from_numpy((there[:, None] * PAGE + np.arange(PAGE)).ravel()[: len(prompt)]), codec.ends(len(prompt))
    made = {Stream.ANCHOR: [], Stream.RESIDUAL: [], Stream.AUX: [both.prefill.aux.read(3)]}
    for begin, end in zip([0, *ends], ends):
        anchor, residual = codec.encode(PlacedPage(begin, slots[begin:end]))
        made[Stream.ANCHOR].append(anchor)
        made[Stream.RESIDUAL].append(residual)
    hashes = page_hashes(prompt, ends)
    found = {}
    for stream, payloads in made.items():
        found[stream] = []
        for page, payload in enumerate(payloads):
            named = b"" if stream is Stream.AUX else hashes[page]
            found[stream].append((PageHeader(room, stream, page, layers, 0, codec.name, len(payload), named).sealed(payload), payload))
    return receiver, found, (room, RoomShape(len(ends), (layers,)))


@pytest.mark.parametrize("seed", range(3))
def test_pages_may_come_in_any_order_of_their_stream(servers, raw, seed):
    both = servers("exact")
    pages, there = pages_of(300, 2)
    receiver, found, room = parts_of(both, 7, list(range(300)), pages)
    sender = raw(both)
    sender.open(*room)
    for stream in Stream:
        random.Random(seed).shuffle(found[stream])
        for header, payload in found[stream]:
            sender.say(Frame(header, 0), bytes(payload))
    until(lambda: settled(receiver))
    assert receiver.poll() == KVPoll.Success and torch.equal(rows(both.decode.pool, there), rows(both.prefill.pool, there))


def test_an_anchor_that_was_changed_on_the_way_is_waited_for_by_its_residual_and_by_who_begins_early(servers, raw):
    """A sender hears late of what it has to send once more, where the receiver has much to write: the record and residuals go meanwhile."""
    both = servers("exact")
    both.begin = lambda rest: None
    both.decode.codec = Counting(both.decode.pool, "exact", UNIT)
    pages, there = pages_of(300, 2)
    receiver, found, room = parts_of(both, 7, list(range(300)), pages)
    sender = raw(both)
    sender.open(*room)
    late, payload = found[Stream.ANCHOR][2]
    for stream in (Stream.ANCHOR, Stream.AUX, Stream.RESIDUAL):
        for header, content in found[stream]:
            sender.say(Frame(header, 0), bytes(len(content)) if header == late else bytes(content))
    assert sender.hear_of(Retransmit) == Retransmit(room[0], Stream.ANCHOR, 2)
    # All others are written, which came after that of the anchor, too.
    until(lambda: both.decode.codec.residuals == len(found[Stream.RESIDUAL]) - 1)
    assert not receiver.anchor_ready and receiver.poll() == KVPoll.WaitingForInput
    sender.say(Frame(late, 0), bytes(payload))
    until(lambda: settled(receiver) and receiver.complete)
    assert receiver.anchor_ready and torch.equal(rows(both.decode.pool, there), rows(both.prefill.pool, there))
