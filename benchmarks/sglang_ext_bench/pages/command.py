"""Writes the tables of the results pages from the JSON files in benchmarks/results.

    sglang-ext-bench pages            # writes README.md, docs/benchmarks.md, docs/methods.md and docs/results/*.md
    sglang-ext-bench pages --check    # writes nothing; exit code 1 if a page is out of date

A table is between the lines `<!-- NAME: begin -->` and `<!-- NAME: end -->` of a page. All other text is handwritten and kept. To show
a new measurement, copy the --json file of its command over the file in benchmarks/results, and run this command. Figures of runs without
such a file are in benchmarks/results/pages, one file for each page.
"""

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from sglang_ext.tools import CommandError

ROOT = Path(__file__).parents[3]
PAGES = (
    *("README.md", "docs/benchmarks.md", "docs/methods.md"),
    *("docs/results/hack.md", "docs/results/longcot.md", "docs/results/quality.md", "docs/results/transfer.md"),
)
"""Pages with generated tables, relative to the root of the repository."""
MARKED = re.compile(r"<!-- ([\w-]+): begin -->\n(.*?)<!-- \1: end -->", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout of the repository (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Write the pages. With ``--check``, print the outdated ones. Returns the exit code."""
    outdated = {path: text for path, text in render_pages(args.root).items() if path.read_text() != text}
    for path, text in outdated.items():
        if args.check:
            print(f"{path} is out of date: run sglang-ext-bench pages")
        else:
            path.write_text(text)
            print(f"{path} written")
    return int(args.check and bool(outdated))


def render_pages(root: Path) -> dict[Path, str]:
    """The text of each page, with its tables from the JSON files.

    Raises:
        CommandError: A file is missing, or the marks and the tables do not match.
    """
    from sglang_ext_bench.pages.measured import measured_tables
    from sglang_ext_bench.pages.recorded import recorded_tables

    results = root / "benchmarks/results"
    recorded = recorded_tables(results / "pages")
    tables = {**recorded, **measured_tables(results, recorded)}
    unused, found = set(tables), {}
    for page in PAGES:
        path = root / page
        try:
            text = path.read_text()
        except OSError as error:
            raise CommandError(f"{path} cannot be read ({error.strerror}): pass the root of a checkout with --root") from error
        unused -= {mark for mark, _ in MARKED.findall(text)}
        found[path] = render(text, {name: table.markdown for name, table in tables.items()}, page)
    if unused:
        raise CommandError(f"no page has the tables {', '.join(sorted(unused))}: add their marks to a page, or delete their figures")
    return found


def render(text: str, tables: Mapping[str, Callable[[], str]], page: str) -> str:
    """Replace the text between each pair of marks by the table of that name.

    Args:
        text: The page.
        tables: Functions that return the Markdown text of a table, by name.
        page: Name of the page, for the error message.

    Raises:
        CommandError: There is no such table.
    """

    def replace(found: re.Match[str]) -> str:
        name = found[1]
        if name not in tables:
            raise CommandError(f"{page} has the marks of a table {name!r}, which has no figures: pass one of {', '.join(sorted(tables))}")
        return f"<!-- {name}: begin -->\n\n{tables[name]()}\n\n<!-- {name}: end -->"

    return MARKED.sub(replace, text)
