"""Options of several values on the command line."""

from sglang_ext.bench import BenchError


def names(text: str) -> tuple[str, ...]:
    """Names separated by commas, without blanks and empty ones."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


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
        raise BenchError(f"{flag} {text!r}: pass numbers above 0, separated by commas")
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
