"""Requests draft on anchors from a slow store while their residuals arrive, with stock's answers, whatever happens meanwhile."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import EXPECTED_TOKENS, STRICT, greedy
from store_servers import free_port, running
from test_prefix_store import UNIT, flags, from_store, objects
from waiting import until

pytestmark = pytest.mark.server
SEEDED = {"sampling_params": {"max_new_tokens": EXPECTED_TOKENS, "temperature": 0.8, "sampling_seed": 11, "ignore_eos": True}}


def test_requests_draft_on_anchors_from_a_slow_store_and_have_stocks_answers(stock, launch, prompts, expected, tmp_path):
    prompts, expected = prompts[:3], expected[:3]
    sampled = [each["output_ids"] for each in stock.ask_all(prompts, 3, **SEEDED)]
    store, form = tmp_path / "store", ("--kv-store-form", "anchored")
    first = launch(*flags(store), *form, env=STRICT)
    found = first.ask_all(prompts, 3, **greedy(EXPECTED_TOKENS))
    assert [each["output_ids"] for each in found] == expected
    until(lambda: len(objects(store)) >= sum((len(ids) + EXPECTED_TOKENS - 1) // UNIT for ids in prompts), "all pages are written")
    port = free_port()
    command = "serve", "--listen", f"tcp://127.0.0.1:{port}", "--memory-gb", "1", "--disk", str(store), "--gbps", "0.04"
    with running(sys.executable, "-m", "sglang_ext.store", *command, port=port):
        server = launch(*flags(store), *form, "--kv-store", f"tcp://127.0.0.1:{port}", env=STRICT)
        # A server that has computed nothing reads the store, however slow it is.
        found = server.ask(input_ids=prompts[-1], **SEEDED)
        assert found["output_ids"] == sampled[-1] and from_store(found) > 0
        assert server.metric("sglang_ext:store_early_requests_total") == 1
        assert server.metric("sglang_ext:store_early_accepted_total") > 0
        check_company(server, prompts, SEEDED, sampled)
        check_company(server, prompts, greedy(EXPECTED_TOKENS), expected)


def check_company(server, prompts, params, answers):
    """Several requests read and draft at once, one of them is aborted, and another request decodes."""
    server.flush_cache()
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(server.ask, input_ids=ids, rid=f"waiting-{i}", **params) for i, ids in enumerate(prompts)]
        server.ask(input_ids=[7, 8, 9], **greedy(4))
        server.request("abort_request", {"rid": "waiting-0"})
        rest = [each.result()["output_ids"] for each in waiting[1:]]
        waiting[0].exception()
    assert rest == answers[1:]
    # Nothing is held: the server checks that when it is idle.
    found = server.ask_all(prompts, 3, **params)
    assert [each["output_ids"] for each in found] == answers and server.alive()
