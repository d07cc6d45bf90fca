"""Pictures of transfers: time to the k-th token, acceptance of drafts on anchors, and one request's timeline."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_ext_bench import drawing
from sglang_ext_bench.transfer.clocks import Request
from sglang_ext_bench.transfer.summary import Figures
from sglang_ext_bench.transfer.tables import group

STYLES = {"generated": "-", "visible": "--"}


def write(path: Path, found: Sequence[Figures], example: Request | None, settings: str) -> None:
    """A row of times for each link and context with cached prompts; the last one has acceptance and a timeline."""
    titles = list(dict.fromkeys(group(figures) for figures in found if not figures.cold)) or list(dict.fromkeys(map(group, found)))
    heading = drawing.Heading("Time to the k-th token after the prefill", settings)
    with drawing.png(path, (11, 3.6 * (len(titles) + 1)), heading, (len(titles) + 1, 2)) as axes:
        for pair, title in zip(axes, titles, strict=False):
            mine = [figures for figures in found if group(figures) == title]
            for one, clock in zip(pair, STYLES, strict=True):
                _times(one, mine, clock)
                one.set_title(f"{title}: {clock}", fontsize="x-small")
        _acceptance(axes[-1][0], found)
        _timeline(axes[-1][1], example)


def _times(axes: Any, found: Sequence[Figures], clock: str) -> None:
    for place, figures in enumerate(found):
        times = figures.times[clock]
        axes.plot(range(1, len(times) + 1), times, STYLES[clock], color=f"C{place % 10}", label=figures.method)
    axes.set(xlabel="k", ylabel="seconds", ylim=(0, None))
    axes.legend(fontsize="x-small")


def _acceptance(axes: Any, found: Sequence[Figures]) -> None:
    for figures in found:
        if figures.survival and not figures.cold:
            label = f"{figures.method}, {figures.context} tokens, {figures.gbps or 'no'} Gbit/s"
            axes.plot(range(1, len(figures.survival) + 1), figures.survival, label=label)
    axes.set(xlabel="k", ylabel="P(accepted >= k) of drafts on anchors", ylim=(0, 1.02))
    if axes.lines:
        axes.legend(fontsize="x-small")


def _timeline(axes: Any, example: Request | None) -> None:
    """Of one request: drafts and answers over time, and when anchor and residual were there."""
    if example is None:
        axes.set_axis_off()
        return
    for clock, label in (("generated", "computed"), ("visible", "at the client")):
        times = example.times(clock)
        axes.step(times, range(1, len(times) + 1), where="post", label=label)
    for at, name in ((example.anchor, "anchor"), (example.complete, "residual"), (example.encoded, "encoded")):
        axes.axvline(at, color="gray", linestyle=":", linewidth=1)
        axes.text(at, axes.get_ylim()[1], name, rotation=90, va="top", ha="right", fontsize="x-small")
    axes.set(xlabel="seconds from the end of prefill", ylabel="tokens")
    axes.set_title(f"one request of {example.tokens} tokens", fontsize="x-small")
    axes.legend(fontsize="x-small", loc="lower right")
