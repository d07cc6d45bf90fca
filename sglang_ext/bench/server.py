"""A real SGLang server as a subprocess, and requests to it over HTTP."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from sglang_ext.bench import BenchError
from sglang_ext.bench.generation import Generation, parse_response

HOST = "127.0.0.1"
TAIL_LINES = 25
ORPHAN_GRACE = 2.0
"""Seconds in which workers end after their server has."""


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are chosen. ``temperature`` 0 is greedy; a seed needs a server that honours it."""

    temperature: float = 0.0
    seed: int | None = None

    def as_json(self, new_tokens: int) -> dict[str, Any]:
        """``sampling_params`` of a request for exactly ``new_tokens`` tokens."""
        params: dict[str, Any] = {
            "temperature": self.temperature,
            "max_new_tokens": new_tokens,
            "ignore_eos": True,
        }
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        return params


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


class ServerProcess:
    """Context manager: starts ``sglang.launch_server``, waits until it is healthy, and ends it.

    Args:
        model: folder or name, as for ``--model-path``.
        arguments: further arguments of the server.
        log: file that takes the server's output.
        port: TCP port; 0 for any free one.
        start_timeout: seconds until ``/health`` must answer.
        request_timeout: seconds for one request.
        stop_grace: seconds between SIGTERM and SIGKILL.

    Raises:
        BenchError: on entry, when the server ends or does not answer in time (with the log's tail).
    """

    def __init__(
        self,
        model: str,
        arguments: tuple[str, ...],
        log: Path,
        port: int = 0,
        start_timeout: float = 300.0,
        request_timeout: float = 1800.0,
        stop_grace: float = 30.0,
    ) -> None:
        self.port = port or free_port()
        self.log = log
        self.command = (
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", model),
            *("--host", HOST, "--port", str(self.port), *arguments),
        )
        self.start_timeout = start_timeout
        self.request_timeout = request_timeout
        self.stop_grace = stop_grace
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "ServerProcess":
        self._refuse_taken_port()
        with self.log.open("wb") as log:
            # A session of its own gives a process group that holds all of the server's workers.
            self._process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            self._wait_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server: SIGTERM and wait; SIGKILL to what is left of its group after the grace."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(self.stop_grace)
        except subprocess.TimeoutExpired:
            pass  # the group is killed below
        if _wait_group_gone(process.pid, ORPHAN_GRACE):
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # it ended between the look and the signal
        process.wait()
        _wait_group_gone(process.pid, ORPHAN_GRACE)

    def flush_cache(self) -> None:
        """Empty the prefix cache.

        Raises:
            BenchError: the server refused, or is gone.
        """
        request = urllib.request.Request(f"{self._url('flush_cache')}?timeout=30", method="POST")
        try:
            with urllib.request.urlopen(request, timeout=60):
                pass
        except (OSError, urllib.error.HTTPError) as error:
            raise BenchError(
                f"POST /flush_cache failed: {_message(error)}; the server must be idle and alive\n"
                f"{self.describe_log()}"
            ) from error

    def generate(
        self,
        input_ids: tuple[int, ...],
        sampling: SamplingSettings,
        new_tokens: int,
        with_margins: bool = False,
    ) -> Generation:
        """Send one prompt; a refused or broken request comes back as ``Generation.error``."""
        body: dict[str, Any] = {
            "input_ids": list(input_ids),
            "sampling_params": sampling.as_json(new_tokens),
        }
        if with_margins:
            body |= {"return_logprob": True, "top_logprobs_num": 2}
        started = time.monotonic()
        try:
            payload = self.post("generate", body)
        except (OSError, ValueError) as error:
            return Generation(error=_message(error), seconds=time.monotonic() - started)
        return parse_response(payload, time.monotonic() - started)

    def describe_log(self) -> str:
        """The command and the last lines of the server's log, for an error message."""
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"command: {shlex.join(self.command)}", "end of its log:", *lines])

    def _url(self, path: str) -> str:
        return f"http://{HOST}:{self.port}/{path}"

    def post_quietly(self, path: str, body: dict[str, Any]) -> None:
        """POST, for requests whose answer does not matter (an abort that comes too late)."""
        try:
            self.post(path, body)
        except (OSError, ValueError):
            return

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST a JSON body, return the JSON answer.

        Raises:
            OSError: the server refused (``urllib.error.HTTPError``) or is gone.
        """
        request = urllib.request.Request(
            self._url(path), json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=self.request_timeout) as response:
            return json.load(response)

    def _refuse_taken_port(self) -> None:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, self.port)) == 0:
                raise BenchError(
                    f"port {self.port} is taken; another server would answer in this one's place. "
                    "Pass --port with a free one, or 0 for any"
                )

    def _wait_healthy(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self.start_timeout
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise BenchError(
                    f"the server ended with code {self._process.returncode} while it started\n"
                    f"{self.describe_log()}"
                )
            try:
                with urllib.request.urlopen(self._url("health"), timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        raise BenchError(
            f"the server was not healthy after {self.start_timeout:g} s (--start-timeout)\n"
            f"{self.describe_log()}"
        )


def _wait_group_gone(group: int, seconds: float) -> bool:
    """Wait until no process of the group is left, at most ``seconds``; whether that is so."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def _message(error: Exception) -> str:
    """The server's own words where it sent any, else the error's."""
    if not isinstance(error, urllib.error.HTTPError):
        return f"{type(error).__name__}: {error}"
    text = error.read().decode(errors="replace")
    try:
        return f"HTTP {error.code}: {json.loads(text)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}: {text.strip()[:500]}"
