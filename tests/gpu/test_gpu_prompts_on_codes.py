"""Codes as the only form of prompts on a GPU: their full KV is given back, and prompts that attend to codes give the same by chunks."""

import random

import pytest
from servers import STRICT, greedy, sampled
from test_gpu_decoding import QUICK

pytestmark = pytest.mark.server

CODES = ("--kv-mode", "lossy", "--kv-compressor", "hack")
PROMPT, ANSWER, POOL = 1500, 120, 6000
SMALL = (
    *("--max-total-tokens", str(POOL), "--chunked-prefill-size", "2048", "--max-running-requests", "16", "--cuda-graph-max-bs", "16"),
    *("--enable-metrics", "--attention-backend", "flashinfer"),
)


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_chunks_change_little_and_codes_cost_little(launch, prompts, backend):
    asked, found = {"return_logprob": True, **greedy(8)}, []
    for more in (("--kv-prefill", "exact"), ("--kv-prefill", "quantized"), ("--kv-prefill", "quantized", "--chunked-prefill-size", "256")):
        server = launch(*QUICK, *CODES, *more, "--attention-backend", backend)
        answers = server.ask_all(prompts, 4, **asked)
        assert all(len(answer["output_ids"]) == 8 for answer in answers)
        found.append([answer["meta_info"]["output_token_logprobs"][0][0] for answer in answers])
    exact, whole, chunks = found
    assert whole != exact, "codes are not what was attended to"
    assert whole == pytest.approx(exact, abs=1.0) and chunks == pytest.approx(whole, abs=0.2)


@pytest.mark.parametrize(("compressor", "prefill"), [("hack", "exact"), ("hack", "quantized"), ("int4", "exact"), ("kivi", "exact")])
def test_full_kv_is_given_back_so_that_more_run_at_once_than_fit_in_full(launch, compressor, prefill):
    drawn = random.Random(7)
    contexts = [[drawn.randrange(1000, 40000) for _ in range(PROMPT)] for _ in range(12)]
    server = launch(*QUICK, "--kv-mode", "lossy", "--kv-compressor", compressor, *SMALL, "--kv-prefill", prefill, env=STRICT)
    with sampled(server, "sglang:num_running_reqs") as running, sampled(server, "sglang_ext:codes_alone_tokens") as alone:
        found = server.ask_all(contexts, len(contexts), **greedy(ANSWER))
    assert all(len(each["output_ids"]) == ANSWER and each["meta_info"]["kv_fallback"] is None for each in found)
    assert max(running) > 2 * (POOL // (PROMPT + ANSWER)) and max(alone) > POOL
    server.flush_cache()
    assert server.metric("sglang_ext:codes_alone_tokens") == server.metric("sglang_ext:compressed_bytes") == 0
