"""Prefill and decode servers on this machine (prefill-decode disaggregation), and their requests."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from sglang_ext.tools import ROLES, CommandError
from sglang_ext.tools.server_process import HOST, free_port
from sglang_ext_bench.server import BenchServer, describe_error
from sglang_ext_bench.speed import decode_wave
from sglang_ext_bench.speed.decode_wave import ResponseStream

STOP_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL. SGLang's prefill and decode loops do not end on SIGTERM."""


class ServersApart:
    """Prefill and decode servers. The context manager starts all of them at once, and stops them.

    Example:
        flags = {"prefill": [("--disaggregation-mode", "prefill")], "decode": [("--disaggregation-mode", "decode")]}
        with ServersApart(model, flags, logs, "run") as servers:
            body = {"text": "Hello", **servers.room()}

    Args:
        model: Folder or name.
        flags: Flags of each server, by role, including ``--disaggregation-mode``. The ports of bootstrap servers are added.
        logs: Folder for logs. A log is called ``{name}-{role}.log``. With several servers of a role, their index follows the role.
        name: Start of the logs' names.
        port: Port of the first server. The other servers and then the bootstrap servers have the next ports. 0 for any free ports.
        env: Environment variables, by role.
        server: Creates a server, as :class:`BenchServer`.
        settings: Further arguments of ``server``.

    Attributes:
        of: Servers by role.
        bootstraps: Ports of SGLang's bootstrap servers, one for each prefill server.
    """

    def __init__(
        self,
        model: str,
        flags: Mapping[str, Sequence[Sequence[str]]],
        logs: Path,
        name: str,
        port: int = 0,
        env: Mapping[str, Mapping[str, str]] | None = None,
        server: Callable[..., BenchServer] = BenchServer,
        **settings: Any,
    ) -> None:
        ports = iter(range(port, port + ports_taken(*(len(flags[role]) for role in ROLES)))) if port else _free_ports()
        server_ports = {role: [next(ports) for _ in flags[role]] for role in ROLES}
        self.bootstraps = [next(ports) for _ in flags["prefill"]]
        self.of: dict[str, list[BenchServer]] = {role: [] for role in ROLES}
        for role in ROLES:
            for index, server_flags in enumerate(flags[role]):
                bootstrap = ("--disaggregation-bootstrap-port", str(self.bootstraps[index])) if role == "prefill" else ()
                self.of[role].append(
                    server(
                        model,
                        (*server_flags, *bootstrap),
                        logs / f"{name}-{role}{index if len(flags[role]) > 1 else ''}.log",
                        port=server_ports[role][index],
                        stop_grace=STOP_GRACE,
                        env={"SGLANG_HOST_IP": HOST, **(env or {}).get(role, {})},
                        **settings,
                    )
                )
        self._pool = ThreadPoolExecutor(len(self.all))
        self._starts: list[Future[BenchServer]] = []

    @property
    def all(self) -> list[BenchServer]:
        """The servers of both roles."""
        return [server for role in ROLES for server in self.of[role]]

    def begin(self) -> None:
        """Start all servers without waiting. Call :meth:`stop` afterwards."""
        self._starts = [self._pool.submit(server.__enter__) for server in self.all]

    def wait(self) -> None:
        """Wait until all servers are healthy.

        Raises:
            CommandError: A server did not start.
        """
        for start in self._starts:
            start.result()

    def stop(self) -> None:
        """Stop all servers, after the started ones are healthy or have failed."""
        for start in self._starts:
            start.exception()
        for stopped in [self._pool.submit(server.stop) for server in self.all]:
            stopped.result()
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
        """Fields for the two parts of one request: prefill server number ``prefill`` and a new room."""
        return {"bootstrap_host": HOST, "bootstrap_port": self.bootstraps[prefill], "bootstrap_room": random.getrandbits(62)}


def answer(
    decode: BenchServer, body: Mapping[str, Any], new_tokens: int, prefilled: Future[Any], patience: float, called: str = "a request"
) -> ResponseStream:
    """Send the decode part of a request, and read its stream. Times are those of ``time.monotonic``.

    Args:
        decode: The decode server.
        body: JSON body of the request.
        new_tokens: Output tokens that the response must have.
        prefilled: The prefill part of the request.
        patience: Seconds to wait for the end of the prefill part if the response breaks off.
        called: Name of the request in error messages.

    Raises:
        CommandError: The server refused the request, or the response broke off.
    """
    try:
        stream = decode_wave.read(decode, body, 0.0, time.monotonic)
    except (OSError, KeyError) as error:
        raise CommandError(f"the decode server: {describe_error(error)}") from error
    if not stream.tokens or stream.tokens[-1] < new_tokens:
        state = prefilled.exception(timeout=patience) or "it has ended"
        received = (stream.tokens or [0])[-1]
        raise CommandError(f"{called} ended after {received} of {new_tokens} tokens (prefill server: {state})\n{decode.describe_log()}")
    return stream


def ports_taken(prefill: int, decode: int) -> int:
    """Ports that ``prefill`` and ``decode`` servers use, with one more for each prefill server's bootstrap server."""
    return 2 * prefill + decode


def _free_ports() -> Iterator[int]:
    while True:
        yield free_port()
