"""Copies in 4 bits draft for full KV, whose answers come out; what requests begin with is packed once."""

import pytest
from servers import EXPECTED_TOKENS, greedy, sampled
from waiting import tries

pytestmark = pytest.mark.server


def test_answers_are_stocks_and_most_drafts_are_right(several, prompts, expected):
    for cold in (True, False):
        found = several.ask_all(prompts, 4, cold, **greedy(EXPECTED_TOKENS))
        assert [r["output_ids"] for r in found] == expected
        told = [r["meta_info"] for r in found]
        assert all(each["kv_drafts"] > 0 and each["kv_fallback"] is None for each in told)
        assert sum(each["kv_accepted"] for each in told) > 0.6 * sum(each["kv_drafts"] for each in told)


def test_partitions_that_are_multiplied_as_integers_draft_in_pages_and_chunks(paged, prompts, expected):
    for cold in (True, False):
        found = paged.ask_all(prompts, 4, cold, **greedy(EXPECTED_TOKENS, custom_params={"kv_compressor": "hack"}))
        assert [r["output_ids"] for r in found] == expected
        told = [r["meta_info"] for r in found]
        assert {each["kv_compressor"] for each in told} == {"hack"}
        assert sum(each["kv_accepted"] for each in told) > 0.45 * sum(each["kv_drafts"] for each in told) > 0


def test_two_requests_read_one_packed_copy_of_their_beginning(stock, several, prompts, token_bytes):
    asked = [prompts[3][:640] + prompts[0][i * 50 : i * 50 + 200] for i in range(2)]
    expected = [r["output_ids"] for r in stock.ask_all(asked, 2, **greedy(EXPECTED_TOKENS))]
    for _ in tries(4, "the two had no copies at a time"):
        several.flush_cache()
        several.ask(input_ids=prompts[3][:640], **greedy(1))
        with sampled(several, "sglang_ext:compressed_bytes", 0.1) as held:
            found = several.ask_all(asked, 2, cold=False, **greedy(EXPECTED_TOKENS))
        assert [r["output_ids"] for r in found] == expected
        assert all(r["meta_info"]["kv_drafts"] > 0 and r["meta_info"]["cached_tokens"] >= 600 for r in found)
        # A block of 64 tokens takes 10 slots: 9 of them once; of each request two before its 128 newest tokens, and the first four.
        assert max(held) <= 138 * token_bytes
        if max(held) > 90 * token_bytes:
            break
