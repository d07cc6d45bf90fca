"""What all benchmarks report with: a console, and JSON files that say where they come from."""

import importlib.metadata
import json
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_ext.tools import CommandError

PLAIN_WIDTH = 150


def make_console() -> Console:
    """A console that does not squeeze its tables into 80 columns when piped."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    names = ("sglang", "torch", "transformers", "sglang-ext")
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in names:
        try:
            found[name.replace("-", "_")] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name.replace("-", "_")] = "not installed"
    return found


def origin() -> dict[str, Any]:
    """What a report is of: versions, and the command."""
    return {
        "versions": versions(),
        "command": shlex.join(["python", "-m", "sglang_ext_bench", *sys.argv[1:]]),
    }


def markdown_row(cells: Iterable[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def markdown_header(columns: Iterable[str]) -> str:
    """Return the two lines that begin a Markdown table."""
    names = list(columns)
    return f"{markdown_row(names)}\n{'|---' * len(names)}|"


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report, with its folder; whoever ends the process meanwhile has the report before it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(report, indent=1, default=str) + "\n")
    part.replace(path)


def read_json(path: Path, flag: str) -> dict[str, Any]:
    """A report that :func:`write_json` wrote; ``flag`` names the file.

    Raises:
        CommandError: The file cannot be read, or holds no JSON object.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CommandError(f"{flag} {path} cannot be read ({error}): pass a file that this command wrote, or a new one") from error
    if not isinstance(found, dict):
        raise CommandError(f"{flag} {path} holds no JSON object: pass a file that this command wrote, or a new one")
    return found
