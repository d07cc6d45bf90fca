"""Lossy serving gives full KV back: more contexts run at once than the pool holds in full, each with its own answer, and nothing leaks."""

import concurrent.futures

import pytest
from servers import LOGGED, STRICT, STRIPS_THOUGHTS, greedy, most_running
from waiting import tries, until

pytestmark = pytest.mark.server

# Tokens of a prompt and of its answer, and slots of the pool: stock would hold three at once.
PROMPT, ANSWER, POOL = 400, 24, 1600


@pytest.fixture
def lossy(launch):
    """A server on int4 codes, with a pool of little more than three contexts, and strict checks."""
    flags = ("--kv-mode", "lossy", "--kv-compressor", "int4", "--max-total-tokens", str(POOL), "--enable-metrics", *LOGGED)
    return launch(*flags, *STRIPS_THOUGHTS, env=STRICT)


@pytest.fixture
def asked(prompts):
    """Six prompts, of which the last three begin alike and part within a block."""
    text = [token for prompt in prompts for token in prompt]
    begins = text[:200]
    return [text[i * PROMPT : (i + 1) * PROMPT] for i in range(3)] + [begins + text[1300 + i * 200 : 1500 + i * 200] for i in range(3)]


def test_more_contexts_run_than_fit_in_full_and_each_answers_as_it_does_alone(lossy, asked):
    alone = []
    for ids in asked[:3]:
        lossy.flush_cache()
        alone.append(lossy.ask(input_ids=ids, **greedy(ANSWER)))
    for _ in tries(4, "no more ran at once than fit in full"):
        since = lossy.log.stat().st_size
        found = lossy.ask_all(asked[:3] + asked[:3], 6, **greedy(ANSWER))
        assert all(r["meta_info"]["kv_fallback"] is None and r["meta_info"]["kv_compressor"] == "int4" for r in alone + found)
        # Of two that are alike the one that comes later may attend to what the other's codes mean.
        for expected, *both in zip(alone, found[:3], found[3:], strict=True):
            assert expected["output_ids"] in [r["output_ids"] for r in both]
        if most_running(lossy, since) > POOL // (PROMPT + ANSWER):
            break
    assert lossy.metric("sglang_ext:codes_alone_tokens") >= 3 * 300


def test_a_prompt_that_begins_as_one_whose_codes_alone_are_left_reads_them(lossy, asked):
    lossy.flush_cache()
    assert lossy.metric("sglang_ext:codes_alone_tokens") == 0
    first = lossy.ask(input_ids=asked[3], **greedy(ANSWER))
    for ids in (asked[3], asked[4]):
        warm = lossy.ask(input_ids=ids, **greedy(ANSWER))
        # The first four tokens in full, and whole blocks of the rest.
        assert warm["meta_info"]["cached_tokens"] >= 196
        assert warm["output_ids"][0] == first["output_ids"][0] or ids is not asked[3]
        assert len(warm["output_ids"]) == ANSWER and warm["meta_info"]["kv_fallback"] is None


def test_aborts_in_a_crowd_leave_no_slot_behind(lossy, asked):
    lossy.flush_cache()
    since = lossy.log.stat().st_size
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        answers = [pool.submit(lossy.ask, input_ids=ids, rid=f"crowd-{i}", **greedy(40)) for i, ids in enumerate(asked)]
        until(lambda: most_running(lossy, since) >= 2, "two requests run at once")
        for i in range(0, len(asked), 2):
            lossy.request("abort_request", {"rid": f"crowd-{i}"})
        ended = [answer.result()["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert ended[1::2] == ["length"] * 3
    lossy.flush_cache()
    assert lossy.metric("sglang_ext:codes_alone_tokens") == lossy.metric("sglang_ext:compressed_bytes") == 0 and lossy.alive()


def test_answers_that_leave_the_cache_with_their_thought_leave_no_slot_behind(lossy, asked):
    lossy.flush_cache()
    before = lossy.metric("sglang_ext:codes_alone_tokens")
    # Long enough that full KV of generated tokens is freed before the request ends.
    found = lossy.ask_all(asked[:2], 2, cold=False, require_reasoning=True, **greedy(260))
    assert before == 0 and all(r["meta_info"]["reasoning_tokens"] > 0 and len(r["output_ids"]) == 260 for r in found)
    warm = lossy.ask(input_ids=asked[0], require_reasoning=True, **greedy(ANSWER))
    assert warm["meta_info"]["cached_tokens"] >= 196 and len(warm["output_ids"]) == ANSWER
    lossy.flush_cache()
    assert lossy.metric("sglang_ext:codes_alone_tokens") == lossy.metric("sglang_ext:compressed_bytes") == 0 and lossy.alive()


def test_each_token_of_a_lossy_round_is_a_chunk_of_a_stream(lossy, asked):
    body = {"input_ids": asked[0], **greedy(ANSWER)}
    chunks = list(lossy.stream("generate", {**body, "stream": True}))
    assert [chunk["meta_info"]["completion_tokens"] for chunk in chunks] == list(range(1, ANSWER + 1))
    assert [chunk["output_ids"] for chunk in chunks] == [chunks[-1]["output_ids"][: i + 1] for i in range(ANSWER)]
    assert chunks[-1]["meta_info"]["kv_compressor"] == "int4"
