"""Tokens are chosen between steps by predicted queries; answers are stock's."""

import pytest
from servers import EXPECTED_TOKENS, greedy

from sglang_ext_bench.baselines import SELECTORS
from sglang_ext_bench.soaking.soak import server_environment

pytestmark = pytest.mark.server

SPADE = ("--kv-compressor", "spade", "--enable-metrics")
CHOICES = 'sglang_ext:copies_total{compressor="spade"'


def test_verified_answers_are_stocks_with_pages_chunks_and_retractions(launch, prompts, expected):
    server = launch(
        "--kv-mode", "verified", *SPADE, "--kv-budget", "0.25", "--kv-draft-length", "8", "--kv-select-by", "regressed",
        "--kv-select-every", "1",
        "--page-size", "16", "--chunked-prefill-size", "256", "--kv-sparse-from", "400", env=server_environment(retraction_steps=2),
    )  # fmt: skip
    found = server.ask_all(prompts[:4], 4, **greedy(EXPECTED_TOKENS))
    assert [r["output_ids"] for r in found] == expected[:4]
    short, *told = [r["meta_info"] for r in found]
    assert (short["kv_fallback"], short["kv_drafts"]) == ("short-context", 0), "300 tokens are read whole"
    assert {each["kv_compressor"] for each in told} == {"spade"}
    # The shortest answer is retracted, too, if it is not alone.
    assert sum(each["meta_info"]["num_retractions"] for each in found) > 0
    assert sum(each["kv_accepted"] for each in told) > 0.3 * sum(each["kv_drafts"] for each in told) > 0
    # Before each round, and after each of its steps but the last.
    assert server.metric(CHOICES) > 4 * sum(each["kv_verifies"] for each in told)


def test_verified_answers_are_stocks_with_keys_of_few_bits_and_prefixes_that_come_back_from_the_host(
    launch, prompts, expected, token_bytes
):
    pool = 1600
    server = launch(
        "--kv-mode", "verified", *SPADE, "--kv-budget", "0.25", "--kv-draft-length", "8", "--kv-score-bits", "4",
        "--max-total-tokens", str(pool), "--chunked-prefill-size", "256", "--kv-host-gb", "0.3", "--kv-select-every", "auto",
    )  # fmt: skip
    for cold in (True, False):
        found = server.ask_all(prompts[1:4], 1, cold=cold, **greedy(EXPECTED_TOKENS))
        assert [r["output_ids"] for r in found] == expected[1:4]
        told = [r["meta_info"] for r in found]
        assert sum(each["kv_accepted"] for each in told) > 0.3 * sum(each["kv_drafts"] for each in told) > 0
    assert server.metric("sglang_ext:host_loaded_bytes_total") > 0
    # The server chose it by measured times.
    assert server.metric("sglang_ext:selection_interval") in (1, 2, 4, 8, 16)
    assert server.metric("sglang_ext:draft_length") > 1 and 0.3 < server.metric("sglang_ext:draft_acceptance_rate") <= 1
    # Of 64 numbers of a key, which have a float32 each in full, with 4 bytes of scales for 32; the pool has a page more, which is nobody's.
    token = token_bytes // (2 * 64 * 4) * (64 * 4 // 8 + 8)
    assert server.metric("sglang_ext:key_code_bytes") == (pool + 1) * token
    assert f"keys in few bits {(pool + 1) * token / 1e9:.2f} GB" in server.log.read_text(errors="replace")


@pytest.mark.parametrize(("value", "method", "least"), [(SELECTORS["true-query"], "TrueQuery", 0.7), ("quest", "quest", 0.2)], ids=["true-query", "quest"])
def test_verified_answers_are_stocks_where_each_layer_chooses_by_the_steps_own_query(
    launch, prompts, of_all_layers, demo_model, value, method, least
):
    server = launch(
        "--kv-mode", "verified", "--kv-compressor", value, "--kv-select", "0.25", "--kv-draft-length", "8", "--enable-metrics",
        "--model-path", str(demo_model),
    )  # fmt: skip
    found = server.ask_all(prompts[:2], 2, **greedy(EXPECTED_TOKENS))
    assert [r["output_ids"] for r in found] == of_all_layers["tokens"]
    told = [r["meta_info"] for r in found]
    assert {each["kv_compressor"] for each in told} == {method}
    drafts = sum(each["kv_drafts"] for each in told)
    assert sum(each["kv_accepted"] for each in told) > least * drafts > 0
    # In each of a round's steps, and as its copies are made.
    assert server.metric(f'sglang_ext:copies_total{{compressor="{method}"') > drafts
