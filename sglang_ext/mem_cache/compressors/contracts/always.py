"""What a method keeps whatever the scores: known on the host, where those are on the device."""

from typing import NamedTuple


class Always(NamedTuple):
    """So many of a context's first and newest tokens have infinite scores in all heads."""

    first: int = 0
    newest: int = 0

    def among(self, start: int, end: int, tokens: int) -> int:
        """Of the positions ``[start, end)`` of ``tokens``, those that have them."""
        sinks, window = min(self.first, tokens), max(self.first, tokens - self.newest)
        return max(0, min(end, sinks) - start) + max(0, end - max(start, window))
