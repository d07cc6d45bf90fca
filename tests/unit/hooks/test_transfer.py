"""SGLang knows the transfer backend by name and finds its classes; others stay as they are; rooms learn their prompts."""

import inspect
from types import SimpleNamespace

import pytest
from sglang.srt import server_args
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, KVTransferError
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, prepare_abort
from sglang.srt.disaggregation.utils import get_kv_class as stock
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_ext import plugin
from sglang_ext.hooks import transfer
from sglang_ext.managers.kv_transfer.progressive.handshakes import Handshakes
from sglang_ext.managers.kv_transfer.progressive.manager import ProgressiveManager
from sglang_ext.managers.kv_transfer.progressive.receiver import ProgressiveReceiver
from sglang_ext.managers.kv_transfer.progressive.sender import ProgressiveSender
from sglang_ext.managers.kv_transfer.feature import KVTransfer
from sglang_ext.managers.worker import KVWorker


@pytest.fixture
def backend():
    plugin.register_transfer_backend()
    plugin.register_transfer_backend()
    return TransferBackend("progressive")


def test_the_name_is_registered_once_beside_sglangs_own(backend):
    assert server_args.DISAGG_TRANSFER_BACKEND_CHOICES.count("progressive") == 1
    assert [each.value for each in TransferBackend].count("progressive") == 1
    assert backend is TransferBackend("progressive") and backend != TransferBackend.FAKE and hash(backend)


def test_classes_are_found_and_those_of_other_backends_are_sglangs(backend):
    found = {kind: plugin.get_kv_class(stock, backend, kind) for kind in KVClassType if kind is not KVClassType.MANAGER}
    expected = (KVArgs, ProgressiveSender, ProgressiveReceiver, CommonKVBootstrapServer)
    assert tuple(found.values()) == expected
    asked = plugin.get_kv_class(lambda *arguments: arguments, TransferBackend.FAKE, KVClassType.SENDER)
    assert asked == (TransferBackend.FAKE, KVClassType.SENDER)


def queue_of(worker=None, pool=100):
    """SGLang's queue, of a scheduler with this worker, whose pool has so many slots, 10 of them for answers."""
    sizes = {"max_total_num_tokens": pool, "num_reserved_decode_tokens": 10, "_pre_alloc_fill_len": lambda req: len(req.origin_input_ids)}
    return SimpleNamespace(scheduler=SimpleNamespace(draft_worker=worker), kv_manager=None, **sizes)


class Sender(ProgressiveSender):
    """A sender that only remembers what it is told."""

    def set_prompt(self, tokens, refused=None, packing=None, read_queries=None):
        self.prompt, self.refused, self.packing, self.read_queries = tokens, refused, packing, read_queries


class Receiver(ProgressiveReceiver):
    """A receiver that only remembers what it is told."""

    def set_prompt(self, tokens, refused=None):
        self.prompt, self.refused = tokens, refused

    def expect_queries(self, queries, row):
        self.queries, self.row = queries, row


def made(kind):
    """A sender or receiver without a manager of rooms."""
    end = kind.__new__(kind)
    end.kv_mgr = SimpleNamespace(handshakes=Handshakes(lambda metadata, reason: None))
    end.room = 7
    return end


def test_a_sender_learns_the_prompt_unless_none_was_made():
    sender = made(Sender)
    req = SimpleNamespace(disagg_kv_sender=sender, origin_input_ids=[1, 2], to_finish=None)
    assert transfer.create_sender(lambda queue, req, heads: True, queue_of(), req, 2)
    assert (sender.prompt, sender.refused, sender.packing, sender.read_queries) == ([1, 2], None, None, None)
    req.to_finish = FINISH_ABORT("no such grammar")
    assert transfer.create_sender(lambda queue, req, heads: True, queue_of(), req, 2)
    assert (sender.prompt, sender.refused, sender.packing, sender.read_queries) == ([1, 2], "no such grammar", None, None)
    assert not transfer.create_sender(lambda queue, req, heads: False, None, SimpleNamespace(), 2)


