"""The soak against running servers: supported options, leaks, and chat completions with tools."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from random import Random
from typing import Any

import pytest
from bench_helpers import PROMPT

from sglang_ext.tools import CommandError
from sglang_ext_bench.__main__ import main
from sglang_ext_bench.soaking import sending, tool_calls
from sglang_ext_bench.soaking.answers import AnswerError, DiffersFromStock, check
from sglang_ext_bench.soaking.external_server import (
    ExternalServer,
    describe_leak,
    supported_options,
)
from sglang_ext_bench.soaking.request_options import OPTIONS
from sglang_ext_bench.soaking.traffic import SoakRequest, cases, draw_request

BY_NAME = {option.name: option for option in OPTIONS}
CALL = {"name": "add", "arguments": '{"left": 1, "right": 4}'}
IDLE = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0}


class Handler(BaseHTTPRequestHandler):
    """Answers GET requests from ``pages``, by path. Of a list, each request takes the next page; the last one stays."""

    pages: dict[str, Any] = {}

    def do_GET(self) -> None:
        page = self.pages[self.path]
        if isinstance(page, list):
            page = page.pop(0) if len(page) > 1 else page[0]
        body = json.dumps(page).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch, quick_sleep: None) -> Iterator[ExternalServer]:
    """The client of a running server."""
    monkeypatch.setattr(Handler, "pages", {"/health": "", "/v1/loads": {"loads": [IDLE]}, "/server_info": {}})
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with ExternalServer(f"http://127.0.0.1:{server.server_port}/", 5.0) as client:
        yield client
    server.shutdown()
    thread.join()
    server.server_close()


class TestExternalServer:
    def test_a_missing_server_is_refused_with_its_address(self) -> None:
        with pytest.raises(CommandError, match="no healthy server at http://127.0.0.1:9"), ExternalServer("http://127.0.0.1:9", 1.0):
            pass

    @pytest.mark.parametrize(("url", "told"), [
        ("http://127.0.0.1:9", "soak: no healthy server at http://127.0.0.1:9: start it, or"),
        ("127.0.0.1:9", "soak: '127.0.0.1:9' is not the address of a server: pass one with http://"),
    ])  # fmt: skip
    @pytest.mark.parametrize("option", ["--url", "--stock-url"])
    def test_a_wrong_address_ends_the_command_in_one_line(self, option: str, url: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["soak", "--model", "none", "--prompts", "none", option, url]) == 2
        assert capsys.readouterr().err.startswith(told)

    def test_options_that_need_a_flag_that_a_server_lacks_are_left_out_and_printed(
        self, running: ExternalServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        served = {option.name for option in supported_options(OPTIONS, [running])}
        assert {"greedy", "regex", "logprobs"} <= served
        assert not {"seeded", "hidden-states", "tools", "logit-processor"} & served
        assert "without --tool-call-parser: tools, tools-streamed" in capsys.readouterr().out
        settings = ("enable_deterministic_inference", "enable_custom_logit_processor", "enable_return_hidden_states")
        Handler.pages["/server_info"] = {**dict.fromkeys(settings, True), "tool_call_parser": "hermes"}
        assert supported_options(OPTIONS, [running]) == OPTIONS

    def test_tokens_and_requests_that_stay_are_a_leak(self, running: ExternalServer) -> None:
        assert describe_leak(running) is None
        Handler.pages["/v1/loads"] = {"loads": [IDLE, {**IDLE, "num_used_tokens": 3, "num_running_reqs": 1}]}
        assert str(describe_leak(running)).endswith("holds 1 running requests, 3 used tokens")

    def test_a_server_that_becomes_idle_in_time_has_no_leak(self, running: ExternalServer) -> None:
        held = {"loads": [{**IDLE, "num_used_tokens": 3}]}
        Handler.pages["/v1/loads"] = [held, held, {"loads": [IDLE]}]
        assert describe_leak(running) is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--url", "http://h", "--apart"), "--apart with --url"),
        (("--url", "http://h", "--force-retraction", "3"), "SGLANG_TEST_RETRACT_INTERVAL=3"),
        (("--leave-out", "greedy,nothing"), "--leave-out 'nothing'"),
        (("--requests", "-1"), "--requests -1"),
    ],
)
def test_options_that_exclude_each_other_are_refused(words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["soak", "--model", "m", "--prompts", "p", *words]) == 2
    assert told in capsys.readouterr().err


def chat(content: str | None, *calls: dict[str, str], finish: str = "tool_calls") -> dict[str, Any]:
    message = {"content": content, "tool_calls": [{"function": call} for call in calls] or None}
    return {"choices": [{"message": message, "finish_reason": finish}]}


def chunk(finish: str | None = None, content: str | None = None, index: int = 0, **function: str) -> dict[str, Any]:
    calls = [{"index": index, "function": function}] if function else None
    return {"choices": [{"delta": {"content": content, "tool_calls": calls}, "finish_reason": finish}]}


class Chatting:
    """A server that answers chat completions."""

    def __init__(self, whole: Any = None, chunks: list[dict[str, Any]] | None = None) -> None:
        self.whole, self.chunks, self.paths = whole, chunks or [], []

    def post(self, path: str, body: dict[str, Any]) -> Any:
        self.paths.append(path)
        return self.whole

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.paths.append(path)
        yield from self.chunks

    def post_quietly(self, path: str, body: dict[str, Any]) -> None: ...


STREAMED = [chunk(content="so: "), chunk(name="add", arguments=""), chunk(arguments='{"left": 1'), chunk(arguments=', "right": 4}'), chunk("tool_calls")]


class TestTools:
    def test_a_stream_adds_up_to_the_whole_message(self) -> None:
        asked = BY_NAME["tools"]
        server = Chatting(chat("so: ", CALL), STREAMED)
        whole, streamed = (sending.post(server, asked, asked.body(PROMPT, 9), stream) for stream in (False, True))
        assert whole == streamed and server.paths == [tool_calls.PATH] * 2
        assert json.loads(str(whole[0].message))["calls"] == [CALL]

    @pytest.mark.parametrize(
        "wrong",
        [chat("so: "), chat("so: ", CALL, CALL), chat("so: ", {**CALL, "name": "look_up"}), chat("so: ", CALL, finish="length"), chat("", CALL)],
    )
    def test_another_message_differs_from_stocks(self, wrong: dict[str, Any]) -> None:
        asked = BY_NAME["tools"]
        request = SoakRequest("r", 0, asked, 9, "plain", stream=False, delay=0.0)
        right, other = (sending.post(Chatting(each), asked, {}, False) for each in (chat("so: ", CALL), wrong))
        check(request, right, right)
        with pytest.raises(DiffersFromStock, match="finish reason"):
            check(request, other, right)

    @pytest.mark.parametrize("chunks", [STREAMED[:-1], [{"error": {"message": "full"}}], [{"choices": [{}]}]])
    def test_a_stream_that_breaks_off_is_refused(self, chunks: list[dict[str, Any]]) -> None:
        with pytest.raises(AnswerError):
            sending.post(Chatting(chunks=chunks), BY_NAME["tools"], {}, True)

    def test_requests_with_tools_are_of_one_length_and_streamed_as_the_option_says(self) -> None:
        chance = Random(1)
        drawn = [draw_request(chance, "r", cases(1, 0, [BY_NAME["tools"], BY_NAME["tools-streamed"]]), 9) for _ in range(200)]
        assert {each.tokens for each in drawn} == {9} and {each.kind for each in drawn} == {"plain", "abort"}
        assert all(each.stream == (each.option.name == "tools-streamed") for each in drawn)
        body = drawn[0].body([PROMPT])
        assert body["input_ids"] == [1, 2, 3] and body["tool_choice"] == "required" and body["max_tokens"] == 9


def test_requests_name_a_compressor_where_their_route_takes_it() -> None:
    for name in ("tools", "logit-processor", "greedy"):
        request = SoakRequest("r", 0, BY_NAME[name], 9, "plain", stream=False, delay=0.0, compressor="int8")
        body = request.body([PROMPT])
        asked = (body if name == "tools" else body["sampling_params"])["custom_params"]
        assert asked["kv_compressor"] == "int8" and ("token_ids" in asked) == (name == "logit-processor")
