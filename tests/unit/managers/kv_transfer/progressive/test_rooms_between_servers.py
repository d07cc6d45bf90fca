"""Requests from a prefill to a decode server: KV arrives bit for bit, in any chunks; what fails says why on both sides."""

import random
import threading

import numpy as np
import pytest
import torch
from link_helpers import QUICK, RawSender
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError
from transfer_helpers import ADDRESS, SLOTS, prefill_info, rows, settled
from waiting import until

from sglang_ext.managers.kv_transfer.endpoints import LinkKeys
from sglang_ext.managers.kv_transfer.link import Link
from sglang_ext.managers.kv_transfer.progressive import decode_peers as peers
from sglang_ext.managers.kv_transfer.progressive.lynx_codec import LynxCodec
from sglang_ext.managers.kv_transfer.progressive.page_codec import UNIT, PlacedPage, RawCodec, page_hashes
from sglang_ext.managers.kv_transfer.progressive.receiver import ProgressiveReceiver
from sglang_ext.managers.kv_transfer.transfer_metrics import TransferTimeline
from sglang_ext.managers.kv_transfer.wire import Frame, PageHeader, Retransmit, RoomShape, Stream
from sglang_ext_bench.timelines import read_timeline

PAGE = 16


def pages_of(tokens, seed):
    """SGLang's pages for so many tokens, in no order, and the tokens' slots."""
    pages = np.array(random.Random(seed).sample(range(SLOTS // PAGE), -(-tokens // PAGE)), np.int64)
    return pages, torch.from_numpy((pages[:, None] * PAGE + np.arange(PAGE)).ravel()[:tokens])


def send(sender, pages, tokens, chunks, aux_index=3):
    """As SGLang's scheduler does: whole pages of each chunk, the rest with the last."""
    sender.init(len(pages), aux_index)
    begin = 0
    for end in (*chunks, len(pages)):
        last = end == len(pages)
        sender.send(pages[begin:end], num_kv_tokens=(tokens if last else end * PAGE) - begin * PAGE)
        begin = end


def transfer(both, room, prompt, prefix=0, chunks=(), receiver_first=True):
    """Both ends of a room that was sent, and the slots on both sides."""
    tokens = len(prompt) - prefix
    source, here = pages_of(tokens, room)
    target, there = pages_of(tokens, room + 1)
    ends = {}

    def receive():
        ends["receiver"] = receiver = both.receiver(room, prompt)
        receiver.send_metadata(target, 5, decode_prefix_len=prefix)

    if receiver_first:
        receive()
    ends["sender"] = sender = both.sender(room, prompt)
    if not receiver_first:
        assert sender.poll() == KVPoll.Bootstrapping
        receive()
    assert sender.poll() == KVPoll.WaitingForInput and sender.pop_decode_prefix_len() == prefix
    send(sender, source, tokens, chunks)
    return sender, ends["receiver"], here, there


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


def begun_early(both, prompt):
    """A room whose request begins on its anchor, as far as SGLang takes it: both ends, slots on both sides, the rest."""
    rest = []
    both.begin = rest.append
    sender, receiver, here, there = transfer(both, 7, prompt)
    until(lambda: receiver.poll() == KVPoll.Success)
    receiver.clear()
    return sender, here, there, rest[0]


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


def test_an_aborted_sender_ends_the_receiver_with_the_reason(servers):
    both = servers("exact", gbps=0.01)
    sender, receiver, _, _ = transfer(both, 7, list(range(640)))
    sender.abort()
    until(lambda: settled(receiver))
    for end in (sender, receiver):
        assert end.poll() == KVPoll.Failed
        with pytest.raises(KVTransferError, match="Aborted by AbortReq"):
            end.failure_exception()
    assert not both.decode.links.rooms


def test_nothing_is_written_once_an_aborted_receiver_is_cleared(servers):
    both = servers("exact", gbps=0.02)
    sender, receiver, _, there = transfer(both, 7, list(range(640)))
    until(lambda: receiver.anchor_ready)
    receiver.abort()
    with pytest.raises(KVTransferError, match="Aborted by AbortReq"):
        receiver.failure_exception()
    kept = rows(both.decode.pool, there)
    until(lambda: not both.prefill.made[0].queued_bytes)
    assert torch.equal(rows(both.decode.pool, there), kept) and settled(sender)


@pytest.mark.parametrize("whole", [True, False])
def test_what_links_wrote_of_a_room_that_ends_early_is_there_before_its_slots_are_others(servers, whole):
    both, waits = servers("exact", gbps=None if whole else 0.02), []
    sender, receiver, _, _ = transfer(both, 7, list(range(640)))
    until(lambda: receiver.complete if whole else receiver.anchor_ready)
    both.decode.pool.watch(lambda kind: waits.append((kind, len(both.decode.links.rooms))))
    both.prefill.pool.watch(lambda kind: kind == "links" and waits.append(kind))
    if whole:
        until(lambda: settled(receiver))
        receiver.clear()
    else:
        receiver.abort()
        with pytest.raises(KVTransferError, match="Aborted by AbortReq"):
            receiver.failure_exception()
    # After the room ended, or what waits in the sink would follow.
    assert waits == [("links", 0)] * (not whole)


def test_a_sender_that_was_aborted_before_it_met_its_decode_side_refuses_it(servers):
    both = servers("raw")
    sender = both.sender(7, range(32))
    sender.abort()
    receiver = both.receiver(7, range(32))
    receiver.send_metadata(pages_of(32, 1)[0], 5, decode_prefix_len=0)
    with pytest.raises(KVTransferError, match="the prefill side ended it: Aborted by AbortReq"):
        receiver.failure_exception()


def test_a_request_whose_prefill_server_is_not_found_says_where_it_was_looked_for(servers):
    both = servers("raw")
    both.decode.prefill_info_table = {}
    receiver = ProgressiveReceiver(both.decode, ADDRESS, 7)
    receiver.abort()
    with pytest.raises(KVTransferError, match=f"no prefill server answers at {ADDRESS}, which the request's bootstrap_host"):
        receiver.failure_exception()


def test_a_decode_side_that_aborted_before_the_sender_came_fails_it_at_once(servers):
    both = servers("raw")
    receiver = both.receiver(7, range(32))
    receiver.send_metadata(pages_of(32, 1)[0], 5, decode_prefix_len=0)
    receiver.abort()
    sender = both.sender(7, range(32))
    with pytest.raises(KVTransferError, match="the decode side ended it: Aborted by AbortReq"):
        assert sender.poll() == KVPoll.Failed
        sender.failure_exception()


@pytest.mark.parametrize("other", [list(range(1, 201)), list(range(190))], ids=["tokens", "length"])
def test_another_prompt_under_the_same_room_fails_on_both_sides(servers, other):
    both = servers("raw")
    receiver = both.receiver(7, list(range(200)))
    receiver.send_metadata(pages_of(200, 1)[0], 5, decode_prefix_len=0)
    sender = both.sender(7, other)
    send(sender, pages_of(len(other), 2)[0], len(other), ())
    until(lambda: settled(receiver))
    with pytest.raises(KVTransferError, match="prefix hash|190 tokens at the prefill server and 200"):
        receiver.failure_exception()


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("refused", ["prefill", "decode", "both"])
def test_a_request_that_sglang_refused_ends_on_both_sides_with_its_reason_whichever_is_first(servers, refused, first):
    """SGLang leaves one token of its prompt there."""
    both = servers("raw")

    def prefill():
        sender = both.sender(7, list(range(200)))
        if refused != "decode":
            sender.set_prompt([0], "no such grammar")
        return sender

    def decode():
        receiver = both.receiver(7, list(range(200)))
        if refused != "prefill":
            receiver.set_prompt([0], "no such grammar")
        receiver.send_metadata(pages_of(200, 1)[0], 5, decode_prefix_len=0)
        return receiver

    ends = [prefill(), decode()] if first == "prefill" else [decode(), prefill()]
    for end in ends:
        assert end.poll() == KVPoll.Failed
        with pytest.raises(KVTransferError, match="no such grammar"):
            end.failure_exception()


def test_a_request_that_was_refused_before_it_has_slots_ends_on_both_sides_without_any(servers):
    both = servers("raw")
    sender = both.sender(7, list(range(200)))
    receiver = both.receiver(7, list(range(200)), refused="no room for it")
    for end in (receiver, sender):
        until(lambda: end.poll() == KVPoll.Failed)
        with pytest.raises(KVTransferError, match="no room for it"):
            end.failure_exception()


def test_a_request_that_sglang_refused_at_the_prefill_server_tells_its_decode_side_also_when_it_is_gone(servers):
    both = servers("raw")
    sender = both.sender(7, list(range(200)))
    sender.set_prompt([0], "no such grammar")
    with pytest.raises(KVTransferError, match="no such grammar"):
        sender.failure_exception()
    receiver = both.receiver(7, list(range(200)))
    receiver.send_metadata(pages_of(200, 1)[0], 5, decode_prefix_len=0)
    with pytest.raises(KVTransferError, match="no such grammar"):
        receiver.failure_exception()


def test_servers_with_other_settings_refuse_each_other_by_name(servers):
    both = servers("exact", prefill_reference="raw")
    sender = both.sender(7, range(32))
    receiver = both.receiver(7, range(32))
    receiver.send_metadata(pages_of(32, 1)[0], 5, decode_prefix_len=0)
    for end in (sender, receiver):
        assert end.poll() == KVPoll.Failed
        with pytest.raises(KVTransferError, match="codec is 'lynx' at the receiver and 'raw' at the sender"):
            end.failure_exception()


def test_other_ranks_are_refused_by_name(servers):
    both = servers("raw")
    both.decode.prefill_info_table = {address: prefill_info(tp_size=2) for address in both.decode.prefill_info_table}
    receiver = both.receiver(7, range(32))
    assert receiver.poll() == receiver.conclude_state == KVPoll.Failed
    with pytest.raises(KVTransferError, match="--tp-size is 2 at the prefill server and 1 at the decode server"):
        receiver.failure_exception()


def test_who_waits_too_long_fails_and_says_for_what(servers):
    both = servers("raw")
    sender, receiver = both.sender(7, range(32)), both.receiver(8, range(32))
    receiver.send_metadata(pages_of(32, 1)[0], 5, decode_prefix_len=0)
    assert (sender.poll(), receiver.poll()) == (KVPoll.Bootstrapping, KVPoll.WaitingForInput)
    both.prefill.bootstrap_timeout = both.decode.waiting_timeout = 0.0
    for end, state in ((sender, "Bootstrapping"), (receiver, "WaitingForInput")):
        assert end.poll() == KVPoll.Failed
        with pytest.raises(KVTransferError, match=f"timed out after .* in KVPoll.{state}"):
            end.failure_exception()


def test_a_page_that_cannot_be_encoded_fails_its_room_and_no_other(servers):
    class Breaking(RawCodec):
        def start(self, page, **streams):
            if len(page.slots) == 5:
                raise RuntimeError("no memory")
            return super().start(page, **streams)

    both = servers("raw")
    both.prefill.codec = Breaking(both.prefill.pool, UNIT)
    failing = transfer(both, 7, list(range(69)))[:2]
    other = transfer(both, 8, list(range(80)))[:2]
    until(lambda: all(settled(end) for end in (*failing, *other)))
    assert [end.poll() for end in other] == [KVPoll.Success] * 2
    for end in failing:
        with pytest.raises(KVTransferError, match="no memory"):
            end.failure_exception()


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


def test_the_decode_side_hears_of_a_link_that_cannot_be_made(servers):
    both = servers("exact")
    made = both.prefill.made
    # Nobody whom such keys let in listens there.
    both.prefill.peers = peers.DecodePeers(lambda at: made.append(Link(at, both.prefill.settings, QUICK, keys=LinkKeys.generate())) or made[-1])
    sender, receiver, *_ = transfer(both, 7, list(range(40)))
    until(lambda: settled(sender) and settled(receiver))
    with pytest.raises(KVTransferError, match="the prefill side ended it: the receiver at .* is not reached for"):
        receiver.failure_exception()