@pytest.mark.parametrize(("again", "expected"), [(False, [1, 2]), (True, [1, 2, 3])])
def test_a_receiver_learns_the_prompt_and_of_a_request_prefilled_again_the_output(again, expected):
    req = SimpleNamespace(origin_input_ids=[1, 2], output_ids=[3], to_finish=None)
    found = SimpleNamespace(kv_receiver=made(Receiver))
    queue = queue_of()
    assert transfer.create_receiver(lambda queue, req, is_rebootstrap: found, queue, req, is_rebootstrap=again) is found
    assert found.kv_receiver.prompt == expected


def test_a_request_that_is_prefilled_again_has_a_new_room_of_its_own_which_is_the_same_on_all_ranks():
    rooms = []
    # Two answers of one request share its room.
    for rid, again in (("a", False), ("a", True), ("a", True), ("b", True)):
        req = SimpleNamespace(origin_input_ids=[1, 2], output_ids=[3], to_finish=None, rid=rid, bootstrap_room=(1 << 63) - 1)
        queue, found = queue_of(), SimpleNamespace(kv_receiver=made(Receiver))
        queue.kv_manager = ProgressiveManager.__new__(ProgressiveManager)
        transfer.create_receiver(lambda queue, req, is_rebootstrap: rooms.append(req.bootstrap_room) or found, queue, req, is_rebootstrap=again)
    assert rooms[0] == (1 << 63) - 1 != rooms[1] == rooms[2] != rooms[3] and all(1 <= room < 1 << 63 for room in rooms)


@pytest.mark.parametrize(("tokens", "refused"), [(90, False), (91, True)])
def test_a_prompt_that_no_empty_pool_would_admit_is_refused_with_what_it_takes_and_the_remedy(tokens, refused):
    req = SimpleNamespace(origin_input_ids=list(range(tokens)), output_ids=[], to_finish=None)
    found = SimpleNamespace(kv_receiver=made(Receiver))
    transfer.create_receiver(lambda queue, req, is_rebootstrap: found, queue_of(), req)
    assert (req.to_finish is not None) == (found.kv_receiver.refused is not None) == refused
    if refused:
        assert req.to_finish.status_code == 400 and found.kv_receiver.refused == req.to_finish.message
        for word in ("takes 91 tokens", "has 100", "keeps 10", "--num-reserved-decode-tokens", "--max-total-tokens"):
            assert word in req.to_finish.message


def test_a_request_that_was_refused_before_keeps_that_reason_where_the_pool_is_too_small_as_well():
    earlier = FINISH_ABORT("no such grammar")
    req = SimpleNamespace(origin_input_ids=[1] * 200, output_ids=[], to_finish=earlier)
    found = SimpleNamespace(kv_receiver=made(Receiver))
    transfer.create_receiver(lambda queue, req, is_rebootstrap: found, queue_of(), req)
    assert req.to_finish is earlier and found.kv_receiver.refused == "no such grammar"


@pytest.mark.parametrize("earlier", [None, FINISH_ABORT("no such grammar", 400, "BadRequestError")])
def test_a_request_that_was_refused_before_its_room_failed_ends_with_that_reason(earlier):
    req = SimpleNamespace(to_finish=earlier, return_logprob=False)
    transfer.prepare_abort(prepare_abort, req, "the room failed", status_code=500)
    assert (req.finished_reason.message, req.finished_reason.status_code) == (("no such grammar", 400) if earlier else ("the room failed", 500))


WORDS = "rank=0 decode_req.req.rid='abc' decode_req.req.bootstrap_room=7 with exception"


