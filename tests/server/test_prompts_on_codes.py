"""Prompts that attend to codes: the same outcome cold, warm, beside others and however they are cut, near that of exact prompts.

Their full KV goes as they are computed, so that more run at once than the pool holds in full.
"""

import concurrent.futures

import pytest
from servers import LOGGED, STRICT, greedy, most_running
from waiting import until

pytestmark = pytest.mark.server

# Slots of the pool, tokens of a chunk, of a page, and of an answer in a crowd.
POOL, CHUNK, PAGE, ANSWER = 2048, 256, 16, 32
# PyTorch rounds products of few rows otherwise, with two threads those of up to seven, the last of a chunk for example; what is rounded
# otherwise is drawn otherwise where it lies at the border of two codes. With one thread chunks of up to three tokens differ, on some
# processors of up to 15.
ENV = STRICT | {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def server(launch):
    """Pages of 16, prompts in chunks, a pool of some three of them, and strict checks."""
    return launch(
        "--kv-mode", "lossy", "--kv-compressor", "hack", "--kv-prefill", "quantized", "--page-size", str(PAGE),
        "--chunked-prefill-size", str(CHUNK), "--max-total-tokens", str(POOL), "--enable-metrics", *LOGGED, env=ENV,
    )  # fmt: skip


def test_what_a_prompt_gives_depends_on_no_company_chunk_or_cached_prefix(server, prompts, kinds):
    assert server.request("server_info")["kv_prefill"] == "quantized"
    # Steps over copies of a batch are rounded otherwise than those of a request, so the token after the prompt is looked at.
    asked = {"return_logprob": True, **greedy(1)}
    # Of whole pages. A cached prefix ends with a block of 64 tokens, after the page of the sinks, and leaves a page at least.
    prompts = [ids[: len(ids) // PAGE * PAGE] for ids in prompts]
    beside = server.ask_all(prompts, 4, **asked)
    alone, warm = zip(*(asked_twice(server, ids, **asked) for ids in prompts))
    assert [r["meta_info"]["cached_tokens"] for r in warm] == [PAGE + (len(ids) - 2 * PAGE) // 64 * 64 for ids in prompts]
    for others in (beside, warm):
        assert after_prompts(others) == pytest.approx(after_prompts(alone), abs=1e-4)
    # Of the same tokens as stock, a little more or less likely.
    body, stocks = kinds["log-probabilities"]
    (found,), (exact,) = after_prompts([server.ask(**body)]), after_prompts([stocks])
    assert 1e-4 < abs(found - exact) < 0.3


def test_a_prompt_that_parts_from_one_whose_codes_alone_are_left_reads_them_and_answers_as_it_does_cold(server, prompts):
    longest = max(prompts, key=len)
    parting = longest[:280] + min(prompts, key=len)[:60]
    asked = {"return_logprob": True, **greedy(8)}
    server.flush_cache()
    cold = server.ask(input_ids=parting, **asked)
    server.flush_cache()
    server.ask(input_ids=longest, **greedy(8))
    assert server.metric("sglang_ext:codes_alone_tokens") >= (len(longest) - PAGE) // 64 * 64
    warm = server.ask(input_ids=parting, **asked)
    # The sinks, a page, and whole blocks of the rest of the first chunk: in pages, codes of a chunk end in a page of their own.
    assert warm["meta_info"]["cached_tokens"] == PAGE + (CHUNK - PAGE) // 64 * 64 and warm["meta_info"]["kv_fallback"] is None
    assert warm["output_ids"] == cold["output_ids"]
    assert logprobs(warm) == pytest.approx(logprobs(cold), abs=1e-4)


def test_more_run_at_once_than_fit_in_full_and_each_answers_as_alone(server, prompts):
    asked = [ids[-400:] if len(ids) >= 400 else ids for ids in prompts]
    # Of whole pages: however the crowd's prompts share chunks, none has fewer than 16 tokens.
    asked = [ids[: len(ids) // PAGE * PAGE] for ids in (*asked, *(ids[5:] for ids in asked))]
    alone = after_prompts(server.ask_all(asked, 1, return_logprob=True, **greedy(1)))
    server.flush_cache()
    since = server.log.stat().st_size
    found = server.ask_all(asked, len(asked), return_logprob=True, **greedy(ANSWER))
    assert after_prompts(found) == pytest.approx(alone, abs=1e-4)
    assert all(r["meta_info"]["kv_fallback"] is None for r in found)
    assert most_running(server, since) > POOL // (max(map(len, asked)) + ANSWER)


def test_prompts_that_are_aborted_while_they_are_computed_or_answered_leave_no_slot_behind(server, prompts):
    server.flush_cache()
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(server.ask, input_ids=ids, rid=f"prompt-{i}", **greedy(40)) for i, ids in enumerate(prompts)]
        until(lambda: server.metric("sglang_ext:codes_alone_tokens"), "a prompt is on codes alone", pause=0.05)
        for i in range(0, len(prompts), 2):
            server.request("abort_request", {"rid": f"prompt-{i}"})
        ended = [answer.result()["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert set(ended[1::2]) == {"length"}
    server.flush_cache()
    assert server.metric("sglang_ext:codes_alone_tokens") == server.metric("sglang_ext:compressed_bytes") == 0 and server.alive()


def asked_twice(server, ids, **body):
    """The answer to a prompt from an empty cache, and that to it asked again."""
    server.flush_cache()
    return server.ask(input_ids=ids, **body), server.ask(input_ids=ids, **body)


def after_prompts(answers):
    """Log-probabilities of the first token of each."""
    return [logprobs(answer)[0] for answer in answers]


def logprobs(answer):
    """Of each token of an answer."""
    return [each[0] for each in answer["meta_info"]["output_token_logprobs"]]


def test_several_answers_under_one_grammar_share_a_prompt_whose_own_request_is_for_no_token(server, prompts):
    params = {"max_new_tokens": 12, "temperature": 0, "n": 2, "regex": "2024-[0-9]{2}"}
    # One prompt is shorter than a copy, the other is computed in chunks.
    for ids in (prompts[0][:24], prompts[0]):
        found = server.ask(input_ids=ids, sampling_params=params)
        assert [r["text"][:5] for r in found] == ["2024-"] * 2 and {r["meta_info"]["finish_reason"]["type"] for r in found} == {"stop"}
        assert server.ask(input_ids=ids, sampling_params={**params, "n": 1, "max_new_tokens": 0})["output_ids"] == []
