"""``sglang-ext-bench pages``: each results page has the tables that follow from the JSON files, each with its origin and a conclusion."""

import re
import shutil
from pathlib import Path

import pytest

from sglang_ext.tools import CommandError
from sglang_ext_bench.__main__ import main
from sglang_ext_bench.pages.command import MARKED, PAGES, ROOT, render
from sglang_ext_bench.pages.measured import shown_command
from sglang_ext_bench.pages.recorded import recorded_tables

AFTER = re.compile(r"<!-- [\w-]+: end -->\n\n(.*)")
RESULTS = [page for page in PAGES if page not in ("README.md", "docs/methods.md")]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the pages and of their figures."""
    for page in PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    shutil.copytree(ROOT / "benchmarks/results", tmp_path / "benchmarks/results", ignore=shutil.ignore_patterns("*.png"))
    return tmp_path


def write_table(folder: Path, text: str) -> None:
    """Write figures of one page."""
    folder.mkdir(exist_ok=True)
    (folder / "page.json").write_text(f'{{"source": "page", "page": "page.md", "tables": {text}}}')


def test_the_pages_have_the_tables_of_the_json_files() -> None:
    assert main(["pages", "--check"]) == 0


@pytest.mark.parametrize("page", RESULTS)
def test_each_table_of_a_results_page_has_an_origin_and_a_conclusion(page: str) -> None:
    text = (ROOT / page).read_text()
    tables = MARKED.findall(text)
    assert tables and len(AFTER.findall(text)) == len(tables)
    assert [line for line in AFTER.findall(text) if not line.startswith("**Conclusion.** ")] == []
    for name, table in tables:
        below = table.rstrip().rpartition("|")[2].strip()
        assert re.search(r"(measured|recorded) 20\d\d-\d\d-\d\d|sglang-ext-bench|Recorded", below), name


def test_a_changed_figure_is_written_into_its_page(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, page = checkout / "benchmarks/results/pages/benchmarks.json", checkout / "docs/benchmarks.md"
    text = figures.read_text()
    assert '["`int4`", 85, 1.27]' in text
    figures.write_text(text.replace('["`int4`", 85, 1.27]', '["`int4`", 84.50, 1.27]'))
    assert main(["pages", "--check", f"--root={checkout}"]) == 1
    assert "benchmarks.md is out of date" in capsys.readouterr().out and "| `int4` | 85 | 1.27 |" in page.read_text()
    assert main(["pages", f"--root={checkout}"]) == 0
    assert "| `int4` | 84.50 | 1.27 |" in page.read_text()
    # Another page repeats the figure.
    assert "| 98 | 84.50 | 99 |" in (checkout / "docs/results/hack.md").read_text()
    assert main(["pages", "--check", f"--root={checkout}"]) == 0


def test_a_changed_report_is_written_into_its_page(checkout: Path) -> None:
    report = checkout / "benchmarks/results/transfer.json"
    report.write_text(report.read_text().replace('"drafted": 44.0', '"drafted": 45.0'))
    assert main(["pages", f"--root={checkout}"]) == 0
    assert "| .98 | 45 | 39 |" in (checkout / "docs/results/transfer.md").read_text()


def test_marks_without_figures_and_figures_without_marks_are_refused(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = checkout / "docs/results/hack.md"
    text = page.read_text()
    page.write_text(text.replace("hack-kl: ", "hack-nothing: "))
    assert main(["pages", f"--root={checkout}"]) == 2
    assert "docs/results/hack.md has the marks of a table 'hack-nothing', which has no figures" in capsys.readouterr().err
    page.write_text(text.replace("hack-kl: end", "hack-kl: ends"))
    assert main(["pages", f"--root={checkout}"]) == 2
    assert "no page has the tables hack-kl" in capsys.readouterr().err


def test_text_outside_the_marks_is_kept() -> None:
    text = "before\n<!-- a: begin -->\nold\n<!-- a: end -->\nafter\n<!-- by hand: begin -->\nkept\n<!-- by hand: end -->\n"
    written = render(text, {"a": lambda: "| new |"}, "page.md")
    assert written == text.replace("old", "\n| new |\n")


def test_cells_keep_digits_and_show_lists_bold_figures_and_repeated_figures(tmp_path: Path) -> None:
    write_table(
        tmp_path,
        """{
        "a": {"command": ["run a \\\\", "    --more"], "hardware": "one GPU", "date": "2026-11-30", "commit": "abc",
              "columns": ["", "x", "y"], "rows": [["row", 14.20, [0.50, {"bold": 2048}]], [null, {"bold": 0.25}, "text"]]},
        "b": {"command": "above", "note": "By hand.", "recorded": "2026-11-29", "columns": ["", "z"],
              "rows": [["same", {"table": "a", "row": "row", "column": "y", "part": 0}], ["bold", {"table": "a", "row": 1, "column": "x"}]]}}""",
    )
    tables = recorded_tables(tmp_path)
    assert tables["a"].markdown().splitlines() == [
        "|  | x | y |",
        "|---|---|---|",
        "| row | 14.20 | .50, **2,048** |",
        "|  | **.25** | text |",
        "",
        "    run a \\",
        "        --more",
        "",
        "One GPU, measured 2026-11-30, commit abc.",
    ]
    rows = tables["b"].markdown().splitlines()
    assert rows[2:] == ["| same | .50 |", "| bold | .25 |", "", "Same command as the table above. By hand. Recorded 2026-11-29."]


def test_a_repeated_figure_that_is_missing_is_named(tmp_path: Path) -> None:
    write_table(tmp_path, '{"a": {"columns": ["x"], "rows": [[{"table": "a", "row": "no", "column": "x"}]]}}')
    with pytest.raises(CommandError, match="'row': 'no', 'column': 'x'} names no figure"):
        recorded_tables(tmp_path)["a"].markdown()


def test_two_tables_of_one_name_are_refused(tmp_path: Path) -> None:
    write_table(tmp_path, '{"a": {"columns": ["x"], "rows": []}}')
    shutil.copy(tmp_path / "page.json", tmp_path / "second.json")
    with pytest.raises(CommandError, match="second.json has a table 'a', which another page has"):
        recorded_tables(tmp_path)


def test_the_command_of_a_report_is_wrapped_and_can_be_pasted() -> None:
    lines = shown_command("python -m sglang_ext.bench methods '--server-arg=--a 1 --b 2' --model M" + " --more x" * 12)
    assert lines[0].startswith('sglang-ext-bench methods --server-arg="--a 1 --b 2" --model M') and lines[0].endswith(" \\")
    assert len(lines) == 2 and lines[1].startswith("    --more") and not lines[1].endswith("\\")
