"""One server drafts on copies of several methods at once, and each request says on which of them."""

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import EXPECTED_TOKENS, OWN, greedy

from sglang_ext.hooks.request_body import HEADER

pytestmark = pytest.mark.server

# The first serves whoever asks for none.
METHODS = ("kivi", "snapkv", "snapkv:0.125", OWN)
# As they are told; of a user's own it is the class.
CALLED = dict(zip(METHODS, (*METHODS[:3], "KeyNorm")))


def asking(tokens, method):
    """Body of a greedy request for so many tokens, and a method; None for the server's first."""
    return greedy(tokens) if method is None else greedy(tokens, custom_params={"kv_compressor": method})


def test_requests_of_four_methods_at_once_get_stocks_answers_and_are_told_what_served_them(several, prompts, expected):
    several.flush_cache()
    # The second time the beginnings of the prompts are in the prefix tree, and each method leaves its own copy of them there.
    for _ in range(2):
        with ThreadPoolExecutor(6) as pool:
            asked = [
                (method, answer, pool.submit(several.ask, input_ids=ids, **asking(EXPECTED_TOKENS, method)))
                for ids, answer in zip(prompts[1:3], expected[1:3])
                for method in (None, *METHODS[1:])
            ]
        for method, answer, found in asked:
            told = found.result()["meta_info"]
            assert found.result()["output_ids"] == answer
            assert told["kv_compressor"] == CALLED[method or METHODS[0]]
            assert told["kv_drafts"] > 0 and told["kv_fallback"] is None
    for called in CALLED.values():
        assert several.metric(f'sglang_ext:copies_total{{compressor="{called}"') >= 4


@pytest.mark.parametrize("path", ["generate", "v1/completions"])
def test_an_acceptance_that_the_server_does_not_force_is_refused(several, prompts, path):
    body = {"input_ids": prompts[0], **greedy(4, custom_params={"kv_acceptance": 0.9})}
    if path != "generate":
        body = {"model": "default", "prompt": prompts[0], "custom_params": {"kv_acceptance": 0.9}}
    with pytest.raises(urllib.error.HTTPError) as raised:
        several.request(path, body)
    assert raised.value.code == 400 and "--kv-bench-acceptance" in raised.value.read().decode()


@pytest.mark.parametrize("path", ["generate", "v1/completions"])
def test_a_method_that_the_server_does_not_have_is_refused_by_name_and_the_server_goes_on(several, prompts, expected, path):
    body = {"input_ids": prompts[0], **asking(4, "snapkv:0.5")}
    if path != "generate":
        body = {"model": "default", "prompt": prompts[0], "custom_params": {"kv_compressor": "snapkv:0.5"}}
    with pytest.raises(urllib.error.HTTPError) as raised:
        several.request(path, body)
    told = raised.value.read().decode()
    assert raised.value.code == 400 and "'snapkv:0.5'" in told and ", ".join(CALLED.values()) in told
    assert several.ask(input_ids=prompts[0], **asking(4, "snapkv"))["output_ids"] == expected[0][:4]


SNAPKV = {"kv_compressor": "snapkv:0.125"}
# A short request to each endpoint.
SHORT = {
    "generate": {"text": "hi there", **greedy(4)},
    "v1/completions": {"model": "default", "prompt": "hi there", "max_tokens": 4},
    "v1/chat/completions": {"model": "default", "messages": [{"role": "user", "content": "hi there"}], "max_tokens": 4},
    "v1/responses": {"model": "default", "input": "hi there", "max_output_tokens": 8},
}


def ask_with_header(server, path, body, params):
    """POST with custom parameters in the header that SGLang's router forwards."""
    headers = {"Content-Type": "application/json", HEADER: json.dumps(params)}
    request = urllib.request.Request(f"{server.url}/{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


@pytest.mark.parametrize("place", [SNAPKV, {"custom_params": SNAPKV}, "header"], ids=["key", "custom_params", "header"])
def test_a_method_that_is_asked_for_at_the_top_level_or_in_a_header_serves_the_request(several, prompts, expected, place):
    body = {"input_ids": prompts[1], **greedy(EXPECTED_TOKENS)}
    found = ask_with_header(several, "generate", body, SNAPKV) if place == "header" else several.ask(**body, **place)
    assert found["meta_info"]["kv_compressor"] == "snapkv:0.125" and found["output_ids"] == expected[1]


@pytest.mark.parametrize("path", SHORT)
def test_no_endpoint_ignores_a_method_that_the_server_does_not_have_at_the_top_level_or_in_the_header(several, path):
    wrong = {"kv_compressor": "snapkv:0.5"}
    for asked, header in ((wrong, {}), ({"custom_params": wrong}, {}), ({}, wrong)):
        with pytest.raises(urllib.error.HTTPError) as raised:
            ask_with_header(several, path, {**SHORT[path], **asked}, header)
        assert raised.value.code == 400 and "this server compresses with" in raised.value.read().decode()
    assert ask_with_header(several, path, {**SHORT[path], **SNAPKV}, {})
