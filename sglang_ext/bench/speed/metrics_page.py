"""Values on a server's ``/metrics`` page."""

import re


def readings(page: str, name: str) -> list[tuple[str, float]]:
    """Labels, as they are written, and value of each series of the metric ``name``."""
    found = re.findall(rf"^{re.escape(name)}\{{([^}}]*)\}} (\S+)$", page, re.MULTILINE)
    return [(labels, float(value)) for labels, value in found]
