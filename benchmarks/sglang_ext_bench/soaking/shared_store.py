"""Servers that share a bounded prefix store in a folder, which the soak tests like one server.

Each request goes to one of the servers, which its id decides. Meanwhile the store is disturbed: pages are damaged, and the folder is removed.
The soak fails if the folder exceeds its bound, or if no page is read from it. It also fails if a server with an empty prefix cache still holds
host memory.
"""

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from sglang_ext.core import run_periodically
from sglang_ext.mem_cache.prefix_store.file_backend import FileBackend
from sglang_ext_bench.server import BenchServer

LOOK_SECONDS = 0.5
"""Time between two looks at the size of the folder."""
DISTURB_SECONDS = 15.0
"""Time between two disturbances."""
DAMAGED_SHARE = 4
"""One of so many pages is damaged."""
RELEASE_SECONDS = 10.0
"""Time in which an idle server must write the last pages, and release their host memory."""
METRICS = ("hit_pages", "miss_pages", "slower", "written_pages", "dropped_pages", "bad_pages", "errors")


def store_flags(folder: Path, megabytes: float) -> tuple[str, ...]:
    """Flags of a server on the store."""
    return "--kv-store", f"file:{folder.absolute()}?max-gb={megabytes / 1000:g}", "--enable-metrics"


class ServersOnStore:
    """Context manager: starts the servers. It has the same methods as a client of one server.

    Args:
        servers: The servers, not started.
        folder: Folder of their store.
        max_bytes: Its bound.
        fail: Called with the description of each problem.
    """

    def __init__(self, servers: Sequence[BenchServer], folder: Path, max_bytes: int, fail: Callable[[str], None]) -> None:
        self._servers, self._folder, self._max_bytes, self._fail = servers, folder, max_bytes, fail
        self._running = ExitStack()
        self._most_bytes = self._looks = 0
        self._disturbances: Counter[str] = Counter()
        self._metrics: dict[str, dict[str, float]] = {}

    def __enter__(self) -> "ServersOnStore":
        with ExitStack() as starting:
            for server in self._servers:
                starting.enter_context(server)
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
        """Process groups of the servers."""
        return tuple(server.group for server in self._servers)

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
            self.post("generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 1}})
            self.flush_cache()
        for number, server in self.by_role.items():
            if held := _host_bytes(server):
                self._fail(f"server {number} holds {held:g} bytes of host memory though its prefix cache is empty")
            self._metrics[number] = {name: _metric(server, f"store_{name}_total") for name in METRICS}
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
            disturb = self._damage if self._looks // every % 2 else self._remove
            disturb()

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
        self._disturbances["pages damaged"] += 1

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._disturbances["folder removed"] += 1


def _metric(server: BenchServer, name: str) -> float:
    """Sum of the samples of a metric."""
    lines = server.request("metrics").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"sglang_ext:{name}"))


def _host_bytes(server: BenchServer) -> float:
    return _metric(server, "host_bytes")
