"""A real SGLang server as a subprocess."""

import logging
import multiprocessing
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO

from sglang_ext.config import model_folder
from sglang_ext.tools import CommandError
from sglang_ext.tools.server_client import HOST, ServerClient, free_port

TAIL_LINES = 25
PROMPTS = "--context-len"
"""How long prompts are, as most benchmarks name it."""
ERROR = re.compile(r"\b(ERROR|Errno|\w+Error)\b")
ORPHAN_GRACE = 2.0
"""Seconds in which workers end after their server has."""
NCCL_PORT = "--nccl-port"
"""SGLang takes one that the kernel gives to others too, seconds before its workers listen there."""
POLL_SECONDS = 0.1
"""Seconds between two requests to ``/health`` of a server that starts."""
INTERRUPTED_GRACE = 2.0
"""Seconds that a server has to end where the benchmark itself is ended."""

_entered: "list[ServerProcess]" = []
_is_leaving = False
"""Whether a signal is ending this process. Threads then start no further server."""


def file_name(arm: str) -> str:
    """What is compared, as a part of a file's name: it may name a user's file (``--kv-compressor ./my_method.py:KeyNorm``)."""
    return re.sub(r"[^\w.+-]+", "-", arm)


def stop_all() -> None:
    """End all servers of this process that run, together: requests under way fail then, instead of being waited for."""
    servers = list(_entered)
    for server in servers:
        server.stop_grace = min(server.stop_grace, INTERRUPTED_GRACE)
    stop_together(servers)


def stop_together(servers: Iterable["ServerProcess"]) -> None:
    """End servers as one is ended: SIGTERM to all, and SIGKILL to what is left of each group after its grace.

    Without threads: a signal's handler, which may have interrupted one that was being started, calls this.
    """
    ending = [(process, server.stop_grace) for server in servers if (process := server.give_up()) is not None]
    begun = time.monotonic()
    for process, _ in ending:
        process.terminate()
    for process, grace in ending:
        _wait(process, begun + grace)
    left = _groups_after([process.pid for process, _ in ending], ORPHAN_GRACE)
    for group in left:
        with suppress(ProcessLookupError):  # it ended between the look and the signal
            os.killpg(group, signal.SIGKILL)
    killed = time.monotonic()
    for process, _ in ending:
        # Not for ever: where a signal's handler stops servers, what it interrupted may hold the lock under which the end is noted.
        _wait(process, killed + ORPHAN_GRACE)
    _groups_after(left, ORPHAN_GRACE)


