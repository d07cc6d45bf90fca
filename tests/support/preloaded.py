"""Servers as forks of a process that has loaded SGLang: each of a server's three processes otherwise takes 11 s of a core to load it.

What they run is what ``python -m sglang.launch_server`` runs: that module, as ``__main__``, and in the processes that it starts
what ``multiprocessing`` sends to those that it spawns; or a script. Each begins as the first process was when SGLang was loaded,
before plugins are. What modules read of the environment while they load is that of the first process (``LOADED``), but for what the
scheduler's reads to retract on purpose (``RETRACTING``).
"""

import fcntl
import gc
import importlib
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import set_spawning_popen
from pathlib import Path
from threading import Lock
from typing import IO, Any

# Variables that Python, SGLang or PyTorch reads while it is loaded begin so.
LOADED = ("PYTHON", "SGLANG_PL", "SGLANG_TEST_", "OMP_", "TORCH")
# Of these, what each server may have as it likes, and the names of the scheduler's module that hold it.
RETRACTING = {f"SGLANG_{name}": name for name in ("TEST_RETRACT", "TEST_RETRACT_INTERVAL", "TEST_RETRACT_NO_PREFILL_BS")}
SCHEDULER = "sglang.srt.managers.scheduler"
# What a server's processes load before plugins, and what after, of which it does not matter when.
MODULES = ("sglang.srt.server_args", "sglang.srt.utils", SCHEDULER, "sglang.srt.managers.detokenizer_manager")
AFTER_PLUGINS = ("sglang.srt.models.registry", "sglang.srt.entrypoints.http_server", "sglang.srt.entrypoints.openai.serving_responses")
# What a server's processes load last: for the demo model on a CPU, and what the plugin's flags need. Not the client of Prometheus, which
# reads the environment as it is loaded.
LATE = (
    *("sglang.srt.managers.tp_worker", "sglang.srt.speculative.draft_worker_common", "sglang.srt.constrained.llguidance_backend"),
    *("sglang.srt.layers.attention.torch_native_backend", "transformers.models.gpt2.tokenization_gpt2"),
    *("uvicorn.loops.uvloop", "uvicorn.protocols.http.h11_impl", "sglang_ext.config.options"),
)
# Processes that a server may start: three ranks, and what turns tokens into text.
SPARES = 4
# A file descriptor that no module has opened.
UNUSED = 300


class Preloaded:
    """A process that has loaded SGLang with this one's environment and ``env``, and forks servers."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = {**os.environ, **env}
        self._lock, self._background = Lock(), ThreadPoolExecutor()
        self._running: list[Future[None]] = []
        self._ask, theirs = Pipe()
        command = (sys.executable, __file__, str(theirs.fileno()))
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=self.env, stdin=subprocess.DEVNULL)
        theirs.close()

    def serves(self, env: Mapping[str, str]) -> bool:
        """Whether a process with these variables of its own would load the same modules."""
        fixed = [name for name in env if name.startswith(LOADED) and name not in RETRACTING]
        return all(self.env.get(name) == env[name] for name in fixed)

    def start(self, command: Sequence[str], log: IO[bytes], env: Mapping[str, str]) -> "Forked":
        """Begin ``python -m MODULE ...`` or ``python SCRIPT ...`` as ``subprocess.Popen(start_new_session=True)`` would."""
        return Forked(self, self.ask("start", list(command[1:]), log.name, {**self.env, **env}))

    def ask(self, *request: Any) -> Any:
        """The process's answer; it gives one after the other."""
        with self._lock:
            self._ask.send(request)
            return self._ask.recv()

    def run_before_stop(self, end: Callable[[], None]) -> None:
        """Run ``end``, which ends some servers, in the background. :meth:`stop` waits for it, and raises its error."""
        self._running.append(self._background.submit(end))

    def stop(self) -> None:
        """End the process; servers go on."""
        for running in self._running:
            running.result()
        self._ask.close()
        self._process.wait()


