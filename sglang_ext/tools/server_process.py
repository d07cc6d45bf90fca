"""Starts an SGLang server on a free port of this machine as a subprocess, and stops it."""

import logging
import multiprocessing
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from types import FrameType
from typing import IO

from sglang_ext.config import model_folder
from sglang_ext.tools import CommandError

HOST = "127.0.0.1"
HEALTH_SECONDS = 30.0
"""Default time limit of a health check."""
PROCESSES = 16
"""Number of parallel processes that draw from disjoint sets of ports."""
TAIL_LINES = 25
"""Last lines of a log in an error message."""
ERROR = re.compile(r"\b(ERROR|Errno|\w+Error)\b")
ORPHAN_GRACE = 2.0
"""Seconds for workers to end after their server has ended."""
NCCL_PORT = "--nccl-port"
"""Passed to each server: SGLang would choose a port that the kernel may assign to another process before the workers bind it."""
POLL_SECONDS = 0.1
"""Seconds between two health checks of a server that starts."""
INTERRUPTED_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL when the command itself is interrupted."""

_started: "list[ServerProcess]" = []
"""Servers that run, and must be stopped before this process ends."""
_is_leaving = False
"""Whether a signal is ending this process. Threads then start no further server."""
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


def stop_all() -> None:
    """Stop all servers of this process at once. Running requests fail."""
    servers = list(_started)
    for server in servers:
        server.stop_grace = min(server.stop_grace, INTERRUPTED_GRACE)
    stop_together(servers)


def stop_together(servers: Iterable["ServerProcess"]) -> None:
    """Stop several servers at once: SIGTERM to all, then SIGKILL to the processes that remain after each server's grace period.

    It starts no threads, because a signal handler calls it, which may have interrupted the start of a thread.
    """
    stopping = [(process, server.stop_grace) for server in servers if (process := server.detach()) is not None]
    started = time.monotonic()
    for process, _ in stopping:
        process.terminate()
    for process, grace in stopping:
        _wait(process, started + grace)
    remaining = _wait_for_groups([process.pid for process, _ in stopping], ORPHAN_GRACE)
    for group in remaining:
        with suppress(ProcessLookupError):  # the group ended after the check
            os.killpg(group, signal.SIGKILL)
    killed = time.monotonic()
    for process, _ in stopping:
        # With a time limit: the code that a signal handler interrupted may hold the lock that `wait` needs.
        _wait(process, killed + ORPHAN_GRACE)
    _wait_for_groups(remaining, ORPHAN_GRACE)


def leave_on_signals(leave: Callable[[int, FrameType | None], None]) -> None:
    """Call ``leave`` on SIGINT, SIGTERM and SIGHUP. SIGHUP stays ignored if it is ignored now, as under nohup.

    These signals do not reach the servers, which have sessions of their own: ``leave`` stops them. Further signals are ignored while
    ``leave`` runs, because users press Ctrl-C twice, and ``timeout`` sends two signals.
    """
    handles_hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    numbers = signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if handles_hangup else ())

    def set_handlers(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
        for number in numbers:
            signal.signal(number, handler)

    def leave_once(number: int, frame: FrameType | None) -> None:
        global _is_leaving
        set_handlers(signal.SIG_IGN)
        _is_leaving = True
        try:
            leave(number, frame)
            # The handler returned, so the process keeps running.
            _is_leaving = False
        finally:
            set_handlers(leave_once)

    set_handlers(leave_once)


def check_servers(model: str, servers: Mapping[str, Sequence[str]]) -> None:
    """Check the model and the flags of several servers, by name, before the first one starts.

    Raises :class:`CommandError`, which names the model, or the server and its flag, and the remedy.
    """
    problem = model_folder.find_problem(model)
    if problem is not None:
        raise CommandError(f"--model {problem}: pass a Hugging Face folder")
    # Another process imports SGLang, so that the measuring process does not take device memory from the servers.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as checker:
        checker.submit(_check_flags, model, dict(servers)).result()


def _check_flags(model: str, servers: Mapping[str, Sequence[str]]) -> None:
    # The servers log the same warnings.
    warnings.simplefilter("ignore")
    logging.getLogger("sglang_ext").setLevel(logging.ERROR)
    from sglang_ext.tools import server_flags

    server_flags.check(model, servers)


class LocalServer:
    """A server on TCP port ``port`` of this machine."""

    health_path = "health"
    port: int

    @property
    def url(self) -> str:
        """URL of the server, without a slash at its end."""
        return f"http://{HOST}:{self.port}"

    def alive(self, timeout: float = HEALTH_SECONDS) -> bool:
        """Whether a GET request to :attr:`health_path` succeeds within ``timeout`` seconds."""
        with suppress(OSError, HTTPException), urllib.request.urlopen(f"{self.url}/{self.health_path}", timeout=timeout) as response:
            response.read()
            return True
        return False


class ServerProcess(LocalServer):
    """An SGLang server that runs as a subprocess, in the environment of this process with the variables ``env``.

    Port 0 stands for any free port. Times are seconds; ``stop_grace`` is the time between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        model: str,
        arguments: tuple[str, ...],
        log: Path,
        port: int = 0,
        start_timeout: float = 300.0,
        stop_grace: float = 30.0,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port or free_port()
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

    def start(self) -> None:
        """Start the server without waiting until it is healthy. Call :func:`stop_together` afterwards."""
        if _is_leaving:
            raise CommandError("the benchmark was interrupted and starts no further server; run it again for the rest")
        if is_taken(self.port):
            raise CommandError(
                f"port {self.port} is taken, and requests would reach the other server: pass --port with a free port, or 0 for any free one"
            )
        # The server appends to the log, so that truncating the file during the run leaves no hole.
        self.log.write_bytes(b"")
        with self.log.open("ab") as log:
            self._process = self.launch(log)
        _started.append(self)

    def wait_healthy(self) -> None:
        """Wait until a started server is healthy. Raises :class:`CommandError` if it ended, or was not healthy in time."""
        # Keep the process: another thread may stop the server during the wait.
        process = self._process
        assert process is not None
        deadline = time.monotonic() + self.start_timeout
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise CommandError(f"the server ended with code {process.returncode} while it started\n{self.describe_log()}")
            if self.alive(timeout=5):
                return
            time.sleep(POLL_SECONDS)
        raise CommandError(f"the server was not healthy after {self.start_timeout:g} s (--start-timeout)\n{self.describe_log()}")

    def detach(self) -> subprocess.Popen[bytes] | None:
        """Forget the process, and return it to the caller, who stops it. None if no process runs."""
        process, self._process = self._process, None
        if process is not None:
            _started.remove(self)
        return process

    @property
    def running(self) -> bool:
        """Whether the server's process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def describe_log(self) -> str:
        """Describe the log for an error message: the command, the first error, and the last lines."""
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in lines[:-TAIL_LINES] if ERROR.search(line)]
        first = [f"first error in its log: {errors[0]}"] if errors else []
        return "\n".join([f"command: {shlex.join(self.command)}", *first, "end of its log:", *lines[-TAIL_LINES:]])

    def launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Launch the process in a session of its own, so that one process group has all of its workers. Subclasses may override it."""
        environment = {**os.environ, **self.env}
        return subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment)


def _wait(process: subprocess.Popen[bytes], deadline: float) -> None:
    """Wait until a process ends, at most until ``deadline`` (of ``time.monotonic``)."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline - time.monotonic()))


def _wait_for_groups(groups: Iterable[int], seconds: float) -> list[int]:
    """Wait until all process groups have ended, at most ``seconds``. Return the groups that still have processes."""
    remaining, deadline = list(groups), time.monotonic() + seconds
    while (remaining := [group for group in remaining if _has_processes(group)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return remaining


def _has_processes(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
