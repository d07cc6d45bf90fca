"""Page size, chunking, a pool too small, retraction, lossy mode: still stock's answers."""

import pytest
from servers import EXPECTED_TOKENS, STRICT, assert_same_answers, greedy

from sglang_ext.bench.soak import server_environment

pytestmark = pytest.mark.server


def test_pages_of_16_with_chunked_prefill_and_sink_recent(paged, prompts, expected):
    for cold in (True, False):
        found = paged.ask_all(prompts, 3, cold, **greedy(EXPECTED_TOKENS))
        assert [r["output_ids"] for r in found] == expected
        assert all(r["meta_info"]["kv_drafts"] > 0 for r in found)


def test_a_pool_too_small_and_retractions_keep_the_output(launch, prompts, expected, penalized):
    body, theirs = penalized
    server = launch(
        "--kv-mode", "verified", "--kv-budget", "0.5", "--max-total-tokens", "1300",
        "--schedule-conservativeness", "0.1", env=server_environment(retraction_steps=12),
    )
    found = server.ask_all([*prompts, *prompts[:2]], 6, **greedy(EXPECTED_TOKENS))
    assert [r["output_ids"] for r in found] == [*expected, *expected[:2]]
    assert sum(r["meta_info"]["kv_drafts"] for r in found) > 0
    ours = server.ask(**body)
    assert_same_answers(theirs, ours, "penalty")
    for answers in (found, ours):
        assert sum(r["meta_info"]["num_retractions"] for r in answers) > 0
    server.flush_cache()
    assert server.alive()


def test_lossy_serves_the_compressed_view_and_leaves_the_prefix_tree_exact(launch, prompts, expected):
    server = launch("--kv-mode", "lossy", "--kv-budget", "0.125", env=STRICT)
    found = server.ask_all(prompts, 2, **greedy(EXPECTED_TOKENS))
    assert all(len(r["output_ids"]) == EXPECTED_TOKENS for r in found)
    assert all(r["meta_info"]["kv_verifies"] == 0 for r in found)
    assert [r["output_ids"] for r in found] != expected, "1/8 of the KV cannot give all of stock's tokens"
    # The first token after a cached prompt comes from full KV: the tree holds no lossy tokens.
    longer = prompts[0] + found[0]["output_ids"]
    again = server.ask(input_ids=longer, **greedy(1))
    assert again["meta_info"]["cached_tokens"] <= len(prompts[0])
