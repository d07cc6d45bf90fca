"""Pages that attention chooses by each step's own query, in graphs: `--kv-compressor quest` on a GPU's server.

Servers check before each forward that pointers lead to whole pages of their requests, whose extremes are those of the keys that are there.
"""

import pytest
from servers import LOGGED, greedy
from test_gpu_decoding import DRAFTS, EXACT, NEEDS_FA3, QUICK
from test_gpu_packed import REPLAYS, accept_length, served
from test_gpu_spade import apart

from sglang_ext_bench.soaking.soak import server_environment

pytestmark = pytest.mark.server
PAGES = ("--page-size", "16")
QUEST = ("--kv-compressor", "quest", *PAGES, "--enable-metrics")
LOSSY = ("--kv-mode", "lossy", *QUEST)
FLASHINFER = ("--attention-backend", "flashinfer")
CHOICES = 'sglang_ext:copies_total{compressor="quest"'


@pytest.mark.parametrize("backend", ["flashinfer", "triton", pytest.param("fa3", marks=NEEDS_FA3)])
def test_lossy_steps_in_graphs_choose_pages(launch, prompts, backend):
    flags = *QUICK, *LOGGED, *LOSSY, "--attention-backend", backend, "--kv-select", "0.25"
    server = launch(*flags, env=REPLAYS | server_environment(None))
    answers = served(server, prompts)
    log = server.log.read_text(errors="replace")
    assert "capturing steps over compressed KV of --kv-compressor quest" in log and "extremes of pages" in log
    assert "cuda graph: True" in log and "mode=DECODE" in log
    assert server.metric("sglang_ext:page_extreme_bytes") > 0
    # One in each step but those of the first rounds.
    assert server.metric(CHOICES) > len(answers) * 40


def test_without_graphs_and_in_the_plain_loop_steps_choose_too(launch, prompts):
    for more in ("--disable-cuda-graph", "--disable-overlap-schedule"):
        server = launch(*QUICK, *LOSSY, *FLASHINFER, "--kv-select", "0.25", more, env=server_environment(None))
        served(server, prompts)
        assert server.metric(CHOICES) > len(prompts) * 40


def test_who_reads_all_pages_answers_as_full_kv_does(launch, prompts):
    texts, asked = [prompt[: len(prompt) - cut] for prompt in prompts for cut in (0, 9, 18, 27)], {"return_logprob": True, **greedy(8)}
    stock = launch(*QUICK, *FLASHINFER)
    expected, again = (stock.ask_all(texts, workers, **asked) for workers in (1, 4))
    near = 2 * apart(again, expected) + 0.02
    server = launch(*QUICK, *LOSSY, *FLASHINFER, "--kv-select", "1.0", env=server_environment(None))
    # From an empty prefix cache, then by its hits, whose pages others wrote, beside slots that are used again.
    for workers, cold in ((1, True), (4, True), (4, False)):
        found = server.ask_all(texts, workers, cold=cold, **asked)
        assert {(r["meta_info"]["kv_fallback"], r["meta_info"]["kv_compressor"]) for r in found} == {(None, "quest")}
        assert apart(found, expected) <= near


def test_choices_are_the_same_whoever_had_the_slots_before(launch, prompts):
    server = launch(*EXACT, *LOSSY, "--kv-select", "0.25", env=server_environment(None))
    first = [r["output_ids"] for r in server.ask_all(prompts, 1, **greedy(48))]
    server.ask_all([prompt[::-1] for prompt in prompts], 4, **greedy(32))
    assert [r["output_ids"] for r in server.ask_all(prompts, 1, **greedy(48))] == first


def test_a_short_prompt_is_read_sparsely_once_its_answer_is_long_and_every_other_step_chooses(launch, prompts):
    more = "--kv-select", "64", "--kv-select-every", "2", "--kv-sparse-from", "200"
    server = launch(*QUICK, *LOSSY, *FLASHINFER, *more, env=server_environment(None))
    (answer,) = server.ask_all([prompts[0][:50]], 1, **greedy(260))
    assert answer["meta_info"]["kv_fallback"] is None and answer["meta_info"]["kv_compressor"] == "quest"
    # Of the last 110 tokens.
    assert 40 < server.metric(CHOICES) < 65


def test_verified_answers_in_deterministic_mode_are_stocks_token_by_token(launch, prompts):
    expected = [r["output_ids"] for r in launch(*EXACT, *PAGES).ask_all(prompts, 1, **greedy(64))]
    server = launch(*EXACT, "--kv-mode", "verified", "--kv-budget", "0.25", *DRAFTS, *QUEST, env=server_environment(None))
    for workers in (1, 4):
        found = server.ask_all(prompts, workers, **greedy(64))
        assert [r["output_ids"] for r in found] == expected
        assert accept_length(found) > 2
    # More than one for each round.
    assert server.metric(CHOICES) > 4 * sum(r["meta_info"]["kv_verifies"] for r in found)


def test_requests_come_and_go_and_are_retracted_while_steps_choose(launch, prompts):
    for every in ("1", "3"):
        flags = *QUICK, *LOSSY, *FLASHINFER, "--kv-select", "0.25", "--kv-select-every", every
        server = launch(*flags, env=server_environment(retraction_steps=5))
        for _ in range(2):
            found = server.ask_all(prompts * 6, 12, **greedy(40))
            assert all(len(r["output_ids"]) == 40 for r in found)
        assert sum(r["meta_info"]["num_retractions"] for r in found) > 0
