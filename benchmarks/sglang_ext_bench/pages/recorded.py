"""Tables whose figures are recorded in ``benchmarks/results/pages``, because their runs left no report.

A file has the tables of one page by name::

    {"source": "page", "page": "docs/benchmarks.md", "tables": {"round-parts": {
        "command": ["sglang-ext-bench ..."], "hardware": "One H200", "date": "2026-11-22",
        "columns": ["", "8 at once"], "rows": [["the whole round", 133.5]]}}}

A cell is a number, which keeps its digits, a text, or null. A list is a cell of several values. ``{"bold": CELL}`` is a bold cell.
``{"table": NAME, "row": CELL, "column": HEADER}`` repeats a figure of another table: of its first row with that cell, or of the row with
that index. With ``"part": INDEX`` it repeats one value of a list.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

from sglang_ext.tools import CommandError
from sglang_ext_bench.report import markdown_table

Cell: TypeAlias = "int | Decimal | str | None | list[Cell] | dict[str, Any]"
ABOVE = "above"
"""Value of ``command`` if the table above has the same one."""


@dataclass(frozen=True)
class TableOrigin:
    """How the figures of a table were measured.

    Attributes:
        command: Lines of the command. ``above`` if it is that of the table above. Empty if ``note`` says more.
        note: Sentences about the command.
        hardware: Where it ran.
        date: Date of the measurement. Empty if it is unknown.
        recorded: Date of the commit that added the figures, for an unknown ``date``.
        commit: Commit that was measured. Empty if it is unknown.
    """

    command: Sequence[str] | str = ()
    note: str = ""
    hardware: str = ""
    date: str = ""
    recorded: str = ""
    commit: str = ""

    def markdown(self) -> str:
        """The command as a block of code, then a line with hardware and date."""
        above = self.command == ABOVE
        code = "" if above else "\n".join(f"    {line}" for line in self.command)
        day = f"measured {self.date}" if self.date else f"recorded {self.recorded}" if self.recorded else ""
        facts = ", ".join(filter(None, (self.hardware, day, self.commit and f"commit {self.commit}")))
        sentence = f"{facts[0].upper()}{facts[1:]}." if facts else ""
        text = " ".join(filter(None, ("Same command as the table above." if above else "", self.note, sentence)))
        return "\n\n".join(filter(None, (code, text)))


@dataclass(frozen=True)
class ResultTable:
    """A table of a results page.

    Attributes:
        columns: Headers.
        rows: Cells of each row.
        origin: How the figures were measured. None leaves the lines below the table out.
        others: All recorded tables by name, for cells that repeat their figures.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    origin: TableOrigin | None = None
    others: Mapping[str, "ResultTable"] = field(default_factory=dict, repr=False)

    def markdown(self) -> str:
        """The table, its command, its hardware and its date."""
        table = "\n".join(markdown_table(self.columns, ([self.show(cell) for cell in row] for row in self.rows)))
        return f"{table}\n\n{self.origin.markdown()}" if self.origin else table

    def show(self, cell: Cell) -> str:
        """The text of a cell. Shares have no zero before the point, and large numbers have commas."""
        if cell is None:
            return ""
        if isinstance(cell, int):
            return f"{cell:,}"
        if isinstance(cell, Decimal):
            text = str(cell)
            return text[1:] if text.startswith("0.") else text
        if isinstance(cell, list):
            return ", ".join(map(self.show, cell))
        if isinstance(cell, dict):
            return f"**{self.show(cell['bold'])}**" if "bold" in cell else self.show(self._repeated(cell))
        return cell

    def _repeated(self, cell: Mapping[str, Any]) -> Cell:
        try:
            table = self.others[cell["table"]]
            row = table.rows[cell["row"]] if isinstance(cell["row"], int) else next(row for row in table.rows if cell["row"] in row)
            found = row[table.columns.index(cell["column"])]
        except (KeyError, IndexError, ValueError, StopIteration) as error:
            raise CommandError(f"the cell {dict(cell)} names no figure: pass a table, and a row and a column of it") from error
        if "part" in cell and isinstance(found, list):
            found = found[cell["part"]]
        return found["bold"] if isinstance(found, dict) and "bold" in found else found


def recorded_tables(folder: Path) -> dict[str, ResultTable]:
    """Read the tables of all pages, by name.

    Raises:
        CommandError: A file cannot be read, or two tables have one name.
    """
    tables: dict[str, ResultTable] = {}
    for path in sorted(folder.glob("*.json")):
        for name, found in read_figures(path)["tables"].items():
            if name in tables:
                raise CommandError(f"{path} has a table {name!r}, which another page has, too: give it another name")
            origin = TableOrigin(**{key: value for key, value in found.items() if key not in ("columns", "rows")})
            tables[name] = ResultTable(found["columns"], found["rows"], origin, tables)
    return tables


def read_figures(path: Path, parse_float: Callable[[str], Any] = Decimal) -> dict[str, Any]:
    """Read a JSON file.

    Args:
        path: The file.
        parse_float: Type of the numbers. ``Decimal`` keeps their digits.

    Raises:
        CommandError: The file cannot be read.
    """
    try:
        return json.loads(path.read_text(), parse_float=parse_float)
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} cannot be read ({error}): run the command in a checkout of the repository") from error
