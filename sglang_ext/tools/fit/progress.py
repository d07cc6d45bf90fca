"""Progress of a fit: bars on a terminal, and a line at intervals elsewhere, as in a log."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

# Seconds between two lines of one task.
EVERY = 15.0


@contextmanager
def show_progress(console: Console) -> Iterator[Callable[[str, int, str], Callable[[int], None]]]:
    """Yield a function that begins a task, given its name, total and unit. It returns a function that advances the task by a count."""
    if not console.is_terminal:
        yield lambda name, total, unit: ProgressLines(console, name, total, unit).advance
        return
    unit = TextColumn("{task.fields[unit]}")
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), unit, TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:

        def begin(name: str, total: int, unit: str) -> Callable[[int], None]:
            task = progress.add_task(name, total=total, unit=unit)
            return lambda count: progress.advance(task, count)

        yield begin


class ProgressLines:
    """Prints a task's progress as lines: at its start, every :data:`EVERY` seconds, and at its end."""

    def __init__(self, console: Console, name: str, total: int, unit: str) -> None:
        self.console, self.name, self.total, self.unit = console, name, total, unit
        self.done, self.begun = 0, time.monotonic()
        self.told = self.begun
        self._print()

    def advance(self, count: int) -> None:
        """Add ``count`` to the completed work."""
        self.done += count
        if self.done >= self.total or time.monotonic() - self.told >= EVERY:
            self._print()

    def _print(self) -> None:
        self.told = time.monotonic()
        seconds = self.told - self.begun
        left = f", about {seconds * (self.total - self.done) / self.done:.0f} s left" if 0 < self.done < self.total else ""
        line = f"{self.name}: {self.done} of {self.total} {self.unit}, {seconds:.0f} s{left}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
