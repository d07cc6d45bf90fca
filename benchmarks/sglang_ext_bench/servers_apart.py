"""Prefill and decode servers on this machine, and what joins the two parts of a request."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from sglang_ext.tools import ROLES, CommandError
from sglang_ext.tools.server_client import HOST, describe_error, free_port
from sglang_ext.tools.server_process import ServerProcess
from sglang_ext_bench.speed import decode_wave
from sglang_ext_bench.speed.decode_wave import Stream

# SGLang's loops of these roles do not end by themselves.
STOP_GRACE = 2.0


class ServersApart:
    """Context manager: starts all servers at once, and ends them.

    Args:
        model: folder or name.
        flags: of each server, by role, ``--disaggregation-mode`` among them; ports of bootstrap servers are chosen here.
        logs: folder; a log is called ``{name}-{role}.log``, of several of a role with their place at the end.
        name: of logs.
        port: of the first server; the next, and those of SGLang's bootstrap servers after them, have the ports that follow. 0: any.
        env: environment variables by role.
        server: makes one, as :class:`ServerProcess`.
        settings: further arguments of ``server``.

    Attributes:
        of: servers by role.
        bootstraps: ports of SGLang's bootstrap servers, one of each prefill server.
    """

    def __init__(
        self,
        model: str,
        flags: Mapping[str, Sequence[Sequence[str]]],
        logs: Path,
        name: str,
        port: int = 0,
        env: Mapping[str, Mapping[str, str]] | None = None,
        server: Callable[..., ServerProcess] = ServerProcess,
        **settings: Any,
    ) -> None:
        ports = iter(range(port, port + ports_taken(*(len(flags[role]) for role in ROLES)))) if port else _any_port()
        own = {role: [next(ports) for _ in flags[role]] for role in ROLES}
        self.bootstraps = [next(ports) for _ in flags["prefill"]]
        self.of: dict[str, list[ServerProcess]] = {role: [] for role in ROLES}
        for role in ROLES:
            for place, each in enumerate(flags[role]):
                joined = ("--disaggregation-bootstrap-port", str(self.bootstraps[place])) if role == "prefill" else ()
                self.of[role].append(
                    server(
                        model,
                        (*each, *joined),
                        logs / f"{name}-{role}{place if len(flags[role]) > 1 else ''}.log",
                        port=own[role][place],
                        stop_grace=STOP_GRACE,
                        env={"SGLANG_HOST_IP": HOST, **(env or {}).get(role, {})},
                        **settings,
                    )
                )
        self._pool = ThreadPoolExecutor(len(self.all))
        self._starts: list[Future] = []

    @property
    def all(self) -> list[ServerProcess]:
        """Of both roles."""
        return [server for role in ROLES for server in self.of[role]]

    def begin(self) -> None:
        """Start all, and do not wait for them; ``stop`` must follow."""
        self._starts = [self._pool.submit(server.__enter__) for server in self.all]

    def wait(self) -> None:
        """Until all serve.

        Raises:
            CommandError: one of them does not.
        """
        for start in self._starts:
            start.result()

    def stop(self) -> None:
        """End what runs, or still starts."""
        for start in self._starts:
            start.exception()
        for ended in [self._pool.submit(server.stop) for server in self.all]:
            ended.result()
        self._pool.shutdown()

    def __enter__(self) -> "ServersApart":
        self.begin()
        try:
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def room(self, prefill: int = 0) -> dict[str, Any]:
        """Fields of both parts of a request that the ``prefill``-th server computes; those of another are other ones."""
        return {"bootstrap_host": HOST, "bootstrap_port": self.bootstraps[prefill], "bootstrap_room": random.getrandbits(62)}


def answer(
    decode: ServerProcess, body: Mapping[str, Any], new_tokens: int, prefilled: Future, patience: float, called: str = "a request"
) -> Stream:
    """A decode server's answer as it comes, with times of ``time.monotonic``.

    Args:
        decode: the server.
        body: its part of the request.
        new_tokens: that the answer must have.
        prefilled: the prefill server's part.
        patience: seconds in which that has ended, where the answer breaks off.
        called: what a message names the request.

    Raises:
        CommandError: the server refused it, or it broke off.
    """
    try:
        stream = decode_wave.read(decode, body, 0.0, time.monotonic)
    except (OSError, KeyError) as error:
        raise CommandError(f"the decode server: {describe_error(error)}") from error
    if not stream.tokens or stream.tokens[-1] < new_tokens:
        what = prefilled.exception(timeout=patience) or "it has ended"
        got = (stream.tokens or [0])[-1]
        raise CommandError(f"{called} ended after {got} of {new_tokens} tokens (prefill server: {what})\n{decode.describe_log()}")
    return stream


def ports_taken(prefill: int, decode: int) -> int:
    """How many ports so many servers take: one each, and one for each prefill server's bootstrap server."""
    return 2 * prefill + decode


def _any_port() -> Iterator[int]:
    while True:
        yield free_port()
