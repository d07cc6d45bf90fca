"""Each verification chooses what the next drafts read of full KV; answers are stock's."""

import pytest
from servers import EXPECTED_TOKENS, STRICT, greedy

from sglang_ext.bench.soak import server_environment

pytestmark = pytest.mark.server

GUIDED = ("--kv-mode", "verified", "--kv-compressor", "verify-guided", "--kv-budget", "0.25")


def test_answers_are_stocks_many_drafts_are_right_and_each_round_chooses_anew(launch, prompts, expected):
    server, verifies = launch(*GUIDED, "--enable-metrics", env=STRICT), 0
    for cold in (True, False):
        found = server.ask_all(prompts, 4, cold, **greedy(EXPECTED_TOKENS))
        assert [r["output_ids"] for r in found] == expected
        told = [r["meta_info"] for r in found]
        assert {each["kv_compressor"] for each in told} == {"verify-guided"}
        assert sum(each["kv_accepted"] for each in told) > 0.4 * sum(each["kv_drafts"] for each in told)
        verifies += sum(each["kv_verifies"] for each in told)
    # Chosen before each round; the last token of an answer may need no drafts.
    made = server.metric('sglang_ext:copies_total{compressor="verify-guided"')
    assert verifies <= made <= verifies + 2 * len(prompts)


def test_pages_chunks_proposals_and_retractions_in_lockstep(launch, prompts, expected):
    server = launch(
        *GUIDED, "--kv-schedule", "lockstep", "--page-size", "16", "--chunked-prefill-size", "256", "--kv-ngram-tokens", "2",
        env=server_environment(retraction_steps=2),
    )  # fmt: skip
    found = server.ask_all(prompts[:3], 3, **greedy(EXPECTED_TOKENS))
    assert [r["output_ids"] for r in found] == expected[:3]
    told = [r["meta_info"] for r in found]
    assert sum(each["kv_drafts"] for each in told) > 0 and sum(each["num_retractions"] for each in told) > 0
