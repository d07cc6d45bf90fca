"""HTTP requests to an SGLang server."""

import json
import os
import random
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from typing import Any

from sglang_ext.tools import CommandError

HOST = "127.0.0.1"
HEALTH_SECONDS = 30.0


# Processes that choose among different ports, and those that this one gave.
PROCESSES = 16
_given: set[int] = set()


def free_port() -> int:
    """A TCP port of the loopback interface that nothing is bound to now.

    It lies below those that the kernel hands out by itself: a server listens only when it has started, and by
    then the kernel may have given one of its own to another process. Meanwhile nobody else who asks gets it:
    no port is given twice, and processes side by side choose among different ones.

    Raises:
        CommandError: none was found.
    """
    for port in random.SystemRandom().sample(range(10000 + os.getpid() % PROCESSES, 32768, PROCESSES), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port))
            if port not in _given:
                _given.add(port)
                return port
    raise CommandError("100 ports of 10000 to 32767 are all taken; pass --port with a free one")


class ServerClient:
    """Requests to the server on a port of this machine.

    Args:
        port: its TCP port.
        request_timeout: seconds for one request.
    """

    def __init__(self, port: int, request_timeout: float = 1800.0) -> None:
        self.port = port
        self.request_timeout = request_timeout

    @property
    def url(self) -> str:
        """Address of the server, without a slash at its end."""
        return f"http://{HOST}:{self.port}"

    def request(self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None) -> Any:
        """GET without a body, POST of JSON with one; the answer's JSON, or its text where it is none.

        Raises:
            OSError: the server refused (``urllib.error.HTTPError``), is gone, or needs longer than
                ``timeout`` seconds (default: the client's).
        """
        with _lost_connections(), self._open(path, body, timeout) as response:
            text = response.read().decode()
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    def _open(
        self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.url}/{path.lstrip('/')}", data, {"Content-Type": "application/json"} if data else {}
        )
        seconds = self.request_timeout if timeout is None else timeout
        return urllib.request.urlopen(request, timeout=seconds)

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """POST JSON whose answer is a stream of server-sent events; each one's JSON, when it comes.

        Raises:
            OSError: as for :meth:`request`; a stream that breaks off may also just end.
        """
        with _lost_connections(), self._open(path, body) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    def alive(self, timeout: float = HEALTH_SECONDS) -> bool:
        """Whether ``GET /health`` answers well within ``timeout`` seconds."""
        try:
            self.request("health", timeout=timeout)
        except OSError:
            return False
        return True

    def flush_cache(self) -> None:
        """Empty the prefix cache.

        Raises:
            CommandError: the server refused, or is gone.
        """
        try:
            self.request("flush_cache?timeout=30", {}, timeout=60)
        except OSError as error:
            raise CommandError(
                f"POST /flush_cache failed: {describe_error(error)}; the server must be idle and alive"
            ) from error

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
        return self.request(path, body)


@contextmanager
def _lost_connections() -> Iterator[None]:
    """Make answers that break off an :class:`OSError`, like other lost connections."""
    try:
        yield
    except HTTPException as error:
        raise ConnectionError(f"the answer broke off: {error!r}") from error


def describe_error(error: Exception) -> str:
    """The server's own words where it sent any, else the error's."""
    if not isinstance(error, urllib.error.HTTPError):
        return f"{type(error).__name__}: {error}"
    text = error.read().decode(errors="replace")
    try:
        return f"HTTP {error.code}: {json.loads(text)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}: {text.strip()[:500]}"
