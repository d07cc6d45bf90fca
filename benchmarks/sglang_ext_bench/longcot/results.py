"""Results of ``sglang-ext-bench longcot``: Markdown tables and the plot."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sglang_ext_bench.longcot.arms import STOCK
from sglang_ext_bench.longcot.flops import StepPartTime
from sglang_ext_bench.longcot.overlap import Overlap
from sglang_ext_bench.longcot.packs import PackSummary, Step
from sglang_ext_bench.longcot.serving import LongcotSummary
from sglang_ext_bench import drawing

# Steps of the plotted timeline.
PLOTTED_STEPS = 3
# Series of overlaps by distance, and their labels.
DISTANCE_SERIES = {"distance": "rotated to the step", "distance, unrotated": "unrotated"}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| " + " | ".join(head) + " |"
    yield "|---" * len(head) + "|"
    yield from ("| " + " | ".join(row) + " |" for row in rows)


def serving_tables(summaries: Sequence[LongcotSummary]) -> Iterator[str]:
    """Yield the lines of one table per load: times, the ratio to stock, selections, acceptance and operations of each server."""
    for load in dict.fromkeys(each.load for each in summaries):
        selected = [each for each in summaries if each.load == load]
        stock = next((each for each in selected if each.method == STOCK), None)
        ends = [f"to token {length}" for length in selected[0].lengths]
        yield f"\n{load}; milliseconds of each request per output token:\n"
        head = ("server", *ends, "last, over stock", "side by side", "selections in time", "accepted", "GFLOP a token", "on full KV")
        yield from _table(head, [_serving_row(each, stock) for each in selected])


def _serving_row(summary: LongcotSummary, stock: LongcotSummary | None) -> list[str]:
    """One row. ``stock`` is the summary that its last time is compared with."""
    ratio = "" if stock is None or not stock.token_ms[-1] else f"{summary.token_ms[-1] / stock.token_ms[-1]:.2f}"
    accepted = "" if summary.acceptance is None else f"{summary.accepted} of {summary.drafts}, {summary.acceptance:.2f}"
    times = [f"{each:.2f}" for each in summary.token_ms]
    side_by_side = "" if summary.running is None else f"{summary.together_ms:.2f}, {summary.running} at once"
    name = summary.name.removesuffix(f" {summary.load.select}")
    selections = "" if summary.choices is None else str(summary.choices)
    return [name, *times, ratio, side_by_side, selections, accepted, f"{summary.flops / 1e9:.3f}", str(summary.fallbacks or "")]


def pack_table(summaries: Sequence[PackSummary]) -> Iterator[str]:
    """Yield the lines of a table with the columns of AsyncSpade's Table 2, for positions and for K and V."""
    if not summaries:
        return
    head = (
        "server", "load", "layers served", "inference, ms", "selection, ms", "transfer, ms", "hidden", "late",
        "GB/s for positions", "GB/s for K and V",
    )  # fmt: skip
    yield "\nPer pack of layers, means over steps:\n"
    yield from _table(head, [_pack_row(each) for each in summaries])


def _pack_row(summary: PackSummary) -> list[str]:
    times = (f"{1000 * seconds:.2f}" for seconds in (summary.inference, summary.selection, summary.transfer))
    rates = (f"{rate / 1e9:.3f}" for rate in (summary.bandwidth, summary.gathered_bandwidth))
    hidden = "yes" if summary.is_hidden else "no"
    return [summary.name, summary.load, str(summary.layers), *times, hidden, f"{summary.missed:.1%}", *rates]


def step_part_tables(times: Sequence[StepPartTime]) -> Iterator[str]:
    """Yield the lines of one table per load: milliseconds of each part and its share of a layer's step."""
    for load in dict.fromkeys(each.load for each in times):
        selected = [each for each in times if each.load == load]
        whole = sum(each.seconds for each in selected)
        yield f"\nA layer's step that selects pages, {load}:\n"
        rows = [(each.part, f"{1000 * each.seconds:.3f}", f"{each.seconds / whole:.0%}") for each in selected]
        yield from _table(("part", "ms", "share"), rows)


