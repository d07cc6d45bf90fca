"""Values on a server's ``/metrics`` page."""

import re


def readings(page: str, name: str) -> list[tuple[str, float]]:
    """Labels, as they are written, and value of each series of the metric ``name``."""
    found = re.findall(rf"^{re.escape(name)}\{{([^}}]*)\}} (\S+)$", page, re.MULTILINE)
    return [(labels, float(value)) for labels, value in found]


def total(page: str, name: str) -> float:
    """The sum of all series of a metric; 0 where there are none."""
    return sum(value for _, value in readings(page, name))
