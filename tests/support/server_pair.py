"""A prefill and a decode server, driven without a router."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from preloaded import Preloaded
from servers import OFFLINE, QUICK_START, STOCK, Server

from sglang_ext_bench.servers_apart import ServersApart


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
        # A busy machine answers heartbeats late; who is gone is heard of by the link.
        env = {**OFFLINE, **QUICK_START, "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "20", **(env or {})}
        # Seeds need the first of stock's flags.
        flags = {role: [(STOCK[0], "--disaggregation-mode", role, *own)] for role, own in (("prefill", prefill), ("decode", decode))}
        self._made = ServersApart(
            str(model), flags, folder, "pair", env={role: env for role in flags}, server=Server, request_timeout=300, preloaded=preloaded
        )
        self.bootstrap = self._made.bootstraps[0]
        self.servers = {role: self._made.of[role][0] for role in flags}
        self._pool, self._preloaded = ThreadPoolExecutor(16), preloaded
        # Both at once, beside stock's, since a start leaves cores idle.
        self._made.begin()

    def stop(self) -> None:
        """End what runs, or still starts. Forks end in the background: SGLang's loops of both roles ignore SIGTERM, and are killed later."""
        if self._preloaded is None:
            self._stop()
        else:
            self._preloaded.run_before_stop(self._stop)

    def _stop(self) -> None:
        self._made.stop()
        self._pool.shutdown()

    def wait(self) -> None:
        """Until both serve."""
        self._made.wait()

    def new_room(self) -> dict[str, Any]:
        """Of a request to both servers: what says that its parts belong together."""
        return self._made.room()

    def begin(self, prefill: dict[str, Any], decode: dict[str, Any]) -> list[Future[Any]]:
        """Ask each server for its part of one request."""
        self.wait()
        room = self.new_room()
        bodies = zip(self.servers.values(), (prefill, decode), strict=True)
        return [self._pool.submit(server.ask, **body, **room) for server, body in bodies]

    def both(self, prefill: dict[str, Any], decode: dict[str, Any]) -> list[Any]:
        """What each server says to its part of one request: an answer, or the text of an error."""
        return [said(each) for each in self.begin(prefill, decode)]

    def ask(self, **body: Any) -> Any:
        """The decode server's answer."""
        found = self.both(body, body)[1]
        assert not isinstance(found, str), found
        return found


def said(asked: Future[Any]) -> Any:
    """An answer, or the text of an error."""
    try:
        return asked.result()
    except HTTPError as error:
        return error.read().decode()
