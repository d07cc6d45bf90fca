"""Tables whose figures are in the report of a command. A description names the file, its rows and the function of each column."""

import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext_bench.methods import command as methods_command
from sglang_ext_bench.pages.recorded import ABOVE, Cell, ResultTable, TableOrigin, read_figures
from sglang_ext_bench.quality.suites import suite_report
from sglang_ext_bench.quality.suites.comparison import ArmScores
from sglang_ext_bench.quality.suites.options import FULL
from sglang_ext_bench.serving.auto_cells import AUTO, STOCK
from sglang_ext_bench.transfer.clocks import CLOCKS

COMMAND_WIDTH = 110
"""Columns of a command before it continues on the next line."""
STOCK_SERVER = "stock SGLang"
"""Name of stock in the figures of the plot."""
LONGEST = (30000, 16)
"""Prompt tokens and batch of the cell that README.md shows."""
README_METHOD = "`snapkv+kivi`, 1/4"
"""Method of the last row of README.md."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Text:
    """A table that its own command formats.

    Attributes:
        markdown: Returns the text.
    """

    markdown: Callable[[], str]


@dataclass(frozen=True)
class Description:
    """Describes a table of a report.

    Attributes:
        file: The report, in ``benchmarks/results``.
        rows: Function of the report that returns one value for each row.
        columns: For each header, the function of such a value that returns the cell.
        same_command: The table above has the same command.
        has_origin: The command, the hardware and the date are written below the table.
    """

    file: str
    rows: Callable[[Row], Iterable[Any]]
    columns: Mapping[str, Callable[[Any], Cell]]
    same_command: bool = False
    has_origin: bool = True

    def table(self, results: Path) -> ResultTable:
        """Read the report and make the table."""
        report = read_report(results / self.file)
        rows = [[cell(row) for cell in self.columns.values()] for row in self.rows(report)]
        return ResultTable(list(self.columns), rows, origin_of(report, self.same_command) if self.has_origin else None)


def read_report(path: Path) -> Row:
    """Read a report in ``benchmarks/results``."""
    return read_figures(path, float)


def origin_of(report: Mapping[str, Any], same_command: bool = False) -> TableOrigin:
    """The command, the hardware and the date of a report."""
    command = ABOVE if same_command else shown_command(report["command"], report.get("environment", ""))
    return TableOrigin(command, "", report["hardware"], report.get("date", ""), report.get("recorded", ""), report.get("commit", ""))


def shown_command(command: str | Sequence[str], environment: str = "") -> Sequence[str]:
    """The lines of a command. A command in one line is wrapped, and starts with its environment and the name of the program."""
    if not isinstance(command, str):
        return command
    words = shlex.split(re.sub(r"^python -m sglang_ext[._]bench", "sglang-ext-bench", command))
    text = " ".join(re.sub(r'^(--[\w-]+)=(.* .*)$', r'\1="\2"', word) if word.startswith("--") else shlex.quote(word) for word in words)
    lines = textwrap.wrap(f"{environment} {text}".strip(), COMMAND_WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def fixed(value: float, digits: int = 2) -> str:
    """A number with a fixed number of digits. A share has no zero before the point."""
    text = f"{value:.{digits}f}"
    return text[1:] if text.startswith("0.") else text


def pairs(values: Iterable[float]) -> str:
    """Several numbers in one cell."""
    return ", ".join(map(fixed, values))


def part_of(part: int, whole: int) -> str:
    """A count, and its share of another one. Empty if there is none."""
    return f"{part} of {whole}, {fixed(part / whole)}" if whole else ""


def cells_of_arms(report: Row) -> list[dict[str, Row]]:
    """The cells of `auto-cells`, each by arm."""
    arms = report["arms"]
    return [dict(zip(arms, cells)) for cells in zip(*arms.values())]


def speeds(cell: Mapping[str, Row], arm: str, over: str = STOCK) -> list[float]:
    """Speed of an arm over that of another one, wave by wave."""
    return [other / own for other, own in zip(cell[over]["steady_ms"], cell[arm]["steady_ms"])]


def times(arm: str) -> Callable[[Mapping[str, Row]], Cell]:
    """Column of an arm's milliseconds per token, by wave."""
    return lambda cell: pairs(cell[arm]["steady_ms"])


def auto_columns(*lengths: str) -> dict[str, Callable[[Mapping[str, Row]], Cell]]:
    """Columns of a table of `auto-cells`, with these draft lengths."""
    return {
        "tokens x requests": lambda cell: f"{cell[STOCK]['context']:,} x {cell[STOCK]['batch']}",
        "stock, ms/token": times(STOCK),
        **{f"{length} drafts": times(length) for length in lengths},
        "`auto`": times(AUTO),
        "speed of `auto` over stock": lambda cell: pairs(speeds(cell, AUTO)),
    }


