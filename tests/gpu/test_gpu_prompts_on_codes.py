"""Prompts that attend to codes on a GPU: by whole prompts or by chunks they give the same, near what exact prompts give."""

import pytest
from servers import greedy
from test_gpu_decoding import QUICK

pytestmark = pytest.mark.server

CODES = ("--kv-mode", "lossy", "--kv-compressor", "hack")


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
