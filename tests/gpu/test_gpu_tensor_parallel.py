"""Two ranks on two GPUs: stock's answers, and the same decisions on both."""

import padded_model
import pytest
import torch
from servers import STRICT, greedy

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

RANKS = (
    *("--tp-size", "2", "--dtype", "bfloat16", "--enable-deterministic-inference", "--attention-backend", "triton"),
    *("--mem-fraction-static", "0.5", "--max-total-tokens", "60000", "--cuda-graph-bs", "1", "4"),
    *("--max-running-requests", "4", "--disable-prefill-cuda-graph"),
)


@pytest.fixture(scope="module")
def padded(model, tmp_path_factory):
    """The flag that names the demo model with heads that two ranks can share."""
    return "--model-path", str(padded_model.write(model, tmp_path_factory.mktemp("padded") / "model"))


@pytest.mark.parametrize("drafts", ["16", "auto"])
def test_two_ranks_give_stocks_answers_and_decide_alike(launch, padded, prompts, drafts):
    expected = launch(*RANKS, *padded).ask_all(prompts, 1, **greedy(64))
    flags = ("--kv-mode", "verified", "--kv-budget", "0.25", "--kv-draft-length", drafts)
    # In strict mode a round that differs between ranks stops the server.
    verified = launch(*RANKS, *padded, *flags, env=STRICT)
    for workers in (1, 4):
        found = verified.ask_all(prompts, workers, **greedy(64))
        assert [r["output_ids"] for r in found] == [r["output_ids"] for r in expected]
        assert drafts == "auto" or all(r["meta_info"]["kv_drafts"] > 0 for r in found)
