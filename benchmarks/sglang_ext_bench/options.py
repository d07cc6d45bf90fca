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


def check_budgets(budgets: Iterable[float]) -> None:
    """Refuse values of --budget that are no shares.

    Raises:
        CommandError: names the value.
    """
    for budget in budgets:
        if not 0 < budget <= 1:
            raise CommandError(f"--budget {budget:g}: a budget is a share of the cache in (0, 1]")


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
