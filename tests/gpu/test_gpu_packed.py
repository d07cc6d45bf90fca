"""Packed copies on a GPU: drafts on them replay graphs of their own, and full KV verifies them as ever."""

import pytest
from servers import LOGGED, greedy
from test_gpu_decoding import DRAFTS, EXACT, QUICK

pytestmark = pytest.mark.server

# SGLang says for each replay of graphs of which kind it is; with LOGGED, for each iteration whether it ran in graphs.
REPLAYS = {"SGLANG_LOG_DECODE_GRAPH_KEY": "1"}
CAPTURED = "capturing steps over packed KV"


def served(server, prompts, tokens=64):
    """Answers to all prompts at once; each has its tokens, and none fell back to full KV for good."""
    answers = server.ask_all(prompts, 4, **greedy(tokens))
    assert all(len(r["output_ids"]) == tokens for r in answers)
    assert {r["meta_info"]["kv_fallback"] for r in answers} == {None}
    return answers


def accept_length(answers):
    """Tokens gained per verification, over all answers."""
    told = [r["meta_info"] for r in answers]
    return 1 + sum(each["kv_accepted"] for each in told) / sum(each["kv_verifies"] for each in told)


@pytest.mark.parametrize(
    ("backend", "compressor", "least"),
    [
        ("flashinfer", "kivi", 4),
        ("flashinfer", "int8", 6),
        ("flashinfer", "int4", 3),
        ("triton", "int4", 3),
        ("flashinfer", "turboquant --kv-bits 4", 3),
        ("triton", "lynx", 3),
        ("flashinfer", "hack", 3),
        ("triton", "snapkv+kivi --kv-budget 0.5", 2),
    ],
)
def test_drafts_on_blocks_run_in_graphs_and_most_are_right(launch, prompts, backend, compressor, least):
    flags = ("--attention-backend", backend, "--kv-mode", "verified", *DRAFTS, "--kv-compressor", *compressor.split())
    server = launch(*QUICK, *LOGGED, *flags, env=REPLAYS)
    answers = served(server, prompts)
    assert accept_length(answers) > least
    log = server.log.read_text(errors="replace")
    assert CAPTURED in log and "cuda graph: True" in log and "mode=DECODE" in log


@pytest.mark.parametrize(("compressor", "least"), [("kivi", 4), ("int4", 3)])
def test_in_deterministic_mode_answers_are_stocks_token_by_token(launch, prompts, compressor, least):
    expected = [r["output_ids"] for r in launch(*EXACT).ask_all(prompts, 1, **greedy(64))]
    server = launch(*EXACT, "--kv-mode", "verified", *DRAFTS, "--kv-compressor", compressor)
    for workers in (1, 4):
        found = server.ask_all(prompts, workers, **greedy(64))
        assert [r["output_ids"] for r in found] == expected
        assert accept_length(found) > least


@pytest.mark.parametrize("compressor", ["kivi", "int4"])
def test_lossy_answers_come_from_blocks_in_graphs(launch, prompts, compressor):
    flags = ("--attention-backend", "flashinfer", "--kv-mode", "lossy", "--kv-compressor", compressor)
    server = launch(*QUICK, *LOGGED, *flags, env=REPLAYS)
    served(server, prompts)
    log = server.log.read_text(errors="replace")
    assert CAPTURED in log and "cuda graph: True" in log and "mode=DECODE" in log


def test_without_graphs_drafts_read_blocks_too(launch, prompts):
    flags = ("--attention-backend", "flashinfer", "--kv-mode", "verified", *DRAFTS, "--kv-compressor", "kivi", "--disable-cuda-graph")
    server = launch(*QUICK, *flags)
    assert accept_length(served(server, prompts)) > 4
    assert CAPTURED not in server.log.read_text(errors="replace")
