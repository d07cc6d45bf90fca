"""Where the pool does not hold all prompts at once, and host memory takes the rest, answers are stock's too."""

import concurrent.futures

import pytest
from servers import EXPECTED_TOKENS, assert_same_answers, greedy

pytestmark = pytest.mark.server


def test_greedy_output_is_stocks_cold_and_warm(crowded, prompts, expected):
    for cold in (True, False):
        found = crowded.ask_all(prompts, cold=cold, **greedy(EXPECTED_TOKENS))
        assert [r["output_ids"] for r in found] == expected
        assert all(r["meta_info"]["kv_drafts"] > 0 for r in found)
        assert all(r["meta_info"]["kv_accept_length"] > 1 for r in found)


def test_variables_that_a_shell_has_left_force_nothing(crowded, prompts, expected):
    answer = crowded.ask(input_ids=prompts[1], **greedy(EXPECTED_TOKENS))
    assert answer["output_ids"] == expected[1] and answer["meta_info"]["kv_accepted"] > 0
    assert "kv_simulated_acceptance" not in answer["meta_info"]
    info = crowded.request("server_info")
    assert (info["kv_bench_acceptance"], info["kv_bench_corrupt_loads"]) == (None, None)


def test_seeded_sampling_with_logprobs_is_stocks(stock, crowded, prompts):
    params = {"temperature": 0.9, "top_p": 0.95, "sampling_seed": 5, "max_new_tokens": 24, "ignore_eos": True}
    body = {"input_ids": prompts[0], "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    expected, found = (server.ask(**body) for server in (stock, crowded))
    assert_same_answers(expected, found, None)
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert len(found["meta_info"][name]) == 24
    pairs = zip(expected["meta_info"]["output_token_logprobs"], found["meta_info"]["output_token_logprobs"])
    assert all(a[1] == b[1] and abs(a[0] - b[0]) < 1e-3 for a, b in pairs)


def test_a_grammar_drafts_and_its_neighbour_too(stock, crowded, prompts):
    more = {"regex": r"[0-9]{3}-[a-z]{4,12}", "ignore_eos": False}
    bodies = [{"input_ids": prompts[1], **greedy(24, **more)}, {"input_ids": prompts[2], **greedy(60)}]
    expected = [stock.ask(**body) for body in bodies]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda body: crowded.ask(**body), bodies))
    assert_same_answers(expected[0], found[0], None)
    assert found[1]["output_ids"] == expected[1]["output_ids"]
    assert all(answer["meta_info"]["kv_drafts"] > 0 for answer in found)
