"""Tables of transfers in Markdown, and what is required of progressive transfer, beside what was measured."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_ext.bench.transfer.accuracy import Accuracy
from sglang_ext.bench.transfer.methods import LYNX
from sglang_ext.bench.transfer.summary import SHOWN, Figures

HEAD = ("method", "bits", "generated: 1", *(f"{k}" for k in SHOWN[1:]), "kept: 1", "32", "visible: 1", "32", "link's use", "steps of residual", "drafted", "accepted")


@dataclass(frozen=True)
class Requirement:
    """A ratio of times to the k-th token that progressive transfer shall keep to another method's.

    Attributes:
        other: the method.
        k: which token.
        most: the ratio.
    """

    other: str
    k: int
    most: float


# Of cached prompts whose residual takes so many steps: of others the residual hides little, or most has travelled before.
STEPS = 30
REQUIRED = (Requirement("int4", 1, 1.15), Requirement("int8", 1, 1 / 1.4), Requirement("int8", 32, 0.95))


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
        yield from requirements(mine)


def row(figures: Figures) -> str:
    """A line of a table."""
    times = [figures.at("generated", k) for k in SHOWN] + [figures.at(clock, k) for clock in ("kept", "visible") for k in (1, 32)]
    split = figures.bits_anchor is not None and figures.drafted is not None
    bits = "" if figures.bits is None else f"{figures.bits_anchor:.2f} + {figures.bits - figures.bits_anchor:.2f}" if split else f"{figures.bits:.2f}"
    use = f"{figures.rate / 1e6:.0f} MB/s" if figures.efficiency is None else f"{figures.efficiency:.2f}"
    drafts = [f"{value:.1f}" if value is not None else "" for value in (figures.drafted, figures.accepted)]
    cells = [figures.method, bits, *("" if time is None else f"{time:.2f}" for time in times), use]
    return "| " + " | ".join([*cells, f"{figures.residual_steps:.0f}" if split else "", *drafts]) + " |"


def requirements(found: Sequence[Figures]) -> Iterator[str]:
    """Of one table: each ratio, on all clocks, beside what is required of the times at which tokens were computed, where it is."""
    named = {figures.method: figures for figures in found}
    ours = named.get(LYNX)
    if ours is None or not {each.other for each in REQUIRED} & named.keys():
        return
    yield ""
    for each in REQUIRED:
        other = named.get(each.other)
        if other is None:
            continue
        ratios = {clock: ratio(ours, other, clock, each.k) for clock in ours.times}
        if ratios["generated"] is None:
            continue
        said = ", ".join(f"{clock} {value:.3f}" for clock, value in ratios.items() if value is not None)
        required = ""
        if not ours.cold and ours.residual_steps >= STEPS:
            required = f"; at most {each.most:.3f} (generated): {'holds' if ratios['generated'] <= each.most else 'DOES NOT HOLD'}"
        yield f"- token {each.k}, {LYNX} over {each.other}: {said}{required}"
    yield f"\nRequired is something of cached prompts whose residual takes {STEPS} steps or more."


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
