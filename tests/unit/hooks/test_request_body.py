"""Custom parameters at the top level of a body or in a header reach ``sampling_params``, whichever endpoint takes them."""

import asyncio
import json
from inspect import unwrap
from types import SimpleNamespace

import pytest
from fastapi import HTTPException
from fastapi.testclient import TestClient
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.http_server import ORJSONRequest
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_ext.hooks.request_body import HEADER, add_custom_params, read_body


async def serve(body, header=None, sampling_params=None):
    """What the endpoint sees of a body, and the sampling parameters of the request that it makes of it, read twice."""
    headers = [] if header is None else [(HEADER.encode(), header.encode())]

    async def receive():
        return {"type": "http.request", "body": json.dumps(body).encode()}

    request = ORJSONRequest({"type": "http", "headers": headers, "path": "/", "method": "POST"}, receive)
    rest = await read_body(unwrap(ORJSONRequest.json), request)
    assert await read_body(unwrap(ORJSONRequest.json), request) == rest
    obj = GenerateReqInput(text="a", sampling_params=sampling_params)
    # SGLang normalizes a request as it came, and each of its prompts again.
    add_custom_params(obj)
    add_custom_params(obj)
    return rest, obj.sampling_params


def served(*args, **named):
    """As :func:`serve`, in a context of its own, as HTTP requests are."""
    return asyncio.run(serve(*args, **named))


KIVI = {"kv_compressor": "kivi"}


@pytest.mark.parametrize(("body", "header"), [
    ({"kv_compressor": "kivi"}, None),
    ({"custom_params": KIVI}, None),
    ({}, json.dumps(KIVI)),
    ({"kv_compressor": "kivi", "custom_params": KIVI}, json.dumps(KIVI)),
])  # fmt: skip
@pytest.mark.parametrize("given", [None, {}, {"temperature": 0}, {"custom_params": None}, {"custom_params": {"token_ids": [1]}}])
def test_each_place_counts_as_custom_params(body, header, given):
    rest, found = served({"text": "a", **body}, header, given)
    assert rest == {"text": "a"}
    assert found == {**(given or {}), "custom_params": {**((given or {}).get("custom_params") or {}), **KIVI}}


def test_each_prompt_of_a_list_gets_them():
    _, found = served(KIVI, sampling_params=[{"temperature": 0}, {"temperature": 1}])
    assert found == [{"temperature": 0, "custom_params": KIVI}, {"temperature": 1, "custom_params": KIVI}]


@pytest.mark.parametrize("body", [{"text": "a"}, [1], "a", None])
def test_other_bodies_are_left_as_they_are(body):
    assert served(body, sampling_params={"temperature": 0}) == (body, {"temperature": 0})


def test_a_request_does_not_get_those_of_the_one_before():
    async def both():
        return [await serve(body) for body in (KIVI, {})]

    assert [found for _, found in asyncio.run(both())] == [{"custom_params": KIVI}, None]


@pytest.mark.parametrize(("body", "header", "words"), [
    ({"kv-compressor": "kivi"}, None, "the request has 'kv-compressor', .* did you mean 'kv_compressor'"),
    ({"compressor": "kivi"}, None, "the request has 'compressor', .* did you mean 'kv_compressor'"),
    ({"customParams": KIVI}, None, "the request has 'customParams', .* did you mean 'custom_params'"),
    ({"custom_params": "kivi"}, None, "custom_params is 'kivi'; pass a JSON object"),
    ({"kv_compressor": "kivi", "custom_params": {"kv_compressor": "int4"}}, None, "kv_compressor is 'int4' in custom_params and 'kivi'"),
    ({"kv_compressor": "kivi"}, '{"kv_compressor": "int4"}', "kv_compressor is 'kivi' in the body and 'int4' in the header"),
    ({}, "kivi", f"the header {HEADER} is 'kivi'; pass a JSON object"),
    ({}, "[1]", f"the header {HEADER} is .1.; pass a JSON object"),
    ({}, '{"compressor": 1}', f"the header {HEADER} has 'compressor'"),
])  # fmt: skip
def test_what_is_misspelled_or_said_twice_gets_status_400(body, header, words):
    with pytest.raises(HTTPException, match=words) as raised:
        served(body, header)
    assert raised.value.status_code == 400


def test_another_value_in_sampling_params_is_refused():
    with pytest.raises(ValueError, match="kv_compressor is 'int4' in sampling_params.custom_params and 'kivi' in the request: pass it once"):
        served(KIVI, sampling_params={"custom_params": {"kv_compressor": "int4"}})


@pytest.fixture
def client(monkeypatch):
    """A client of SGLang's HTTP application, with the hook, before a tokenizer manager that answers with sampling parameters."""
    original = unwrap(ORJSONRequest.json)

    async def generate_request(obj, request):
        add_custom_params(obj)
        yield {"text": "", "sampling_params": obj.sampling_params}

    manager = SimpleNamespace(generate_request=generate_request, create_abort_task=lambda obj: None)
    monkeypatch.setattr(ORJSONRequest, "json", lambda request: read_body(original, request))
    monkeypatch.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=manager))
    return TestClient(http_server.app)


@pytest.mark.parametrize("stream", [False, True])
def test_sglangs_application_hands_them_to_the_request_that_it_makes(client, stream):
    for asked, headers in ((KIVI, {}), ({"custom_params": KIVI}, {}), ({}, {HEADER: json.dumps(KIVI)})):
        told = client.post("/generate", json={"text": "a", "stream": stream, **asked}, headers=headers).text
        assert json.loads(told.removeprefix("data: ").split("\n")[0])["sampling_params"] == {"custom_params": KIVI}
    assert "kivi" not in client.post("/generate", json={"text": "a"}).text


@pytest.mark.parametrize("path", [
    "generate", "v1/completions", "v1/chat/completions", "v1/responses", "v1/messages", "invocations", "api/chat", "api/generate",
])  # fmt: skip
def test_each_endpoint_refuses_a_misspelled_parameter_before_it_reads_the_rest(client, path):
    answer = client.post(f"/{path}", json={"kv-compressor": "kivi"})
    assert answer.status_code == 400 and "did you mean 'kv_compressor'" in answer.text
