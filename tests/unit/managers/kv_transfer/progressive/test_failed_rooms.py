"""Rooms that fail: both servers say why, and nothing is written to freed slots."""

import pytest
import torch
from link_helpers import QUICK
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError
from transfer_helpers import ADDRESS, pages_of, prefill_info, rows, send, settled, transfer
from waiting import until

from sglang_ext.managers.kv_transfer.endpoints import LinkKeys
from sglang_ext.managers.kv_transfer.link import Link
from sglang_ext.managers.kv_transfer.progressive import decode_peers as peers
from sglang_ext.managers.kv_transfer.progressive.page_codec import UNIT, RawCodec
from sglang_ext.managers.kv_transfer.progressive.receiver import ProgressiveReceiver


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


def test_a_sender_that_is_aborted_while_metadata_arrives_ends_its_decode_side_too(servers):
    """SGLang's thread aborts it just after the thread of control messages has read its status."""
    both = servers("raw")
    sender = both.sender(7, range(32))

    class Statuses(dict):
        def get(self, number, default=None):
            found = super().get(number, default)
            both.prefill.request_status = dict(self)
            sender.abort()
            return found

    both.prefill.request_status = Statuses(both.prefill.request_status)
    receiver = both.receiver(7, range(32))
    receiver.send_metadata(pages_of(32, 1)[0], 5, decode_prefix_len=0)
    assert receiver.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError, match="Aborted by AbortReq"):
        receiver.failure_exception()
    assert not both.prefill.request_status and not both.prefill.req_to_decode_prefix_len


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


def test_the_decode_side_hears_of_a_link_that_cannot_be_made(servers):
    both = servers("exact")
    made = both.prefill.made
    # Nobody whom such keys let in listens there.
    both.prefill.peers = peers.DecodePeers(lambda at: made.append(Link(at, both.prefill.settings, QUICK, keys=LinkKeys.generate())) or made[-1])
    sender, receiver, *_ = transfer(both, 7, list(range(40)))
    until(lambda: settled(sender) and settled(receiver))
    with pytest.raises(KVTransferError, match="the prefill side ended it: the receiver at .* is not reached for"):
        receiver.failure_exception()
