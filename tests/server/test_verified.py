"""Verified decoding in the real server gives stock SGLang's answers, whatever the request asks for."""

import concurrent.futures
import json
import urllib.error
import urllib.request

import pytest

pytestmark = pytest.mark.server

VERIFIED = ("--kv-mode", "verified", "--kv-budget", "0.25", "--enable-metrics")


@pytest.fixture(scope="module")
def stock(launch):
    return launch()


@pytest.fixture(scope="module")
def verified(launch):
    return launch(*VERIFIED)


def run_all(server, prompts, workers=4, **body):
    """Outputs of all prompts at once, cold cache."""
    server.flush()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda ids: server.generate(input_ids=ids, **body), prompts))


def sampling(tokens=40, **more):
    return {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def test_greedy_output_is_stocks_at_concurrency(stock, verified, prompts):
    body = {"sampling_params": sampling()}
    expected, found = run_all(stock, prompts, **body), run_all(verified, prompts, **body)
    assert [r["output_ids"] for r in found] == [r["output_ids"] for r in expected]
    assert all(r["meta_info"]["kv_drafts"] > 0 for r in found)
    assert all(r["meta_info"]["kv_accept_length"] > 1 for r in found)


def test_warm_cache_and_shared_prefix_keep_the_output(stock, verified, prompts):
    body = {"sampling_params": sampling(24)}
    longer = prompts[0] + prompts[1][:50]
    for server in (stock, verified):
        server.flush()
        server.generate(input_ids=prompts[0], **body)
    expected, found = (s.generate(input_ids=longer, **body) for s in (stock, verified))
    assert found["output_ids"] == expected["output_ids"]
    assert found["meta_info"]["cached_tokens"] > 200
    again = verified.generate(input_ids=longer, **body)
    assert again["output_ids"] == expected["output_ids"]


def test_logprobs_and_input_logprobs_match(stock, verified, prompts):
    body = {
        "sampling_params": sampling(24),
        "return_logprob": True,
        "top_logprobs_num": 2,
        "logprob_start_len": 250,
        "token_ids_logprob": [5, 17],
    }
    expected, found = run_all(stock, prompts[:2], **body), run_all(verified, prompts[:2], **body)
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
    ("more", "fallback"),
    [
        ({"frequency_penalty": 0.5, "presence_penalty": 0.3}, "penalty"),
        ({"repetition_penalty": 1.3}, "penalty"),
        ({"min_new_tokens": 8, "ignore_eos": False}, "penalty"),
        ({"regex": r"[0-9]{3}-[a-z]{4,12}", "ignore_eos": False}, "grammar"),
        ({"json_schema": json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})}, "grammar"),
        ({"logit_bias": {"28": -5.0, "30": 2.0}}, None),
        ({"stop": ["return", "the"]}, None),
        ({"stop_token_ids": [30, 28]}, None),
        ({"n": 2}, None),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_sampling_option_gives_stocks_answer(stock, verified, prompts, more, fallback):
    body = {"sampling_params": sampling(**more), "input_ids": prompts[1]}
    expected, found = stock.generate(**body), verified.generate(**body)
    expected, found = (r if isinstance(r, list) else [r] for r in (expected, found))
    assert [r["output_ids"] for r in found] == [r["output_ids"] for r in expected]
    assert [r["text"] for r in found] == [r["text"] for r in expected]
    reasons = [r["meta_info"]["finish_reason"] for r in found]
    assert reasons == [r["meta_info"]["finish_reason"] for r in expected]
    assert {r["meta_info"]["kv_fallback"] for r in found} == {fallback}


def test_streaming_sends_no_empty_chunk_and_the_same_text(stock, verified, prompts):
    expected = stock.generate(input_ids=prompts[2], sampling_params=sampling())
    body = {"input_ids": prompts[2], "sampling_params": sampling(), "stream": True}
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
    assert lengths == sorted(set(lengths)), "a chunk brought no new token"


def test_abort_while_drafting_frees_everything_and_the_rid_can_come_back(stock, verified, prompts):
    def long_request():
        return verified.generate(
            input_ids=prompts[3], rid="to-abort", sampling_params=sampling(400)
        )

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pending = pool.submit(long_request)
        concurrent.futures.wait([pending], timeout=4)
        verified.request("/abort_request", {"rid": "to-abort"})
        result = pending.result(60)
    assert result["meta_info"]["finish_reason"]["type"] == "abort"
    verified.flush()
    assert verified.alive()
    assert held_bytes(verified) == 0
    body = {"input_ids": prompts[0], "rid": "to-abort", "sampling_params": sampling(16)}
    assert verified.generate(**body)["output_ids"] == stock.generate(**body)["output_ids"]


def held_bytes(server) -> float:
    """The server's gauge of bytes in compressed slots."""
    lines = server.request("/metrics").splitlines()
    return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith("sglang_ext:compressed_bytes"))


def test_new_weights_drop_what_was_cached_and_serve_on(verified, prompts, model):
    body = {"input_ids": prompts[1], "sampling_params": sampling(16)}
    before = verified.generate(**body)
    answer = verified.request("/update_weights_from_disk", {"model_path": str(model)})
    assert answer["success"]
    after = verified.generate(**body)
    assert after["meta_info"]["cached_tokens"] == 0
    assert after["output_ids"] == before["output_ids"]


def test_metrics_count_drafts_verifies_and_fallbacks(verified):
    page = verified.request("/metrics")
    for name in ("drafts_total", "verifies_total", "accepted_drafts_total", "accept_length_bucket"):
        assert f"sglang_ext:{name}" in page
    assert 'reason="grammar"' in page and 'reason="penalty"' in page


def test_flags_show_in_server_info(verified):
    info = verified.request("/server_info")
    assert (info["kv_mode"], info["kv_compressor"], info["kv_budget"]) == ("verified", "snapkv", 0.25)


@pytest.mark.parametrize(
    "body",
    [b"{not json", json.dumps({"text": "x", "sampling_params": {"no_such_option": 1}}).encode(),
     json.dumps({"input_ids": [5] * 9000, "sampling_params": {"max_new_tokens": 4}}).encode()],
    ids=["malformed", "unknown-option", "too-long"],
)
def test_bad_requests_get_stocks_error_and_the_server_goes_on(stock, verified, body):
    codes = []
    for server in (stock, verified):
        request = urllib.request.Request(
            server.url + "/generate", body, {"Content-Type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(request, timeout=60)
        codes.append(raised.value.code)
    assert codes[0] == codes[1] >= 400
    assert verified.alive()