def speed_rows(report: Row) -> list[list[str]]:
    """Rows of milliseconds per token and gains, by server."""
    servers = report["milliseconds_per_token"]
    stock = servers[STOCK_SERVER]
    rows = [["stock", *map(fixed, stock)], ["limit of stock", *map(fixed, report["limit_of_stock"])]]
    for name, own in reversed(servers.items()):
        if name != STOCK_SERVER:
            probability = name.rpartition(", ")[2]
            cells = [f"{fixed(ms)} ({fixed(full / ms)})" for ms, full in zip(own, stock)]
            first = len(rows) == 2
            label = f"1/32, 24 drafts, {probability}" if first else probability
            rows.append([label, *(f"**{cell}**" if first else cell for cell in cells)])
    for name, cells in report["other_runs"].items():
        rows.append([name, *(f"{fixed(ms)} ({fixed(gain)})" for ms, gain in cells)])
    return rows


def gain_rows(report: Row) -> list[list[str]]:
    """Gains of 16 requests by acceptance probability, in one row."""
    servers = report["milliseconds_per_token"]
    stock = servers[STOCK_SERVER][1]
    return [[f"gain over stock's {fixed(stock)} ms/token", *(fixed(stock / own[1]) for name, own in servers.items() if name != STOCK_SERVER)]]


LONGCOT_LABELS = {"spade-ranks": "`spade`, one cache rank", "spade": "`spade`, between steps"}


def longcot_rows(report: Row) -> list[Row]:
    """Servers, each with stock's operations per token."""
    stock = next(each["flops"] for each in report["results"] if each["method"] == "stock")
    return [{**each, "stock_flops": stock} for each in report["results"]]


def transfer_rows(report: Row) -> list[Row]:
    """Methods with cached prompts."""
    order = [method for method in report["arguments"]["method"]]
    cached = [each for each in report["figures"] if not each["cold"]]
    return sorted(cached, key=lambda each: order.index(each["method"]))


def token_time(clock: str, k: int) -> Callable[[Row], Cell]:
    """Column of the seconds to the k-th token."""
    return lambda row: fixed(row["times"][clock][k - 1])


def transfer_ratios(report: Row) -> list[tuple[str, list[float]]]:
    """Times of `lynx` over those of another method, cached and then cold, by clock."""
    figures = {(each["method"], each["cold"]): each["times"] for each in report["figures"]}
    rows = []
    for method, k, token in (("int4", 1, "first token"), ("int8", 1, "first token"), ("int8", 32, "32nd token")):
        ratios = [
            figures["lynx", cold][clock][k - 1] / figures[method, cold][clock][k - 1] for cold in (False, True) for clock in CLOCKS
        ]
        rows.append((f"`{method}`, {token}", ratios))
    return rows


def column(index: int) -> Callable[[Sequence[Any]], Cell]:
    """Column of rows that are already cells."""
    return lambda row: row[index]


def ratio(index: int) -> Callable[[tuple[str, list[float]]], Cell]:
    """Column of :func:`transfer_ratios`."""
    return lambda row: fixed(row[1][index])


DESCRIPTIONS = {
    "auto-cells": Description(
        "auto-cells.json", cells_of_arms, auto_columns("15") | {"over 15 drafts": lambda cell: pairs(speeds(cell, AUTO, "15"))}
    ),
    "speed": Description(
        "decode-32k.json", speed_rows, {"": column(0), "8 at once": column(1), "16 at once": column(2)}
    ),
    "readme-gains": Description(
        "decode-32k.json", gain_rows, {"*p*": column(0), ".95": column(1), ".97": column(2), ".99": column(3)}, has_origin=False
    ),
    "longcot-demo": Description(
        "longcot.json",
        longcot_rows,
        {
            "server": lambda row: LONGCOT_LABELS.get(row["method"], f"`{row['method']}`"),
            "drafts accepted": lambda row: part_of(row["accepted"], row["drafts"]),
            "operations of a token on the path that answers, of stock's": lambda row: (
                1 if row["method"] == "stock" else fixed(row["flops"] / row["stock_flops"])
            ),
        },
    ),
    "transfer-demo": Description(
        "transfer.json",
        transfer_rows,
        {
            "cached": lambda row: f"`{row['method']}`",
            "bits": lambda row: (
                fixed(row["bits"]) if row["drafted"] is None else f"{fixed(row['bits_anchor'])} + {fixed(row['bits'] - row['bits_anchor'])}"
            ),
            "first, generated": token_time("generated", 1),
            "8th": token_time("generated", 8),
            "16th": token_time("generated", 16),
            "32nd": token_time("generated", 32),
            "first, visible": token_time("visible", 1),
            "32nd, visible": token_time("visible", 32),
            "link use": lambda row: fixed(row["efficiency"]),
            "drafted": lambda row: None if row["drafted"] is None else int(row["drafted"]),
            "accepted": lambda row: None if row["accepted"] is None else int(row["accepted"]),
        },
    ),
    "transfer-demo-ratios": Description(
        "transfer.json",
        transfer_ratios,
        {
            "`lynx` over": column(0),
            **{f"{prompts}{clock}": ratio(3 * index + place) for index, prompts in enumerate(("cached: ", "cold: "))
               for place, clock in enumerate(CLOCKS)},
        },
        same_command=True,
    ),
}  # fmt: skip


