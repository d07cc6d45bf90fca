"""Quality against bytes: one panel for each figure, one line for each compressor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext.bench import report
from sglang_ext.bench.quality.results import ArmQuality, Results

BYTES = "bytes, share of full KV's"


@dataclass(frozen=True)
class Line:
    """Points of one line: (share of full KV's bytes, value)."""

    label: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Panel:
    """One figure's lines; ``level`` is a horizontal one, of stock."""

    title: str
    lines: tuple[Line, ...]
    level: float | None = None
    log: bool = False


def write(path: Path, results: Results) -> None:
    """Draw the parts that were measured; nothing where there are none."""
    panels = panels_of(results)
    if not panels:
        return
    with report.png(path, (4.5 * len(panels), 4.2), (1, len(panels))) as axes:
        for each, panel in zip([axes] if len(panels) == 1 else axes, panels):
            _draw(each, panel)


def panels_of(results: Results) -> list[Panel]:
    """What there is to draw."""
    lossy = [each for each in results.arms if each.arm.mode == "lossy"]
    verified = [each for each in results.arms if each.arm.mode == "verified"]
    stock = results.stock
    panels = [
        Panel("accepted / offered drafts", _acceptance_lines(verified)),
        Panel(
            "KL divergence per step, nats",
            _lines(lossy, _kl) + _lines(verified, _kl),
            stock and stock.kl and stock.kl.per_step,
            log=True,
        ),
        Panel("median first difference, tokens", _difference_lines(lossy)),
        Panel(
            "functional score, mean",
            _lines(lossy, _functional) + _lines(verified, _functional),
            stock and stock.functional_mean,
        ),
        Panel("attention outputs, relative error", _attention_lines(results)),
    ]
    return [panel for panel in panels if panel.lines]


def _lines(arms: Sequence[ArmQuality], value: Callable[[ArmQuality], float | None], suffix: str = "") -> tuple[Line, ...]:
    """One line for each mode, compressor and draft length of ``arms``, where it has values."""
    points: dict[str, list[tuple[float, float]]] = {}
    for each in arms:
        found = value(each)
        if found is not None:
            label = f"{each.arm.mode} {each.arm.compressor}{suffix}"
            points.setdefault(label, []).append((each.share, found))
    return tuple(Line(label, tuple(sorted(of_line))) for label, of_line in points.items())


def _acceptance_lines(verified: Sequence[ArmQuality]) -> tuple[Line, ...]:
    found: tuple[Line, ...] = ()
    for length in sorted({each.arm.draft_length or 0 for each in verified}):
        arms = [each for each in verified if each.arm.draft_length == length]
        for temperature in _temperatures(arms, lambda each: each.acceptance):
            suffix = f", {length} drafts, T={temperature:g}"
            found += _lines(arms, lambda each: each.acceptance[temperature].rate, suffix)
    return found


def _difference_lines(lossy: Sequence[ArmQuality]) -> tuple[Line, ...]:
    found: tuple[Line, ...] = ()
    for temperature in _temperatures(lossy, lambda each: each.first_differences):
        found += _lines(lossy, lambda each: each.first_differences[temperature].median, f", T={temperature:g}")
    return found


def _attention_lines(results: Results) -> tuple[Line, ...]:
    names = dict.fromkeys(each.compressor for each in results.attention)
    points = [
        (each.compressor, (results.bytes_share(each.compressor, each.budget), each.mean)) for each in results.attention
    ]
    return tuple(Line(name, tuple(sorted(point for of, point in points if of == name))) for name in names)


def _temperatures(arms: Sequence[ArmQuality], of: Callable[[ArmQuality], Any]) -> list[float]:
    return sorted({temperature for each in arms for temperature in of(each)})


def _kl(each: ArmQuality) -> float | None:
    return each.kl and each.kl.per_step


def _functional(each: ArmQuality) -> float | None:
    return each.functional_mean


def _draw(axes: Any, panel: Panel) -> None:
    for line in panel.lines:
        axes.plot(*zip(*line.points), marker="o", label=line.label)
    if panel.level is not None:
        axes.axhline(panel.level, color="black", linestyle=":", label="stock")
    axes.set(xlabel=BYTES, title=panel.title)
    axes.set_xscale("log", base=2)
    if panel.log:
        # Divergences of nothing have a place too.
        axes.set_yscale("symlog", linthresh=1e-12)
        axes.set_ylim(0, 3 * max(value for line in panel.lines for _, value in line.points) or 1)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