class Forked:
    """What is used of ``subprocess.Popen``."""

    def __init__(self, preloaded: Preloaded, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._preloaded = preloaded

    def poll(self) -> int | None:
        """The exit code, once it has ended."""
        if self.returncode is None:
            self.returncode = self._preloaded.ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        until = time.monotonic() + (timeout or float("inf"))
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            time.sleep(0.05)
        return self.poll() or 0

    def terminate(self) -> None:
        """SIGTERM, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def run_script(preloaded: Preloaded | None, log: Path, script: Path, *arguments: str) -> str:
    """Run a script that loads SGLang, as a fork of ``preloaded`` if there is one. It must succeed.

    Returns:
        What it printed, warnings and errors included.
    """
    command = (sys.executable, str(script), *arguments)
    with log.open("wb") as printed:
        if preloaded is None:
            code = subprocess.run(command, stdout=printed, stderr=subprocess.STDOUT, timeout=600).returncode
        else:
            code = preloaded.start(command, printed, {}).wait(600)
    assert code == 0, log.read_text()[-3000:]
    return log.read_text()


def serve(connection: Connection) -> tuple[list[str], str, dict[str, str]] | None:
    """Answer requests; in a fork return what it is to run, and None where nobody asks any more."""
    while True:
        try:
            kind, *details = connection.recv()
        except EOFError:
            return None
        if kind == "poll":
            pid, status = os.waitpid(details[0], os.WNOHANG)
            connection.send(os.waitstatus_to_exitcode(status) if pid else None)
            continue
        pid = os.fork()
        if not pid:
            connection.close()
            return tuple(details)
        connection.send(pid)


def run(command: list[str], log: str, env: dict[str, str]) -> None:
    """Be the server or the script, whose processes are forks of this one as it is now."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    os.environ.clear()
    os.environ.update(env)
    for variable, name in RETRACTING.items():
        setattr(sys.modules[SCHEDULER], name, getattr(sys.modules["sglang.srt.environ"].envs, variable).get())
    spares: list[socket.socket] = []
    for _ in range(SPARES):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not os.fork():
            for each in (ours, *spares):
                each.close()
            return be_spawned(theirs)
        theirs.close()
        spares.append(ours)
    popen_spawn_posix.Popen._launch = lambda popen, process: launch(popen, process, spares)
    if command[0] != "-m":
        sys.path[0], sys.argv = str(Path(command[0]).parent), command
        runpy.run_path(command[0], run_name="__main__")
        return
    _, module, *arguments = command
    sys.path[0], sys.argv = os.getcwd(), ["-m", *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def launch(popen: Any, process: Any, spares: list[socket.socket]) -> None:
    """In place of starting Python anew: a spare takes what that is sent, the environment and open files."""
    tracker = resource_tracker.getfd()
    parent_read, child_write = os.pipe()
    child_read, parent_write = os.pipe()
    popen._fds += [tracker, child_read, child_write]
    set_spawning_popen(popen)
    try:
        parts = [reduction.ForkingPickler.dumps(part) for part in (spawn.get_preparation_data(process._name), process)]
    finally:
        set_spawning_popen(None)
    spare = spares.pop(0)
    spare.settimeout(120)
    numbers = pickle.dumps((child_read, tracker, popen._fds, dict(os.environ)))
    socket.send_fds(spare, [numbers], popen._fds)
    popen.pid = int(spare.recv(32))
    spare.close()
    popen.sentinel = parent_read
    popen.finalizer = popen_spawn_posix.util.Finalize(popen, popen_spawn_posix.util.close_fds, (parent_read, parent_write))
    os.close(child_read)
    os.close(child_write)
    with open(parent_write, "wb", closefd=False) as sent:
        for part in parts:
            sent.write(part)


def be_spawned(told: socket.socket) -> None:
    """Wait to be told what to run, as ``multiprocessing.spawn.spawn_main`` does; end where nobody tells any more."""
    told = socket.socket(fileno=fcntl.fcntl(told.detach(), fcntl.F_DUPFD_CLOEXEC, UNUSED))
    message, files, *_ = socket.recv_fds(told, 1 << 20, UNUSED)
    if not message:
        os._exit(0)
    pipe, tracker, numbers, env = pickle.loads(message)
    given = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, UNUSED) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(given, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    told.send(str(os.getpid()).encode())
    told.close()
    os.environ.clear()
    os.environ.update(env)
    resource_tracker._resource_tracker._fd = tracker
    sys.exit(spawn._main(pipe, os.dup(pipe)))


def main() -> None:
    """Load, and serve; a fork goes on as a server, and ends as a process of its own does."""
    connection = Connection(int(sys.argv[1]))
    for name in (*MODULES, *AFTER_PLUGINS, *LATE):
        importlib.import_module(name)
    assert "prometheus_client" not in sys.modules
    gc.freeze()
    asked = serve(connection)
    if asked is not None:
        run(*asked)


if __name__ == "__main__":
    main()
