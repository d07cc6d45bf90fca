"""Rounds in SGLang's plain loop (--disable-overlap-schedule) give stock's answers too."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import EXPECTED_TOKENS, assert_same_answers, first_name, greedy

pytestmark = pytest.mark.server


def test_greedy_output_is_stocks_cold_and_warm(plain, prompts, expected):
    assert plain.request("server_info")["disable_overlap_schedule"]
    for cold in (True, False):
        found = plain.ask_all(prompts, cold=cold, **greedy(EXPECTED_TOKENS))
        assert [r["output_ids"] for r in found] == expected
        assert all(r["meta_info"]["kv_drafts"] > 0 and r["meta_info"]["kv_accept_length"] > 1 for r in found)


@pytest.mark.parametrize(
    "more",
    [
        {"regex": r"[0-9]{3}-[a-z]{4,12}", "ignore_eos": False},
        {"stop": ["return", "the"]},
    ],
    ids=first_name,
)
def test_grammars_draft_and_give_stocks_answer(stock, plain, prompts, more):
    body = {"input_ids": prompts[1], **greedy(28, **more)}
    assert_same_answers(stock.ask(**body), plain.ask(**body), fallback=None)


def test_seeded_sampling_beside_a_penalty_is_stocks(stock, plain, prompts):
    seeded = {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 3, "max_new_tokens": 24, "ignore_eos": True}
    bodies = [{"input_ids": prompts[1], "sampling_params": seeded}, {"input_ids": prompts[0], **greedy(60, frequency_penalty=0.5)}]
    expected = stock.ask(**bodies[0])
    with ThreadPoolExecutor(2) as pool:
        found, penalized = pool.map(lambda body: plain.ask(**body), bodies)
    assert_same_answers(expected, found, None)
    assert found["meta_info"]["kv_drafts"] > 0
    assert penalized["meta_info"]["kv_fallback"] == "penalty" and len(penalized["output_ids"]) == 60
