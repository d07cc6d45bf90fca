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
    sampled = [each["output_ids"] for each in stock.ask_all(prompts, 4, **SEEDED)]
    store, form = tmp_path / "store", ("--kv-store-form", "anchored")
    first = launch(*flags(store), *form, env=STRICT)
    found = first.ask_all(prompts, 4, **greedy(EXPECTED_TOKENS))
    assert [each["output_ids"] for each in found] == expected
    until(lambda: len(objects(store)) >= sum((len(ids) + EXPECTED_TOKENS - 1) // UNIT for ids in prompts), "all pages are written")
    whole = [(len(ids) - 1) // UNIT * UNIT for ids in prompts]
    # A prompt takes some seconds to read, and this server has computed none.
    port = free_port()
    command = "serve", "--listen", f"tcp://127.0.0.1:{port}", "--memory-gb", "1", "--disk", str(store), "--gbps", "0.05"
    with running(sys.executable, "-m", "sglang_ext.store", *command, port=port):
        second = launch(*flags(store), *form, "--kv-store", f"tcp://127.0.0.1:{port}", env=STRICT)
        check_early_drafts(second, prompts, expected, sampled, whole)


def check_early_drafts(second, prompts, expected, sampled, whole):
    before = second.metric("sglang_ext:store_early_requests_total")
    found = second.ask_all(prompts, 4, **greedy(EXPECTED_TOKENS))
    assert [each["output_ids"] for each in found] == expected and [from_store(each) for each in found] == whole
    assert second.metric("sglang_ext:store_early_requests_total") > before
    assert second.metric("sglang_ext:store_early_accepted_total") > 0
    found = second.ask_all(prompts, 4, **SEEDED)
    assert [each["output_ids"] for each in found] == sampled
    # Requests that are aborted while they draft, beside one that decodes.
    second.flush_cache()
    drafted = second.metric("sglang_ext:store_early_requests_total")
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(second.ask, input_ids=ids, rid=f"waiting-{i}", **greedy(EXPECTED_TOKENS)) for i, ids in enumerate(prompts[:3])]
        until(lambda: second.ask(input_ids=[7, 8, 9], **greedy(1)) and second.metric("sglang_ext:store_early_requests_total") > drafted, "one drafts")
        second.request("abort_request", {"rid": "waiting-0"})
        rest = [each.result() for each in answers[1:]]
        answers[0].exception()
    assert [each["output_ids"] for each in rest] == expected[1:3]
    # Nothing is held: the server checks that when it is idle.
    found = second.ask_all(prompts, 4, **greedy(EXPECTED_TOKENS))
    assert [each["output_ids"] for each in found] == expected and second.alive()
