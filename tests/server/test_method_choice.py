"""One server drafts on copies of several methods at once, and each request says on which of them."""

import urllib.error
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import EXPECTED_TOKENS, OWN, greedy

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
