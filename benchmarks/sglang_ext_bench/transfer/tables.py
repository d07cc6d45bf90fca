"""Tables of transfers in Markdown, and where progressive transfer is faster or slower than the other methods."""

from collections.abc import Iterator, Sequence

from sglang_ext_bench.transfer.accuracy import Accuracy
from sglang_ext_bench.transfer.clocks import CLOCKS
from sglang_ext_bench.transfer.methods import SPLIT
from sglang_ext_bench.transfer.summary import SHOWN, Figures

ENDS = (1, 32)
"""Tokens whose times the main table shows on the clocks *kept* and *visible*, too."""
HEAD = (
    *("method", "bits", f"generated: {SHOWN[0]}", *map(str, SHOWN[1:])), *(f"{clock}: {k}" for clock in ("kept", "visible") for k in ENDS),
    *("link's use", "steps of residual", "drafted", "accepted"),
)  # fmt: skip
NOISE = 0.02
"""Ratios of times that differ less from 1 count as equal."""


def group(figures: Figures) -> str:
    """What stands above a table: figures that are compared with each other."""
    link = "no limit" if figures.gbps is None else f"{figures.gbps:g} Gbit/s"
    return f"{figures.context} tokens, {link}, prompts {'not cached' if figures.cold else 'cached'} on the prefill server"


def tables(found: Sequence[Figures]) -> Iterator[str]:
    """One for each link, context, and whether prompts were cached."""
    for title in dict.fromkeys(map(group, found)):
        mine = [figures for figures in found if group(figures) == title]
        yield f"\n{title}; seconds from the end of prefill to the k-th token, by clock (generated: with rejected drafts; kept: accepted tokens, as in Lynx's figures; visible: at the client):\n"
        yield "| " + " | ".join(HEAD) + " |"
        yield "|---" * len(HEAD) + "|"
        yield from (row(figures) for figures in mine)
        yield from comparison(mine)


def row(figures: Figures) -> str:
    """A line of a table."""
    times = [figures.at("generated", k) for k in SHOWN] + [figures.at(clock, k) for clock in ("kept", "visible") for k in ENDS]
    split = figures.bits_anchor is not None and figures.drafted is not None
    bits = "" if figures.bits is None else f"{figures.bits_anchor:.2f} + {figures.bits - figures.bits_anchor:.2f}" if split else f"{figures.bits:.2f}"
    use = f"{figures.rate / 1e6:.0f} MB/s" if figures.efficiency is None else f"{figures.efficiency:.2f}"
    drafts = [f"{value:.1f}" if value is not None else "" for value in (figures.drafted, figures.accepted)]
    cells = [figures.method, bits, *("" if time is None else f"{time:.2f}" for time in times), use]
    return "| " + " | ".join([*cells, f"{figures.residual_steps:.0f}" if split else "", *drafts]) + " |"


def comparison(found: Sequence[Figures]) -> Iterator[str]:
    """Yield the lines of a table: each method that drafts before all KV has arrived, over each that does not, by token and clock.

    Args:
        found: The figures of one table.
    """
    pairs = [(ours, other) for ours in found if ours.method in SPLIT for other in found if other.method not in SPLIT]
    rows = [line for ours, other in pairs for k in SHOWN if (line := compared(ours, other, k)) is not None]
    if not rows:
        return
    yield "\nTime of the first method to the k-th token over the second's:\n"
    yield "| methods | token | " + " | ".join(CLOCKS) + " | verdict |"
    yield "|---" * (len(CLOCKS) + 3) + "|"
    yield from rows


def compared(ours: Figures, other: Figures, k: int) -> str | None:
    """Return a row of :func:`comparison`; None where the k-th token was not timed on all clocks."""
    ratios = {clock: ratio(ours, other, clock, k) for clock in CLOCKS}
    if None in ratios.values():
        return None
    cells = [f"{ours.method} over {other.method}", str(k), *(f"{value:.3f}" for value in ratios.values()), verdict(ratios)]
    return "| " + " | ".join(cells) + " |"


def verdict(ratios: dict[str, float]) -> str:
    """Say on which clocks a method is slower or faster, by the ratio of its time on each."""
    slower = [clock for clock, value in ratios.items() if value > 1 + NOISE]
    faster = [clock for clock, value in ratios.items() if value < 1 - NOISE]
    parts = [f"{word} on {', '.join(clocks)}" for word, clocks in (("SLOWER", slower), ("faster", faster)) if clocks]
    return "; ".join(parts) or "equal"


def ratio(ours: Figures, other: Figures, clock: str, k: int) -> float | None:
    """Of the times to the k-th token; None where one is not known."""
    times = ours.at(clock, k), other.at(clock, k)
    return times[0] / times[1] if None not in times and times[1] > 0 else None


def accuracy_table(found: Sequence[Accuracy]) -> Iterator[str]:
    """Of the codecs."""
    yield "\nvNMSE of attention outputs, and bits of a number:\n"
    yield "| method | of what decoding begins on | of all | bits | of all |"
    yield "|---|---|---|---|---|"
    for each in found:
        both = (f"{each.all:.2g}", f"{each.bits_all:.2f}") if each.all is not None else ("", "")
        yield f"| {each.method} | {each.anchor:.2g} | {both[0]} | {each.bits_anchor:.2f} | {both[1]} |"
