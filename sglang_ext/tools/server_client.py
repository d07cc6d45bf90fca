"""HTTP client of an SGLang server on this machine."""

import json
import os
import random
import socket
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from typing import Any

from sglang_ext.tools import CommandError

HOST = "127.0.0.1"
HEALTH_SECONDS = 30.0
"""Default time limit of a health check."""
PROCESSES = 16
"""Number of parallel processes that draw from disjoint sets of ports."""
_given: set[int] = set()
"""Ports that this process has returned. No port is returned twice."""


def free_port() -> int:
    """Return a TCP port of the loopback interface to which nothing is bound. Raises :class:`CommandError` if none is found.

    A server binds its port some seconds later. Until then the port stays free. It is below the kernel's range of ephemeral ports, and this
    process does not return it again. Processes that run at the same time choose among other ports.
    """
    for port in random.SystemRandom().sample(range(10000 + os.getpid() % PROCESSES, 32768, PROCESSES), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port))
            if port not in _given:
                _given.add(port)
                return port
    raise CommandError("tried 100 ports of 10000 to 32767, and all are taken: pass --port with a free one")


def is_taken(port: int) -> bool:
    """Whether a process listens on this port of the loopback interface."""
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


class ServerClient:
    """Sends requests to a server on a TCP port of this machine. ``request_timeout``: time limit of one request, in seconds."""

    health_path = "health"

    def __init__(self, port: int, request_timeout: float = 1800.0) -> None:
        self.port = port
        self.request_timeout = request_timeout

    @property
    def url(self) -> str:
        """URL of the server, without a slash at its end."""
        return f"http://{HOST}:{self.port}"

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

    def alive(self, timeout: float = HEALTH_SECONDS) -> bool:
        """Whether a GET request to :attr:`health_path` succeeds within ``timeout`` seconds."""
        try:
            self.request(self.health_path, timeout=timeout)
        except OSError:
            return False
        return True
