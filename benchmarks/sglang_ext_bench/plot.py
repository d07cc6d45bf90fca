"""Draws the plot of docs/benchmarks.md and README.md from recorded figures of the decode benchmark.

    sglang-ext-bench plot

Reads benchmarks/results/decode-32k.json and writes decode-32k.png beside it. Bars are tokens per second of all requests together, by number
of requests, of stock SGLang and of verified servers. Their labels have the gain over stock. Dashed lines are stock's limit, the bytes that
it reads over the bandwidth.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_ext.tools import CommandError
from sglang_ext_bench.drawing import Heading, png

RESULTS = Path(__file__).parents[1] / "results"
FIGURES, PLOT = RESULTS / "decode-32k.json", RESULTS / "decode-32k.png"
STOCK = "stock SGLang"
COLORS = ("#8a8f98", "#a6cbe8", "#5b9bd0", "#1f5f99")
BAR_WIDTH = 0.2
# Distance of a label from the top of its bar, and the top of the axis, in tokens per second.
LABEL_GAP, AXIS_TOP = 15, 2150


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(args: argparse.Namespace) -> int:
    """Write the plot. Returns 0."""
    try:
        figures = json.loads(FIGURES.read_text())
    except OSError as error:
        raise CommandError(f"{FIGURES} cannot be read ({error.strerror}): run the command in a checkout of the repository") from error
    draw(figures, PLOT)
    print(f"wrote {PLOT}")
    return 0


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draw recorded figures.

    Args:
        figures: ``title``, ``settings``, ``machine``, ``batches``, and milliseconds per token in ``milliseconds_per_token``, by server,
            and ``limit_of_stock``.
        path: File of the plot.
    """
    batches, series = figures["batches"], figures["milliseconds_per_token"]
    stock_rates = tokens_per_second(batches, series[STOCK])
    with png(path, (9, 5.5), Heading(figures["title"], figures["settings"], figures["machine"])) as axes:
        for index, (label, milliseconds) in enumerate(series.items()):
            rates = tokens_per_second(batches, milliseconds)
            positions = [group + (index - (len(series) - 1) / 2) * BAR_WIDTH for group in range(len(batches))]
            axes.bar(positions, rates, BAR_WIDTH * 0.92, color=COLORS[index], label=label)
            for x, rate, stock_rate in zip(positions, rates, stock_rates):
                if label == STOCK:
                    axes.text(x, rate - LABEL_GAP, f"{rate:,.0f}", ha="center", va="top", fontsize=9, color="white")
                else:
                    text = f"{rate:,.0f}\n{rate / stock_rate:.2f}x"
                    axes.text(x, rate + LABEL_GAP, text, ha="center", va="bottom", fontsize=9)
        for group, limit in enumerate(tokens_per_second(batches, figures["limit_of_stock"])):
            limit_label = "stock's limit: bytes it reads over bandwidth" if group == 0 else None
            axes.hlines(limit, group - 0.48, group + 0.48, color="black", linestyle="--", linewidth=1, label=limit_label)
        axes.set_xticks(range(len(batches)), [f"{batch} requests at once" for batch in batches])
        axes.set_ylabel("tokens per second, all requests")
        axes.set_ylim(0, AXIS_TOP)
        axes.legend(loc="upper left")


def tokens_per_second(batches: Sequence[int], milliseconds: Sequence[float]) -> list[float]:
    """Tokens per second of all requests together, from milliseconds per token of each request."""
    return [1000 * batch / each for batch, each in zip(batches, milliseconds)]
