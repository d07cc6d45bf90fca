"""One line of the doctor's report."""

from dataclasses import dataclass

SGLANG_VERSION = "0.5.17"
INSTALL = "run `make install`, or `pip install -e .` in the environment that serves"


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: what was looked at.
        ok: whether sglang-ext can serve with what was found.
        found: what was found.
        remedy: what to do when not ``ok``; empty when it is.
    """

    name: str
    ok: bool
    found: str
    remedy: str = ""


def verdict(name: str, ok: bool, found: str, remedy: str) -> Check:
    """A check whose remedy is told only when it fails."""
    return Check(name, ok, found, "" if ok else remedy)


def told(error: Exception) -> str:
    """An error in one line of at most 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
