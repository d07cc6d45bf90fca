"""SGLang's overlapped loop, the default on a GPU: a round is launched before the result of the last one is processed."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import EXPECTED_TOKENS, assert_same_answers, greedy

pytestmark = pytest.mark.server

WORDS = r"(yes|no)( and (yes|no)){2,4}"


def ask_together(server, bodies):
    """Answers to all, asked at once."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: server.ask(**body), bodies))


def test_stock_and_verified_run_the_overlapped_loop(stock, verified):
    for server in (stock, verified):
        assert not server.request("server_info")["disable_overlap_schedule"]


def test_a_grammar_request_that_finishes_beside_others_leaves_the_next_round(stock, verified, prompts, expected):
    # A round is launched before it is known who finished in the last one: its grammar is walked past its end.
    bodies = [
        {"input_ids": prompts[0], **greedy(EXPECTED_TOKENS)},
        {"input_ids": prompts[1], **greedy(24, regex=WORDS, ignore_eos=False)},
        {"input_ids": prompts[2], **greedy(9)},
        {"input_ids": prompts[3], **greedy(5), "return_logprob": True, "top_logprobs_num": 2},
        {"input_ids": prompts[1][:200], **greedy(40, regex="[a-z ]{20}", ignore_eos=False)},
    ]
    alone = [stock.ask(**body)["output_ids"] for body in bodies]
    assert alone[0] == expected[0]
    for _ in range(2):
        found = ask_together(verified, bodies)
        assert [r["output_ids"] for r in found] == alone
        assert len(found[3]["meta_info"]["output_top_logprobs"]) == 5
    assert verified.alive()


PENALTIES = [
    {"frequency_penalty": 0.6, "presence_penalty": 0.3},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.4, "repetition_penalty": 1.2, "regex": "[a-z ]{30}", "ignore_eos": False},
    {"min_new_tokens": 8, "stop_token_ids": [28, 30], "ignore_eos": False},
    {"logit_bias": {"28": -5.0}},
]


def test_penalties_are_counted_along_drafts_and_whoever_joins(stock, verified, prompts):
    # In stock's overlapped loop a prefill that joins changes what was counted: here each is stock's answer to that request alone.
    asked = [*PENALTIES, *PENALTIES[:2]]
    bodies = [{"input_ids": prompts[place % 4], **greedy(16 + 2 * place, **more)} for place, more in enumerate(asked)]
    alone = [stock.ask(**body) for body in bodies]
    verified.flush_cache()
    for theirs, ours in zip(alone, ask_together(verified, bodies)):
        assert_same_answers(theirs, ours, None)
        # The others may end at once.
        assert ours["meta_info"]["kv_drafts"] > 0 or len(ours["output_ids"]) < 10


def test_samples_of_one_request_differ_where_seeds_do_not_count(paged, prompts):
    params = {"temperature": 1.0, "n": 4, "sampling_seed": 7, "max_new_tokens": 24, "ignore_eos": True}
    found = paged.ask(input_ids=prompts[0], sampling_params=params)
    assert len({tuple(answer["output_ids"]) for answer in found}) == 4


def test_copies_draft_as_well_warm_and_beside_others_as_cold_and_alone(several, prompts, expected):
    # The prefix tree exchanges slots of a warm prompt after the first round was launched over them.
    several.flush_cache()

    def accepted(answers):
        return [r["meta_info"]["kv_accepted"] / r["meta_info"]["kv_drafts"] for r in answers]

    body = {"input_ids": prompts[1], **greedy(EXPECTED_TOKENS)}
    cold = several.ask(**body)
    busy = ask_together(several, [body, {**body, "input_ids": prompts[2]}, body, {**body, "input_ids": prompts[0]}])
    for found, place in zip((cold, *busy), (1, 1, 2, 1, 0)):
        assert found["output_ids"] == expected[place]
    first, *others = accepted([cold, busy[0], busy[2]])
    assert min(others) > 0.7 * first
