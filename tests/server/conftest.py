"""Real SGLang servers for tests: ``launch(*flags)`` starts one, reuses it, and stops it at the end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
START_SECONDS = 240
# Few enough that the machine's memory holds them: further ones push out the oldest.
KEPT_SERVERS = 2


@dataclass
class Server:
    """A running server: ``url``, its ``flags``, its log."""

    url: str
    flags: tuple[str, ...]
    process: subprocess.Popen
    log: Path
    texts: list[str] = field(default_factory=list)

    def request(self, path: str, body: dict[str, Any] | None = None, timeout: float = 300) -> Any:
        """GET, or POST with a JSON body; the JSON answer, or text where it is not JSON."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"} if data else {}
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            text = response.read().decode()
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    def generate(self, **body: Any) -> Any:
        """POST /generate."""
        return self.request("/generate", body)

    def flush(self) -> None:
        """Empty the prefix cache."""
        self.request("/flush_cache", {})

    def alive(self) -> bool:
        """Whether the server answers its health check."""
        try:
            self.request("/health", timeout=30)
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False
        return True

    def stop(self) -> None:
        """End the server by its process group."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(30)


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(model: Path, flags: tuple[str, ...], folder: Path, env: dict[str, str] | None = None) -> Server:
    """Start a server and wait until it is healthy."""
    port = free_port()
    log = folder / f"server-{port}.log"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    if "--max-total-tokens" not in flags:
        command += ["--max-total-tokens", "16384"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})}
    with log.open("w") as sink:
        process = subprocess.Popen(
            [*command, *flags], stdout=sink, stderr=sink, env=environment, start_new_session=True
        )
    server = Server(f"http://127.0.0.1:{port}", flags, process, log)
    deadline = time.monotonic() + START_SECONDS
    try:
        while not server.alive():
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"server {flags} did not start:\n" + log.read_text()[-3000:])
            time.sleep(1)
    except BaseException:
        server.stop()
        raise
    return server


@pytest.fixture(scope="session")
def model() -> Path:
    """The demo model's folder."""
    from sglang_ext.demo_model import prepare

    return prepare(ROOT / ".cache/models/SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def launch(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Start (or reuse) a server with these flags."""
    running: dict[tuple, Server] = {}
    folder = tmp_path_factory.mktemp("servers")

    def launch_server(*flags: str, env: dict[str, str] | None = None) -> Server:
        key = (*flags, *sorted((env or {}).items()))
        if key in running and running[key].process.poll() is None:
            running[key] = running.pop(key)
            return running[key]
        while len(running) >= KEPT_SERVERS:
            running.pop(next(iter(running))).stop()
        running[key] = start(model, flags, folder, env)
        return running[key]

    yield launch_server
    for server in running.values():
        server.stop()


@pytest.fixture(scope="session")
def prompts(model: Path) -> list[list[int]]:
    """Token ids of real text: source code and prose, 300 to 700 tokens each."""
    import argparse
    import inspect
    import textwrap

    import pydoc_data.topics
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    topics = "\n".join(list(pydoc_data.topics.topics.values())[:12])
    texts = [inspect.getsource(argparse), topics, inspect.getsource(textwrap), topics[9000:]]
    lengths = [300, 430, 560, 700]
    return [tokenizer.encode(text[:8000])[:length] for text, length in zip(texts, lengths)]
