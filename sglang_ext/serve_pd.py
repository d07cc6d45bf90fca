"""Serves one model with a prefill and a decode server on this machine, behind SGLang's router.

    python -m sglang_ext.serve_pd --model MODEL [--port 30000]

Clients send requests to the router, on --port. The prefill server, the decode server and SGLang's bootstrap server use the next three
ports. The first two find each other with the third. By default KV is transferred with the transfer backend progressive, and the decode
server drafts and verifies.
"""

import argparse
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from sglang_ext.command_line import sample_request
from sglang_ext.tools import LAST_PORT, ROLES, CommandError, seconds, split_flags
from sglang_ext.tools.server_process import HOST, ServerProcess, check_servers, free_port, is_taken, leave_on_signals, stop_all, stop_together

ROUTER = "sglang_router"
INSTALL_ROUTER = "pip install --no-deps -r requirements/pd.txt, or run make serve-pd"
USE_OWN_OPTION = "which this command sets from its own {0}: pass {0} ({1} of make serve-pd), and leave it out there"
ALWAYS_SET = "which this command sets itself: leave it out there, or start the servers by hand (docs/guides/prefill-and-decode-apart.md)"
RESERVED_FLAGS = {
    **dict.fromkeys(("--model-path", "--model"), USE_OWN_OPTION.format("--model", "MODEL")),
    **dict.fromkeys(("--port", "--disaggregation-bootstrap-port"), USE_OWN_OPTION.format("--port", "PORT")),
    **dict.fromkeys(("--host", "--disaggregation-mode"), ALWAYS_SET),
}
"""Flags that this command sets itself, with the remedy."""
PORTS = 4
"""Ports of the router, the prefill server, the decode server and SGLang's bootstrap server."""
ENVIRONMENT = {"SGLANG_HOST_IP": HOST}
"""Environment variables of the servers. All traffic stays on the loopback interface."""
STOP_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL. SGLang's prefill and decode loops do not end on SIGTERM."""
POLL_SECONDS = 0.5
"""Seconds between two checks that all processes run."""


class Router(ServerProcess):
    """SGLang's router for the prefill and the decode server on the ports ``servers``. ``bootstrap``: port of SGLang's bootstrap server."""

    # Succeeds when the router has found both servers. /health succeeds earlier.
    health_path = "readiness"

    def __init__(self, port: int, servers: Sequence[int], bootstrap: int, log: Path) -> None:
        super().__init__("", (), log, port=port, start_timeout=60.0, stop_grace=STOP_GRACE)
        prefill, decode = (f"http://{HOST}:{each}" for each in servers)
        self.command = (
            *(sys.executable, "-m", f"{ROUTER}.launch_router", "--pd-disaggregation"),
            # Without these flags its metrics are on port 29000 of all interfaces, where a second router cannot start.
            *("--prometheus-host", HOST, "--prometheus-port", str(free_port())),
            *("--host", HOST, "--port", str(port)),
            *("--prefill", prefill, str(bootstrap), "--decode", decode),
        )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    result = argparse.ArgumentParser("python -m sglang_ext.serve_pd", description=__doc__, formatter_class=formatter)
    add = result.add_argument
    add("--model", required=True, help="Hugging Face folder or name")
    add("--port", type=int, default=30000, help="port of the router; the next three are used too (default: %(default)s)")
    add("--arg", default="", metavar="FLAGS", help="SGLang's flags for both servers, as one string")
    for role in ROLES:
        add(f"--{role}-arg", default="", metavar="FLAGS", help=f"flags for the {role} server; they override --arg")
    add("--logs", type=Path, default=Path(".cache/serve-pd"), help="folder for the logs (default: %(default)s)")
    add("--start-timeout", type=seconds, default=600.0, help="seconds until both servers must be ready (default: %(default)g)")
    return result


