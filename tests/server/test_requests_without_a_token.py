"""Requests that SGLang finishes without an output token, or whose grammar allows no token: answers are stock's, and the server goes on.

SGLang sends a request for 0 tokens before those of ``n`` answers, so that they share its prompt in the prefix cache.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import greedy

pytestmark = pytest.mark.server

DATE = r"2024-[0-9]{2}"
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
# Prompt-log-probabilities alone, as a client asks for that scores a text.
SCORES = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [10, 20]}
SCORED = "input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs", "output_token_ids_logprobs"
CASES = [
    ({"max_new_tokens": 12, "n": 2, "regex": DATE}, {}),
    ({"max_new_tokens": 0, "regex": DATE}, {}),
    ({"max_new_tokens": 0, "n": 3, "json_schema": SCHEMA}, {}),
    ({"max_new_tokens": 0}, SCORES),
    ({"max_new_tokens": 0, "regex": DATE}, SCORES),
    ({"max_new_tokens": 1, "n": 2, "regex": DATE}, {}),
    # A small one: where the prefill of one answer joins the decode of the other, stock counts another token than for each alone.
    ({"max_new_tokens": 12, "n": 2, "regex": DATE, "frequency_penalty": 0.01}, {}),
    # After its end the grammar allows the end token alone, and min_new_tokens does not.
    ({"max_new_tokens": 12, "regex": "(a|b)", "min_new_tokens": 6}, {}),
]


def outcome(answer):
    """Tokens, ends and scores of one answer, or of each of a list, as a flat list to compare with pytest.approx."""
    if isinstance(answer, list):
        return [value for each in answer for value in outcome(each)]
    info = answer["meta_info"]
    end = info["finish_reason"]
    # SGLang aborts a request some tokens after its grammar refused one.
    tokens = [] if end["type"] == "abort" else answer["output_ids"]
    return [end["type"], *tokens, *flat([info.get(name) for name in SCORED])]


def flat(values):
    """All numbers in lists of lists."""
    if isinstance(values, list):
        return [value for each in values for value in flat(each)]
    return [] if values is None else [values]


def approximately(values):
    return [value if isinstance(value, str | int) else pytest.approx(value, abs=1e-3) for value in values]


@pytest.fixture
def asked(prompts):
    """Each case after one that is long enough for drafts, and after a short prompt; beside them a request that decodes."""
    texts = prompts[0][:160], prompts[1][:24]
    bodies = [{"input_ids": ids, **greedy(0, **params, ignore_eos=False), **more} for ids in texts for params, more in CASES]
    return [*bodies, {"input_ids": prompts[2], **greedy(24)}]


@pytest.fixture
def ends(once, stock, asked):
    """What becomes of each request at stock."""
    return [approximately(outcome(answer)) for answer in once("without-a-token", lambda: [stock.ask(**body) for body in asked])]


def check_ends_together(server, asked, ends):
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda body: server.ask(**body), asked))
    assert [outcome(answer) for answer in together] == ends
    server.flush_cache()
    assert server.alive()


def test_they_end_as_at_stock_alone_and_together(verified, asked, ends):
    # Alone those that may draft.
    assert [outcome(verified.ask(**body)) for body in asked[: len(CASES)]] == ends[: len(CASES)]
    check_ends_together(verified, asked, ends)


def test_they_end_as_at_stock_together_in_the_plain_loop(paged, asked, ends):
    check_ends_together(paged, asked, ends)
