"""Verified decoding in the real server gives stock SGLang's answers, whatever the request asks for."""

import json
import urllib.request

import pytest
from servers import EXPECTED_TOKENS, assert_same_answers, assert_times_of_tokens, first_name, greedy

pytestmark = pytest.mark.server

# Gauges of what drafting holds beside SGLang's own.
HELD = ("sglang_ext:compressed_bytes", "sglang_ext:query_bytes")


def test_greedy_output_is_stocks_at_concurrency(verified, prompts, expected):
    found = verified.ask_all(prompts, **greedy(EXPECTED_TOKENS))
    assert [r["output_ids"] for r in found] == expected
    assert all(r["meta_info"]["kv_drafts"] > 0 for r in found)
    assert all(r["meta_info"]["kv_accept_length"] > 1 for r in found)


def test_warm_cache_and_shared_prefix_keep_the_output(stock, verified, prompts):
    body = greedy(24)
    longer = prompts[0] + prompts[1][:50]
    for server in (stock, verified):
        server.flush_cache()
        server.ask(input_ids=prompts[0], **body)
    expected, found = (s.ask(input_ids=longer, **body) for s in (stock, verified))
    assert found["output_ids"] == expected["output_ids"]
    assert found["meta_info"]["cached_tokens"] > 200
    again = verified.ask(input_ids=longer, **body)
    assert again["output_ids"] == expected["output_ids"]


def test_logprobs_and_input_logprobs_match(stock, verified, prompts):
    body = {
        **greedy(24),
        "return_logprob": True,
        "top_logprobs_num": 2,
        "logprob_start_len": 250,
        "token_ids_logprob": [5, 17],
    }
    expected, found = stock.ask_all(prompts[:2], **body), verified.ask_all(prompts[:2], **body)
    for old, new in zip(expected, found):
        for name in ("input_token_logprobs", "output_token_logprobs"):
            left, right = old["meta_info"][name], new["meta_info"][name]
            assert [x[1] for x in left] == [x[1] for x in right]
            pairs = [(a[0], b[0]) for a, b in zip(left, right) if a[0] is not None]
            assert all(abs(a - b) < 1e-3 for a, b in pairs)
        for name in ("output_top_logprobs", "output_token_ids_logprobs"):
            left, right = old["meta_info"][name], new["meta_info"][name]
            assert len(left) == len(right) == 24
            assert [[t[1] for t in row] for row in left] == [[t[1] for t in row] for row in right]


@pytest.mark.parametrize(
    "more",
    [
        {"logit_bias": {"28": -5.0, "30": 2.0}},
        {"stop": ["return", "the"]},
        {"stop_token_ids": [30, 28], "ignore_eos": False},
        {"n": 2},
        {"regex": r"[0-9]{3}-[a-z]{4,12}", "ignore_eos": False},
        {"json_schema": json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})},
        {"ebnf": 'root ::= [a-z]+ (", " [a-z]+)* "."', "ignore_eos": False},
    ],
    ids=first_name,
)
def test_each_sampling_option_gives_stocks_answer(stock, verified, prompts, more):
    body = {"input_ids": prompts[1], **greedy(28, **more)}
    ours = verified.ask(**body)
    assert_same_answers(stock.ask(**body), ours, None)
    assert all(each["meta_info"]["kv_drafts"] > 0 for each in (ours if isinstance(ours, list) else [ours]))


def test_a_stop_right_before_the_longest_output_ends_it(stock, verified, prompts, expected):
    for ids, answer in zip(prompts[:2], expected):
        body = greedy(9, ignore_eos=False, stop_token_ids=[answer[7]])
        body["input_ids"] = ids
        assert_same_answers(stock.ask(**body), verified.ask(**body), None)


def test_streaming_sends_a_chunk_for_each_token_and_the_same_text(stock, verified, prompts):
    expected = stock.ask(input_ids=prompts[2], **greedy(28))
    body = {"input_ids": prompts[2], **greedy(28), "stream": True}
    request = urllib.request.Request(
        verified.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    lengths, text = [], ""
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                lengths.append(chunk["meta_info"]["completion_tokens"])
                text = chunk["text"]
    assert text == expected["text"]
    assert lengths == list(range(1, 29))


def test_abort_while_drafting_frees_everything_and_the_rid_can_come_back(stock, verified, prompts):
    aborted, last = False, None
    for last in verified.stream("generate", {"input_ids": prompts[3], "rid": "to-abort", "stream": True, **greedy(4000)}):
        if not aborted and last["meta_info"]["completion_tokens"] > 8:
            verified.request("/abort_request", {"rid": "to-abort"})
            aborted = True
    assert aborted and last["meta_info"]["finish_reason"]["type"] == "abort"
    verified.flush_cache()
    assert verified.alive()
    assert verified.metric(*HELD) == 0
    body = {"input_ids": prompts[0], "rid": "to-abort", **greedy(16)}
    assert verified.ask(**body)["output_ids"] == stock.ask(**body)["output_ids"]


def test_metrics_count_drafts_verifies_and_fallbacks(verified, prompts):
    verified.ask(input_ids=prompts[0], **greedy(4, min_p=0.2))
    page = verified.request("/metrics")
    for name in ("drafts_total", "verifies_total", "accepted_drafts_total", "accept_length_bucket"):
        assert f"sglang_ext:{name}" in page
    assert 'reason="min-p"' in page


@pytest.mark.parametrize("tokens", [24, 70])
def test_times_of_an_answer_that_is_not_streamed_are_those_of_its_tokens(verified, prompts, tokens):
    assert_times_of_tokens(verified, prompts[0], tokens)


def test_flags_show_in_server_info(verified):
    info = verified.request("/server_info")
    assert (info["kv_mode"], info["kv_compressor"], info["kv_budget"]) == ("verified", "snapkv", 0.25)
