"""A machine with two GPUs, as far as flags are looked at; for a process of its own, as SGLang and PyTorch keep what they once found."""

import argparse
import io
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field

import torch

GPUS = 2
# Ports differ from server to server, and change nothing of what flags resolve to.
PORTS = re.compile(r"(port\S*) \d+")


@dataclass
class Asked:
    """What became of a benchmark's command.

    Attributes:
        servers: that it would have started.
        refused: the last line of what it ended with itself, and of what each of these would have, by flags.
    """

    servers: int
    refused: dict[str, str] = field(default_factory=dict)


def pretend() -> None:
    """Let PyTorch find GPUs; to be called before SGLang is loaded."""
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: GPUS
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_name = lambda device=None: "NVIDIA H200"


def ask(commands: Mapping[str, str]) -> dict[str, Asked]:
    """Run benchmarks whose servers do not start: in the place of each SGLang resolves its flags, and the plugin looks at what comes of it.

    Args:
        commands: of a shell, by name: ``python -m sglang_ext_bench``, and ``jobs``, ``longcot``, ``methods`` or ``transfer`` with their options.
    """
    pretend()
    from sglang.srt.plugins import load_plugins

    from sglang_ext.arguments import CheckedServerArgs
    from sglang_ext.tools import CommandError, server_flags, server_process
    from sglang_ext_bench.__main__ import main
    from sglang_ext_bench.jobs import command as jobs
    from sglang_ext_bench.longcot import command as longcot
    from sglang_ext_bench.methods import command as methods
    from sglang_ext_bench.server import BenchServer
    from sglang_ext_bench.transfer import command as transfer

    started: list[tuple[str, ...]] = []

    def enter(server: BenchServer) -> None:
        started.append(server.command[3:])  # after python -m sglang.launch_server
        raise CommandError("servers do not start here")

    BenchServer.__enter__ = enter
    server_process.check_servers = server_flags.check  # in this process
    for each in (jobs, longcot, transfer):
        each.make_prompts = lambda args, count, contexts: {tokens: [(0,) * tokens] * count for tokens in contexts}
    methods.text_prompts = methods.shared_settings = lambda args, *_: {}
    load_plugins()  # as a server does
    parser = argparse.ArgumentParser()
    CheckedServerArgs.add_cli_args(parser)

    def resolve(flags: tuple[str, ...]) -> int:
        try:
            CheckedServerArgs.from_cli_args(parser.parse_args(flags))
        except SystemExit as ended:
            return ended.code
        return 0

    # Servers of several commands have the same flags.
    resolved: dict[str, tuple[int, str]] = {}
    found = {}
    for name, command in commands.items():
        started.clear()
        code, told = _heard(lambda: main(shlex.split(command)[3:]))
        found[name] = Asked(len(started), {"the benchmark": told} if code == 2 else {})
        for flags in started:
            key = PORTS.sub(r"\1", shlex.join(flags))
            if key not in resolved:
                resolved[key] = _heard(lambda: resolve(flags))
            code, told = resolved[key]
            if code:
                found[name].refused[shlex.join(flags)] = told
    return found


def _heard(run: Callable[[], int]) -> tuple[int, str]:
    """The exit code, and the last line that was printed."""
    with redirect_stdout(io.StringIO()) as told, redirect_stderr(told):
        code = run()
    return code, (told.getvalue().strip().splitlines() or [""])[-1]
