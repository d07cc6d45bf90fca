"""What became of the choices of cache ranks while requests decoded side by side: a step whose choices are late is no step with choices."""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from sglang_ext.periodic import run_periodically
from sglang_ext.tools.server_client import ServerClient
from sglang_ext_bench.client import readings, total

# Seconds between looks.
LOOKS = 0.1


@dataclass(frozen=True)
class Look:
    """What a server's metrics have said so far.

    Attributes:
        at: seconds of ``time.perf_counter``.
        taken: choices that copies were led to.
        missed: choices that were not there when a step's turn came, by reason.
        waited: seconds that steps waited.
        alone: tokens whose full KV lies at ranks alone.
        every: steps between two choices of a request, beside GPUs; 0 elsewhere.
    """

    at: float
    taken: float
    missed: dict[str, float]
    waited: float
    alone: float
    every: float = 0.0

    @classmethod
    def at_page(cls, page: str, at: float) -> "Look":
        """Of a server's ``/metrics``."""
        by_reason = readings(page, "sglang_ext:missed_selections_total")
        missed = {re.search(r'reason="([^"]*)"', labels)[1]: value for labels, value in by_reason}
        names = "selections_total", "selection_wait_seconds_total", "rank_alone_tokens", "selection_steps"
        taken, waited, alone, every = (total(page, f"sglang_ext:{name}") for name in names)
        return cls(at, taken, missed, waited, alone, every)


@dataclass(frozen=True)
class ChoicesTaken:
    """Of a span.

    Attributes:
        taken, waited, alone, every: as :class:`Look` has them; the last two at its end.
        missed: by reason, those that there were.
        seconds: of the span.
    """

    taken: float
    missed: dict[str, float]
    waited: float
    alone: float
    every: float
    seconds: float

    def __str__(self) -> str:
        missed = sum(self.missed.values())
        reasons = f" ({', '.join(self.missed)})" if missed else ""
        pace = f", every {self.every:.0f} steps" if self.every > 1 else ""
        return f"{self.taken:.0f} of {self.taken + missed:.0f}{reasons}{pace}, waited {self.waited / self.seconds:.0%}"


def between(looks: Sequence[Look], begin: float, end: float) -> ChoicesTaken | None:
    """From the first look after ``begin`` to the last one before ``end``; None where these are not two."""
    inside = [look for look in looks if begin <= look.at <= end]
    if len(inside) < 2:
        return None
    first, last = inside[0], inside[-1]
    grown = {reason: count - first.missed.get(reason, 0) for reason, count in last.missed.items()}
    missed = {reason: count for reason, count in grown.items() if count}
    return ChoicesTaken(last.taken - first.taken, missed, last.waited - first.waited, last.alone, last.every, last.at - first.at)


@contextmanager
def looking(server: ServerClient, seconds: float = LOOKS) -> Iterator[list[Look]]:
    """Looks at a server with ``--enable-metrics``, while this is entered."""
    looks: list[Look] = []

    def look() -> None:
        with suppress(OSError):
            looks.append(Look.at_page(server.request("metrics"), time.perf_counter()))

    with run_periodically(look, seconds):
        yield looks
