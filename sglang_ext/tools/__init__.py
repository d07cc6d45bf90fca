"""Helpers of the commands and benchmarks: start a server, check its flags, send requests, score documents."""

import math
import shlex
import tempfile
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sglang_ext.core import OptionError

ROLES = ("prefill", "decode")
"""Roles of the two servers in prefill-decode disaggregation."""
LAST_PORT = 65535
PROGRESS_SECONDS = 15.0
"""Seconds between two lines about one task, without a terminal."""


class CommandError(Exception):
    """A command cannot run. The message names the cause, the allowed values, and the remedy."""


def split_flags(texts: Sequence[str], option: str = "flags") -> tuple[str, ...]:
    """Split the values of an option into flags as a shell does. Raises ``CommandError``, which names ``option``, for an open quote."""
    found: list[str] = []
    for text in texts:
        try:
            found += shlex.split(text)
        except ValueError as error:
            raise CommandError(f"{option} {text!r}: {error}; close it as for a shell") from error
    return tuple(found)


def seconds(text: str) -> float:
    """Parse a time above 0. Raises ``ArgumentTypeError`` for another text."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not found > 0:
        raise ArgumentTypeError(f"{text!r}: pass seconds above 0")
    return found


def check_folder(flag: str, path: Path) -> None:
    """Create the folder. Raises ``OptionError`` with the flag and its value if no file can be written in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OptionError(
            f"{flag} is {str(path)!r}, to which nothing can be written ({error.strerror}): pass a folder that you may write to"
        ) from error


def exit_code(name: str, work: Callable[[], int | None], console: Console) -> int:
    """Run ``work``. Returns its exit code, None for 0; 2 for an error in its input, which is shown; and 130 if it was interrupted."""
    try:
        return work() or 0
    except (CommandError, OptionError) as error:
        console.print(f"{name}: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print(f"{name}: interrupted; run it again for the rest")
        return 130


@contextmanager
def show_progress(console: Console) -> Iterator[Callable[[str, int, str], Callable[[int], None]]]:
    """Yield a function that begins a task, given its name, total and unit. It returns a function that advances the task by a count."""
    if not console.is_terminal:
        yield partial(_print_progress, console)
        return
    unit = TextColumn("{task.fields[unit]}")
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), unit, TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:

        def begin(name: str, total: int, unit: str) -> Callable[[int], None]:
            task = progress.add_task(name, total=total, unit=unit)
            return lambda count: progress.advance(task, count)

        yield begin


def _print_progress(console: Console, name: str, total: int, unit: str) -> Callable[[int], None]:
    """Print a task's progress as lines: at its start, every :data:`PROGRESS_SECONDS`, and at its end. Return the function that advances it."""
    done, begun = 0, time.monotonic()
    told = begun

    def advance(count: int) -> None:
        nonlocal done, told
        done, now = done + count, time.monotonic()
        if count and done < total and now - told < PROGRESS_SECONDS:
            return
        told, seconds = now, now - begun
        left = f", about {seconds * (total - done) / done:.0f} s left" if 0 < done < total else ""
        console.print(f"{name}: {done} of {total} {unit}, {seconds:.0f} s{left}", markup=False, highlight=False, soft_wrap=True)

    advance(0)
    return advance
