"""Servers that benchmarks and tests start, and requests to them."""

import json
import urllib.error
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from sglang_ext.tools import CommandError
from sglang_ext.tools.server_client import ServerClient
from sglang_ext.tools.server_process import ServerProcess


class RequestClient(ServerClient):
    """Client of a server on this machine that also streams, and empties the prefix cache."""

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
    """A server that benchmarks send requests to.

    Example:
        with BenchServer(model, ("--kv-mode", "verified"), Path("server.log")) as server:
            server.post("generate", {"text": "Hello"})
    """

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


def describe_error(error: Exception) -> str:
    """Return the server's error message if it sent one, else the message of the exception."""
    if not isinstance(error, urllib.error.HTTPError):
        return f"{type(error).__name__}: {error}"
    text = error.read().decode(errors="replace")
    try:
        return f"HTTP {error.code}: {json.loads(text)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}: {text.strip()[:500]}"