def overlap_table(overlaps: Sequence[Overlap]) -> Iterator[str]:
    """Yield the lines of a table with the mean overlap of each way to select."""
    if not overlaps:
        return
    yield f"\nA step's own query selects {overlaps[0].share:g} of the context. Share of these tokens that each way also selects:\n"
    yield from _table(("selected by", "overlap"), [(each.name, f"{each.mean:.3f}") for each in overlaps])


def write_plot(
    path: Path, summaries: Sequence[LongcotSummary], steps: Sequence[Step], overlaps: Sequence[Overlap], settings: str
) -> None:
    """Write a PNG: times of each load, some steps of cache ranks, and overlaps. Panels without data are left out.

    Args:
        path: File to write.
        summaries: Summaries of all servers.
        steps: Steps of one server with cache ranks.
        overlaps: Overlaps of all ways to select.
        settings: Settings of the run, for the heading.
    """
    loads = list(dict.fromkeys(each.load for each in summaries))
    panels = [("times", load) for load in loads] + [("steps", None)] * bool(steps) + [("overlaps", None)] * bool(overlaps)
    if not panels:
        return
    with drawing.png(path, (9, 3.4 * len(panels) + 1), drawing.Heading("Long answers", settings), (len(panels), 1)) as grid:
        for axes, (kind, load) in zip([grid] if len(panels) == 1 else grid, panels, strict=True):
            if kind == "times":
                _plot_times(axes, [each for each in summaries if each.load == load])
                axes.set_title(str(load), fontsize="small")
            elif kind == "steps":
                _plot_steps(axes, steps)
            else:
                _plot_overlaps(axes, overlaps)


def _plot_times(axes: Any, summaries: Sequence[LongcotSummary]) -> None:
    curves = [drawing.Curve(each.name, each.lengths, each.token_ms) for each in summaries]
    drawing.draw(axes, curves, "output tokens")
    axes.set(ylabel="ms per token", ylim=(0, None))


def _plot_steps(axes: Any, steps: Sequence[Step]) -> None:
    """Plot what the model computes above what the rank selects, with one color per pack."""
    middle = len(steps) // 2
    shown = steps[middle : middle + PLOTTED_STEPS]
    begin = min(pack.start for step in shown for pack in step.values())
    for step in shown:
        for index, (_, pack) in enumerate(sorted(step.items())):
            color = f"C{index % 10}"
            if (end := pack.known_end) is not None:
                axes.broken_barh([(1000 * (pack.start - begin), 1000 * (end - pack.start))], (1.1, 0.8), color=color)
            for event in pack.selections:
                axes.broken_barh([(1000 * (event.at - event.seconds - begin), 1000 * event.seconds)], (0.1, 0.8), color=color)
    axes.set(xlabel="ms", yticks=[0.5, 1.5], yticklabels=["cache rank selects", "model computes"], ylim=(0, 2))
    axes.set_title("packs of layers, one color each, in consecutive steps; a step's last pack until its last layer begins", fontsize="small")


def _plot_overlaps(axes: Any, overlaps: Sequence[Overlap]) -> None:
    means = {each.name: each.mean for each in overlaps}
    for series, label in DISTANCE_SERIES.items():
        by_distance = {name.removeprefix(f"{series} "): mean for name, mean in means.items()}
        points = sorted((int(distance), mean) for distance, mean in by_distance.items() if distance.isdecimal())
        if points:
            axes.plot(*zip(*points), marker="o", label=label)
    for name in ("regressed", "regressed, without the shift"):
        if name in means:
            axes.axhline(means[name], linestyle="--" if name == "regressed" else ":", color="gray", label=name)
    axes.set(xlabel="age of the query in steps", ylabel="overlap", xscale="log")
    axes.legend(fontsize="small")
