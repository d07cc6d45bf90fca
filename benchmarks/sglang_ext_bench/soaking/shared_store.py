"""Servers that share a bounded prefix store, which the soak tests like one server.

Each request goes to one of the servers, which its id decides. Meanwhile the store is disturbed. Pages of a folder are damaged, and the folder is
removed. A store process is restarted and killed. The soak fails if the folder exceeds its bound, or if no page is read from the store. It also
fails if a server with an empty prefix cache still holds host memory.
"""

import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from sglang_ext.core import run_periodically
from sglang_ext.mem_cache.prefix_store.file_backend import FileBackend
from sglang_ext.tools import CommandError
from sglang_ext.tools.server_process import free_port
from sglang_ext_bench.client import total
from sglang_ext_bench.server import BenchServer

LOOK_SECONDS = 0.5
"""Time between two looks at the size of the folder."""
DISTURB_SECONDS = 15.0
"""Time between two disturbances."""
DAMAGED_SHARE = 4
"""One of so many pages is damaged."""
RELEASE_SECONDS = 10.0
"""Time in which an idle server must write the last pages, and release their host memory."""
MEMORY_SHARE = 0.25
"""Memory of a store process, as a share of the bound of its disk. So pages are dropped from memory, and loaded from the disk."""
END_SECONDS = 60.0
"""Time in which a store process must end after SIGTERM."""
METRICS = ("hit_pages", "miss_pages", "slower", "written_pages", "dropped_pages", "bad_pages", "errors")


class StoreProcess:
    """Context manager: runs ``python -m sglang_ext.store serve`` with a folder as its disk.

    Args:
        folder: The folder.
        max_bytes: Its bound.
        log: File of the log.

    Attributes:
        url: The store, as for ``--kv-store``.
        group: Process group of the store. None if it does not run.
    """

    def __init__(self, folder: Path, max_bytes: int, log: Path) -> None:
        address = f"tcp://127.0.0.1:{free_port()}"
        bounds = ("--memory-gb", f"{MEMORY_SHARE * max_bytes / 1e9:g}", "--disk-gb", f"{max_bytes / 1e9:g}")
        self._command = (sys.executable, "-m", "sglang_ext.store", "serve", "--listen", address, *bounds, "--disk", str(folder))
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.url = address

    def __enter__(self) -> "StoreProcess":
        self._log.write_bytes(b"")
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    @property
    def group(self) -> int | None:
        # Another thread may end it.
        process = self._process
        return None if process is None else process.pid

    def restart(self) -> None:
        """End the store as an administrator does, and start it again.

        Raises:
            CommandError: It does not end, or does not start.
        """
        self._end()
        self._start()

    def kill(self) -> None:
        """Kill the store, and start it again.

        Raises:
            CommandError: It does not start.
        """
        if self._process is not None:
            self._process.kill()
        self.restart()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log, start_new_session=True)
        # It prints its URL when it listens, and an error if it cannot.
        line = self._process.stdout.readline().decode()
        if self.url not in line:
            self._end()
            raise CommandError(f"the store process did not start: {line.strip()}; see {self._log}")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired as error:
            process.kill()
            process.wait()
            raise CommandError(f"the store process did not end in {END_SECONDS:g} s after SIGTERM; see {self._log}") from error
        finally:
            process.stdout.close()


