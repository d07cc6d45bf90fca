"""Drafts whose attention multiplies codes as integers; answers are stock's."""

import pytest
from servers import EXPECTED_TOKENS, greedy

pytestmark = pytest.mark.server

HACK = ("--kv-mode", "verified", "--kv-compressor", "hack", "--kv-partition", "32", "--kv-draft-length", "8")


def test_answers_are_stocks_with_pages_chunks_and_shared_prefixes(launch, prompts, expected):
    server = launch(*HACK, "--page-size", "16", "--chunked-prefill-size", "256", "--enable-metrics")
    for cold in (True, False):
        found = server.ask_all(prompts[:4], 4, cold, **greedy(EXPECTED_TOKENS))
        assert [r["output_ids"] for r in found] == expected[:4]
    told = [r["meta_info"] for r in found]
    assert {each["kv_compressor"] for each in told} == {"hack"}
    assert sum(each["kv_accepted"] for each in told) > 0.45 * sum(each["kv_drafts"] for each in told) > 0
    assert server.metric('sglang_ext:copies_total{compressor="hack"') >= 8
