"""Results of transfers: summaries of a method, link and context, their Markdown tables, and the plot."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext_bench import drawing
from sglang_ext_bench.transfer.accuracy import CodecAccuracy
from sglang_ext_bench.transfer.clocks import CLOCKS, RequestTimes
from sglang_ext_bench.transfer.methods import SPLIT

TABLE_TOKENS = (1, 8, 16, 32, 64)
"""Tokens whose times the tables show."""
KEPT_TOKENS = (1, 32)
"""Tokens whose times the main table shows by the clocks ``kept`` and ``visible``, too."""
HEAD = (
    *("method", "bits", f"generated: {TABLE_TOKENS[0]}", *map(str, TABLE_TOKENS[1:])),
    *(f"{clock}: {k}" for clock in ("kept", "visible") for k in KEPT_TOKENS),
    *("link use", "residual, steps", "drafted", "accepted"),
)  # fmt: skip
NOISE = 0.02
"""Ratios of times count as equal if they differ from 1 by at most this."""
LINE_STYLES = {"generated": "-", "visible": "--"}


@dataclass(frozen=True)
class TransferSummary:
    """Summary of the requests of a method, link and context. Its fields are keys of the JSON file.

    Values are medians over requests unless stated. Times are seconds from the end of prefill.

    Attributes:
        method: Name of the method.
        gbps: Rate of the link in Gbit/s. None without a limit.
        context: Tokens of a prompt.
        cold: The prompts were not in the prefill server's prefix cache. Their chunks were transferred during prefill.
        requests: Number of requests.
        times: Times of each token after the first, by clock.
        step: Duration of a decode step in seconds.
        bits_anchor: Bits per number of the pool, of the data with which decoding can start. None for SGLang's own backend.
        bits: Bits per number of the pool, of all transferred data. None for SGLang's own backend.
        complete: Time at which all KV was written.
        residual_steps: Duration of the residual's transfer, in decode steps.
        encode: Seconds from the first submitted page to the last encoded one.
        efficiency: Share of the link's rate in use from the first submitted page to the last written one. None without a limit.
        rate: Bytes per second in that time.
        drafted: Mean draft tokens on the anchor. None if there were none.
        accepted: Mean accepted ones among them. None if there were none.
        survival: Element k - 1: of the verifications with at least k early draft tokens, the share that accepted at least k.
    """

    method: str
    gbps: float | None
    context: int
    cold: bool
    requests: int
    times: dict[str, tuple[float, ...]]
    step: float
    bits_anchor: float | None
    bits: float | None
    complete: float
    residual_steps: float
    encode: float
    efficiency: float | None
    rate: float
    drafted: float | None
    accepted: float | None
    survival: tuple[float, ...]

    def token_time(self, clock: str, k: int) -> float | None:
        """Time of the k-th token in seconds. None if it was not timed."""
        times = self.times[clock]
        return times[k - 1] if k <= len(times) else None

    @property
    def title(self) -> str:
        """Title of its table: context, link, and whether prompts were cached. Summaries of one title are compared."""
        link = "no limit" if self.gbps is None else f"{self.gbps:g} Gbit/s"
        return f"{self.context} tokens, {link}, prompts {'not cached' if self.cold else 'cached'} on the prefill server"


def summarize(method: str, gbps: float | None, requests: Sequence[RequestTimes], numbers_per_token: int) -> TransferSummary:
    """Summarize requests of one context, which are all cold or all cached.

    Args:
        method: Name of the method.
        gbps: Rate of the link in Gbit/s. None without a limit.
        requests: Times of each request.
        numbers_per_token: Numbers of keys and values of a token in the pool, all layers.
    """
    first = requests[0]
    numbers = first.tokens * numbers_per_token
    spans = [(request.complete - request.sending, request.bytes_all) for request in requests]
    early = [request for request in requests if request.drafted]
    step = statistics.median(request.step for request in requests)
    residual = statistics.median(request.complete - request.anchor for request in requests)
    efficiencies = [8e-9 * size / gbps / span for span, size in spans if size] if gbps else []
    return TransferSummary(
        method=method,
        gbps=gbps,
        context=first.tokens,
        cold=first.cold,
        requests=len(requests),
        times={clock: _medians([request.token_times(clock) for request in requests]) for clock in CLOCKS},
        step=step,
        bits_anchor=_median([8 * request.bytes_anchor / numbers for request in requests if request.bytes_anchor]),
        bits=_median([8 * request.bytes_all / numbers for request in requests if request.bytes_all]),
        complete=statistics.median(request.complete for request in requests),
        residual_steps=residual / step if step else 0.0,
        encode=statistics.median(request.encoded - request.sending for request in requests),
        efficiency=_median(efficiencies),
        rate=statistics.median(size / span for span, size in spans),
        drafted=statistics.fmean(request.drafted for request in early) if early else None,
        accepted=statistics.fmean(request.accepted for request in early) if early else None,
        survival=survival(early),
    )


def survival(requests: Sequence[RequestTimes]) -> tuple[float, ...]:
    """P(accepted >= k) for k = 1, 2, ... of the drafts on anchors. For each k, requests with at least k drafts count."""
    shares = []
    for k in range(1, max((request.drafted for request in requests), default=0) + 1):
        drafted = [request for request in requests if request.drafted >= k]
        shares.append(sum(request.accepted >= k for request in drafted) / len(drafted))
    return tuple(shares)


def _medians(times: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Median time of each token that all requests have."""
    return tuple(statistics.median(each) for each in zip(*times))


