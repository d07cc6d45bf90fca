"""Parses and checks the options that several commands have."""

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_ext.core import OptionError
from sglang_ext.tools import LAST_PORT, CommandError, check_folder, seconds, split_flags

DTYPES = ("bfloat16", "float16", "float32")
"""Values of ``--dtype``. SGLang's ``auto`` is not allowed, because it depends on the model's config."""


def add_start_timeout(parser: argparse.ArgumentParser, default: float = 600.0) -> None:
    """Add the option --start-timeout, with its default in seconds."""
    parser.add_argument(
        "--start-timeout", type=seconds, default=default, metavar="SECONDS", help="seconds until servers must be ready (default: %(default)g)"
    )


def names(text: str) -> tuple[str, ...]:
    """Parse names separated by commas. Blanks and empty names are removed."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def check_counts(counts: Mapping[str, int], least: int = 1) -> None:
    """Check that values, by option, are at least ``least``.

    Raises:
        CommandError: Names the option and its value.
    """
    for option, value in counts.items():
        if value < least:
            raise CommandError(f"{option} {value}: must be at least {least}")


def check_port(port: int, taken: int = 1) -> None:
    """Check a TCP port.

    Args:
        port: Value of --port. 0 for any free port.
        taken: Number of consecutive ports that the command uses.

    Raises:
        CommandError: The number is no port, or the last ports are out of range.
    """
    if not 0 <= port <= LAST_PORT:
        raise CommandError(f"--port {port}: must be from 1 to {LAST_PORT}, or 0 for any free one")
    if port > LAST_PORT - (taken - 1):
        raise CommandError(f"--port {port}: the next {taken - 1} ports are used too: pass at most {LAST_PORT - (taken - 1)}")


def check_budgets(budgets: Iterable[float], option: str = "--budget") -> None:
    """Refuse values of an option that are not shares of the cache.

    Raises:
        CommandError: With the option and its value.
    """
    for budget in budgets:
        if not 0 < budget <= 1:
            raise CommandError(f"{option} {budget:g}: a budget is a share of the cache in (0, 1]")


def check_known(option: str, values: Iterable[str], known: Iterable[str]) -> None:
    """Refuse values of an option that are not among ``known``.

    Raises:
        CommandError: With the option, its value and the allowed ones.
    """
    allowed = list(known)
    for value in values:
        if value not in allowed:
            raise CommandError(f"{option} {value!r}: pass some of {', '.join(allowed)}")


def numbers(text: str, flag: str, kind: type[int] | type[float] = int, zero: bool = False) -> list[Any]:
    """Parse numbers separated by commas.

    Args:
        text: Value of the option.
        flag: Name of the option.
        kind: int or float.
        zero: 0 is allowed. Negative numbers never are.

    Raises:
        CommandError: Names the option and its value.
    """
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 0 or (0 in found and not zero):
        raise CommandError(f"{flag} {text!r}: pass numbers {'of 0 or more' if zero else 'above 0'}, separated by commas")
    return found


def probabilities(text: str, flag: str) -> list[float]:
    """Parse probabilities separated by commas.

    Raises:
        CommandError: Names the option and its value.
    """
    found = numbers(text, flag, float, zero=True)
    if max(found) > 1:
        raise CommandError(f"{flag} {text!r}: pass probabilities up to 1")
    return found


def file_name(name: str) -> str:
    """Turn a server's name into a part of a file name. The name may contain a path, as ``--kv-compressor ./my_method.py:KeyNorm``."""
    return re.sub(r"[^\w.+-]+", "-", name)


def find_repeated_flag(texts: Sequence[str], own: Iterable[str]) -> str | None:
    """Return the first flag of ``texts``, by name, that is in ``own`` too. None if there is no such flag.

    Args:
        texts: Flags that the user passed, as for :func:`split_flags`.
        own: Flags that the command sets itself.
    """
    return min({word.partition("=")[0] for word in split_flags(texts) if word.startswith("--")} & {*own}, default=None)


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
