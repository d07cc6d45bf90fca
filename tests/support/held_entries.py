"""Counts what objects hold, so that a test sees what is left behind without naming their fields."""

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

CONTAINERS = (list, tuple, set, frozenset, deque)
ATTEMPTS = 100
PAUSE = 0.3


def held_entries(*objects: Any) -> int:
    """Number of entries of all containers that objects of this project hold, directly or through other such objects.

    Other threads may change the containers meanwhile.
    """
    for _ in range(ATTEMPTS):
        try:
            return _count(objects)
        except RuntimeError:  # a container changed while it was read
            continue
    raise AssertionError(f"containers changed in each of {ATTEMPTS} attempts to count them")


def _count(objects: Iterable[Any]) -> int:
    count, waiting, seen = 0, list(objects), set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, dict):
            count += len(each)
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, CONTAINERS):
            count += len(each)
            waiting += list(each)
        elif type(each).__module__.partition(".")[0] == "sglang_ext":
            waiting += list(getattr(each, "__dict__", {}).values())
            slots = (name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ()))
            waiting += [getattr(each, name) for name in slots if hasattr(each, name)]
    return count


def steady_entries(*objects: Any) -> int:
    """:func:`held_entries`, once two counts in a row are equal."""
    before = -1
    while before != (now := held_entries(*objects)):
        before = now
        time.sleep(PAUSE)
    return now
