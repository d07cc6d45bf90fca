"""Draws what README.md begins with, from recorded figures: tokens per second of stock and verified servers.

    sglang-ext-bench plot      # decode-32k.json -> decode-32k.png, beside this file
"""

import json
from pathlib import Path

from sglang_ext_bench.drawing import Heading, png

HERE = Path(__file__).parents[2] / "results"
COLORS = ("#8a8f98", "#a6cbe8", "#5b9bd0", "#1f5f99")
WIDTH = 0.2


def tokens_per_second(batches: list[int], milliseconds: list[float]) -> list[float]:
    """Of all requests together, from the milliseconds that each waits for a token."""
    return [1000 * batch / each for batch, each in zip(batches, milliseconds)]


def main() -> None:
    """Write the plot."""
    found = json.loads((HERE / "decode-32k.json").read_text())
    batches, series = found["batches"], found["milliseconds_per_token"]
    heading = Heading(found["title"], found["settings"], found["machine"])
    stock = tokens_per_second(batches, series["stock SGLang"])
    with png(HERE / "decode-32k.png", (9, 5.5), heading) as axes:
        for place, (label, milliseconds) in enumerate(series.items()):
            rates = tokens_per_second(batches, milliseconds)
            at = [group + (place - (len(series) - 1) / 2) * WIDTH for group in range(len(batches))]
            axes.bar(at, rates, WIDTH * 0.92, color=COLORS[place], label=label)
            for x, rate, plain in zip(at, rates, stock):
                if rate == plain:
                    axes.text(x, rate - 15, f"{rate:,.0f}", ha="center", va="top", fontsize=9, color="white")
                else:
                    axes.text(x, rate + 15, f"{rate:,.0f}\n{rate / plain:.2f}x", ha="center", va="bottom", fontsize=9)
        for group, limit in enumerate(tokens_per_second(batches, found["limit_of_stock"])):
            label = "stock's limit: bytes it reads over bandwidth" if not group else None
            axes.hlines(limit, group - 0.48, group + 0.48, color="black", linestyle="--", linewidth=1, label=label)
        axes.set_xticks(range(len(batches)), [f"{batch} requests at once" for batch in batches])
        axes.set_ylabel("tokens per second, all requests")
        axes.set_ylim(0, 2150)
        axes.legend(loc="upper left")


if __name__ == "__main__":
    main()