def _median(values: Sequence[float]) -> float | None:
    """The median. None without values."""
    return statistics.median(values) if values else None


def tables(summaries: Sequence[TransferSummary]) -> Iterator[str]:
    """Yield the lines of one table per link and context, for cached prompts and for others."""
    for title in dict.fromkeys(each.title for each in summaries):
        selected = [each for each in summaries if each.title == title]
        yield (
            f"\n{title}; seconds from the end of prefill to the k-th token, by clock (generated: draft tokens count, rejected ones included; "
            "kept: accepted tokens, as in Lynx's figures; visible: tokens at the client):\n"
        )
        yield "| " + " | ".join(HEAD) + " |"
        yield "|---" * len(HEAD) + "|"
        yield from map(row, selected)
        yield from comparison(selected)


def row(summary: TransferSummary) -> str:
    """One row of the main table."""
    times = [summary.token_time("generated", k) for k in TABLE_TOKENS]
    times += [summary.token_time(clock, k) for clock in ("kept", "visible") for k in KEPT_TOKENS]
    has_residual = summary.bits_anchor is not None and summary.drafted is not None
    bits = "" if summary.bits is None else f"{summary.bits:.2f}"
    if summary.bits is not None and summary.bits_anchor is not None and has_residual:
        bits = f"{summary.bits_anchor:.2f} + {summary.bits - summary.bits_anchor:.2f}"
    use = f"{summary.rate / 1e6:.0f} MB/s" if summary.efficiency is None else f"{summary.efficiency:.2f}"
    drafts = [f"{value:.1f}" if value is not None else "" for value in (summary.drafted, summary.accepted)]
    cells = [summary.method, bits, *("" if time is None else f"{time:.2f}" for time in times), use]
    return "| " + " | ".join([*cells, f"{summary.residual_steps:.0f}" if has_residual else "", *drafts]) + " |"


def comparison(summaries: Sequence[TransferSummary]) -> Iterator[str]:
    """Yield the lines of a table that compares each method with early decoding to each one without, by token and clock.

    Args:
        summaries: The summaries of one main table.
    """
    pairs = [(early, other) for early in summaries if early.method in SPLIT for other in summaries if other.method not in SPLIT]
    rows = [line for early, other in pairs for k in TABLE_TOKENS if (line := comparison_row(early, other, k)) is not None]
    if not rows:
        return
    yield "\nTime of the first method to the k-th token over the second's:\n"
    yield "| methods | token | " + " | ".join(CLOCKS) + " | verdict |"
    yield "|---" * (len(CLOCKS) + 3) + "|"
    yield from rows


def comparison_row(early: TransferSummary, other: TransferSummary, k: int) -> str | None:
    """Return a row of :func:`comparison`. None if the k-th token was not timed by all clocks."""
    ratios = {clock: ratio for clock in CLOCKS if (ratio := time_ratio(early, other, clock, k)) is not None}
    if len(ratios) < len(CLOCKS):
        return None
    cells = [f"{early.method} over {other.method}", str(k), *(f"{value:.3f}" for value in ratios.values()), verdict(ratios)]
    return "| " + " | ".join(cells) + " |"


