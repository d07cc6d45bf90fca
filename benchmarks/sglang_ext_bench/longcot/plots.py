"""Pictures of long answers: time by length, a timeline of packs, overlaps by distance."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_ext_bench.longcot.overlap import Overlap
from sglang_ext_bench.longcot.packs import Step
from sglang_ext_bench.longcot.serving import LongFigures
from sglang_ext_bench import drawing

# Steps of a timeline that are drawn.
DRAWN = 3
WAYS = ("distance", "distance, turned as it was")


def write(path: Path, found: Sequence[LongFigures], steps: Sequence[Step], overlaps: Sequence[Overlap], settings: str) -> None:
    """Times of each load, then some steps of cache ranks, then overlaps, as far as they were measured."""
    loads = list(dict.fromkeys(figures.load for figures in found))
    drawn = [("times", load) for load in loads] + [("steps", None)] * bool(steps) + [("overlap", None)] * bool(overlaps)
    if not drawn:
        return
    with drawing.png(path, (9, 3.4 * len(drawn) + 1), drawing.Heading("Long answers", settings), (len(drawn), 1)) as axes:
        for one, (what, load) in zip([axes] if len(drawn) == 1 else axes, drawn, strict=True):
            if what == "times":
                _times(one, [figures for figures in found if figures.load == load])
                one.set_title(str(load), fontsize="small")
            elif what == "steps":
                _steps(one, steps)
            else:
                _overlaps(one, overlaps)


def _times(axes: Any, found: Sequence[LongFigures]) -> None:
    curves = [drawing.Curve(figures.name, figures.lengths, figures.token_ms) for figures in found]
    drawing.draw(axes, curves, "tokens of the answer")
    axes.set(ylabel="ms per token", ylim=(0, None))


def _steps(axes: Any, steps: Sequence[Step]) -> None:
    """What the model computes above what the rank chooses, by pack."""
    middle = len(steps) // 2
    shown = steps[middle : middle + DRAWN]
    begin = min(pack.reached for step in shown for pack in step.values())
    for step in shown:
        for place, (_, pack) in enumerate(sorted(step.items())):
            color = f"C{place % 10}"
            if (until := pack.seen_until) is not None:
                axes.broken_barh([(1000 * (pack.reached - begin), 1000 * (until - pack.reached))], (1.1, 0.8), color=color)
            for event in pack.chosen:
                axes.broken_barh([(1000 * (event.at - event.seconds - begin), 1000 * event.seconds)], (0.1, 0.8), color=color)
    axes.set(xlabel="ms", yticks=[0.5, 1.5], yticklabels=["cache rank chooses", "model computes"], ylim=(0, 2))
    told = "packs of layers, a color each, of some steps in a row; the last of a step until its last layer begins"
    axes.set_title(told, fontsize="small")


def _overlaps(axes: Any, overlaps: Sequence[Overlap]) -> None:
    known = {each.name: each.mean for each in overlaps}
    for way in WAYS:
        after = {name.removeprefix(f"{way} "): mean for name, mean in known.items()}
        points = sorted((int(steps), mean) for steps, mean in after.items() if steps.isdecimal())
        if points:
            axes.plot(*zip(*points), marker="o", label="turned to the step" if way == WAYS[0] else "turned as it was")
    for name in ("regressed", "regressed, without the shift"):
        if name in known:
            axes.axhline(known[name], linestyle="--" if name == "regressed" else ":", color="gray", label=name)
    axes.set(xlabel="steps before", ylabel="overlap", xscale="log")
    axes.legend(fontsize="small")
