"""The rate of a prefix store is measured on pages that are restored."""

import json
from pathlib import Path

import pytest

from sglang_ext.mem_cache.prefix_store.file_backend import FileBackend
from sglang_ext_bench.__main__ import main


def measure(folder: Path, form: str) -> tuple[int, dict]:
    words = ("--layers", "2", "--heads", "2", "--dim", "16", "--pages", "5", "--repeats", "2", "--form", form, "--json", str(folder / "rates.json"))
    code = main(["store-rate", "--store", f"file:{folder}/store", *words])
    return code, json.loads((folder / "rates.json").read_text())


@pytest.mark.parametrize("form", ["raw", "anchored"])
def test_all_pages_are_written_and_restored(form, tmp_path, capsys):
    code, found = measure(tmp_path, form)
    (rates,) = found["stores"].values()
    assert code == 0 and all(rate > 0 for rate in rates.values()) and FileBackend(tmp_path / "store").statistics().objects == 5
    assert "all pages restored" in capsys.readouterr().out


def test_damaged_pages_are_reported(tmp_path, monkeypatch, capsys):
    put = FileBackend.put
    monkeypatch.setattr(FileBackend, "put", lambda store, name, parts: put(store, name, [*parts[:-1], memoryview(bytes(len(parts[-1])))]))
    code, _ = measure(tmp_path, "raw")
    assert code == 1 and "pages were not restored" in capsys.readouterr().out


def test_a_store_that_cannot_be_opened_is_refused(capsys):
    assert main(["store-rate", "--store", "nothing:x"]) == 2 and "nothing" in capsys.readouterr().err
