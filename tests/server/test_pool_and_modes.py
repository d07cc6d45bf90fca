"""Page size, chunking, a pool too small, retraction, lossy mode: still stock's answers."""

import pytest
from servers import EXPECTED_TOKENS, STRICT, assert_same_answers, assert_times_of_tokens, greedy
from waiting import tries

from sglang_ext_bench.soaking.soak import server_environment

pytestmark = pytest.mark.server


@pytest.fixture
def retracting(launch):
    """A server with a pool too small for all requests, which retracts one every few steps."""
    return launch(
        "--kv-mode", "verified", "--kv-budget", "0.5", "--max-total-tokens", "1400", "--kv-draft-length", "8",
        "--schedule-conservativeness", "0.1", env=server_environment(retraction_steps=6),
    )


def test_a_pool_too_small_and_retractions_keep_the_output(retracting, prompts, expected):
    # A retraction falls on one of so many of the scheduler's steps, with whom it may be.
    for _ in tries(5, "none was retracted"):
        found = retracting.ask_all([*prompts, *prompts[:2]], 6, **greedy(EXPECTED_TOKENS))
        assert [r["output_ids"] for r in found] == [*expected, *expected[:2]]
        assert sum(r["meta_info"]["kv_drafts"] for r in found) > 0
        if sum(r["meta_info"]["num_retractions"] for r in found) > 0:
            break
    retracting.flush_cache()
    assert retracting.alive()


def test_a_prompt_whose_answer_just_fits_the_pool_is_answered(stock, retracting, prompts):
    # Stock's pool of 1,400 slots takes no longer one.
    body = {"input_ids": [*prompts[3], *prompts[3][:680]], **greedy(18)}
    expected, found = (server.ask(**body) for server in (stock, retracting))
    assert len(found["output_ids"]) == 18 and found["output_ids"] == expected["output_ids"]


def test_what_was_accepted_after_an_end_is_neither_kept_nor_counted(stock, retracting, prompts):
    whole = stock.ask(input_ids=prompts[1], **greedy(EXPECTED_TOKENS))["output_ids"]
    for end in range(2, EXPECTED_TOKENS, 3):
        found = retracting.ask(input_ids=prompts[1], **greedy(EXPECTED_TOKENS, stop_token_ids=[whole[end]], ignore_eos=False))
        told, count = found["meta_info"], len(found["output_ids"])
        assert found["output_ids"] == whole[: whole.index(whole[end]) + 1]
        assert told["completion_tokens"] == count
        assert told["kv_accepted"] + told["kv_verifies"] < count


def answers_until_retracted(server, beside, body):
    """Its answers until one was retracted: which of two requests that is, and when, is the scheduler's."""
    for _ in tries(5, "it was never retracted"):
        answer, _ = server.ask_beside({"input_ids": beside, **greedy(88)}, **body)
        yield answer
        if answer["meta_info"]["num_retractions"]:
            break


def test_a_retracted_request_keeps_what_it_was_penalized_for(retracting, prompts, penalized):
    for body, theirs in penalized:
        for ours in answers_until_retracted(retracting, prompts[2], body):
            assert (ours["output_ids"], ours["text"]) == (theirs["output_ids"], theirs["text"])
            assert ours["meta_info"]["finish_reason"] == theirs["meta_info"]["finish_reason"]


def test_a_retracted_request_goes_on_in_its_grammar_where_it_was(retracting, prompts, worded):
    body, theirs = worded
    for ours in answers_until_retracted(retracting, prompts[2], body):
        assert_same_answers(theirs, ours, None)


def test_lossy_serves_the_compressed_view_and_leaves_the_prefix_tree_exact(launch, prompts, expected):
    server = launch("--kv-mode", "lossy", "--kv-budget", "0.125", "--enable-metrics", env=STRICT)
    found = server.ask_all(prompts, 2, **greedy(EXPECTED_TOKENS))
    assert all(len(r["output_ids"]) == EXPECTED_TOKENS for r in found)
    assert all(r["meta_info"]["kv_verifies"] == 0 for r in found)
    assert [r["output_ids"] for r in found] != expected, "1/8 of the KV cannot give all of stock's tokens"
    # The first token after a cached prompt comes from full KV: the tree holds no lossy tokens.
    longer = prompts[0] + found[0]["output_ids"]
    again = server.ask(input_ids=longer, **greedy(1))
    assert again["meta_info"]["cached_tokens"] <= len(prompts[0])
    assert_times_of_tokens(server, prompts[1], EXPECTED_TOKENS)
