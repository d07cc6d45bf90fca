"""Memory and descriptors of each process of a server while it has traffic: what grows is a leak."""

import os
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from statistics import median_low
from types import TracebackType
from typing import NamedTuple

import psutil

from sglang_ext.periodic import run_periodically

SAMPLE_SECONDS = 10.0
# Samples of a process from which on it is judged.
LEAST_SAMPLES = 6
MOST_GROWTH, SPARE_BYTES, SPARE_DESCRIPTORS = 0.15, 64 << 20, 16
"""The median of the last third of samples may be so much above that of the first third."""


class Sample(NamedTuple):
    """Of one process: bytes of memory that are its own, and open descriptors."""

    own: int
    descriptors: int


@dataclass
class Watched:
    """One process.

    Attributes:
        name: its title, or the module that it runs.
        samples: oldest first.
    """

    name: str
    samples: list[Sample] = field(default_factory=list)

    @property
    def judged(self) -> bool:
        """Whether it was there for long enough."""
        return len(self.samples) >= LEAST_SAMPLES

    def thirds(self) -> tuple[Sample, Sample]:
        """The medians of the first and of the last third: neither a start that is cold nor work that comes and goes counts."""
        third = max(1, len(self.samples) // 3)
        first, last = (Sample(*map(median_low, zip(*part))) for part in (self.samples[:third], self.samples[-third:]))
        return first, last

    def problems(self) -> Iterator[str]:
        """What grew."""
        first, last = self.thirds()
        if last.own > first.own * (1 + MOST_GROWTH) + SPARE_BYTES:
            yield f"{self.name}: its memory grew from {_mb(first.own)} to {_mb(last.own)} MB"
        if last.descriptors > first.descriptors + SPARE_DESCRIPTORS:
            yield f"{self.name}: its descriptors grew from {first.descriptors} to {last.descriptors}"


class ProcessWatch:
    """Context manager: looks at all processes of a group, again and again, from another thread.

    Args:
        group: of the server; None for nothing.
        seconds: between two looks.
    """

    def __init__(self, group: int | None, seconds: float = SAMPLE_SECONDS):
        self._group = group
        self._found: dict[int, Watched] = {}
        self._looks = nullcontext() if group is None else run_periodically(self._watch, seconds)

    def __enter__(self) -> "ProcessWatch":
        self._looks.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._looks.__exit__(kind, error, trace)

    def problems(self) -> list[str]:
        """What grew, of the processes that were there for long enough."""
        return [problem for each in self._found.values() if each.judged for problem in each.problems()]

    def table(self) -> str:
        """A line for each of them."""
        lines = []
        for each in filter(lambda each: each.judged, self._found.values()):
            first, last = each.thirds()
            most = Sample(*map(max, zip(*each.samples)))
            lines.append(
                f"{each.name}: {_mb(first.own)} MB of its own, {_mb(last.own)} at the end, {_mb(most.own)} at most; descriptors "
                f"{first.descriptors}, {last.descriptors}, {most.descriptors}"
            )
        return "\n".join(lines)

    def _watch(self) -> None:
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(process.pid) == self._group:
                    self._look_at(process)

    def _look_at(self, process: psutil.Process) -> None:
        sample = Sample(process.memory_full_info().uss, process.num_fds())
        self._found.setdefault(process.pid, Watched(_name_of(process))).samples.append(sample)


def _name_of(process: psutil.Process) -> str:
    words = process.cmdline()
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else " ".join(words)[:40]
    return f"{module or process.name()} ({process.pid})"


def _mb(count: int) -> int:
    return round(count / 1e6)
