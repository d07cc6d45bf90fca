"""Each verification chooses what the next drafts read of full KV; answers are stock's."""

import pytest
from servers import EXPECTED_TOKENS, greedy

from sglang_ext_bench.soaking.soak import server_environment

pytestmark = pytest.mark.server

GUIDED = ("--kv-mode", "verified", "--kv-compressor", "verify-guided", "--kv-budget", "0.25", "--kv-draft-length", "8")


def test_each_round_chooses_anew_and_answers_are_stocks_with_pages_chunks_and_retractions(launch, prompts, expected):
    server = launch(
        *GUIDED, "--page-size", "16", "--chunked-prefill-size", "256", "--enable-metrics",
        env=server_environment(retraction_steps=2),
    )  # fmt: skip
    found = server.ask_all(prompts[:4], 4, **greedy(EXPECTED_TOKENS))
    assert [r["output_ids"] for r in found] == expected[:4]
    told = [r["meta_info"] for r in found]
    assert {each["kv_compressor"] for each in told} == {"verify-guided"}
    assert sum(each["num_retractions"] for each in told) > 0
    assert sum(each["kv_accepted"] for each in told) > 0.3 * sum(each["kv_drafts"] for each in told) > 0
    # Chosen before each round, those among them that a retraction ended.
    made = server.metric('sglang_ext:copies_total{compressor="verify-guided"')
    assert made >= sum(each["kv_verifies"] for each in told)