def verdict(ratios: dict[str, float]) -> str:
    """Name the clocks by which a method is slower or faster.

    Args:
        ratios: Its time over that of the other method, by clock.
    """
    slower = [clock for clock, value in ratios.items() if value > 1 + NOISE]
    faster = [clock for clock, value in ratios.items() if value < 1 - NOISE]
    parts = [f"{word} on {', '.join(clocks)}" for word, clocks in (("SLOWER", slower), ("faster", faster)) if clocks]
    return "; ".join(parts) or "equal"


def time_ratio(early: TransferSummary, other: TransferSummary, clock: str, k: int) -> float | None:
    """Ratio of the times to the k-th token. None if one is unknown."""
    early_time, other_time = early.token_time(clock, k), other.token_time(clock, k)
    return early_time / other_time if early_time is not None and other_time is not None and other_time > 0 else None


def accuracy_table(results: Sequence[CodecAccuracy]) -> Iterator[str]:
    """Yield the lines of the table of codec errors."""
    yield "\nError (vNMSE) of attention outputs, and bits per number. Anchor: the data with which decoding can start.\n"
    yield "| method | error, anchor | error, all | bits, anchor | bits, all |"
    yield "|---|---|---|---|---|"
    for each in results:
        error, bits = (f"{each.all:.2g}", f"{each.bits_all:.2f}") if each.all is not None else ("", "")
        yield f"| {each.method} | {each.anchor:.2g} | {error} | {each.bits_anchor:.2f} | {bits} |"


def write_plot(path: Path, summaries: Sequence[TransferSummary], example: RequestTimes | None, settings: str) -> None:
    """Write a PNG: the times of each link and context, then the acceptance of early drafts and the timeline of one request.

    Args:
        path: File to write.
        summaries: All summaries. Those of cold prompts are plotted only if there are no others.
        example: Request of the timeline. None leaves it out.
        settings: Settings of the run, for the heading.
    """
    titles = list(dict.fromkeys(each.title for each in summaries if not each.cold))
    titles = titles or list(dict.fromkeys(each.title for each in summaries))
    heading = drawing.Heading("Time to the k-th token after the prefill", settings)
    with drawing.png(path, (11, 3.6 * (len(titles) + 1)), heading, (len(titles) + 1, 2)) as axes:
        for pair, title in zip(axes, titles, strict=False):
            selected = [each for each in summaries if each.title == title]
            for each, clock in zip(pair, LINE_STYLES, strict=True):
                _plot_times(each, selected, clock)
                each.set_title(f"{title}: {clock}", fontsize="x-small")
        _plot_acceptance(axes[-1][0], summaries)
        _plot_timeline(axes[-1][1], example)


def _plot_times(axes: Any, summaries: Sequence[TransferSummary], clock: str) -> None:
    for index, summary in enumerate(summaries):
        times = summary.times[clock]
        axes.plot(range(1, len(times) + 1), times, LINE_STYLES[clock], color=f"C{index % 10}", label=summary.method)
    axes.set(xlabel="k", ylabel="seconds", ylim=(0, None))
    axes.legend(fontsize="x-small")


def _plot_acceptance(axes: Any, summaries: Sequence[TransferSummary]) -> None:
    for summary in summaries:
        if summary.survival and not summary.cold:
            label = f"{summary.method}, {summary.context} tokens, {summary.gbps or 'no'} Gbit/s"
            axes.plot(range(1, len(summary.survival) + 1), summary.survival, label=label)
    axes.set(xlabel="k", ylabel="P(accepted >= k), drafts on anchors", ylim=(0, 1.02))
    if axes.lines:
        axes.legend(fontsize="x-small")


def _plot_timeline(axes: Any, example: RequestTimes | None) -> None:
    """Plot the tokens of one request over time, and the times at which its anchor and residual arrived."""
    if example is None:
        axes.set_axis_off()
        return
    for clock, label in (("generated", "computed"), ("visible", "at the client")):
        times = example.token_times(clock)
        axes.step(times, range(1, len(times) + 1), where="post", label=label)
    for at, name in ((example.anchor, "anchor"), (example.complete, "residual"), (example.encoded, "encoded")):
        axes.axvline(at, color="gray", linestyle=":", linewidth=1)
        axes.text(at, axes.get_ylim()[1], name, rotation=90, va="top", ha="right", fontsize="x-small")
    axes.set(xlabel="seconds from the end of prefill", ylabel="tokens")
    axes.set_title(f"one request of {example.tokens} tokens", fontsize="x-small")
    axes.legend(fontsize="x-small", loc="lower right")