def leave_on_signals(leave: Callable[[int, FrameType | None], None]) -> None:
    """Let ``leave`` be called where Ctrl-C or SIGTERM ends this process, or its terminal closes; under nohup that is ignored, as before.

    Servers have sessions of their own, so that none of these reaches them. While ``leave`` runs, which ends them, another signal is
    ignored: Ctrl-C is pressed twice, and ``timeout`` sends two.
    """
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    numbers = signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hangs_up else ())

    def handle(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
        for number in numbers:
            signal.signal(number, handler)

    def once(number: int, frame: FrameType | None) -> None:
        global _is_leaving
        handle(signal.SIG_IGN)
        _is_leaving = True
        try:
            leave(number, frame)
            # The handler returned, so the process keeps running.
            _is_leaving = False
        finally:
            handle(once)

    handle(once)


def check_servers(model: str, servers: Mapping[str, Sequence[str]], tokens: int = 0, prompts: str = PROMPTS) -> None:
    """Refuse a model that is not there, and flags that one of the servers would end at, before the first of them starts.

    Args:
        model: folder or name.
        servers: the flags of each, by its name.
        tokens: of the longest request that they will be sent, its answer among them; 0 where that is not known.
        prompts: the benchmark's option that says how long prompts are.

    Raises:
        CommandError: names the model, or the server, its flag, what is allowed and the remedy.
    """
    missing = model_folder.find_problem(model)
    if missing is not None:
        raise CommandError(f"--model {missing}: pass a Hugging Face folder")
    # SGLang is loaded apart, so that the process that measures takes none of the memory that servers find free; its warnings, of
    # what this machine lacks, and what flags of benchmarks do are for the servers' logs.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _leave_to_logs) as apart:
        apart.submit(_check_flags, model, dict(servers), tokens, prompts).result()


def _leave_to_logs() -> None:
    """Of a process that only checks."""
    warnings.simplefilter("ignore")
    from sglang_ext.config import benchmark_options

    benchmark_options.logger.setLevel(logging.ERROR)


def _check_flags(model: str, servers: Mapping[str, Sequence[str]], tokens: int, prompts: str) -> None:
    from sglang_ext.tools import server_flags

    server_flags.check(model, servers, tokens, prompts)


class ServerProcess(ServerClient):
    """Context manager: starts ``sglang.launch_server``, waits until it is healthy, and ends it.

    Args:
        model: folder or name, as for ``--model-path``.
        arguments: further arguments of the server.
        log: file that takes the server's output.
        port: TCP port; 0 for any free one.
        start_timeout: seconds until ``/health`` must answer.
        request_timeout: seconds for one request.
        stop_grace: seconds between SIGTERM and SIGKILL.
        env: environment variables of the server beside this process's own, which they replace.

    Raises:
        CommandError: on entry, when the server ends or does not answer in time (with the log's tail).
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
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(port or free_port(), request_timeout)
        self.log = log
        self.command = (
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", model),
            *("--host", HOST, "--port", str(self.port), *arguments),
            *(() if NCCL_PORT in arguments else (NCCL_PORT, str(free_port()))),
        )
        self.start_timeout = start_timeout
        self.stop_grace = stop_grace
        self.env = dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "ServerProcess":
        self.start()
        with ExitStack() as unhealthy:
            unhealthy.callback(self.stop)
            self.wait_healthy()
            unhealthy.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server, and do not wait for it; ``stop`` must follow.

        Raises:
            CommandError: its port is taken, or a signal ends this process.
        """
        if _is_leaving:
            raise CommandError("the benchmark was interrupted and starts no further server; run it again for the rest")
        self._refuse_taken_port()
        # Appended to, so that nobody who empties it meanwhile leaves a hole.
        self.log.write_bytes(b"")
        with self.log.open("ab") as log:
            self._process = self._begin(log)
        _entered.append(self)

    def wait_healthy(self) -> None:
        """Wait until a server that was started answers.

        Raises:
            CommandError: it ended, or did not in time (with the log's tail).
        """
        # Keep the process: another thread may stop the server during the wait.
        process = self._process
        assert process is not None
        deadline = time.monotonic() + self.start_timeout
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise CommandError(
                    f"the server ended with code {process.returncode} while it started\n"
                    f"{self.describe_log()}"
                )
            if self.alive(timeout=5):
                return
            time.sleep(POLL_SECONDS)
        raise CommandError(
            f"the server was not healthy after {self.start_timeout:g} s (--start-timeout)\n"
            f"{self.describe_log()}"
        )

    def stop(self) -> None:
        """End the server: SIGTERM and wait; SIGKILL to what is left of its group after the grace."""
        stop_together([self])

    def give_up(self) -> subprocess.Popen[bytes] | None:
        """The process, for who ends it, and which is no longer this server's; None where it was not started, or is given up."""
        process, self._process = self._process, None
        if process is not None:
            _entered.remove(self)
        return process

    @property
    def running(self) -> bool:
        """Whether the server's process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def group(self) -> int | None:
        """The process group that holds all of the server's processes; None where it was not started."""
        return None if self._process is None else self._process.pid

    def flush_cache(self) -> None:
        """Empty the prefix cache; an error shows the log's end too."""
        try:
            super().flush_cache()
        except CommandError as error:
            raise CommandError(f"{error}\n{self.describe_log()}") from error

    def describe_log(self) -> str:
        """The command, the first error and the last lines of the server's log, for an error message."""
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in lines[:-TAIL_LINES] if ERROR.search(line)]
        first = [f"first error in its log: {errors[0]}"] if errors else []
        return "\n".join(
            [f"command: {shlex.join(self.command)}", *first, "end of its log:", *lines[-TAIL_LINES:]]
        )

    def _begin(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        """The process; a session of its own gives a process group that holds all of the server's workers."""
        own = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        return subprocess.Popen(self.command, **own, env={**os.environ, **self.env})

    def _refuse_taken_port(self) -> None:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, self.port)) == 0:
                raise CommandError(
                    f"port {self.port} is taken; another server would answer in this one's place. "
                    "Pass --port with a free one, or 0 for any"
                )


def _wait(process: subprocess.Popen[bytes], deadline: float) -> None:
    """Wait until a process has ended, at most until ``deadline``, of ``time.monotonic``."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline - time.monotonic()))


def _groups_after(groups: Iterable[int], seconds: float) -> list[int]:
    """Process groups of which some process is left after ``seconds``; it waits no longer than until there is none."""
    left, deadline = list(groups), time.monotonic() + seconds
    while (left := [group for group in left if _is_there(group)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
