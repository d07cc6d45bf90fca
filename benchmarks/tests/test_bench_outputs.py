"""Output files are checked before a benchmark starts, and the check does not change them."""

import argparse
from pathlib import Path

import pytest

from sglang_ext.core import OptionError
from sglang_ext_bench import __main__ as bench
from sglang_ext_bench.options import check_outputs


def test_what_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "made" / "new.png"
    old.write_text("[1]")
    check_outputs(argparse.Namespace(json=old, plot=new, logs=tmp_path / "logs", model="m"))
    assert old.read_text() == "[1]" and new.parent.is_dir() and not new.exists()
    assert not list((tmp_path / "logs").iterdir())


@pytest.mark.parametrize("name", ["json", "plot", "logs", "out"])
def test_what_cannot_be_written_is_named_with_a_remedy(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=f"--{name} is '.*file/x.png'.*: pass a (file|folder)"):
        check_outputs(argparse.Namespace(**{name: tmp_path / "file" / "x.png"}))


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "--json", "/proc/x.json"),
        ("soak", "--model", "m", "--prompts", "p", "--json", "/proc/x.json"),
        ("quality", "--model", "m", "--logs", "/proc/x"),
        ("prompts", "--tokenizer", "m", "--out", "/proc/x"),
        ("families", "--tokenizer", "m", "--prompts", "p", "--out", "/proc/x"),
    ],
)
def test_each_command_looks_first(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert bench.main(list(words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{words[0]}: {words[-2]} is '{words[-1]}'")


def test_soak_says_that_it_needs_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["soak", "--help"])
    assert "required: folder of .txt files" in " ".join(capsys.readouterr().out.split())
