"""Options of several values on the command line."""

from collections.abc import Iterable, Mapping

from sglang_ext.tools import CommandError
from sglang_ext.tools.options import LAST_PORT

DTYPES = ("bfloat16", "float16", "float32")
"""Of ``--dtype``: those that say what is computed; SGLang's ``auto`` is whatever a model's config names."""


def names(text: str) -> tuple[str, ...]:
    """Names separated by commas, without blanks and empty ones."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def check_counts(counts: Mapping[str, int], least: int = 1) -> None:
    """Refuse options below ``least``.

    Raises:
        CommandError: names the option.
    """
    for option, value in counts.items():
        if value < least:
            raise CommandError(f"{option} {value}: must be at least {least}")


def check_port(port: int, taken: int = 1) -> None:
    """Refuse a number that is no TCP port, or after which there are too few for ``taken`` in all.

    Raises:
        CommandError: names it.
    """
    if not 0 <= port <= LAST_PORT:
        raise CommandError(f"--port {port}: must be from 1 to {LAST_PORT}, or 0 for any free one")
    if port > LAST_PORT - (taken - 1):
        raise CommandError(f"--port {port}: the next {taken - 1} are taken as well: pass at most {LAST_PORT - (taken - 1)}")


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


def numbers(text: str, flag: str, kind: type = int, zero: bool = False) -> list:
    """Numbers separated by commas, all above 0 (or 0, where ``zero`` allows it).

    Raises:
        CommandError: names the flag.
    """
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 0 or (0 in numbers and not zero):
        raise CommandError(f"{flag} {text!r}: pass numbers {'of 0 or more' if zero else 'above 0'}, separated by commas")
    return numbers


def probabilities(text: str, flag: str) -> list[float]:
    """Probabilities separated by commas.

    Raises:
        CommandError: names the flag.
    """
    found = numbers(text, flag, float, zero=True)
    if max(found) > 1:
        raise CommandError(f"{flag} {text!r}: pass probabilities up to 1")
    return found
