"""The notebook of the examples runs, and its outputs are stored."""

import json
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[3] / "examples/which_tokens.ipynb"
CODE_CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_plots_what_methods_keep(demo_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot

    monkeypatch.setenv("MODEL", str(demo_model))
    monkeypatch.chdir(NOTEBOOK.parent)
    shown: list[int] = []
    monkeypatch.setattr(pyplot, "show", lambda: shown.append(len(pyplot.gcf().axes)))
    names: dict[str, object] = {}
    for number, cell in enumerate(CODE_CELLS, start=1):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    pyplot.close("all")
    assert shown == [3, 1]
    printed = capsys.readouterr().out
    tokens, count = map(int, re.search(r"(\d+) tokens; each KV head keeps (\d+)", printed).groups())
    assert count == -(-tokens // 4)
    some = {name: (int(kept), int(by_all)) for name, kept, by_all in re.findall(r"(\S+): (\d+) of \d+ .*, (\d+) by all", printed)}
    assert some["sink-recent"] == (count, count)
    assert some["snapkv"][0] > 2 * count and 32 <= some["snapkv"][1] < count


def test_the_stored_outputs_are_small_and_of_one_run() -> None:
    assert NOTEBOOK.stat().st_size < 300_000
    assert [cell["execution_count"] for cell in CODE_CELLS] == list(range(1, len(CODE_CELLS) + 1))
    pictures = [output for cell in CODE_CELLS for output in cell["outputs"] if "image/png" in output.get("data", ())]
    assert len(pictures) == 2
