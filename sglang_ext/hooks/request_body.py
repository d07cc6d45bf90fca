"""Reads a request's custom parameters from places that SGLang ignores, and adds them to ``sampling_params.custom_params``.

SGLang's request models drop unknown fields without an error. A client may set ``kv_*`` parameters and ``custom_params`` here:

1. At the top level of the body of any endpoint. The ``extra_body`` of an OpenAI client puts them there.
2. In the header :data:`HEADER`, as a JSON object. SGLang's router drops unknown fields of a body; it forwards headers whose names
   begin with ``x-request-id-``.

:func:`read_body` runs when FastAPI parses the body, before the fields are dropped. It stores the parameters in a context variable,
because endpoints convert the request in between. :func:`add_custom_params` adds them to each ``GenerateReqInput`` of the same request.
"""

import json
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from fastapi import HTTPException, Request
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_ext.config.request_params import CUSTOM_PARAMS, REQUEST_PARAMS, check_key

HEADER = "x-request-id-custom-params"
IN_SAMPLING_PARAMS = f"sampling_params.{CUSTOM_PARAMS}"
_of_request: ContextVar[dict[str, Any]] = ContextVar("custom_params_of_request", default={})
"""Custom parameters of the HTTP request that the running task serves."""


async def read_body(original: Callable[[Request], Awaitable[Any]], request: Request) -> Any:
    """Hook around ``ORJSONRequest.json``: return the parsed body without custom parameters at its top level.

    SGLang caches the whole body, so that further calls find them again. The client gets status 400 (``HTTPException``) if a key is
    misspelled, a parameter has two values, or the header is not a JSON object.
    """
    body = await original(request)
    try:
        rest, params = split_body(body)
        _of_request.set(merge(params, _read_header(request), f"the header {HEADER}", "the body"))
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
    return rest


def split_body(body: Any) -> tuple[Any, dict[str, Any]]:
    """Split a parsed body into the fields for SGLang and the custom parameters at its top level."""
    if not isinstance(body, dict):
        return body, {}
    for key in body:
        check_key(key, "the request")
    found = {key: body[key] for key in REQUEST_PARAMS if key in body}
    params = merge(_as_object(body.get(CUSTOM_PARAMS), CUSTOM_PARAMS), found, "the top level", CUSTOM_PARAMS)
    return {key: value for key, value in body.items() if key not in REQUEST_PARAMS and key != CUSTOM_PARAMS}, params


def add_custom_params(obj: GenerateReqInput) -> None:
    """Add the custom parameters of the HTTP request to a request's ``sampling_params``. Raises ``ValueError`` if one has another value there."""
    asked, given = _of_request.get(), obj.sampling_params
    if asked:
        obj.sampling_params = [_add(each, asked) for each in given] if isinstance(given, list) else _add(given or {}, asked)


def _add(sampling_params: Any, asked: dict[str, Any]) -> Any:
    """Return a copy with the parameters added. Wrong types are returned as they are, for frontend.py to refuse."""
    if not isinstance(sampling_params, dict):
        return sampling_params
    given = sampling_params.get(CUSTOM_PARAMS) or {}
    if not isinstance(given, dict):
        return sampling_params
    return {**sampling_params, CUSTOM_PARAMS: merge(given, asked, "the request", IN_SAMPLING_PARAMS)}


def merge(first: dict[str, Any], second: dict[str, Any], of_second: str, of_first: str) -> dict[str, Any]:
    """Merge the parameters of two places, with these names in messages. Raises ``ValueError`` if one has different values in them."""
    for key in first.keys() & second.keys():
        if first[key] != second[key]:
            raise ValueError(f"{key} is {first[key]!r} in {of_first} and {second[key]!r} in {of_second}: pass it once")
    return {**first, **second}


def _read_header(request: Request) -> dict[str, Any]:
    text = request.headers.get(HEADER)
    if text is None:
        return {}
    try:
        params = json.loads(text)
    except ValueError:
        params = text
    params = _as_object(params, f"the header {HEADER}")
    for key in params:
        check_key(key, f"the header {HEADER}")
    return params


def _as_object(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, dict | None):
        return value or {}
    raise ValueError(f"""{name} is {value!r}; pass a JSON object, as in {{"kv_compressor": "snapkv"}}, or leave it out""")
