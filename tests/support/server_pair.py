"""A prefill and a decode server, driven without a router."""

import random
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from preloaded import Preloaded
from servers import OFFLINE, QUICK_START, STOCK, Server

from sglang_ext.bench.client import free_port


class Pair:
    """Both servers, and the requests that a router would send to them.

    Args:
        model: folder.
        folder: for their logs.
        preloaded: what forks them; None where they are started anew.
        prefill, decode: flags of each, beside those of the roles.
        env: of both.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        preloaded: Preloaded | None,
        prefill: tuple[str, ...],
        decode: tuple[str, ...],
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.preloaded, self._env = preloaded, env or {}
        self.bootstrap = free_port()
        named = {
            "prefill": ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(self.bootstrap), *prefill),
            "decode": ("--disaggregation-mode", "decode", *decode),
        }
        self.servers = {name: self._server(model, folder / f"{name}.log", flags) for name, flags in named.items()}
        self._pool = ThreadPoolExecutor(16)
        # Both at once, beside stock's, since a start leaves cores idle.
        self._starts = [self._pool.submit(server.__enter__) for server in self.servers.values()]

    def stop(self) -> None:
        """End what runs, or still starts."""
        for start in self._starts:
            start.exception()
        for ended in [self._pool.submit(server.stop) for server in self.servers.values()]:
            ended.result()
        self._pool.shutdown()

    def wait(self) -> None:
        """Until both serve."""
        for start in self._starts:
            start.result()

    def begin(self, prefill: dict[str, Any], decode: dict[str, Any]) -> list[Future[Any]]:
        """Ask each server for its part of one request."""
        self.wait()
        room = self.new_room()
        bodies = zip(self.servers.values(), (prefill, decode), strict=True)
        return [self._pool.submit(server.ask, **body, **room) for server, body in bodies]

    def new_room(self) -> dict[str, Any]:
        """Of a request to both servers: what says that its parts belong together."""
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap, "bootstrap_room": random.getrandbits(62)}

    def both(self, prefill: dict[str, Any], decode: dict[str, Any]) -> list[Any]:
        """What each server says to its part of one request: an answer, or the text of an error."""
        return [said(each) for each in self.begin(prefill, decode)]

    def ask(self, **body: Any) -> Any:
        """The decode server's answer."""
        found = self.both(body, body)[1]
        assert not isinstance(found, str), found
        return found

    def _server(self, model: Path, log: Path, flags: tuple[str, ...]) -> Server:
        env = {**OFFLINE, "SGLANG_HOST_IP": "127.0.0.1", **QUICK_START, **self._env}
        # Seeds need the first of stock's flags. SGLang's loops of these roles do not end by themselves.
        own = {"request_timeout": 120, "stop_grace": 2, "env": env, "preloaded": self.preloaded}
        return Server(str(model), (STOCK[0], *flags), log, **own)


def said(asked: Future[Any]) -> Any:
    """An answer, or the text of an error."""
    try:
        return asked.result()
    except HTTPError as error:
        return error.read().decode()
