"""A prefill and a decode server that the soak tests like one server. Each request goes to both.

SGLang's prefill and decode servers do not support some request options, with any transfer backend. They are left out. With ``n`` above 1,
all samples get the same room, and the request is refused. Log-probabilities of the prompt are in the prefill server's answer, which only
a router reads. Log-probabilities of given tokens are not transferred with the first token.

Chat completions with tools are left out, too, because :func:`prefill_outcome` parses answers of ``/generate`` only.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.error import HTTPError

import psutil

from sglang_ext.config.options import BACKEND
from sglang_ext.tools import ROLES
from sglang_ext_bench.server import BenchServer, describe_error
from sglang_ext_bench.servers_apart import ServersApart
from sglang_ext_bench.soaking.request_options import OPTIONS, Option

ANSWER_SECONDS = 240.0
"""A request without an answer after this time hangs. Links time out after half a minute."""
MAX_GROWTH = 0.15
ANSWERED = "answered"
UNSUPPORTED_FIELDS = ("token_ids_logprob",)


def disaggregated_options() -> tuple[Option, ...]:
    """The request options that a prefill and a decode server support."""
    return tuple(
        replace(option, fields={name: value for name, value in option.fields.items() if name not in UNSUPPORTED_FIELDS})
        for option in OPTIONS
        if option.samples == 1 and not option.input_logprobs and option.tool_choice is None
    )


def disaggregated_flags(shared: Sequence[str], decode: Sequence[str], gbps: float) -> dict[str, tuple[str, ...]]:
    """Flags of both servers, by role.

    Args:
        shared: Flags of both servers.
        decode: Further flags of the decode server.
        gbps: Rate of the link, in Gbit/s.
    """
    transfer = ("--disaggregation-transfer-backend", BACKEND, "--kv-reference", "exact")
    return {
        "prefill": ("--disaggregation-mode", "prefill", *shared, *transfer, "--kv-link-gbps", f"{gbps:g}"),
        "decode": ("--disaggregation-mode", "decode", *shared, *transfer, *decode),
    }


class DisaggregatedServers:
    """Context manager: starts a prefill and a decode server. It has the same methods as a client of one server.

    When the decode server has ended a request, the prefill server's answer to it is checked.

    Args:
        model: Model folder or name.
        flags: Flags by role.
        logs: Folder of the logs.
        env: Environment variables by role, beside those that each role needs.
        workers: Requests in flight.
        fail: Called with the description of each problem.
        prefill_seconds: Time in which the prefill server must end a request after the decode server.
        warm_seconds: Time after which a server is warm. Its memory at the end is compared with its memory then.
    """

    def __init__(
        self,
        model: str,
        flags: Mapping[str, tuple[str, ...]],
        logs: Path,
        env: Mapping[str, Mapping[str, str]],
        workers: int,
        fail: Callable[[str], None],
        prefill_seconds: float = 60.0,
        warm_seconds: float = 120.0,
    ) -> None:
        self._servers = ServersApart(
            model, {role: [flags[role]] for role in ROLES}, logs, "soak", env=env, request_timeout=ANSWER_SECONDS
        )
        self._prefill, self._decode = (self._servers.of[role][0] for role in ROLES)
        self._fail = fail
        self._prefill_seconds, self._warm_seconds = prefill_seconds, warm_seconds
        # Each request needs one thread for the prefill server, and two for an abort at both servers.
        self._pool = ThreadPoolExecutor(3 * workers)
        self._running = ExitStack()
        self._warm_memory: dict[str, int] = {}
        self._end_memory: dict[str, int] = {}
        self._warm_timer = threading.Timer(warm_seconds, lambda: self._warm_memory.update(self._resident()))
        self._lock = threading.Lock()
        self._prefill_outcomes: Counter[str] = Counter()

    def __enter__(self) -> "DisaggregatedServers":
        with ExitStack() as starting:
            starting.callback(self._pool.shutdown)
            starting.enter_context(self._servers)
            starting.callback(self._warm_timer.cancel)
            self._warm_timer.start()
            self._running = starting.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._running.close()

    def request(self, path: str) -> Any:
        """Send GET to the decode server and return its answer.

        Raises:
            OSError: As for one server.
        """
        return self._decode.request(path)

    @property
    def by_role(self) -> dict[str, BenchServer]:
        """The prefill and the decode server, by role."""
        return {role: self._servers.of[role][0] for role in ROLES}

    def describe_log(self) -> str:
        """Describe the logs of both servers."""
        return "\n".join(f"{role} server: {server.describe_log()}" for role, server in self.by_role.items())

    def flush_cache(self) -> None:
        """Empty both prefix caches.

        Raises:
            CommandError: A server is not idle, or is gone.
        """
        for server in self._servers.all:
            server.flush_cache()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send a request to both servers and return the decode server's answer.

        Raises:
            OSError: The error of the decode server.
        """
        body, prefill = self._start_prefill(path, body)
        try:
            return self._decode.post(path, body)
        finally:
            self._check_prefill(prefill, body)

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Send a request to both servers and stream the decode server's answer.

        Raises:
            OSError: The error of the decode server.
        """
        body, prefill = self._start_prefill(path, body)
        try:
            yield from self._decode.stream(path, body)
        finally:
            self._check_prefill(prefill, body)

    def post_quietly(self, path: str, body: dict[str, Any]) -> None:
        """Send POST to both servers at the same time, and ignore the answers."""
        wait([self._pool.submit(server.post_quietly, path, body) for server in self._servers.all])

    def check_memory(self) -> None:
        """Report each server whose resident memory grew by more than :data:`MAX_GROWTH` since it was warm."""
        self._end_memory = self._resident()
        for role, warm in self._warm_memory.items():
            if self._end_memory[role] > warm * (1 + MAX_GROWTH):
                self._fail(f"the {role} server's memory grew from {_mb(warm)} to {_mb(self._end_memory[role])} MB")

    def table(self) -> str:
        """The outcomes of requests at the prefill server, and the memory of both servers."""
        lines = [f"prefill server: {count} times {outcome}" for outcome, count in sorted(self._prefill_outcomes.items())]
        for role, end in self._end_memory.items():
            warm = self._warm_memory.get(role)
            before = "not measured before" if warm is None else f"{_mb(warm)} after {self._warm_seconds:g} s, {end / warm - 1:+.1%}"
            lines.append(f"{role} server: {_mb(end)} MB resident ({before})")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The outcomes at the prefill server and the memory of both servers, as JSON values."""
        memory = {"warm": self._warm_memory, "end": self._end_memory}
        resident = {when: {role: _mb(count) for role, count in by_role.items()} for when, by_role in memory.items()}
        return {"prefill": dict(self._prefill_outcomes), "resident_mb": resident}

    def _start_prefill(self, path: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], Future[str]]:
        body = {**body, **self._servers.room()}
        return body, self._pool.submit(prefill_outcome, self._prefill, path, body)

    def _check_prefill(self, prefill: Future[str], body: Mapping[str, Any]) -> None:
        name = f"{body.get('rid', 'a request')} at the prefill server"
        if wait([prefill], self._prefill_seconds).not_done:
            self._fail(f"{name}: did not end within {self._prefill_seconds:g} s after the decode server")
            return
        error = prefill.exception()
        if error is not None:
            self._fail(f"{name}: {describe_error(error) if isinstance(error, OSError) else repr(error)}")
            return
        outcome = prefill.result().replace(str(body["bootstrap_room"]), "ROOM").replace(str(body.get("rid")), "RID")
        if not outcome:
            self._fail(f"{name}: ended without an answer or a message")
        with self._lock:
            self._prefill_outcomes[outcome] += 1

    def _resident(self) -> dict[str, int]:
        return {role: resident_bytes(self._servers.of[role][0].group) for role in ROLES}


def prefill_outcome(server: BenchServer, path: str, body: dict[str, Any]) -> str:
    """Send a request to the prefill server and wait for its end.

    Returns:
        :data:`ANSWERED`, or the server's error message. Empty if the request ends with neither.

    Raises:
        OSError: The server is gone, or does not answer in time.
    """
    last: dict[str, Any] = {}
    try:
        if body.get("stream"):
            for last in server.stream(path, body):
                pass
        else:
            last = server.post(path, body)
    except HTTPError as error:
        return describe_error(error)
    if "error" in last:
        return str(last["error"].get("message", ""))
    finish = last.get("meta_info", {}).get("finish_reason") or {}
    return str(finish.get("message", "")) if finish.get("type") == "abort" else ANSWERED if finish else ""


def resident_bytes(group: int | None) -> int:
    """Resident memory of all processes of a process group, in bytes."""
    found = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group:
                found += process.memory_info().rss
    return found


def _mb(count: int) -> int:
    return round(count / 1e6)
