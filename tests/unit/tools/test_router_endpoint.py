"""A frontend program's lists of prompts go one by one, as SGLang's router takes them."""

import inspect
import json
import runpy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import sglang as sgl
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

from sglang_ext.router_endpoint import RouterEndpoint

# Log-probabilities of a choice by its words.
SCORES = {"good": -1.0, "bad": -3.0, "worse": -5.0, "text": -4.0, "numbers": -1.0, "pictures": -2.0}
EXAMPLE = Path(__file__).parents[3] / "examples/frontend_program.py"


class Router(BaseHTTPRequestHandler):
    """Answers as SGLang's router does: a list of texts with status 422."""

    asked: list[dict] = []

    def do_GET(self):
        self.answer(200, {"model_path": "a-model"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        text = body.get("text", "")
        if isinstance(text, list) or (body.get("input_ids") and isinstance(body["input_ids"][0], list)):
            self.answer(422, "Failed to deserialize the JSON body into the target type: text: invalid type: sequence, expected a string")
            return
        scored = [[None, 1, "A"]] + [[SCORES[word], 2, f" {word}"] for word in text.split() if word in SCORES]
        self.answer(200, {"text": "", "meta_info": {"prompt_tokens": 3, "input_token_logprobs": scored, "output_token_logprobs": []}})

    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def url():
    Router.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Router)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@sgl.function
def choose(s):
    s += "A word is" + sgl.select("word", choices=[" bad", " good", " worse"])


def test_a_choice_is_made_of_one_request_a_prompt(url):
    state = choose.run(backend=RouterEndpoint(url))
    assert state.error() is None and state["word"] == " good"
    assert state.get_meta_info("word")["normalized_prompt_logprobs"] == [-3.0, -1.0, -5.0]
    assert all(isinstance(body["text"], str) for body in Router.asked) and len(Router.asked) == 4


@pytest.mark.filterwarnings("ignore:Error in stream_executor")
def test_stocks_endpoint_sends_them_in_one_which_the_router_refuses(url):
    """Where this fails, SGLang asks otherwise: the class may go."""
    assert "invalid type: sequence" in str(choose.run(backend=RuntimeEndpoint(url)).error())


@pytest.mark.filterwarnings("ignore:Error in stream_executor")
def test_the_example_says_how_it_runs_behind_the_router_and_does(url, capsys):
    main = runpy.run_path(str(EXAMPLE))["main"]
    with pytest.raises(SystemExit, match=f"(?s)invalid type: sequence.*\nbefore SGLang's router add: {url} router$"):
        main(url)
    main(url, "router")
    assert "subject:  numbers" in capsys.readouterr().out


def test_lists_of_token_ids_go_one_by_one_and_a_single_prompt_as_it_is(url):
    backend = RouterEndpoint(url)
    executor = type("NoImages", (), {"images_": []})()
    assert len(backend._generate_http_request(executor, {"input_ids": [[1, 2], [3]], "return_logprob": True})) == 2
    assert sorted(body["input_ids"] for body in Router.asked) == [[1, 2], [3]] and all(body["return_logprob"] for body in Router.asked)
    for body in ({"input_ids": [1, 2]}, {"text": "a"}):
        assert backend._generate_http_request(executor, dict(body))["text"] == "" and Router.asked[-1] == body


def test_what_is_replaced_is_as_it_was():
    assert list(inspect.signature(RuntimeEndpoint._generate_http_request).parameters) == ["self", "s", "data"]
