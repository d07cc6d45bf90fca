"""Full KV of running requests in host memory on a GPU: rolling rounds in graphs, beside copies over the link."""

import pytest
from servers import LOGGED, STRICT, greedy, sampled

pytestmark = pytest.mark.server

POOL = ("--dtype", "bfloat16", "--mem-fraction-static", "0.5", "--max-total-tokens", "3000", "--disable-prefill-cuda-graph")
BATCH = ("--cuda-graph-bs", "1", "4", "8", "--max-running-requests", "8", "--enable-metrics", *LOGGED)
EXACT = (*POOL, *BATCH, "--enable-deterministic-inference", "--attention-backend", "triton")
HOST = (
    *("--kv-mode", "verified", "--kv-budget", "0.25", "--kv-draft-length", "8", "--kv-offload-draft-length", "32"),
    *("--kv-full-tier", "host", "--kv-host-gb", "2"),
)


@pytest.fixture(scope="module")
def asked(prompts):
    """Prompts whose full KV does not fit: 3,000 tokens."""
    return [*prompts, *(prompt[::-1] for prompt in prompts)]


def test_in_deterministic_mode_answers_are_stocks(launch, asked):
    expected = launch(*EXACT).ask_all(asked, 1, **greedy(64))
    server = launch(*EXACT, *HOST, env=STRICT)
    for workers in (1, 8):
        with sampled(server, "sglang_ext:offloaded_bytes") as offloaded:
            found = server.ask_all(asked, workers, **greedy(64))
        assert [r["output_ids"] for r in found] == [r["output_ids"] for r in expected]
    assert max(offloaded) > 0
    assert server.metric("sglang_ext:recomputed_requests_total") == 0
    log = server.log.read_text(errors="replace")
    assert "capturing verifications of 9 tokens" in log and "capturing verifications of 33 tokens" in log


def test_what_host_memory_lost_is_computed_again(launch, asked):
    """By a prefill, which rounds unlike the decoding that gave it: answers may differ where two tokens are nearly as good."""
    server = launch(*EXACT, *HOST, "--kv-bench-corrupt-loads", "9", env=STRICT)
    answers = server.ask_all(asked, 8, **greedy(64))
    assert all(len(r["output_ids"]) == 64 for r in answers)
    assert server.metric("sglang_ext:recomputed_requests_total") > 0 < server.metric("sglang_ext:host_failed_pages_total")


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_drafts_gather_and_are_accepted_in_graphs(launch, asked, backend):
    server = launch(*POOL, *BATCH, *HOST, "--attention-backend", backend)
    answers = server.ask_all(asked, 8, **greedy(64))
    assert all(len(r["output_ids"]) == 64 for r in answers)
    assert sum(r["meta_info"]["kv_accepted"] for r in answers) > 64
    assert max(len(r["meta_info"]["kv_offer_histogram"]) for r in answers) > 9, "more than the drafts of one round"
    assert server.metric("sglang_ext:host_loaded_bytes_total") > 0
    log = server.log.read_text(errors="replace")
    assert "disable_overlap_schedule=False" in log and "cuda graph: True" in log
