"""A running server that the soak tests without starting it, and the check for leaks after the traffic."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

from sglang_ext.tools import CommandError
from sglang_ext_bench.server import RequestClient, describe_error
from sglang_ext_bench.soaking.request_options import SERVER_FLAGS, Option

IDLE_SECONDS = 30.0
"""Time in which a server must become idle after its last request. SGLang aborts a stream again two seconds after its client disconnects."""
POLL_SECONDS = 0.5
SCHEMES = ("http://", "https://")


class SupportsGet(Protocol):
    """A server that answers GET requests."""

    def request(self, path: str) -> Any: ...


class ExternalServer(RequestClient):
    """Context manager: a client of a running SGLang server at any address. The soak neither starts nor stops this server.

    Args:
        url: Address, for example ``http://127.0.0.1:30000``.
        request_timeout: Seconds for one request.

    Raises:
        CommandError: The address has no ``http://`` or ``https://``.
    """

    group = None
    """The process group is unknown, so that its processes are not watched."""

    def __init__(self, url: str, request_timeout: float) -> None:
        super().__init__(0, request_timeout)
        if not url.startswith(SCHEMES):
            raise CommandError(f"{url!r} is not the address of a server: pass one with http://, for example http://127.0.0.1:30000")
        self._url = url.rstrip("/")

    @property
    def url(self) -> str:
        """Address of the server, without a slash at the end."""
        return self._url

    def __enter__(self) -> "ExternalServer":
        self.check()
        return self

    def __exit__(self, *_: object) -> None: ...

    def check(self) -> None:
        """Check that the server is healthy.

        Raises:
            CommandError: It does not answer. The message has the address.
        """
        if not self.alive():
            raise CommandError(f"no healthy server at {self.url}: start it, or leave the option out and the soak starts one")

    def describe_log(self) -> str:
        """A sentence that says where the log is."""
        return f"see the log of the server at {self.url}"


def supported_options(options: Sequence[Option], servers: Sequence[SupportsGet]) -> tuple[Option, ...]:
    """Select the options that all servers support by their settings. Print the others.

    Raises:
        CommandError: No option is supported.
    """
    settings = [server.request("server_info") for server in servers]
    missing: dict[str, list[str]] = {}
    for option in options:
        for name in option.needed_settings:
            if not all(found.get(name) for found in settings):
                missing.setdefault(name, []).append(option.name)
    for name, left_out in missing.items():
        print(f"left out, because a server runs without --{name.replace('_', '-')}: {', '.join(left_out)}")
    left_out = {name for names in missing.values() for name in names}
    if kept := tuple(option for option in options if option.name not in left_out):
        return kept
    raise CommandError(f"the servers support no request option of the soak: start them with {' '.join(SERVER_FLAGS)}")


def describe_leak(server: SupportsGet) -> str | None:
    """Describe the requests and tokens that an idle server still holds, by SGLang's own counters. Return None if there are none.

    SGLang counts a token as used unless its slot is free or belongs to the evictable part of the prefix cache. Call this before
    ``/flush_cache``, which frees all slots of the pool, leaked ones too.
    """
    deadline = time.monotonic() + IDLE_SECONDS
    while (held := _describe_held(server)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    if not held:
        return None
    return f"{IDLE_SECONDS:g} s after the last answer the server still holds {held}"


def _describe_held(server: SupportsGet) -> str:
    names = {"num_running_reqs": "running requests", "num_waiting_reqs": "waiting requests", "num_used_tokens": "used tokens"}
    try:
        loads = server.request("v1/loads")["loads"]
    except OSError as error:
        return f"no counters: GET /v1/loads failed: {describe_error(error)}"
    return ", ".join(f"{count} {word}" for name, word in names.items() if (count := sum(load[name] for load in loads)))
