"""Requests that nobody should send: what stock answers is answered alike, the rest is refused, and the server goes on."""

import json
import os
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import request_fuzz
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from servers import STOCK

pytestmark = pytest.mark.server

FUZZ_SECONDS = float(os.environ.get("FUZZ_SECONDS", "10"))
FUZZ_SEED = int(os.environ.get("FUZZ_SEED", "1"))
STUCK_SECONDS = 120
# The prefill that joins decides what stock's own penalties have counted, in its overlapped loop.
PENALTIES = {"frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens"}
OURS = ("leave it out", "own tokenizer")
"""One of these is in each message of ``frontend.py``: stock ends at most of what these refuse."""


class Over(BaseException):
    """The time is; hypothesis passes on what is no ``Exception``."""


def status(server, path, body):
    """Status and answer, or what it says of the request."""
    try:
        if body.get("stream"):
            last = [*server.stream(path, body)][-1:]
            if not last:
                raise ConnectionError("the stream ended without an answer")
            last = last[0]
            return (400, last["error"]["message"]) if "error" in last else (200, last)
        return 200, server.request(path, body)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


PARAMETERS = [
    ("max_new_tokens", 3.5, "expected `int | null`, got `float`"),
    ("max_new_tokens", True, "expected `int | null`, got `bool`"),
    ("sampling_seed", "abc", "expected `int | null`, got `str`"),
    ("sampling_seed", 2**63, "pass a number from -9223372036854775808 to 9223372036854775807"),
    ("top_k", 2**31, "pass a number from -1 to 2147483647"),
    ("logit_bias", {"5": 1e39}, "1e+39 for token '5'"),
    ("repetition_penalty", 1e-300, "is 1e-300; pass a number from"),
    ("stop_token_ids", [[1]], "pass a list of token ids"),
    ("logit_bias", {"5": "a"}, "expected `float`, got `str`"),
    ("custom_params", "snapkv", "expected `object | null`, got `str`"),
    ("custom_params", {"kv_copmressor": "snapkv"}, "did you mean 'kv_compressor'"),
    ("is_normalized", True, "SGLang sets it itself"),
    ("max_tokens", 5, "which SGLang does not know"),
]
FIELDS = [
    ({"input_ids": [1, 99999]}, "input_ids has 99999 at place 1; the model's vocabulary has token ids from 0 to {last}"),
    ({"input_ids": [-1]}, "input_ids has -1 at place 0"),
    ({"text": "hi there", "return_logprob": True, "top_logprobs_num": 10**6}, "top_logprobs_num is 1000000; pass a number from 0 to"),
    ({"text": "hi there, you", "return_logprob": True, "logprob_start_len": -3}, "logprob_start_len is -3; pass a number from -1 to"),
    ({"text": "hi there", "session_params": {"rid": 5}}, "session_params.rid is 5: expected `str | null`"),
    ({"text": "hi there", "custom_logit_processor": "abc"}, "custom_logit_processor is 'abc', which is not a processor"),
    ({"text": "hi there", "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num is -1; pass a number from 0 to"),
]
ASKED = {
    "generate": {"text": "hi there"},
    "v1/completions": {"model": "default", "prompt": "hi there"},
    "v1/chat/completions": {"model": "default", "messages": [{"role": "user", "content": "hi there"}]},
}


def test_what_cannot_be_served_is_named_on_each_route_and_the_server_goes_on(verified, model_config):
    cases = [
        ("generate", {"text": "hi there", "sampling_params": {"max_new_tokens": 3, field: value, "n": samples}}, (field, words))
        for field, value, words in PARAMETERS
        for samples in (1, 2)
    ]
    last = model_config["vocab_size"] - 1
    cases += [("generate", {**body, "sampling_params": {"max_new_tokens": 3}}, (words.format(last=last),)) for body, words in FIELDS]
    cases += [
        (path, {**ASKED[path], "max_tokens": 3, "seed": 2**63}, ("sampling_seed is 9223372036854775808",))
        for path in ("v1/completions", "v1/chat/completions")
    ]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda case: status(verified, *case[:2]), cases))
    for (_, body, words), (code, told) in zip(cases, found, strict=True):
        assert code == 400, (body, told)
        assert all(part in told for part in words) and any(part in told for part in OURS), (body, told)
    assert verified.alive()


def test_a_profile_is_written_while_requests_are_answered(verified, tmp_path):
    asked = {"input_ids": list(range(40, 60)), "sampling_params": {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}}
    before = verified.ask(**asked)["output_ids"]
    verified.request("start_profile", {"output_dir": str(tmp_path)})
    assert verified.ask(**asked)["output_ids"] == before
    verified.request("stop_profile", {})
    assert any(file.stat().st_size for file in tmp_path.iterdir()) and verified.alive()


def test_what_a_fuzz_sends_ends_no_server_and_what_is_valid_gets_stocks_answers(stock, verified, launch):
    ends = time.monotonic() + FUZZ_SECONDS
    asked = {"bodies": 0, "equal": 0, "ends of stock": 0}

    @seed(FUZZ_SEED)
    @settings(
        max_examples=100_000,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(request_fuzz.drawn, min_size=6, max_size=12))
    def send(drawn):
        bodies = [body for body, _ in drawn]
        # On a busy machine the first bodies may take long, or end stock.
        enough = asked["equal"] and asked["bodies"] >= 6
        if time.monotonic() > (ends if enough else ends + 300):
            raise Over
        answers = together(verified, bodies)
        # What stock's scheduler would end at is not sent there; what is allowed by its documents is, refused or not.
        sent = [
            (body, answer)
            for (body, valid), answer in zip(drawn, answers, strict=True)
            if valid or answer[0] == 200 or not any(part in str(answer[1]) for part in OURS)
        ]
        try:
            expected = together(launch(*STOCK), [body for body, _ in sent])
        except (OSError, AssertionError):
            # Some of what we answer ends stock, in the company of others.
            asked["ends of stock"] += 1
            return
        for (body, ours), stocks in zip(sent, expected, strict=True):
            assert ours[0] == stocks[0], (json.dumps(body), ours, stocks)
            if ours[0] == 200 and is_comparable(body["sampling_params"] or {}):
                assert tokens(ours[1]) == tokens(stocks[1]), json.dumps(body)
                asked["equal"] += 1
        asked["bodies"] += len(bodies)

    def together(server, bodies):
        began = time.monotonic()
        with ThreadPoolExecutor(len(bodies) or 1) as pool:
            answers = list(pool.map(lambda body: status(server, "generate", body), bodies))
        assert server.alive(timeout=STUCK_SECONDS), bodies
        assert time.monotonic() - began < STUCK_SECONDS, bodies
        return answers

    with suppress(Over):
        send()
    print(asked)
    assert asked["bodies"] >= 6 and asked["equal"] > 0


def is_comparable(params):
    """Whether stock's answer is the same in any company: that of a drawn token depends on how the others are drawn."""
    return isinstance(params, dict) and not PENALTIES & set(params) and (params.get("temperature", 1) == 0 or params.get("top_k") == 1)


def tokens(answer):
    """Of one answer, or of each of a list."""
    return [tokens(one) for one in answer] if isinstance(answer, list) else answer["output_ids"]
