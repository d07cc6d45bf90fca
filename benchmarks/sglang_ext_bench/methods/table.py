"""The table of ``bench methods``, and the writing of it into a document."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sglang_ext.tools import CommandError
from sglang_ext_bench.methods.measurement import MethodFigures
from sglang_ext_bench.methods.servers import KINDS, STOCK

BEGIN, END = "<!-- measured by bench methods: begin -->", "<!-- measured by bench methods: end -->"
NOTHING = "-"


def table(found: Sequence[MethodFigures], told: Mapping[str, str]) -> Iterator[str]:
    """The lines of the table in Markdown: one row for each method, in the order of ``found``, then a line with the shared settings.

    Args:
        found: Figures of all methods, lengths and temperatures.
        told: Shared settings: ``model``, ``dtype``, ``device``, ``date``, ``requests`` (at once), ``output_len`` and ``draft_length``.
    """
    contexts = sorted({each.context for each in found})
    temperatures = sorted({each.temperature for each in found})
    lengths = " / ".join(f"{context:,}" for context in contexts)
    columns = [(kind, temperature) for kind in KINDS for temperature in temperatures]
    head = ["method", "bytes", *(f"{kind}, {_sampling(temperature)}" for kind, temperature in columns), "ms/token", "gain"]
    yield "| " + " | ".join(head) + " |"
    yield "|---" * len(head) + "|"
    stock = _timed(found, STOCK)
    for label in dict.fromkeys(each.label for each in found):
        mine = [each for each in found if each.label == label]
        timed = _timed(found, label)
        cells = [_acceptances(mine, contexts, kind, temperature) for kind, temperature in columns]
        token_ms = NOTHING if timed is None else f"{timed.token_ms:.2f}"
        gain = NOTHING if timed is None or stock is None or timed is stock else f"{stock.token_ms / timed.token_ms:.2f}"
        share = _plain(mine[-1].draft_share)
        yield "| " + " | ".join([label, share, *cells, token_ms, gain]) + " |"
    yield ""
    yield (
        f"Acceptance (accepted over offered draft tokens) at {lengths} prompt tokens. *Bytes*: compressed or selected KV that a draft "
        f"step reads, over the full KV, at {contexts[-1]:,} tokens, without the newest tokens that stay exact. *ms/token* and *gain* over stock: {_sampling(temperatures[0])}, {contexts[-1]:,} tokens, "
        f"{told['requests']} requests at once, half of them code. {told['model']}, {told['dtype']}, {told['draft_length']} drafts, "
        f"{told['output_len']} output tokens, prompts in the prefix cache, {told['device']}, {told['date']}."
    )
    if shown := [each for each in found if each.fallbacks and each.label != STOCK]:
        yield ""
        counts = ", ".join(f"{each.label} {each.fallbacks} ({each.context:,} tokens, {_sampling(each.temperature)})" for each in shown)
        yield f"Requests that full KV served at their end: {counts}."


def _timed(found: Sequence[MethodFigures], label: str) -> MethodFigures | None:
    """The figures whose time the table shows: longest prompts, lowest temperature. None if their time is unknown."""
    mine = [each for each in found if each.label == label]
    longest = max(mine, key=lambda each: (each.context, -each.temperature), default=None)
    return None if longest is None or longest.token_ms is None else longest


def _acceptances(mine: Sequence[MethodFigures], contexts: Sequence[int], kind: str, temperature: float) -> str:
    by_context = {each.context: each.acceptance(kind) for each in mine if each.temperature == temperature}
    values = [by_context.get(context) for context in contexts]
    if all(value is None for value in values):
        return NOTHING
    return " / ".join(NOTHING if value is None else _plain(value) for value in values)


def _plain(value: float) -> str:
    """A share with two decimals, without the zero before the point."""
    return f"{value:.2f}".removeprefix("0")


def _sampling(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"T = {temperature:g}".replace("0.", ".")


def write(path: Path, lines: Sequence[str]) -> None:
    """Put ``lines`` between the marks of a document.

    Raises:
        CommandError: The document cannot be read, or lacks the marks.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise CommandError(f"--write {path} cannot be read ({error.strerror}): pass a document with the lines {BEGIN} and {END}") from error
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise CommandError(f"--write {path} lacks the lines {BEGIN} and {END}: add them where the table belongs")
    path.write_text("\n".join([before + BEGIN, "", *lines, "", END]) + after)
