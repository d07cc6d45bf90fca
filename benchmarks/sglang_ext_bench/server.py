"""Servers that benchmarks and tests start, and requests to them."""

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, Self

from sglang_ext.config.model_folder import read_config
from sglang_ext.tools import CommandError, server_process
from sglang_ext.tools.server_process import LocalServer, ServerProcess, stop_together

PROMPT_LENGTH_OPTION = "--context-len"
"""Option of most benchmarks for the length of prompts."""
RESERVED_TOKENS = 2
"""Tokens of the context that SGLang's scheduler does not use. It silently shortens longer outputs."""


class RequestClient(LocalServer):
    """Sends requests to a server on a TCP port of this machine. ``request_timeout``: time limit of one request, in seconds."""

    def __init__(self, port: int, request_timeout: float = 1800.0) -> None:
        self.port = port
        self.request_timeout = request_timeout

    def request(self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Send a GET request, or with ``body`` a POST request. Return the JSON of the response, or its text if it is no JSON.

        ``timeout`` is in seconds; None: the client's. Raises :class:`OSError` if the server returned an error (``urllib.error.HTTPError``),
        is not reachable, or exceeded the time limit.
        """
        with self._open(path, body, timeout) as response:
            text = response.read().decode()
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    @contextmanager
    def _open(self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None) -> Iterator[HTTPResponse]:
        """Send a request. The error of an incomplete response is an :class:`OSError`, like that of other lost connections."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data else {}
        request = urllib.request.Request(f"{self.url}/{path.lstrip('/')}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.request_timeout if timeout is None else timeout) as response:
                yield response
        except HTTPException as error:
            raise ConnectionError(f"the response is incomplete: {error!r}") from error

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Send a POST request. Yield the JSON of each server-sent event when it arrives. Raises as :meth:`request`.

        A stream that breaks off may also just end.
        """
        with self._open(path, body) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    def flush_cache(self) -> None:
        """Empty the prefix cache. Raises :class:`CommandError` if the server refuses."""
        try:
            self.request("flush_cache?timeout=30", {}, timeout=60)
        except OSError as error:
            raise CommandError(f"POST /flush_cache failed: {describe_error(error)}; the server must be idle and alive") from error

    def post_quietly(self, path: str, body: dict[str, Any]) -> None:
        """Send a POST request and ignore errors, for example for an abort that may be too late."""
        with suppress(OSError, ValueError):
            self.post(path, body)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a POST request. Return the JSON of the response. Raises as :meth:`request`."""
        return self.request(path, body)


class BenchServer(ServerProcess, RequestClient):
    """A server that benchmarks send requests to. Its context manager starts it, waits until it is healthy, and stops it.

    On entry it raises :class:`CommandError` if the server ended, or was not healthy in time.

    Example:
        with BenchServer(model, ("--kv-mode", "verified"), Path("server.log")) as server:
            server.post("generate", {"text": "Hello"})
    """

    def __init__(self, *arguments: Any, request_timeout: float = 1800.0, **settings: Any) -> None:
        """Other arguments are those of :class:`ServerProcess`."""
        super().__init__(*arguments, **settings)
        self.request_timeout = request_timeout

    def __enter__(self) -> Self:
        self.start()
        with ExitStack() as on_error:
            on_error.callback(self.stop)
            self.wait_healthy()
            on_error.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server: SIGTERM, then SIGKILL to the processes of its group that remain after the grace period."""
        stop_together([self])

    @property
    def group(self) -> int | None:
        """Process group of the server and its workers. None if the server was not started."""
        return None if self._process is None else self._process.pid

    def flush_cache(self) -> None:
        """Empty the prefix cache. An error message shows the end of the log too."""
        try:
            super().flush_cache()
        except CommandError as error:
            raise CommandError(f"{error}\n{self.describe_log()}") from error


def check_servers(model: str, servers: Mapping[str, Sequence[str]], max_tokens: int, length_option: str = PROMPT_LENGTH_OPTION) -> None:
    """Check servers as :func:`server_process.check_servers`, and that their contexts have the longest request's ``max_tokens``.

    ``length_option``: option for the length of prompts, for the message.
    """
    server_process.check_servers(model, servers)
    for name, flags in servers.items():
        check_length(Path(model), name, flags, max_tokens, length_option)


def check_length(model: Path, name: str, flags: Sequence[str], max_tokens: int, length_option: str = PROMPT_LENGTH_OPTION) -> None:
    """Refuse requests longer than a server's context (:class:`CommandError`), if the context is known."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--json-model-override-args", default="{}")
    args, others = parser.parse_known_args(flags)
    if "--config" in others:
        return  # a file with further flags
    context = args.context_length
    if not context:
        known = args.json_model_override_args == "{}" and (model / "config.json").is_file()
        config = read_config(model) if known else {}
        context = None if config.get("rope_scaling") else config.get("max_position_embeddings")
    if context is not None and max_tokens > context - RESERVED_TOKENS:
        raise CommandError(
            f"the server {name} serves prompts of up to {context - RESERVED_TOKENS} tokens with their outputs, and the longest has {max_tokens}: "
            f"pass shorter prompts ({length_option}) or a shorter --output-len, or, if the model supports it, "
            f'--server-arg="--context-length {max_tokens + RESERVED_TOKENS}"'
        )


def describe_error(error: Exception) -> str:
    """Return the server's error message if it sent one, else the message of the exception."""
    if not isinstance(error, urllib.error.HTTPError):
        return f"{type(error).__name__}: {error}"
    text = error.read().decode(errors="replace")
    try:
        return f"HTTP {error.code}: {json.loads(text)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}: {text.strip()[:500]}"
