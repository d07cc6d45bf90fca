"""Verified decoding on a GPU: CUDA graphs, SGLang's overlapped scheduler, and stock's answers in bfloat16."""

import pytest
from servers import greedy

from sglang_ext.doctor.checks import has_fa3

pytestmark = pytest.mark.server
NEEDS_FA3 = pytest.mark.skipif(not has_fa3(), reason="this sglang-kernel has no FlashAttention-3")

COMMON = (
    *("--dtype", "bfloat16", "--mem-fraction-static", "0.5", "--max-total-tokens", "60000"),
    *("--cuda-graph-max-bs", "8", "--max-running-requests", "8"),
)
# Prompts are short here, and SGLang takes long to capture their graphs.
QUICK = (*COMMON, "--disable-prefill-cuda-graph")
EXACT = (*QUICK, "--enable-deterministic-inference", "--attention-backend", "triton")
# As long as `auto` may choose; how often it drafts depends on the machine's load.
DRAFTS = ("--kv-draft-length", "15")
VERIFIED = ("--kv-mode", "verified", "--kv-budget", "0.25", *DRAFTS)
SEEDED = {"temperature": 0.8, "top_p": 0.95, "sampling_seed": 7, "max_new_tokens": 64, "ignore_eos": True}


@pytest.mark.parametrize("drafts", ["16", "auto"])
def test_in_deterministic_mode_answers_are_stocks_token_by_token(launch, prompts, drafts):
    bodies = [greedy(64), {"sampling_params": SEEDED}]
    expected = [launch(*EXACT).ask_all(prompts, 1, **body) for body in bodies]
    verified = launch(*EXACT, *VERIFIED, "--kv-draft-length", drafts)
    narrow = "capturing verifications of 5 tokens a request with triton"
    assert (narrow in verified.log.read_text(errors="replace")) == (drafts != "16")
    for body, answers in zip(bodies, expected):
        for workers in (1, 4):
            found = verified.ask_all(prompts, workers, **body)
            assert [r["output_ids"] for r in found] == [r["output_ids"] for r in answers]
            assert drafts == "auto" or all(r["meta_info"]["kv_drafts"] > 0 for r in found)


@pytest.mark.parametrize("backend", ["flashinfer", "triton", pytest.param("fa3", marks=NEEDS_FA3)])
@pytest.mark.parametrize("mode", ["verified", "lossy"])
def test_drafts_and_verifications_run_in_graphs(launch, prompts, backend, mode):
    server = launch(*COMMON, "--attention-backend", backend, "--kv-budget", "0.25", *DRAFTS, "--kv-mode", mode)
    answers = server.ask_all(prompts, 4, **greedy(64))
    assert all(len(r["output_ids"]) == 64 for r in answers)
    verified = mode != "lossy"
    if verified:
        assert all(r["meta_info"]["kv_accept_length"] > 1.5 for r in answers)
    log = server.log.read_text(errors="replace")
    assert (f"capturing verifications of 16 tokens a request with {backend}" in log) == verified
    assert "disable_overlap_schedule=False" in log and "cuda graph: True" in log


def test_without_graphs_and_in_the_plain_loop_it_drafts_too(launch, prompts):
    ways = [
        ("triton", ("--disable-cuda-graph",)),
        ("flashinfer", ("--disable-cuda-graph",)),
        ("flashinfer", ("--disable-overlap-schedule",)),
    ]
    for backend, more in ways:
        server = launch(*QUICK, "--attention-backend", backend, *VERIFIED, *more)
        answers = server.ask_all(prompts, 4, **greedy(40))
        assert all(r["meta_info"]["kv_accept_length"] > 1.5 for r in answers)


def test_deterministic_mode_refuses_a_backend_that_rounds_differently(launch):
    from sglang_ext.tools import CommandError

    with pytest.raises(CommandError, match="'flashinfer'.*torch_native, triton.*rounds differently"):
        launch(*COMMON, "--enable-deterministic-inference", "--attention-backend", "flashinfer", *VERIFIED)