class ServersOnStore:
    """Context manager: starts the servers. It has the same methods as a client of one server.

    Args:
        servers: The servers, not started.
        folder: Folder of their store.
        max_bytes: Its bound.
        fail: Called with the description of each problem.
        process: The store process that has the folder as its disk, not started. None if the servers use the folder themselves.
        restart_seconds: Time from the start in which this process is restarted. Its last run is long enough to find a leak.
    """

    def __init__(
        self,
        servers: Sequence[BenchServer],
        folder: Path,
        max_bytes: int,
        fail: Callable[[str], None],
        process: StoreProcess | None = None,
        restart_seconds: float = 0.0,
    ) -> None:
        self._servers, self._folder, self._max_bytes, self._fail = servers, folder, max_bytes, fail
        self._process, self._restart_seconds, self._restart_until = process, restart_seconds, 0.0
        self._running = ExitStack()
        self._most_bytes = self._looks = 0
        self._disturbances: Counter[str] = Counter()
        self._metrics: dict[str, dict[str, float]] = {}

    def __enter__(self) -> "ServersOnStore":
        with ExitStack() as starting:
            if self._process is not None:
                starting.enter_context(self._process)
            for server in self._servers:
                starting.enter_context(server)
            self._restart_until = time.monotonic() + self._restart_seconds
            starting.enter_context(run_periodically(self._look, LOOK_SECONDS))
            self._running = starting.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._running.close()

    @property
    def by_role(self) -> dict[str, BenchServer]:
        """The servers by their number."""
        return {str(number): server for number, server in enumerate(self._servers, 1)}

    @property
    def groups(self) -> tuple[int | None, ...]:
        """Process groups of the servers, and of a store process."""
        return tuple(each.group for each in (*self._servers, *(() if self._process is None else (self._process,))))

    def describe_log(self) -> str:
        """Describe the logs of all servers."""
        return "\n".join(f"server {number}: {server.describe_log()}" for number, server in self.by_role.items())

    def request(self, path: str) -> Any:
        """Send GET to the first server and return its answer."""
        return self._servers[0].request(path)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send a request to its server. One without an id goes to all servers, and the last answer is returned."""
        if "rid" in body:
            return self._server(body).post(path, body)
        return [server.post(path, body) for server in self._servers][-1]

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Send a request to its server and stream the answer."""
        return self._server(body).stream(path, body)

    def post_quietly(self, path: str, body: dict[str, Any]) -> None:
        """Send POST to the server of a request, and ignore the answer."""
        self._server(body).post_quietly(path, body)

    def flush_cache(self) -> None:
        """Empty all prefix caches."""
        for server in self._servers:
            server.flush_cache()

    def check_memory(self) -> None:
        """Report servers that hold host memory though their prefix caches are empty, and a store that was never read."""
        deadline = time.monotonic() + RELEASE_SECONDS
        # Written pages are released by the next request.
        while any(map(_host_bytes, self._servers)) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            # Metrics are updated when a request decodes.
            self.post("generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 4}})
            self.flush_cache()
        for number, server in self.by_role.items():
            if held := _host_bytes(server):
                self._fail(f"server {number} holds {held:g} bytes of host memory though its prefix cache is empty")
            self._metrics[number] = {name: total(server.request("metrics"), f"sglang_ext:store_{name}_total") for name in METRICS}
        if not sum(each["hit_pages"] for each in self._metrics.values()):
            self._fail(f"no page was read from the store in {self._folder}")

    def table(self) -> str:
        """The size of the folder, the disturbances, and the pages of each server."""
        done = ", ".join(f"{count} times {name}" for name, count in sorted(self._disturbances.items())) or "undisturbed"
        lines = [f"store: at most {self._most_bytes / 1e6:.1f} of {self._max_bytes / 1e6:.1f} MB; {done}"]
        for number, metrics in self._metrics.items():
            lines.append(f"server {number}: " + ", ".join(f"{name} {value:g}" for name, value in metrics.items()))
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {"most_bytes": self._most_bytes, "max_bytes": self._max_bytes, "disturbances": dict(self._disturbances), "servers": self._metrics}

    def _server(self, body: Mapping[str, Any]) -> BenchServer:
        return self._servers[sum(str(body["rid"]).encode()) % len(self._servers)]

    def _look(self) -> None:
        """Compare the size of the folder with the bound, and now and then disturb the store."""
        self._looks += 1
        size = FileBackend(self._folder, self._max_bytes).statistics().size
        self._most_bytes = max(self._most_bytes, size)
        if size > self._max_bytes:
            self._fail(f"the store in {self._folder} has {size} bytes; its bound is {self._max_bytes}")
        every = int(DISTURB_SECONDS / LOOK_SECONDS)
        if self._looks % every == 0:
            self._disturb(self._looks // every)

    def _disturb(self, turn: int) -> None:
        """Disturb the store, in two ways in turn."""
        if self._process is None:
            ways = {"folder removed": self._remove, "pages damaged": self._damage}
        elif time.monotonic() < self._restart_until:
            ways = {"store process killed": self._process.kill, "store process restarted": self._process.restart}
        else:
            return
        name, disturb = list(ways.items())[turn % 2]
        try:
            disturb()
        except CommandError as error:
            self._fail(str(error))
        self._disturbances[name] += 1

    def _damage(self) -> None:
        for found in list(FileBackend(self._folder, self._max_bytes).objects())[::DAMAGED_SHARE]:
            namespace, _, page = found.name.partition("/")
            path = self._folder / namespace / page[:2] / page
            try:
                with path.open("r+b") as file:
                    file.seek(found.size // 2)
                    file.write(b"damage")
            except FileNotFoundError:
                continue

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _host_bytes(server: BenchServer) -> float:
    return total(server.request("metrics"), "sglang_ext:host_bytes")
