"""What tests do about time: they wait for what they look for, and try again what others may come in the way of."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest


def until(holds: Callable[[], Any], what: str = "what was waited for", seconds: float = 60.0, pause: float = 0.005) -> None:
    """Look again until something holds; the test fails with ``what`` where it does not in time."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            pytest.fail(f"not within {seconds:g} s: {what}")
        time.sleep(pause)


def tries(times: int, what: str) -> Iterator[int]:
    """Numbers of tries, for what depends on who comes first: leave the loop once it was seen; the test fails after the last."""
    yield from range(times)
    pytest.fail(f"in {times} tries: {what}")
