"""Draws the plots of all benchmarks. Each plot has a heading with the hardware and the settings."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext_bench import report


@dataclass(frozen=True)
class Heading:
    """The heading of a plot.

    Attributes:
        title: Title of the plot.
        settings: Settings of the measurement, as one line.
        machine: The measured machine. None for this machine.
    """

    title: str
    settings: str
    machine: str | None = None

    @property
    def lines(self) -> tuple[str, str]:
        """The title, and the lines below it in smaller type."""
        return self.title, f"{self.settings}\n{self.machine or report.hardware()}"


@dataclass(frozen=True)
class Curve:
    """One line of a plot.

    Attributes:
        label: Label in the legend.
        places: Positions on the horizontal axis.
        values: Values at these positions.
        style: Line style of matplotlib.
        color: Color of matplotlib. None for the next color of its cycle.
    """

    label: str
    places: Sequence[float]
    values: Sequence[float]
    style: str = "-"
    color: str | None = None


@contextmanager
def png(path: Path, inches: tuple[float, float], heading: Heading, grid: tuple[int, int] = (1, 1)) -> Iterator[Any]:
    """Create a figure, yield its axes, and write it to a PNG file at the end. Creates the folder of the file.

    Args:
        path: The PNG file.
        inches: Width and height of the figure.
        heading: Heading above the axes.
        grid: Rows and columns of axes. For more than one, an array of axes is yielded.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(*grid, figsize=inches, layout="constrained")
    title, small = heading.lines
    figure.suptitle(title)
    # Reserve space for the small lines between the title and the axes.
    figure.get_layout_engine().set(rect=(0, 0, 1, 0.93 if inches[1] > 5 else 0.9))
    figure.text(0.5, 0.95 if inches[1] > 5 else 0.93, small, ha="center", va="top", fontsize="x-small", wrap=True)
    yield axes
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw(axes: Any, curves: Sequence[Curve], axis: str) -> bool:
    """Draw lines, or bars if all points have the same position. Returns whether lines were drawn.

    Args:
        axes: Axes of matplotlib.
        curves: The lines.
        axis: Label of the horizontal axis.
    """
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
    """Positions of the bars in grouped bar charts: one list for each bar of a group. The middle of group ``k`` is at ``k``."""
    width = bar_width(bars)
    return [[group + (bar - (bars - 1) / 2) * width for group in range(groups)] for bar in range(bars)]


def bar_width(bars: int) -> float:
    """Width of each bar, for groups of ``bars`` bars with a gap of one bar between groups."""
    return 1 / (bars + 1)
