"""A decode rank finds prefill servers without blocking its scheduler, whatever their bootstrap servers do."""

import contextlib
import socket
import time
from types import SimpleNamespace

import pytest
import requests
from held_entries import held_entries
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, KVTransferError
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from transfer_helpers import ADDRESS
from waiting import until

from sglang_ext.hooks import transfer
from sglang_ext.managers.kv_transfer.progressive.manager import PrefillDirectory
from sglang_ext.managers.kv_transfer.progressive.receiver import ProgressiveReceiver
from sglang_ext.tools.server_process import free_port

# Seconds that one turn of a scheduler may take here; an attempt at a server that does not answer takes 5.
TURN = 1.0
REGISTERED = {
    **{"attn_tp_size": 1, "attn_tp_rank": 0, "attn_cp_size": 1, "attn_cp_rank": 0, "attn_dp_size": 1, "attn_dp_rank": 0},
    **{"pp_size": 1, "pp_rank": 0, "system_dp_size": 1, "system_dp_rank": 0, "rank_ip": "127.0.0.1", "rank_port": 4711},
    **{"page_size": 16, "kv_cache_dtype": "auto", "prefill_http_port": 30001},
}


@pytest.fixture
def bootstrap():
    """Starts SGLang's bootstrap server with one registered prefill rank; returns its port."""
    made = []

    def start(**changed):
        made.append(CommonKVBootstrapServer("127.0.0.1", port := free_port()))
        until(lambda: answers(f"http://127.0.0.1:{port}/health"))
        requests.put(f"http://127.0.0.1:{port}/route", json=REGISTERED | changed, timeout=5).raise_for_status()
        return port

    yield start
    for each in made:
        each.close()


def answers(url):
    with contextlib.suppress(requests.ConnectionError):
        return requests.get(url, timeout=5).ok


@pytest.fixture
def silent():
    """The port of a server that takes connections and never answers, as a stopped process does."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def queue_of(decode):
    """SGLang's queue of requests that wait for their prefill server."""
    queue = DecodePreallocQueue.__new__(DecodePreallocQueue)
    queue.kv_manager, queue.pending_reqs, queue.queue = decode, [], []
    queue._ensure_retry_count, queue._ensure_last_attempt_time = {}, {}
    queue._max_ensure_retries, queue._ensure_retry_interval = 15, 1.0
    queue.scheduler = SimpleNamespace(draft_worker=None)
    queue._pre_alloc_fill_len, queue.num_reserved_decode_tokens, queue.max_total_num_tokens = lambda req: 1, 0, 1024
    return queue


def ask(queue, port, room=7):
    """A new request whose prefill server is at a port; its receiver."""
    req = SimpleNamespace(bootstrap_host="127.0.0.1", bootstrap_port=port, bootstrap_room=room, disagg_prefill_dp_rank=None)
    req.origin_input_ids, req.to_finish = [1, 2, 3], None

    def create(queue, req, is_rebootstrap):
        receiver = ProgressiveReceiver(queue.kv_manager, f"127.0.0.1:{port}", room)
        return SimpleNamespace(req=req, kv_receiver=receiver)

    found = transfer.create_receiver(create, queue, req)
    queue.pending_reqs.append(found)
    return found.kv_receiver


def turn(queue, *receivers):
    """One turn of a scheduler, in seconds."""
    begin = time.monotonic()
    queue._resolve_pending_reqs()
    for each in receivers:
        each.poll()
    return time.monotonic() - begin


def test_a_bootstrap_server_that_never_answers_blocks_no_turn_and_fails_its_own_requests_alone(servers, bootstrap, silent):
    decode = servers().decode
    decode.directory.patience = 3.0
    queue, port, turns = queue_of(decode), bootstrap(), []
    stuck, served = ask(queue, silent, 7), ask(queue, port, 8)
    until(lambda: turns.append(turn(queue, stuck, served)) or stuck.poll() == KVPoll.Failed)
    assert max(turns) < TURN
    assert served.poll() == KVPoll.WaitingForInput
    assert served.bootstrap_infos == [{"rank_ip": "127.0.0.1", "rank_port": 4711, "is_dummy": False}]
    with pytest.raises(KVTransferError, match=f"no prefill server answers at 127.0.0.1:{silent}, .* name; the request waited 3 s"):
        stuck.failure_exception()


def test_addresses_that_nobody_polls_any_more_are_forgotten_with_what_was_fetched_from_them():
    def fetch(address):
        fetched.append(address)
        if address != "good":
            raise RuntimeError("no route")
        return address, len(fetched)

    fetched = []
    directory = PrefillDirectory(fetch, retry_interval=0.0, patience=0.1)
    for address in (*map(str, range(20)), "good"):
        directory.poll(address)
    until(lambda: "good" in fetched)
    before = len(fetched)
    time.sleep(0.15)
    results = []
    until(lambda: results.append(directory.poll("good")) or results[-1])
    assert results[-1] > ("good", before)
    assert directory.problem("7") == "it does not answer" and held_entries(directory) == held_entries(PrefillDirectory(fetch))


def test_a_request_is_served_soon_after_its_bootstrap_server_comes_up(servers, bootstrap):
    queue = queue_of(servers().decode)
    receiver = ask(queue, port := free_port())
    for _ in range(3):
        turn(queue, receiver)
        time.sleep(0.1)
    assert receiver.poll() == KVPoll.Bootstrapping
    server = CommonKVBootstrapServer("127.0.0.1", port)
    until(lambda: answers(f"http://127.0.0.1:{port}/health"))
    requests.put(f"http://127.0.0.1:{port}/route", json=REGISTERED, timeout=5).raise_for_status()
    until(lambda: turn(queue, receiver) < TURN and receiver.poll() == KVPoll.WaitingForInput)
    server.close()


@pytest.mark.parametrize(("changed", "flag"), [({"page_size": 64}, "--page-size is 64"), ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype is fp8")])
def test_a_prefill_server_with_other_pages_fails_the_request_and_names_the_flag(servers, bootstrap, changed, flag):
    queue = queue_of(servers().decode)
    receiver = ask(queue, bootstrap(**changed))
    until(lambda: turn(queue, receiver) < TURN and receiver.poll() == KVPoll.Failed)
    with pytest.raises(KVTransferError, match=f"{flag}.*start both with the same"):
        receiver.failure_exception()


def test_one_address_is_fetched_once_at_a_time_and_others_beside_it():
    started, release = [], []

    def fetch(address):
        started.append(address)
        until(lambda: release, seconds=20)
        raise ValueError("not ready")

    directory = PrefillDirectory(fetch, retry_interval=0.0)
    for _ in range(5):
        assert directory.poll("a:1") is None and directory.poll("b:1") is None
    until(lambda: sorted(started) == ["a:1", "b:1"])
    release.append(True)
    until(lambda: directory.poll("a:1") or directory.problem("a:1") == "not ready")
    until(lambda: directory.poll("a:1") or started.count("a:1") == 2)


def test_a_rank_that_is_gone_from_the_directory_is_not_read_over_http(servers):
    decode = servers().decode
    decode.connection_pool.clear()
    receiver = ProgressiveReceiver(decode, ADDRESS, 7)
    receiver.init(0)
    assert receiver.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError, match="Could not fetch bootstrap info"):
        receiver.failure_exception()
