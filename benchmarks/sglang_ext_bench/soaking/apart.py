"""The verified server of a soak as two, of which one prefills and the other decodes: each request goes to both.

What is left out is what SGLang's two servers do not do, with any transfer backend: ``n`` above 1 gives all samples one room, and
is refused; log-probabilities of a prompt are with the prefill server, whose answer only a router reads; and those of
given tokens do not travel with the first token. Chat completions with tools are left out, too: :func:`outcome` reads
answers of ``/generate`` only.
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
from sglang_ext.tools.server_client import describe_error
from sglang_ext.tools.server_process import ServerProcess
from sglang_ext_bench.servers_apart import ServersApart
from sglang_ext_bench.soaking.request_options import OPTIONS, Option

ANSWER_SECONDS = 240.0
"""Without an answer for so long a request hangs: links give up after half a minute."""
PREFILL_SECONDS = 60.0
"""In which the prefill server has ended a request after the decode server has."""
WARM_SECONDS = 120.0
"""After which memory is compared with what it is at the end."""
MOST_GROWTH = 0.15
ANSWERED = "answered"
FIELDS_LEFT_OUT = ("token_ids_logprob",)


def options_apart() -> tuple[Option, ...]:
    """The ways to ask that two servers serve."""
    return tuple(
        replace(option, fields={name: value for name, value in option.fields.items() if name not in FIELDS_LEFT_OUT})
        for option in OPTIONS
        if option.samples == 1 and not option.input_logprobs and option.tool_choice is None
    )


def flags_apart(shared: Sequence[str], decode: Sequence[str], gbps: float) -> dict[str, tuple[str, ...]]:
    """Flags by role.

    Args:
        shared: of both, as of one verified server.
        decode: further ones of the decode server.
        gbps: of the link.
    """
    over = ("--disaggregation-transfer-backend", BACKEND, "--kv-reference", "exact")
    return {
        "prefill": ("--disaggregation-mode", "prefill", *shared, *over, "--kv-link-gbps", f"{gbps:g}"),
        "decode": ("--disaggregation-mode", "decode", *shared, *over, *decode),
    }


class Apart:
    """Context manager: starts both servers, and is to a soak what one server is.

    What the prefill server says of a request is looked at when the decode server has ended it.

    Args:
        model: folder or name.
        flags, env: of each role; beside those that the roles need.
        logs: folder.
        workers: requests in flight.
        fail: is told what must not happen.
    """

    def __init__(
        self,
        model: str,
        flags: Mapping[str, tuple[str, ...]],
        logs: Path,
        env: Mapping[str, Mapping[str, str]],
        workers: int,
        fail: Callable[[str], None],
    ) -> None:
        self._servers = ServersApart(
            model, {role: [flags[role]] for role in ROLES}, logs, "soak", env=env, server=ServerProcess, request_timeout=ANSWER_SECONDS
        )
        self._prefill, self._decode = (self._servers.of[role][0] for role in ROLES)
        self._fail = fail
        # Of each request the prefill server's part, and an abort at both.
        self._pool = ThreadPoolExecutor(3 * workers)
        self._running = ExitStack()
        self._warm_memory: dict[str, int] = {}
        self._memory: dict[str, int] = {}
        self._warm = threading.Timer(WARM_SECONDS, lambda: self._warm_memory.update(self._resident()))
        self._lock = threading.Lock()
        self._prefilled: Counter[str] = Counter()

    def __enter__(self) -> "Apart":
        with ExitStack() as starting:
            starting.callback(self._pool.shutdown)
            starting.enter_context(self._servers)
            starting.callback(self._warm.cancel)
            self._warm.start()
            self._running = starting.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._running.close()

    def request(self, path: str) -> Any:
        """The decode server's answer to GET.

        Raises:
            OSError: as for one server.
        """
        return self._decode.request(path)

    @property
    def by_role(self) -> dict[str, ServerProcess]:
        """Both servers."""
        return {role: self._servers.of[role][0] for role in ROLES}

    def describe_log(self) -> str:
        """Both servers'."""
        return "\n".join(f"{role} server: {server.describe_log()}" for role, server in self.by_role.items())

    def flush_cache(self) -> None:
        """Empty both caches.

        Raises:
            CommandError: one of them holds something, or is gone.
        """
        for server in self._servers.all:
            server.flush_cache()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The decode server's answer to a request.

        Raises:
            OSError: that of the decode server.
        """
        body, prefilled = self._begin(path, body)
        try:
            return self._decode.post(path, body)
        finally:
            self._look_at(prefilled, body)

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The decode server's answer as it comes.

        Raises:
            OSError: that of the decode server.
        """
        body, prefilled = self._begin(path, body)
        try:
            yield from self._decode.stream(path, body)
        finally:
            self._look_at(prefilled, body)

    def post_quietly(self, path: str, body: dict[str, Any]) -> None:
        """POST to both at once, whatever they say."""
        wait([self._pool.submit(server.post_quietly, path, body) for server in self._servers.all])

    def check_memory(self) -> None:
        """Fail where a server holds more than :data:`MOST_GROWTH` above what it held when it was warm."""
        self._memory = self._resident()
        for role, warm in self._warm_memory.items():
            if self._memory[role] > warm * (1 + MOST_GROWTH):
                self._fail(f"the {role} server's memory grew from {_mb(warm)} to {_mb(self._memory[role])} MB")

    def table(self) -> str:
        """What became of requests at the prefill server, and both servers' memory."""
        lines = [f"prefill server: {count} times {outcome}" for outcome, count in sorted(self._prefilled.items())]
        for role, end in self._memory.items():
            warm = self._warm_memory.get(role)
            before = "not looked at before" if warm is None else f"{_mb(warm)} after {WARM_SECONDS:g} s, {end / warm - 1:+.1%}"
            lines.append(f"{role} server: {_mb(end)} MB resident ({before})")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The totals of two servers."""
        memory = {"warm": self._warm_memory, "end": self._memory}
        return {"prefill": dict(self._prefilled), "resident_mb": {when: {r: _mb(b) for r, b in of.items()} for when, of in memory.items()}}

    def _begin(self, path: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], Future[str]]:
        body = {**body, **self._servers.room()}
        return body, self._pool.submit(outcome, self._prefill, path, body)

    def _look_at(self, prefilled: Future[str], body: Mapping[str, Any]) -> None:
        name = f"{body.get('rid', 'a request')} at the prefill server"
        if wait([prefilled], PREFILL_SECONDS).not_done:
            self._fail(f"{name}: no end {PREFILL_SECONDS:g} s after the decode server's")
            return
        error = prefilled.exception()
        if error is not None:
            self._fail(f"{name}: {describe_error(error) if isinstance(error, OSError) else repr(error)}")
            return
        told = prefilled.result().replace(str(body["bootstrap_room"]), "ROOM").replace(str(body.get("rid")), "RID")
        if not told:
            self._fail(f"{name}: it ended without a word")
        with self._lock:
            self._prefilled[told] += 1

    def _resident(self) -> dict[str, int]:
        return {role: resident_bytes(self._servers.of[role][0].group) for role in ROLES}


def outcome(server: ServerProcess, path: str, body: dict[str, Any]) -> str:
    """How a request ends at the prefill server: :data:`ANSWERED`, or its words; empty where there are none.

    Raises:
        OSError: the server is gone, or says nothing in time.
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
    """Of all processes of a group."""
    found = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group:
                found += process.memory_info().rss
    return found


def _mb(count: int) -> int:
    return round(count / 1e6)