def measured_tables(results: Path, recorded: Mapping[str, ResultTable]) -> dict[str, ResultTable | Text]:
    """Make the tables of all reports, by name.

    Args:
        results: The folder ``benchmarks/results``.
        recorded: Tables of figures without a report.
    """
    tables: dict[str, ResultTable | Text] = {name: each.table(results) for name, each in DESCRIPTIONS.items()}
    suites = read_report(results / "quality-suites.json")
    arms = suite_report.from_json(suites["arms"])
    return {
        **tables,
        "acceptance": acceptance(results, recorded["acceptance"]),
        "methods": Text(lambda: methods(results)),
        "readme-speed": readme_speed(results),
        "suites": Text(lambda: suites_text(arms, suites)),
        "hack-real-model": suite_scores(arms, ("full", "kivi", "int4", "hack", "hack --kv-prefill quantized"), origin_of(suites)),
    }


def acceptance(results: Path, others: ResultTable) -> ResultTable:
    """Acceptance of `snapkv` and `sink-recent` by budget, then of the methods that other runs measured."""
    report = read_report(results / "acceptance-2k.json")
    rows: dict[str, list[Cell]] = {}
    for each in report["comparisons"]:
        rows.setdefault(each["setting"]["compressor"], []).append(fixed(each["summary"]["acceptance_rate"]))
    prompts = report["comparisons"][0]["summary"]["prompts"]
    measured = [[f"`{name}`", *shares, prompts] for name, shares in rows.items()]
    return ResultTable(others.columns, [*measured, *others.rows], others.origin, others.others)


def methods(results: Path) -> str:
    """The table of all methods on one model."""
    report = read_report(results / "methods.json")
    return "\n".join(methods_command.table(methods_command.stored_figures(report), report["told"]))


def readme_speed(results: Path) -> ResultTable:
    """Times and gains of README.md: the largest cell of `auto-cells`, and the method with the largest gain."""
    cells = cells_of_arms(read_report(results / "auto-cells.json"))
    cell = next(each for each in cells if (each[STOCK]["context"], each[STOCK]["batch"]) == LONGEST)
    figures = methods_command.stored_figures(read_report(results / "methods.json"))
    method, stock = (
        next(each.token_ms for each in figures if (each.label, each.context, each.temperature) == (label, LONGEST[0], 0.0))
        for label in (README_METHOD, STOCK)
    )
    rows: list[list[Cell]] = [
        ["stock SGLang", "code", pairs(cell[STOCK]["steady_ms"]), 1],
        ["`snapkv`, `--kv-budget 0.125`, draft length `auto`", "code", pairs(cell[AUTO]["steady_ms"]), pairs(speeds(cell, AUTO))],
        ["the same, `--kv-draft-length 15`", "code", pairs(cell["15"]["steady_ms"]), pairs(speeds(cell, "15"))],
    ]
    if method is not None and stock is not None:
        label = f"`snapkv+kivi`, `--kv-budget 0.25`, `--kv-draft-length 15`; stock {fixed(stock)}"
        rows.append([label, "half code, half prose", fixed(method), fixed(stock / method)])
    return ResultTable(("server", "prompts", "ms/token", "gain"), rows)


def suites_text(arms: Sequence[ArmScores], report: Row) -> str:
    """The tables of docs/results/quality.md, and the command."""
    tables = suite_report.tables(arms, report["settings"], report["measured_on"])
    return f"{tables}\n\n{TableOrigin(shown_command(report['command'])).markdown()}"


def suite_scores(arms: Sequence[ArmScores], names: Sequence[str], origin: TableOrigin) -> ResultTable:
    """Points of some arms, one row for each suite."""
    found = [next(arm for arm in arms if arm.name == name) for name in names]
    headers = ["", *("full KV" if arm.name == FULL else f"`{arm.name}`" for arm in found)]
    return ResultTable(headers, [[suite, *(str(arm.suites[suite].score) for arm in found)] for suite in found[0].suites], origin)
