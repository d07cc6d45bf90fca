"""Rounds in SGLang's plain loop, with pages of 16 and chunked prefill, give stock's answers too."""

import pytest
from servers import EXPECTED_TOKENS, assert_same_answers, first_name, greedy

pytestmark = pytest.mark.server


def test_greedy_output_is_stocks_cold_and_warm(paged, prompts, expected):
    assert paged.request("server_info")["disable_overlap_schedule"]
    for cold in (True, False):
        found = paged.ask_all(prompts, 3, cold, **greedy(EXPECTED_TOKENS))
        assert [r["output_ids"] for r in found] == expected
        assert all(r["meta_info"]["kv_drafts"] > 0 for r in found)


@pytest.mark.parametrize(
    "more",
    [
        {"regex": r"[0-9]{3}-[a-z]{4,12}", "ignore_eos": False},
        {"stop": ["return", "the"]},
    ],
    ids=first_name,
)
def test_grammars_draft_and_give_stocks_answer(stock, paged, prompts, more):
    body = {"input_ids": prompts[1], **greedy(28, **more)}
    assert_same_answers(stock.ask(**body), paged.ask(**body), fallback=None)
