"""Checks the output paths of a command before it works for minutes, and maps the end of the command to an exit code."""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from sglang_ext.core import OptionError


def check_outputs(args: argparse.Namespace) -> None:
    """Refuse ``--json``, ``--plot``, ``--logs`` and ``--out`` if they cannot be written. Flags that a command does not have are ignored.

    Raises:
        OptionError: With the flag, its value and the remedy.
    """
    given = {name: path for name, path in vars(args).items() if path is not None}
    if "json" in given:
        check_file("--json", given["json"])
    if "plot" in given:
        check_plot("--plot", given["plot"])
    for name in {"logs", "out"} & set(given):
        check_folder(f"--{name}", given[name])


def check_file(flag: str, path: Path) -> None:
    """Create the folder of a file, and refuse a file that cannot be written. An existing file does not change.

    Raises:
        OptionError: With the flag, its value and the remedy.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        was_there = path.exists()
        with path.open("a"):
            pass
        if not was_there:
            path.unlink()
    except OSError as error:
        raise OptionError(
            f"{flag} is {str(path)!r}, which cannot be written ({error.strerror}): pass a file in a folder that you may write to"
        ) from error


def check_plot(flag: str, path: Path) -> None:
    """Like :func:`check_file`, for a plot, whose suffix names its format.

    Raises:
        OptionError: With the flag, its value and the remedy.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise OptionError(f"{flag} is {str(path)!r}; a plot is one of {', '.join(sorted(formats))}: pass a name that ends in .png")
    check_file(flag, path)


def check_folder(flag: str, path: Path) -> None:
    """Create the folder, and refuse one in which no file can be written.

    Raises:
        OptionError: With the flag, its value and the remedy.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OptionError(
            f"{flag} is {str(path)!r}, to which nothing can be written ({error.strerror}): pass a folder that you may write to"
        ) from error


def exit_code(name: str, work: Callable[[], None], refused: tuple[type[Exception], ...], console: Console) -> int:
    """Run ``work``. Returns 0 if it is done, 2 for an error in ``refused``, which is shown, and 130 if it was interrupted."""
    try:
        work()
    except refused as error:
        console.print(f"{name}: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print(f"{name}: interrupted; run it again for the rest")
        return 130
    return 0
