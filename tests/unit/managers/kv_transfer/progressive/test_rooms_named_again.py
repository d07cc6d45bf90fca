"""A room's number that comes again: beside its first use, and of a request that is prefilled once more."""

import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, KVTransferError
from transfer_helpers import begun_early, pages_of, rows, send, settled, transfer
from waiting import until

from sglang_ext.managers.kv_transfer.progressive.manager import ProgressiveManager

PROMPT = list(range(640))


def given_back(both):
    """A request that began early gave its slots back and asks once more: both ends, pages to send, slots on both sides."""
    first, _, _, rest = begun_early(both, PROMPT)
    both.begin = None
    rest.cancel()
    (source, here), (target, there) = pages_of(len(PROMPT), 11), pages_of(len(PROMPT), 12)
    receiver = both.receiver(7, PROMPT)
    receiver.send_metadata(target, 6, decode_prefix_len=0)
    return first, receiver, source, here, there


def test_a_second_request_with_a_room_does_not_hide_that_the_first_failed(servers):
    both = servers("exact", gbps=0.01)
    sender, receiver, _, _ = transfer(both, 7, PROMPT)
    for manager, first, second in ((both.prefill, sender, both.sender), (both.decode, receiver, both.receiver)):
        manager.conclude(first.bootstrap_room, "a part was wrong")
        second(7, PROMPT)
        assert first.poll() == KVPoll.Failed
        with pytest.raises(KVTransferError, match="bootstrap_room=7.*a part was wrong"):
            first.failure_exception()


@pytest.mark.parametrize("residuals_wait", [False, True])
@pytest.mark.parametrize("asked", ["while the first is sent", "before SGLang saw the end", "before it was through with it", "after that"])
def test_a_request_that_is_prefilled_again_is_served_whatever_is_left_of_the_first_time(servers, residuals_wait, asked):
    # Residuals wait in the pool: the sender is not through when the decode side gives its slots back.
    both = servers("exact", gbps=0.01, **({"most_before_residuals": 1} if residuals_wait else {}))
    first, receiver, source, here, there = given_back(both)
    again = both.sender(7, PROMPT) if asked == "while the first is sent" else None
    until(lambda: both.prefill.check_status(first.bootstrap_room) in (KVPoll.Success, KVPoll.Failed))
    again = again or (both.sender(7, PROMPT) if asked == "before SGLang saw the end" else None)
    assert settled(first)
    if asked == "before it was through with it":
        again = both.sender(7, PROMPT)
    assert again is None or again.poll() == KVPoll.WaitingForInput
    if first.poll() == KVPoll.Success:
        first.clear()
    else:
        with pytest.raises(KVTransferError, match="the receiver ended it"):
            first.failure_exception()
    again = again or both.sender(7, PROMPT)
    until(lambda: again.poll() == KVPoll.WaitingForInput)
    send(again, source, len(PROMPT), ())
    until(lambda: settled(receiver) and settled(again))
    assert (again.poll(), receiver.poll()) == (KVPoll.Success, KVPoll.Success)
    assert torch.equal(rows(both.decode.pool, there), rows(both.prefill.pool, here))


def test_a_first_use_that_ends_late_on_its_link_does_not_end_the_next(servers):
    both = servers("exact", gbps=0.01)
    first, _, _, rest = begun_early(both, PROMPT)
    until(lambda: settled(first))
    first.clear()
    again = both.sender(7, PROMPT)
    first.fail("the receiver ended it")
    assert again.poll() == KVPoll.Bootstrapping
    rest.cancel()


def test_nothing_is_left_of_an_aborted_sender_that_sglang_does_not_look_at_again(servers):
    """Such as one between two chunks of its prompt."""
    both = servers("exact", gbps=0.01)
    sender, receiver, _, _ = transfer(both, 7, PROMPT)
    sender.abort()
    assert not both.prefill.request_status and not both.prefill.failure_records and not len(both.prefill.handshakes)
    until(lambda: settled(receiver))
    for end in (receiver, sender):
        with pytest.raises(KVTransferError, match="Aborted by AbortReq"):
            end.failure_exception()
    assert both.sender(7, PROMPT).poll() == KVPoll.Bootstrapping


def test_what_an_earlier_use_of_a_number_still_says_on_its_link_does_not_end_the_next(servers):
    both = servers("exact", gbps=0.01)
    first, receiver, source, here, there = given_back(both)
    old, new = (said.link_room for said in both.decode.said if hasattr(said, "link_room"))
    assert old != new
    # As a link does that has not heard of the end yet.
    both.prefill.made[0].cancel(old, "too late")
    until(lambda: settled(first))
    first.clear() if first.poll() == KVPoll.Success else pytest.raises(KVTransferError, first.failure_exception)
    again = both.sender(7, PROMPT)
    until(lambda: again.poll() == KVPoll.WaitingForInput)
    send(again, source, len(PROMPT), ())
    until(lambda: settled(receiver) and settled(again))
    assert (again.poll(), receiver.poll()) == (KVPoll.Success, KVPoll.Success)
    assert torch.equal(rows(both.decode.pool, there), rows(both.prefill.pool, here))


def test_the_prefill_server_is_asked_once_more_under_an_id_of_its_own(monkeypatch):
    asked = []
    monkeypatch.setattr(CommonKVManager, "submit_prefill_recompute", lambda manager, receiver, payload: asked.append(payload))
    manager, payload = ProgressiveManager.__new__(ProgressiveManager), {"rid": "mine", "bootstrap_room": 7}
    for _ in "ab":
        manager.submit_prefill_recompute(None, payload)
    first, second = (each["rid"] for each in asked)
    assert len({"mine", first, second}) == 3 and first.endswith("-mine") and payload["rid"] == "mine"
    # SGLang aborts all whose ids begin so.
    assert not first.startswith("mine") and {each["bootstrap_room"] for each in asked} == {7}
