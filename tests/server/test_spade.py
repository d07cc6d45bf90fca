"""Tokens are chosen between steps by predicted queries: verified answers are stock's, lossy ones nearly, and choices are as many as asked."""

import pytest
from servers import EXPECTED_TOKENS, STRICT, greedy

from sglang_ext.bench.soaking.soak import server_environment

pytestmark = pytest.mark.server

SPADE = ("--kv-compressor", "spade", "--enable-metrics")
CHOICES = 'sglang_ext:copies_total{compressor="spade"'


def test_verified_answers_are_stocks_with_pages_chunks_and_retractions(launch, prompts, expected):
    server = launch(
        "--kv-mode", "verified", *SPADE, "--kv-budget", "0.25", "--kv-draft-length", "8", "--kv-select-by", "regressed",
        "--page-size", "16", "--chunked-prefill-size", "256", env=server_environment(retraction_steps=2),
    )  # fmt: skip
    found = server.ask_all(prompts[:4], 4, **greedy(EXPECTED_TOKENS))
    assert [r["output_ids"] for r in found] == expected[:4]
    told = [r["meta_info"] for r in found]
    assert {each["kv_compressor"] for each in told} == {"spade"}
    assert sum(each["num_retractions"] for each in told) > 0
    assert sum(each["kv_accepted"] for each in told) > 0.3 * sum(each["kv_drafts"] for each in told) > 0
    # Before each round, and after each of its steps but the last.
    assert server.metric(CHOICES) > 4 * sum(each["kv_verifies"] for each in told)


@pytest.mark.parametrize(("every", "most"), [(1, 60), (16, 8)])
def test_lossy_answers_read_so_many_tokens_chosen_after_so_many_steps(launch, prompts, expected, every, most):
    server = launch("--kv-mode", "lossy", *SPADE, "--kv-select", "256", "--kv-select-every", str(every), env=STRICT)
    before = server.metric(CHOICES)
    # Shorter than what is read: full KV answers, as stock's.
    short = server.ask(input_ids=prompts[0][:200], **greedy(4))
    assert short["meta_info"]["kv_fallback"] == "short-context" and server.metric(CHOICES) == before
    found = server.ask(input_ids=prompts[3], **greedy(60))
    assert found["meta_info"]["completion_tokens"] == 60
    assert found["output_ids"][0] == expected[3][0]
    assert most // 2 <= server.metric(CHOICES) - before <= most
    # The first token after a cached prompt comes from full KV: the tree holds no lossy tokens.
    again = server.ask(input_ids=prompts[3], **greedy(1))
    assert again["output_ids"] == expected[3][:1]
