"""Parses the values of command-line options."""

import math
import shlex
from argparse import ArgumentTypeError
from collections.abc import Iterable, Sequence

from sglang_ext.tools import CommandError

LAST_PORT = 65535


def split_flags(texts: Sequence[str], option: str = "flags") -> tuple[str, ...]:
    """Split texts into flags as a shell does.

    Args:
        texts: The values of a repeatable option.
        option: Name of the option in the error message.

    Raises:
        CommandError: A quote is not closed.
    """
    found: list[str] = []
    for text in texts:
        try:
            found += shlex.split(text)
        except ValueError as error:
            raise CommandError(f"{option} {text!r}: {error}; close it as for a shell") from error
    return tuple(found)


def find_repeated_flag(texts: Sequence[str], own: Iterable[str]) -> str | None:
    """Return the first flag of ``texts``, by name, that is in ``own`` too. None if there is no such flag.

    Args:
        texts: Flags that the user passed, as for :func:`split_flags`.
        own: Flags that the command sets itself.
    """
    return min({word.partition("=")[0] for word in split_flags(texts) if word.startswith("--")} & {*own}, default=None)


def seconds(text: str) -> float:
    """Parse a time above 0.

    Raises:
        ArgumentTypeError: The text is not a number above 0.
    """
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not found > 0:
        raise ArgumentTypeError(f"{text!r}: pass seconds above 0")
    return found
