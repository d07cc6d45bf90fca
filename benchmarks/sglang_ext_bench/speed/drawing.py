"""Plots of all benchmarks: each says what it shows, on which hardware and with which settings."""

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext_bench import report


@dataclass(frozen=True)
class Heading:
    """What stands above a plot.

    Attributes:
        title: what it shows.
        settings: what it was measured with, in a line.
        machine: what it is of; None for this machine, on which servers ran.
    """

    title: str
    settings: str
    machine: str | None = None

    @property
    def lines(self) -> tuple[str, str]:
        """The title, and the rest in a smaller type."""
        return self.title, f"{self.settings}\n{self.machine or hardware()}"


@dataclass(frozen=True)
class Curve:
    """Points of one line, and how it is drawn; a label of its own for the legend."""

    label: str
    places: Sequence[float]
    values: Sequence[float]
    style: str = "-"
    color: str | None = None


def hardware() -> str:
    """The GPU, or the CPU with its cores, and the versions that decide the numbers."""
    import torch

    found = report.versions()
    software = f"SGLang {found['sglang']}, torch {found['torch']}"
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {software}"
    return f"{_cpu_name()}, {os.cpu_count()} cores, {software}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


@contextmanager
def png(path: Path, inches: tuple[float, float], heading: Heading, grid: tuple[int, int] = (1, 1)) -> Iterator[Any]:
    """Axes to draw on under a heading, or an array of them for a ``grid`` of rows and columns.

    They are written to ``path``, with its folder, at the end.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(*grid, figsize=inches, layout="constrained")
    title, small = heading.lines
    figure.suptitle(title)
    # Above the axes, between them and the title.
    figure.get_layout_engine().set(rect=(0, 0, 1, 0.93 if inches[1] > 5 else 0.9))
    figure.text(0.5, 0.95 if inches[1] > 5 else 0.93, small, ha="center", va="top", fontsize="x-small", wrap=True)
    yield axes
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw(axes: Any, curves: Sequence[Curve], axis: str) -> bool:
    """Draw lines over ``axis``, or bars where all points lie at one place of it; whether these are lines."""
    places = {place for curve in curves for place in curve.places}
    if len(places) > 1:
        for curve in curves:
            axes.plot(curve.places, curve.values, curve.style, color=curve.color, marker="o", label=curve.label)
        axes.set_xlabel(axis)
    else:
        for at, curve in enumerate(curves):
            axes.bar([at] * len(curve.values), curve.values, width=0.8, color=curve.color, label=curve.label)
        axes.set_xticks([])
        axes.set_xlabel(f"{axis}: {next(iter(places)):.4g}" if places else axis)
    if curves:
        axes.legend(fontsize="small")
    return len(places) > 1


def centres(groups: int, bars: int) -> list[list[float]]:
    """Where the bars of each group stand, one list a bar, so that group ``k`` has its middle at ``k``."""
    width = bar_width(bars)
    return [[group + (bar - (bars - 1) / 2) * width for group in range(groups)] for bar in range(bars)]


def bar_width(bars: int) -> float:
    """Of each of so many bars in a group; a bar's breadth is left between groups."""
    return 1 / (bars + 1)
