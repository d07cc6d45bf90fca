"""Options of several values on the command line."""

import math
import shlex
from argparse import ArgumentTypeError
from collections.abc import Iterable, Mapping

from sglang_ext.bench import BenchError

DTYPES = ("bfloat16", "float16", "float32")
"""Of ``--dtype``: those that say what is computed; SGLang's ``auto`` is whatever a model's config names."""
LAST_PORT = 65535
PROMPTS = "--context-len"
"""How long prompts are, as most benchmarks name it."""


def names(text: str) -> tuple[str, ...]:
    """Names separated by commas, without blanks and empty ones."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def split(text: str, option: str) -> list[str]:
    """Words of flags that an option has, as a shell splits them.

    Raises:
        BenchError: a quote is left open.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BenchError(f"{option} {text!r}: {error}; close it as for a shell") from error


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


def check_counts(counts: Mapping[str, int], least: int = 1) -> None:
    """Refuse options below ``least``.

    Raises:
        BenchError: names the option.
    """
    for option, value in counts.items():
        if value < least:
            raise BenchError(f"{option} {value}: must be at least {least}")


def check_port(port: int, taken: int = 1) -> None:
    """Refuse a number that is no TCP port, or after which there are too few for ``taken`` in all.

    Raises:
        BenchError: names it.
    """
    if not 0 <= port <= LAST_PORT:
        raise BenchError(f"--port {port}: must be from 1 to {LAST_PORT}, or 0 for any free one")
    if port > LAST_PORT - (taken - 1):
        raise BenchError(f"--port {port}: the next {taken - 1} are taken as well: pass at most {LAST_PORT - (taken - 1)}")


def check_budgets(budgets: Iterable[float]) -> None:
    """Refuse values of --budget that are no shares.

    Raises:
        BenchError: names the value.
    """
    for budget in budgets:
        if not 0 < budget <= 1:
            raise BenchError(f"--budget {budget:g}: a budget is a share of the cache in (0, 1]")


def numbers(text: str, flag: str, kind: type = int, zero: bool = False) -> list:
    """Numbers separated by commas, all above 0 (or 0, where ``zero`` allows it).

    Raises:
        BenchError: names the flag.
    """
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 0 or (0 in numbers and not zero):
        raise BenchError(f"{flag} {text!r}: pass numbers {'of 0 or more' if zero else 'above 0'}, separated by commas")
    return numbers


def probabilities(text: str, flag: str) -> list[float]:
    """Probabilities separated by commas.

    Raises:
        BenchError: names the flag.
    """
    found = numbers(text, flag, float, zero=True)
    if max(found) > 1:
        raise BenchError(f"{flag} {text!r}: pass probabilities up to 1")
    return found
