"""Page size, chunking, a pool too small, no prefix cache, seeds, lossy mode: still stock's answers."""

import concurrent.futures

import pytest

pytestmark = pytest.mark.server

STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}


def run_all(server, prompts, workers, **body):
    """Outputs of all prompts, ``workers`` at once, cold cache."""
    server.flush()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda ids: server.generate(input_ids=ids, **body), prompts))


def greedy(tokens=32, **more):
    return {"sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}}


@pytest.fixture(scope="module")
def expected(launch, prompts):
    """Stock's greedy answers, one request at a time."""
    return [r["output_ids"] for r in run_all(launch(), prompts, 1, **greedy(48))]


def test_pages_of_16_with_chunked_prefill_and_sink_recent(launch, prompts, expected):
    server = launch(
        "--kv-mode", "verified", "--kv-compressor", "sink-recent", "--kv-budget", "0.125",
        "--page-size", "16", "--chunked-prefill-size", "256", "--kv-draft-length", "8", env=STRICT,
    )
    for _ in ("cold", "warm"):
        found = run_all(server, prompts, 3, **greedy(48))
        assert [r["output_ids"] for r in found] == expected
        assert all(r["meta_info"]["kv_drafts"] > 0 for r in found)


def test_a_pool_too_small_for_all_requests_keeps_the_output(launch, prompts, expected):
    server = launch(
        "--kv-mode", "verified", "--kv-budget", "0.5", "--max-total-tokens", "1300",
        "--schedule-conservativeness", "0.1", env=STRICT,
    )
    found = run_all(server, prompts * 2, 8, **greedy(48))
    assert [r["output_ids"] for r in found] == expected * 2
    server.flush()
    assert server.alive()


def test_retracted_requests_come_back_and_keep_the_output(launch, prompts, expected):
    forced = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "25"}
    flags = ("--kv-mode", "verified", "--kv-budget", "0.5", "--max-total-tokens", "4600")
    found = run_all(launch(*flags, env={**STRICT, **forced}), prompts, 4, **greedy(48))
    assert [r["output_ids"] for r in found] == expected
    assert sum(r["meta_info"]["num_retractions"] for r in found) > 0
    assert all(r["meta_info"]["kv_drafts"] > 0 for r in found)


def test_without_a_prefix_cache(launch, prompts, expected):
    server = launch("--kv-mode", "verified", "--kv-budget", "0.25", "--disable-radix-cache", env=STRICT)
    found = run_all(server, prompts, 4, **greedy(48))
    assert [r["output_ids"] for r in found] == expected


def test_lossy_serves_the_compressed_view_and_leaves_the_prefix_tree_exact(launch, prompts, expected):
    server = launch("--kv-mode", "lossy", "--kv-budget", "0.125", env=STRICT)
    found = run_all(server, prompts, 2, **greedy(48))
    assert all(len(r["output_ids"]) == 48 for r in found)
    assert all(r["meta_info"]["kv_verifies"] == 0 for r in found)
    assert [r["output_ids"] for r in found] != expected, "1/8 of the KV cannot give all of stock's tokens"
    # The first token after a cached prompt comes from full KV: the tree holds no lossy tokens.
    longer = prompts[0] + found[0]["output_ids"]
    again = server.generate(input_ids=longer, **greedy(1))
    assert again["meta_info"]["cached_tokens"] <= len(prompts[0])


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.8, "sampling_seed": 11}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "sampling_seed": 5}],
    ids=["plain", "top-p-top-k"],
)
def test_seeded_sampling_gives_stocks_tokens(launch, prompts, params):
    body = {"sampling_params": {"max_new_tokens": 32, "ignore_eos": True, **params}}
    flags = ("--enable-deterministic-inference",)
    stock, verified = launch(*flags), launch(*flags, "--kv-mode", "verified", "--kv-budget", "0.5")
    expected = run_all(stock, prompts, 1, **body)
    found = run_all(verified, prompts, 4, **body)
    assert [r["output_ids"] for r in found] == [r["output_ids"] for r in expected]
    assert all(r["meta_info"]["kv_accepted"] > 0 for r in found)
