"""What was simulated: a table of each machine, and a plot over acceptance."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from sglang_ext_bench.simulating.simulated import Result
from sglang_ext_bench import drawing

COLUMNS = (
    "policy", "p", "tokens/s", "allowed", "ratio", "gain", "overall", "placed", "drafts", "at once", "link", "rings",
    "load ms", "slack", "waits", "slips",
)  # fmt: skip


def table(results: Sequence[Result], title: str) -> Table:
    """Results of one machine, beside stock's where it was simulated."""
    found = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        found.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    plain = next((each.tokens_per_second for each in results if each.policy == "stock"), None)
    for each in results:
        found.add_row(*_row(each, plain))
    return found


def _row(result: Result, plain: float | None) -> tuple[str, ...]:
    drafts = "-" if result.schedule == "plain" else f"{result.drafts_resident or '-'} / {result.drafts_offloaded or '-'}"
    return (
        result.policy if result.schedule != "lock-step" else f"{result.policy} lock-step",
        "-" if result.policy == "stock" else f"{result.acceptance:g}",
        f"{result.tokens_per_second:.0f}",
        f"{result.allowed:.0f}",
        f"{result.ratio:.2f}",
        f"{result.tokens_per_second / plain:.2f}" if plain else "-",
        f"{result.overall:.0f}",
        f"{result.resident} + {result.offloaded}",
        drafts,
        f"{result.requests_mean:.1f} / {result.requests_most}",
        f"{result.link_used:.0%}",
        f"{result.link_reserved:.0%} / {result.memory_reserved:.0%}" if result.offloaded else "-",
        f"{result.load_ms:.0f}" if result.load_ms else "-",
        f"{result.slack:.1f}" if result.load_ms else "-",
        str(result.waits),
        str(result.slips),
    )


def write_plot(path: Path, results: Sequence[Result], heading: drawing.Heading) -> None:
    """Tokens per second over acceptance, a line for each policy, schedule and machine; what the equations allow, dotted."""
    span = sorted({each.acceptance for each in results if each.policy != "stock"} or {results[0].acceptance})
    keys = dict.fromkeys((each.policy, each.schedule, each.memory_tokens, each.link_bandwidth) for each in results)
    several, curves = len({key[2:] for key in keys}) > 1, []
    for place, (policy, schedule, memory, link) in enumerate(keys):
        key = (policy, schedule, memory, link)
        mine = [each for each in results if (each.policy, each.schedule, each.memory_tokens, each.link_bandwidth) == key]
        label = f"{policy}, {schedule}" + (f", {memory:g} tokens, {link / 1e9:g} GB/s" if several else "")
        if policy == "stock":
            curves.append(drawing.Curve(label, span, [mine[0].tokens_per_second] * len(span), color="gray"))
            continue
        acceptances, color = [each.acceptance for each in mine], f"C{place % 10}"
        curves.append(drawing.Curve(label, acceptances, [each.tokens_per_second for each in mine], color=color))
        curves.append(drawing.Curve(f"{label}, allowed", acceptances, [each.allowed for each in mine], ":", color))
    with drawing.png(path, (8, 4.5), heading) as axes:
        drawing.draw(axes, curves, "acceptance per token")
        axes.set(ylabel="tokens per second, simulated", ylim=(0, None))
