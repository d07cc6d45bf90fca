"""Values of options that several commands have."""

import math
import shlex
from argparse import ArgumentTypeError

from sglang_ext.tools import CommandError

LAST_PORT = 65535


def split(text: str, option: str) -> list[str]:
    """Words of flags that an option has, as a shell splits them.

    Raises:
        CommandError: a quote is left open.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise CommandError(f"{option} {text!r}: {error}; close it as for a shell") from error


def seconds(text: str) -> float:
    """A time above 0.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not found > 0:
        raise ArgumentTypeError(f"{text!r}: pass seconds above 0")
    return found
