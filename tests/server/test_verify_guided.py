"""Each verification chooses what the next drafts read of full KV; answers are stock's."""

import pytest
from servers import EXPECTED_TOKENS, STRICT, greedy

from sglang_ext.bench.soak import server_environment

pytestmark = pytest.mark.server

GUIDED = ("--kv-mode", "verified", "--kv-compressor", "verify-guided", "--kv-budget", "0.25")


def test_answers_are_stocks_half_of_the_drafts_are_right_and_pointers_take_no_room(launch, prompts, expected):
    server = launch(*GUIDED, "--enable-metrics", env=STRICT)
    for cold in (True, False):
        found = server.ask_all(prompts, 4, cold, **greedy(EXPECTED_TOKENS))
        assert [r["output_ids"] for r in found] == expected
        told = [r["meta_info"] for r in found]
        assert {each["kv_compressor"] for each in told} == {"verify-guided"}
        assert sum(each["kv_accepted"] for each in told) > 0.5 * sum(each["kv_drafts"] for each in told)
    # Chosen before each round of drafts, of which a request has as many as verifications.
    made = server.metric('sglang_ext:copies_total{compressor="verify-guided"')
    assert made == 2 * sum(each["kv_verifies"] for each in told)


def test_pages_chunks_proposals_and_retractions_in_lockstep(launch, prompts, expected):
    server = launch(
        *GUIDED, "--kv-schedule", "lockstep", "--page-size", "16", "--chunked-prefill-size", "256", "--kv-ngram-tokens", "2",
        "--max-total-tokens", "1600", "--schedule-conservativeness", "0.1", env=server_environment(retraction_steps=6),
    )  # fmt: skip
    found = server.ask_all(prompts, 4, **greedy(EXPECTED_TOKENS))
    assert [r["output_ids"] for r in found] == expected
    told = [r["meta_info"] for r in found]
    assert sum(each["kv_drafts"] for each in told) > 0 and sum(each["num_retractions"] for each in told) > 0
