"""Requests draft on anchors from a slow store while their residuals arrive, with stock's answers, whatever happens meanwhile."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import EXPECTED_TOKENS, STRICT, greedy
from store_servers import free_port, running
from test_prefix_store import UNIT, flags, objects
from waiting import tries, until

pytestmark = pytest.mark.server
EARLY = "sglang_ext:store_early_requests_total", "sglang_ext:store_early_accepted_total"
SEEDED = {"sampling_params": {"max_new_tokens": EXPECTED_TOKENS, "temperature": 0.8, "sampling_seed": 11, "ignore_eos": True}}


def test_requests_draft_on_anchors_from_a_slow_store_and_have_stocks_answers(stock, launch, prompts, expected, tmp_path):
    sampled = [each["output_ids"] for each in stock.ask_all(prompts, 4, **SEEDED)]
    store, form = tmp_path / "store", ("--kv-store-form", "anchored")
    first = launch(*flags(store), *form, env=STRICT)
    found = first.ask_all(prompts, 4, **greedy(EXPECTED_TOKENS))
    assert [each["output_ids"] for each in found] == expected
    until(lambda: len(objects(store)) >= sum((len(ids) + EXPECTED_TOKENS - 1) // UNIT for ids in prompts), "all pages are written")
    port = free_port()
    command = "serve", "--listen", f"tcp://127.0.0.1:{port}", "--memory-gb", "1", "--disk", str(store), "--gbps", "0.1"
    with running(sys.executable, "-m", "sglang_ext.store", *command, port=port):
        second = launch(*flags(store), *form, "--kv-store", f"tcp://127.0.0.1:{port}", env=STRICT)
        check_early_drafts(second, prompts, expected, sampled)


def check_early_drafts(second, prompts, expected, sampled):
    for params, answers in ((greedy(EXPECTED_TOKENS), expected), (SEEDED, sampled)):
        # On a busy machine computing may be predicted to be faster than the store.
        for _ in tries(5, "no request drafts, or no draft is accepted"):
            before = [second.metric(name) for name in EARLY]
            found = second.ask_all(prompts, 1, **params)
            assert [each["output_ids"] for each in found] == answers
            if all(second.metric(name) > earlier for name, earlier in zip(EARLY, before)):
                break
    # Several read and draft at once, one of them is aborted, and another request decodes.
    second.flush_cache()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(second.ask, input_ids=ids, rid=f"waiting-{i}", **greedy(EXPECTED_TOKENS)) for i, ids in enumerate(prompts)]
        second.ask(input_ids=[7, 8, 9], **greedy(4))
        second.request("abort_request", {"rid": "waiting-0"})
        rest = [each.result()["output_ids"] for each in waiting[1:]]
        waiting[0].exception()
    assert rest == expected[1:]
    # Nothing is held: the server checks that when it is idle.
    found = second.ask_all(prompts, 4, **greedy(EXPECTED_TOKENS))
    assert [each["output_ids"] for each in found] == expected and second.alive()
