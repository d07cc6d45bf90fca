"""Servers of ``BenchServer`` without SGLang: each is a process that sleeps, and threads of this process that answer on its port."""

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError

LAUNCHER = "sglang.launch_server"

Process = subprocess.Popen


class LaunchedServer:
    """Answers the requests of a launched server. Tests override methods.

    Attributes:
        flags: Flags of the server, without those of every server.
        env: Environment variables that only this server has.
        log: File of its log.
        port: Port on which it answers.
        group: Its process group.
        ended: Whether its process has ended.
    """

    def __init__(self, flags: tuple[str, ...], env: Mapping[str, str], log: Path) -> None:
        self.flags, self.env, self.log = flags, env, log
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def group(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def can_start(self) -> bool:
        """Whether its process stays alive."""
        return True

    def flush_cache(self) -> None:
        """Empty the prefix cache."""

    def request(self, path: str) -> Any:
        """The answer to GET."""
        raise HTTPError(path, 404, "no such page", None, None)  # type: ignore[arg-type]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to POST."""
        return {}

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of the answer to a POST request with ``stream``."""
        yield {}


class Handler(BaseHTTPRequestHandler):
    """Passes the requests on the port of a server to its :class:`LaunchedServer`."""

    launched: LaunchedServer

    def do_GET(self) -> None:
        path = self.path.lstrip("/")
        self.answer(lambda: "" if path == "health" else self.launched.request(path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        path = self.path.lstrip("/")
        if path.startswith("flush_cache"):
            self.answer(self.launched.flush_cache)
        elif body.get("stream"):
            self.stream(path, body)
        else:
            self.answer(lambda: self.launched.post(path, body))

    def answer(self, work: Callable[[], Any]) -> None:
        try:
            found = work()
        except HTTPError as error:
            self.refuse(error)
            return
        self.begin(200, found.encode() if isinstance(found, str) else json.dumps(found).encode())

    def stream(self, path: str, body: dict[str, Any]) -> None:
        chunks = self.launched.stream(path, body)
        try:
            chunk = next(chunks, None)
        except HTTPError as error:
            self.refuse(error)
            return
        self.begin(200)
        while chunk is not None:
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            chunk = next(chunks, None)

    def refuse(self, error: HTTPError) -> None:
        self.begin(error.code, error.fp.read() if error.fp is not None else b"")

    def begin(self, code: int, content: bytes = b"") -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


class Listener(ThreadingHTTPServer):
    """An HTTP server for many requests at once. A request that a test breaks off prints nothing."""

    request_queue_size = 256
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: object) -> None: ...


Server = TypeVar("Server", bound=LaunchedServer)


class Launches:
    """Takes the place of ``subprocess.Popen`` for SGLang servers.

    Attributes:
        made: The launched servers that could start, in their order.
    """

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.make: Callable[[tuple[str, ...], Mapping[str, str], Path], LaunchedServer] = LaunchedServer
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()

    def popen(self, command: Any, **given: Any) -> Any:
        """Start a process. That of an SGLang server sleeps, or ends at once if the server cannot start."""
        if LAUNCHER not in command:
            return Process(command, **given)
        # After the launcher: --model-path M --host H --port P, and at the end --nccl-port N.
        port, flags = int(command[8]), tuple(command[9:])
        if "--nccl-port" in flags:
            flags = flags[: flags.index("--nccl-port")]
        env = {name: value for name, value in given["env"].items() if os.environ.get(name) != value}
        server = self.make(flags, env, Path(given["stdout"].name))
        if not server.can_start():
            return Process(["false"], **given)
        self.listen(server, port)
        server.process = Process(["sleep", "600"], **given)
        with self._lock:
            self.made.append(server)
        return server.process

    def listen(self, server: LaunchedServer, port: int = 0) -> str:
        """Let a server answer on ``port``, or on any free one, without a process. Returns its URL."""
        listener = Listener(("127.0.0.1", port), type("", (Handler,), {"launched": server}))
        server.port = listener.server_port
        threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True).start()
        with self._lock:
            self._listeners.append(listener)
        return f"http://127.0.0.1:{server.port}"

    def close(self) -> None:
        """Stop answering."""
        for listener in self._listeners:
            listener.shutdown()
            listener.server_close()