def role_flags(args: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Return the flags of both servers, by role."""
    # An idle scheduler that polls would occupy one core for each server. The prefill server is verified too, because it stores the queries
    # that the methods of the decode server need.
    shared = ("--kv-mode", "verified", "--sleep-on-idle", "--disaggregation-transfer-backend", "progressive", *parse_flags("--arg", args.arg))
    bootstrap = ("--disaggregation-bootstrap-port", str(args.port + 3))
    own = {role: parse_flags(f"--{role}-arg", getattr(args, f"{role}_arg")) for role in ROLES}
    return {role: ("--disaggregation-mode", role, *bootstrap, *shared, *own[role]) for role in ROLES}


def parse_flags(option: str, text: str) -> tuple[str, ...]:
    """Split the value of an option into flags as a shell does, and refuse those that this command sets itself."""
    flags = split_flags([text], option)
    for flag in flags:
        remedy = RESERVED_FLAGS.get(flag.split("=")[0])
        if remedy is not None:
            raise CommandError(f"{option} has {flag}, {remedy}")
    return flags


def check_ports(first: int) -> None:
    """Check that the four ports from ``first`` on are in range and free."""
    if not 1 <= first <= LAST_PORT - 3:
        raise CommandError(f"--port {first}: the next three are used too: pass 1 to {LAST_PORT - 3}")
    if (taken := find_taken_port(first)) is None:
        return
    starts = range(first + PORTS, LAST_PORT - PORTS + 2, PORTS)
    free = next((start for start in starts if find_taken_port(start) is None), None)
    remedy = "" if free is None else f", or pass --port {free} (make serve-pd PORT={free})"
    raise CommandError(f"port {taken} is taken, and this command needs four from --port {first} on: stop the process that listens there{remedy}")


def find_taken_port(first: int) -> int | None:
    """Return the lowest used port of the four from ``first`` on. None if all are free."""
    return next((port for port in range(first, first + PORTS) if is_taken(port)), None)


def check(args: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Check that the servers and the router can start. Return the flags of both servers, by role."""
    if importlib.util.find_spec(ROUTER) is None:
        raise CommandError(f"SGLang's router ({ROUTER}) is not installed: {INSTALL_ROUTER}")
    check_ports(args.port)
    flags = role_flags(args)
    check_servers(args.model, flags)
    return flags


def serve(args: argparse.Namespace, flags: dict[str, tuple[str, ...]]) -> None:
    """Start both servers and the router, and wait until one of them ends, which raises an error."""
    try:
        args.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--logs {args.logs} cannot be created: {error}; pass a folder that can be") from error
    ports = {role: args.port + offset for offset, role in enumerate(ROLES, start=1)}
    make_server = partial(ServerProcess, args.model, start_timeout=args.start_timeout, stop_grace=STOP_GRACE, env=ENVIRONMENT)
    servers = {role: make_server(flags[role], args.logs / f"{role}-{port}.log", port=port) for role, port in ports.items()}
    router = Router(args.port, tuple(ports.values()), args.port + 3, args.logs / f"router-{args.port}.log")
    processes: dict[str, ServerProcess] = {**{f"{role} server": server for role, server in servers.items()}, "router": router}
    with ExitStack() as running:
        running.callback(stop_together, processes.values())
        for role, server in servers.items():
            print(f"{role} server: starting on port {server.port}, log {server.log}", flush=True)
            server.start()
        for role, server in servers.items():
            try:
                server.wait_healthy()
            except CommandError as error:
                raise CommandError(f"the {role} server: {error}") from error
        router.start()
        router.wait_healthy()
        print(f"listening on {router.url}; try: {sample_request(router.url)}", flush=True)
        while all(each.running for each in processes.values()):
            time.sleep(POLL_SECONDS)
        ended = next(name for name, each in processes.items() if not each.running)
        raise CommandError(f"the {ended} ended, so that all are stopped\n{processes[ended].describe_log()}")


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal arrives. Return 2 if a process cannot start or has ended."""
    args = parser().parse_args(argv)
    try:
        serve(args, check(args))
    except CommandError as error:
        print(f"serve_pd: {error}", file=sys.stderr)
    return 2


def _leave(number: int, frame: object) -> None:
    """Stop all processes when a signal arrives."""
    with suppress(OSError):  # the terminal may be closed
        # os.write, because the signal may have interrupted a print.
        os.write(2, b"serve_pd: stopping the servers and the router, which takes some seconds\n")
    stop_all()
    sys.exit(0 if number == signal.SIGINT else 128 + number)


if __name__ == "__main__":
    leave_on_signals(_leave)
    sys.exit(main())
