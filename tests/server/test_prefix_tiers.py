"""Requests that begin alike share one compressed copy, and prefixes that the device has no room for wait on the host."""

import pytest
from servers import greedy, sampled

pytestmark = pytest.mark.server


def test_twenty_requests_with_one_beginning_share_its_copy_and_have_stocks_answers(stock, crowded, prompts, token_bytes):
    asked = [prompts[3][:640] + prompts[0][i * 11 : i * 11 + 24] for i in range(20)]
    for server in (stock, crowded):
        server.flush_cache()
        server.ask(input_ids=prompts[3][:640], **greedy(1))
    expected = [r["output_ids"] for r in stock.ask_all(asked, 20, cold=False, **greedy(12))]
    with sampled(crowded, "sglang_ext:compressed_bytes") as held:
        found = crowded.ask_all(asked, 20, cold=False, **greedy(12))
    assert [r["output_ids"] for r in found] == expected
    told = [r["meta_info"] for r in found]
    assert all(each["cached_tokens"] >= 600 for each in told)
    # There are rings for the queries of 16 requests at once; such short answers end before the others could have copies.
    assert sum(each["kv_drafts"] > 0 and each["kv_compressor"] == "snapkv" for each in told) >= 16
    assert {each["kv_fallback"] for each in told} <= {None, "no-queries"}
    # A quarter of 640 tokens once, and of each request the 32 newest.
    assert 0 < max(held) <= (160 + 20 * 32) * token_bytes


def test_evicted_prefixes_come_back_from_the_host_with_stocks_answers(stock, crowded, prompts):
    asked = [*prompts, *(prompt[::-1] for prompt in prompts)]
    expected = [r["output_ids"] for r in stock.ask_all(asked, 2, **greedy(8))]
    for cold in (True, False):
        found = crowded.ask_all(asked, 1, cold=cold, **greedy(8))
        assert [r["output_ids"] for r in found] == expected
    # Of each prompt all but the tokens whose queries are wanted.
    assert all(r["meta_info"]["cached_tokens"] >= len(ids) - 40 for r, ids in zip(found, asked))
    moved = [crowded.metric(f"sglang_ext:host_{way}_bytes_total") for way in ("stored", "loaded")]
    assert min(moved) > 0 and crowded.metric("sglang_ext:host_load_bytes_per_second") > 0
    assert crowded.metric("sglang_ext:host_failed_pages_total") == 0
