"""Copies of several methods in one batch on a GPU: one packs tokens in few bits, others drop them; the same graphs read all."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import LOGGED, greedy
from test_gpu_decoding import DRAFTS, EXACT, QUICK
from test_gpu_packed import CAPTURED, REPLAYS, accept_length

pytestmark = pytest.mark.server

METHODS = ("kivi", "snapkv:0.5", "sink-recent:0.25")
SEVERAL = ("--kv-mode", "verified", *DRAFTS, "--kv-compressor", METHODS[0], "--kv-more-compressors", ",".join(METHODS[1:]))


def ask(server, prompts, methods=METHODS):
    """Answers of all methods to all prompts, by method, at once."""
    with ThreadPoolExecutor(8) as pool:
        bodies = {method: greedy(64, custom_params={"kv_compressor": method}) for method in methods}
        asked = {name: [pool.submit(server.ask, input_ids=ids, **body) for ids in prompts] for name, body in bodies.items()}
    return {method: [each.result() for each in found] for method, found in asked.items()}


def test_methods_of_other_bits_and_budgets_draft_in_one_batch_in_graphs(launch, prompts):
    server = launch(*QUICK, *LOGGED, "--attention-backend", "flashinfer", *SEVERAL, env=REPLAYS)
    for method, answers in ask(server, prompts).items():
        assert {r["meta_info"]["kv_compressor"] for r in answers} == {method}
        assert all(len(r["output_ids"]) == 64 and r["meta_info"]["kv_fallback"] is None for r in answers)
        assert accept_length(answers) > 1.5
    log = server.log.read_text(errors="replace")
    assert CAPTURED in log and "cuda graph: True" in log and "mode=DECODE" in log


def test_in_deterministic_mode_answers_of_each_method_are_stocks(launch, prompts):
    expected = [r["output_ids"] for r in launch(*EXACT).ask_all(prompts, 1, **greedy(64))]
    for answers in ask(launch(*EXACT, *SEVERAL), prompts).values():
        assert [r["output_ids"] for r in answers] == expected
