"""SGLang's router forwards the header for custom parameters to both servers, at each endpoint."""

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sglang_ext.hooks.request_body import HEADER
from sglang_ext.serve_pd import ROUTER, Router
from sglang_ext.tools.server_process import free_port
from sglang_ext_bench.server import BenchServer

PARAMS = {"kv_compressor": "kivi"}
BODIES = {
    "generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
    "v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    "v1/completions": {"model": "m", "prompt": "a"},
}


class StartedRouter(Router, BenchServer):
    """SGLang's router, as a context manager."""


class Backend(ThreadingHTTPServer):
    """A server that records what it is asked and gives the same answer to all requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str | None]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    """Answers of a :class:`Backend`."""

    def do_GET(self) -> None:
        self._answer({"status": "ok", "model_path": "m"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, self.headers.get(HEADER)))
        self._answer({"text": "a", "meta_info": {}, "choices": []})

    def _answer(self, content: dict[str, object]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def backends() -> Iterator[list[Backend]]:
    """In the place of the prefill and the decode server."""
    found = [Backend(), Backend()]
    yield found
    for each in found:
        each.shutdown()


@pytest.fixture(scope="module")
def router(backends: list[Backend], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """SGLang's router before both."""
    pytest.importorskip(ROUTER, reason="make test installs it, from requirements/pd.txt, where the package index has it for this machine")
    log = tmp_path_factory.mktemp("router") / "router.log"
    with StartedRouter(free_port(), [each.server_port for each in backends], free_port(), Path(log)) as started:
        yield started


@pytest.mark.parametrize("path", BODIES)
def test_both_servers_get_the_header(router: Router, backends: list[Backend], path: str) -> None:
    headers = {"Content-Type": "application/json", HEADER: json.dumps(PARAMS)}
    request = urllib.request.Request(f"{router.url}/{path}", json.dumps(BODIES[path]).encode(), headers)
    urllib.request.urlopen(request, timeout=60).close()
    end = time.monotonic() + 10
    while not all((f"/{path}", json.dumps(PARAMS)) in each.asked for each in backends):
        assert time.monotonic() < end, [each.asked for each in backends]
        time.sleep(0.05)
