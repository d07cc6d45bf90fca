"""Plots quality against bytes and against speed: a panel for each figure, a line for each compressor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang_ext_bench.quality.reporting.results import ArmQuality, Results
from sglang_ext_bench import drawing

BYTES, SPEED = "bytes, share of full KV's", "tokens per second, over stock's"

Across = Callable[[ArmQuality], float | None]
"""Maps a server to its position on the horizontal axis. None if that was not measured."""


@dataclass(frozen=True)
class Line:
    """One line of a panel. Its points are (position on the horizontal axis, value)."""

    label: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: What the vertical axis shows.
        lines: The lines.
        level: Stock's value, drawn as a horizontal line. None: not drawn.
        log: The vertical axis is logarithmic.
        axis: The horizontal axis: :data:`BYTES` or :data:`SPEED`.
    """

    title: str
    lines: tuple[Line, ...]
    level: float | None = None
    log: bool = False
    axis: str = BYTES


def write(path: Path, results: Results, measured_with: str) -> None:
    """Draw the measured parts: a row of panels over bytes, and one over speed. Write no file if no part was measured.

    Args:
        path: The PNG.
        results: The results.
        measured_with: The settings of all servers, in one line.
    """
    rows = [row for row in (by_bytes(results), by_speed(results)) if row]
    if not rows:
        return
    columns = max(map(len, rows))
    heading = drawing.Heading("Quality of a compressed KV cache", measured_with)
    with drawing.png(path, (max(7, 4.5 * columns), 4.2 * len(rows) + 0.8), heading, (len(rows), columns)) as axes:
        for row, row_axes in zip(rows, np.reshape(axes, (len(rows), columns))):
            for panel, panel_axes in zip(row, row_axes):
                draw_panel(panel_axes, panel)
            for unused in row_axes[len(row) :]:
                unused.set_visible(False)


def by_bytes(results: Results) -> list[Panel]:
    """The panels over the bytes of compressed KV."""
    panels = _panels(results, BYTES, lambda each: each.share)
    attention = Panel("attention outputs, relative error", _attention_lines(results))
    return [*panels, *([attention] if attention.lines else [])]


def by_speed(results: Results) -> list[Panel]:
    """The panels over speed."""
    return _panels(results, SPEED, results.speedup)


def _panels(results: Results, axis: str, across: Across) -> list[Panel]:
    lossy = [each for each in results.arms if each.arm.mode == "lossy" and across(each) is not None]
    verified = [each for each in results.arms if each.arm.mode == "verified" and across(each) is not None]
    stock = results.stock
    panels = [
        Panel("accepted / offered drafts", _acceptance_lines(verified, across), axis=axis),
        Panel(
            "KL divergence per step, nats",
            _lines([*lossy, *verified], _kl, across),
            stock and stock.kl and stock.kl.per_step,
            log=True,
            axis=axis,
        ),
        Panel("median first difference, tokens", _difference_lines(lossy, across), axis=axis),
        Panel(
            "functional score, mean", _lines([*lossy, *verified], _functional, across), stock and stock.functional_mean, axis=axis
        ),
    ]
    return [panel for panel in panels if panel.lines]


def _lines(
    arms: Sequence[ArmQuality], value: Callable[[ArmQuality], float | None], across: Across, suffix: str = ""
) -> tuple[Line, ...]:
    """A line for each mode and compressor of ``arms`` that has values."""
    points: dict[str, list[tuple[float, float]]] = {}
    for each in arms:
        position, found = across(each), value(each)
        if position is not None and found is not None:
            label = f"{each.arm.mode} {each.arm.compressor}{suffix}"
            points.setdefault(label, []).append((position, found))
    return tuple(Line(label, tuple(sorted(values))) for label, values in points.items())


def _acceptance_lines(verified: Sequence[ArmQuality], across: Across) -> tuple[Line, ...]:
    found: tuple[Line, ...] = ()
    for length in sorted({each.arm.draft_length or 0 for each in verified}):
        arms = [each for each in verified if each.arm.draft_length == length]
        for temperature in _temperatures(arms, lambda each: each.acceptance):
            suffix = f", {length} drafts, T={temperature:g}"
            found += _lines(arms, lambda each: each.acceptance[temperature].rate, across, suffix)
    return found


def _difference_lines(lossy: Sequence[ArmQuality], across: Across) -> tuple[Line, ...]:
    found: tuple[Line, ...] = ()
    for temperature in _temperatures(lossy, lambda each: each.first_differences):
        found += _lines(lossy, lambda each: each.first_differences[temperature].median, across, f", T={temperature:g}")
    return found


def _attention_lines(results: Results) -> tuple[Line, ...]:
    served = [each for each in results.attention if each.tail == "exact"]
    names = dict.fromkeys(each.compressor for each in served)
    points = [(each.compressor, (results.bytes_share(each.compressor, each.budget), each.mean)) for each in served]
    return tuple(Line(name, tuple(sorted(point for compressor, point in points if compressor == name))) for name in names)


def _temperatures(arms: Sequence[ArmQuality], select: Callable[[ArmQuality], Any]) -> list[float]:
    return sorted({temperature for each in arms for temperature in select(each)})


def _kl(each: ArmQuality) -> float | None:
    return each.kl and each.kl.per_step


def _functional(each: ArmQuality) -> float | None:
    return each.functional_mean


def draw_panel(axes: Any, panel: Panel) -> None:
    """Draw the lines of a panel, with its level and its scales."""
    curves = [drawing.Curve(line.label, *zip(*line.points)) for line in panel.lines]
    has_axis = drawing.draw(axes, curves, panel.axis)
    if panel.level is not None:
        axes.axhline(panel.level, color="black", linestyle=":", label="stock")
    axes.set_title(panel.title)
    if panel.axis == BYTES and has_axis:
        axes.set_xscale("log", base=2)
    if panel.log:
        # A symmetric logarithmic axis shows divergences of 0, too.
        axes.set_yscale("symlog", linthresh=1e-12)
        axes.set_ylim(0, 3 * max(value for line in panel.lines for _, value in line.points) or 1)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
