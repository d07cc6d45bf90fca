"""Requests that begin alike share one compressed copy, and prefixes that the device has no room for wait on the host."""

import re

import pytest
from servers import STRICT, greedy

pytestmark = pytest.mark.server

SHARED = ("--kv-mode", "verified", "--kv-budget", "0.25", "--kv-schedule", "lockstep", "--enable-metrics")
SMALL = (*SHARED, "--max-total-tokens", "2304", "--kv-host-gb", "0.3")


def questions(prompts, count):
    """Prompts of one beginning, whose ends differ."""
    return [prompts[3][:640] + prompts[0][i * 11 : i * 11 + 24] for i in range(count)]


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
def test_twenty_requests_with_one_beginning_share_its_copy_and_have_stocks_answers(stock, launch, prompts, schedule):
    asked = questions(prompts, 20)
    expected = [r["output_ids"] for r in stock.ask_all(asked, 4, **greedy(20))]
    server = launch(*SHARED[:-2], schedule, "--enable-metrics", "--max-running-requests", "20", env=STRICT)
    server.flush_cache()
    server.ask(input_ids=prompts[3][:640], **greedy(1))
    found = server.ask_all(asked, 20, cold=False, **greedy(20))
    assert [r["output_ids"] for r in found] == expected
    assert all(r["meta_info"]["kv_drafts"] > 0 and r["meta_info"]["cached_tokens"] >= 600 for r in found)
    log = server.log.read_text(errors="replace")
    assert not re.search("Traceback|leak", log)


def test_evicted_prefixes_come_back_from_the_host_with_stocks_answers(stock, launch, prompts):
    expected = [r["output_ids"] for r in stock.ask_all(prompts, 1, **greedy(24))]
    server = launch(*SMALL, env=STRICT)
    for again in range(3):
        found = server.ask_all(prompts, 1, cold=not again, **greedy(24))
        assert [r["output_ids"] for r in found] == expected
    # Of each prompt all but the newest queries' tokens; the pool has room for less than three of them.
    assert all(r["meta_info"]["cached_tokens"] >= len(p) - 40 for r, p in zip(found, prompts))
    for direction in ("stored", "loaded"):
        assert server.metric(f'sglang_ext:host_moved_bytes_total{{direction="{direction}"') > 0
    assert server.metric("sglang_ext:host_failed_pages_total") == 0
    assert server.metric("sglang_ext:host_bytes") > 0
