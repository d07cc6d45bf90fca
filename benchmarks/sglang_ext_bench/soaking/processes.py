"""Samples the memory, the open descriptors and the threads of each process of a server, and reports those that keep growing."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median_low
from types import TracebackType
from typing import NamedTuple

import psutil

from sglang_ext.core import run_periodically

SAMPLE_SECONDS = 10.0
MIN_SHOWN_SAMPLES = 6
"""Samples of a process from which the table shows it."""
MIN_JUDGED_SAMPLES = 48
"""Samples from which a process is judged: 8 minutes. In a shorter soak, a server that still warms up looks like a leak."""
MAX_GROWTH, SPARE_BYTES, SPARE_DESCRIPTORS, SPARE_THREADS = 0.15, 64 << 20, 16, 16
"""The most by which the median of the last third of the samples may exceed that of the second third."""


class ProcessSample(NamedTuple):
    """One sample of a process.

    Attributes:
        own: Bytes of memory that no other process shares (USS).
        descriptors: Open file descriptors.
        threads: Threads.
    """

    own: int
    descriptors: int
    threads: int


class Thirds(NamedTuple):
    """Medians of the first, second and last third of the samples of a process."""

    first: ProcessSample
    second: ProcessSample
    last: ProcessSample


@dataclass
class WatchedProcess:
    """The samples of one process.

    Attributes:
        name: Its title, or the module that it runs.
        samples: Oldest first.
    """

    name: str
    samples: list[ProcessSample] = field(default_factory=list)

    @property
    def is_shown(self) -> bool:
        """Whether the process ran long enough for the table."""
        return len(self.samples) >= MIN_SHOWN_SAMPLES

    @property
    def is_judged(self) -> bool:
        """Whether the process ran long enough to tell a leak from a warm-up."""
        return len(self.samples) >= MIN_JUDGED_SAMPLES

    def thirds(self) -> Thirds:
        """Medians of the thirds. A median ignores memory that is used for a short time."""
        third = max(1, len(self.samples) // 3)
        parts = self.samples[:third], self.samples[third:-third] or self.samples, self.samples[-third:]
        return Thirds(*(ProcessSample(*map(median_low, zip(*part))) for part in parts))

    def describe(self) -> str:
        """One line: memory, descriptors and threads in the first, second and last third, and the most of all samples."""
        thirds, most = self.thirds(), ProcessSample(*map(max, zip(*self.samples)))
        memory = " -> ".join(str(_mb(sample.own)) for sample in thirds)
        descriptors, threads = (" -> ".join(str(getattr(sample, name)) for sample in thirds) for name in ("descriptors", "threads"))
        counts = f"descriptors {descriptors}, at most {most.descriptors}; threads {threads}, at most {most.threads}"
        note = "" if self.is_judged else "; too short to judge"
        return f"{self.name}: own memory {memory} MB, at most {_mb(most.own)}; {counts}{note}"

    def problems(self) -> Iterator[str]:
        """Describe growth from the second to the last third. The first third is left out, because the server warms up in it."""
        if not self.is_judged:
            return
        _, second, last = self.thirds()
        if last.own > second.own * (1 + MAX_GROWTH) + SPARE_BYTES:
            yield f"{self.name}: its memory grew from {_mb(second.own)} to {_mb(last.own)} MB"
        if last.descriptors > second.descriptors + SPARE_DESCRIPTORS:
            yield f"{self.name}: its descriptors grew from {second.descriptors} to {last.descriptors}"
        if last.threads > second.threads + SPARE_THREADS:
            yield f"{self.name}: its threads grew from {second.threads} to {last.threads}"


class ProcessWatch:
    """Context manager: samples all processes of process groups in a background thread.

    Args:
        groups: Returns the current process groups of the servers. None: an unknown group, of which no process is watched.
        seconds: Time between two samples.
    """

    def __init__(self, groups: Callable[[], Sequence[int | None]], seconds: float = SAMPLE_SECONDS) -> None:
        self._groups = groups
        self._processes: dict[int, WatchedProcess] = {}
        self._sampling = run_periodically(self._sample_all, seconds)

    def __enter__(self) -> "ProcessWatch":
        self._sampling.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._sampling.__exit__(kind, error, trace)

    def problems(self) -> list[str]:
        """Describe the growth of all processes that ran long enough to judge them."""
        return [problem for each in self._processes.values() for problem in each.problems()]

    def table(self) -> str:
        """A line for each process that ran long enough to show it."""
        return "\n".join(each.describe() for each in self._processes.values() if each.is_shown)

    def _sample_all(self) -> None:
        groups = set(self._groups()) - {None}
        for process in psutil.process_iter() if groups else ():
            with suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(process.pid) in groups:
                    self._sample(process)

    def _sample(self, process: psutil.Process) -> None:
        sample = ProcessSample(process.memory_full_info().uss, process.num_fds(), process.num_threads())
        self._processes.setdefault(process.pid, WatchedProcess(_name_of(process))).samples.append(sample)


def _name_of(process: psutil.Process) -> str:
    words = process.cmdline()
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else " ".join(words)[:40]
    return f"{module or process.name()} ({process.pid})"


def _mb(count: int) -> int:
    return round(count / 1e6)