@pytest.mark.parametrize(
    ("began", "reason", "told", "status"),
    [
        (
            "Decode transfer failed for request", "its sender is silent for 15 s",
            "the decode server could not get the prompt's KV from the prefill server: its sender is silent for 15 s; send the request again", 503,
        ),
        (
            "Prefill transfer failed for request", "the receiver at tcp://1.2.3.4:5 is not reached for 15 s",
            "the prefill server could not send the prompt's KV to the decode server: the receiver at tcp://1.2.3.4:5 is not reached for 15 s; "
            "send the request again", 503,
        ),
        (
            "Decode transfer failed for request", "anchor of page 3 came with a wrong checksum 3 times",
            "the decode server could not get the prompt's KV from the prefill server: anchor of page 3 came with a wrong checksum 3 times", 500,
        ),
    ],
    ids=["sender-gone", "receiver-gone", "bytes"],
)  # fmt: skip
def test_a_client_is_told_why_its_room_failed_and_whether_to_ask_again(began, reason, told, status):
    req = SimpleNamespace(to_finish=None, return_logprob=False, bootstrap_room=7)
    transfer.prepare_abort(prepare_abort, req, f"{began} {WORDS} {KVTransferError(7, reason)}", status_code=500)
    assert (req.finished_reason.message, req.finished_reason.status_code) == (told, status)


def test_reasons_of_sglangs_that_are_known_are_those_it_gives():
    reasons, source = ["Lost connection with", "but now it is down", "Could not fetch bootstrap info", "PD retract rebootstrap"], inspect.getsource(conn)
    assert all(each in source and transfer.RETRYABLE_REASONS.search(each) for each in reasons)
    assert transfer.RETRYABLE_REASONS.search("Request 7 timed out after 300.1s in KVPoll.Bootstrapping") and "in KVPoll.Bootstrapping" in source


def test_who_is_aborted_while_it_waits_to_be_prefilled_ends_its_room_and_no_other_does():
    aborted = []
    waiting = []
    for rid in ("gone", "kept"):
        sender = made(ProgressiveSender)
        sender.abort = lambda rid=rid: aborted.append(rid)
        waiting.append(SimpleNamespace(rid=rid, disagg_kv_sender=sender))
    # Of a server in another role, or of another backend.
    waiting += [SimpleNamespace(rid="gone"), SimpleNamespace(rid="gone", disagg_kv_sender=object())]
    scheduler = SimpleNamespace(waiting_queue=waiting)

    def abort(scheduler, asked):
        scheduler.waiting_queue = [req for req in scheduler.waiting_queue if req.rid != asked.rid]

    transfer.abort_request(abort, scheduler, SimpleNamespace(rid="gone"))
    assert aborted == ["gone"] and [req.rid for req in scheduler.waiting_queue] == ["kept"]


def test_both_ends_learn_where_the_newest_queries_of_a_request_are_kept():
    worker, feature, asked = KVWorker.__new__(KVWorker), KVTransfer(SimpleNamespace()), []
    worker.features = (feature,)
    feature.prompt_queries = SimpleNamespace(read=lambda *given: asked.append(given) or b"queries", write=lambda *given: asked.append(given))
    feature.arriving_full_kv = lambda req: None
    feature.prompt_packing, feature.quantized_prompt_allocator = lambda: None, lambda tree: None
    queue = queue_of(worker)
    queue.tree_cache = None
    req = SimpleNamespace(disagg_kv_sender=made(Sender), origin_input_ids=[1, 2], output_ids=[], to_finish=None, req_pool_idx=None)
    assert transfer.create_sender(lambda queue, req, heads: True, queue, req, 2)
    found = SimpleNamespace(kv_receiver=made(Receiver))
    transfer.create_receiver(lambda queue, req, is_rebootstrap: found, queue, req)
    req.req_pool_idx = 5  # it gets its row later
    assert req.disagg_kv_sender.read_queries(100) == b"queries" and asked == [(5, 2, 100)]
    assert found.kv_receiver.queries is feature.prompt_queries and found.kv_receiver.row() == 5


def test_ends_of_other_backends_are_left_alone():
    req = SimpleNamespace(disagg_kv_sender=object(), origin_input_ids=[1])
    assert transfer.create_sender(lambda queue, req, heads: True, None, req, 2)
