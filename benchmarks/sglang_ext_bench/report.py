"""The console and the JSON reports of all benchmarks. A report has the versions and the command that produced it."""

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_ext.tools import CommandError

PLAIN_WIDTH = 150
"""Columns of a table that is written to a pipe or a file."""


def make_console() -> Console:
    """Create a console whose tables are wider than 80 columns if the output is piped."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Create a table for the console. The first column is aligned to the left, the others to the right."""
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield "| " + " | ".join(columns) + " |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def versions() -> dict[str, str]:
    """Versions of Python, SGLang, PyTorch, transformers and sglang-ext, and the machine's architecture."""
    names = ("sglang", "torch", "transformers", "sglang-ext")
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in names:
        try:
            found[name.replace("-", "_")] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name.replace("-", "_")] = "not installed"
    return found


def hardware() -> str:
    """Name this machine's GPU, or its CPU and cores, and the versions of SGLang and PyTorch."""
    import torch

    found = versions()
    software = f"SGLang {found['sglang']}, torch {found['torch']}"
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {software}"
    return f"{_cpu_name()}, {os.cpu_count()} cores, {software}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def origin() -> dict[str, Any]:
    """The origin of a report: versions, command, hardware and date."""
    return {
        "versions": versions(),
        "command": shlex.join(["python", "-m", "sglang_ext_bench", *sys.argv[1:]]),
        "hardware": hardware(),
        "date": datetime.date.today().isoformat(),
    }


def markdown_row(cells: Iterable[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def markdown_header(columns: Iterable[str]) -> str:
    """Return the two lines that begin a Markdown table."""
    names = list(columns)
    return f"{markdown_row(names)}\n{'|---' * len(names)}|"


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report, and create its folder. If the process is killed while it writes, the file has the previous report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(report, indent=1, default=str) + "\n")
    part.replace(path)


def read_json(path: Path, flag: str) -> dict[str, Any]:
    """Read a report that :func:`write_json` wrote.

    Args:
        path: The file.
        flag: Option that named it, for the error message.

    Raises:
        CommandError: The file cannot be read, or has no JSON object.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CommandError(f"{flag} {path} cannot be read ({error}): pass a file that this command wrote, or a new one") from error
    if not isinstance(found, dict):
        raise CommandError(f"{flag} {path} has no JSON object: pass a file that this command wrote, or a new one")
    return found
