"""Tables of bench longcot, in Markdown."""

from collections.abc import Iterator, Sequence

from sglang_ext_bench.longcot.arms import STOCK
from sglang_ext_bench.longcot.overlap import Overlap
from sglang_ext_bench.longcot.packs import PackFigures
from sglang_ext_bench.longcot.pages import PagePart
from sglang_ext_bench.longcot.serving import LongFigures


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|---" * len(head) + "|"
    yield from ("| " + " | ".join(row) + " |" for row in rows)


def served(found: Sequence[LongFigures]) -> Iterator[str]:
    """Of each load: milliseconds a token by the answer's length, over stock's, of requests side by side, acceptance and operations."""
    for load in dict.fromkeys(figures.load for figures in found):
        mine = [figures for figures in found if figures.load == load]
        stock = next((figures for figures in mine if figures.method == STOCK), None)
        ends = [f"to token {length}" for length in mine[0].lengths]
        yield f"\n{load}; milliseconds of each request per output token:\n"
        head = ("server", *ends, "of stock's, last", "side by side", "choices in time meanwhile", "accepted", "GFLOP a token", "on full KV")
        yield from _table(head, [_row(each, stock) for each in mine])


def _row(figures: LongFigures, stock: LongFigures | None) -> list[str]:
    ratio = "" if stock is None or not stock.token_ms[-1] else f"{figures.token_ms[-1] / stock.token_ms[-1]:.2f}"
    accepted = "" if figures.acceptance is None else f"{figures.accepted} of {figures.drafts}, {figures.acceptance:.2f}"
    times = [f"{each:.2f}" for each in figures.token_ms]
    together = "" if figures.running is None else f"{figures.together_ms:.2f}, {figures.running} at once"
    name = figures.name.removesuffix(f" {figures.load.select}")
    choices = "" if figures.choices is None else str(figures.choices)
    return [name, *times, ratio, together, choices, accepted, f"{figures.flops / 1e9:.3f}", str(figures.fallbacks or "")]


def packed(found: Sequence[PackFigures]) -> Iterator[str]:
    """The columns of Table 2, and what belongs to positions instead of KV."""
    if not found:
        return
    head = (
        "server", "load", "layers served", "inference, ms", "selection, ms", "transfer, ms", "hidden", "late",
        "GB/s of positions", "GB/s were KV sent",
    )  # fmt: skip
    yield "\nPer pack of layers, means over steps:\n"
    yield from _table(head, [_pack_row(each) for each in found])


def _pack_row(each: PackFigures) -> list[str]:
    times = (f"{1000 * seconds:.2f}" for seconds in (each.inference, each.selection, each.transfer))
    rates = (f"{rate / 1e9:.3f}" for rate in (each.bandwidth, each.gathered_bandwidth))
    return [each.name, each.load, str(each.layers), *times, "yes" if each.hidden else "no", f"{each.missed:.1%}", *rates]


def paged(found: Sequence[PagePart]) -> Iterator[str]:
    """Each part's milliseconds and share of a layer's step, by load."""
    for load in dict.fromkeys(part.load for part in found):
        mine = [part for part in found if part.load == load]
        whole = sum(part.seconds for part in mine)
        yield f"\nA layer's step with choices by pages, {load}:\n"
        rows = [(each.part, f"{1000 * each.seconds:.3f}", f"{each.seconds / whole:.0%}") for each in mine]
        yield from _table(("part", "ms", "share"), rows)


def overlapped(found: Sequence[Overlap]) -> Iterator[str]:
    """The mean of each way."""
    if not found:
        return
    yield f"\nOf the tokens that a step's own query selects, {found[0].share:g} of the context, the share that was selected by:\n"
    yield from _table(("chosen by", "overlap"), [(each.name, f"{each.mean:.3f}") for each in found])
