"""Requests side by side."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def together(width: int, items: Sequence[Item], work: Callable[[Item], Answer]) -> tuple[Answer, ...]:
    """Work on items, ``width`` at once; results in their order."""
    with ThreadPoolExecutor(width) as pool:
        return tuple(pool.map(work, items))
