"""The benchmark of prefix stores: what it computes from its measurements, and what it refuses."""

import torch

from sglang_ext.mem_cache.prefix_store.file_backend import FileBackend
from sglang_ext.mem_cache.prefix_store.objects import ObjectFormat, StoredPage, encode_object
from sglang_ext_bench.__main__ import main
from sglang_ext_bench.serving.prefix_store import COMPUTED, READING, WRITING, count_differing, table_rows


def answers(seconds: float, stored: int, output: int = 1) -> list[dict]:
    """Three prompts, the first of which is slower."""
    return [{"time": time, "seconds": seconds * factor, "stored": stored * time, "output": [output]} for time in (0, 1) for factor in (3, 1, 1)]


def test_ratios_are_of_medians_to_the_server_without_a_store():
    found = {COMPUTED: answers(2.0, 0), WRITING: answers(2.2, 64), READING: answers(0.5, 128)}
    found[READING][1]["stored"] = found[READING][2]["stored"] = 128
    rows = table_rows(found)
    assert [row[1:] for row in rows] == [("2.000", "1.000", "0"), ("2.200", "1.100", "0"), ("2.200", "1.100", "64"), ("0.500", "0.250", "128")]
    assert count_differing(found) == 0
    found[READING][5]["output"] = [2]
    assert count_differing(found) == 1


def test_a_store_that_has_pages_is_refused(tmp_path, capsys):
    backend, form = FileBackend(tmp_path / "store", 1 << 30), ObjectFormat("m", torch.float32, 1, 1, 16, 64, form="raw")
    page = StoredPage(form, bytes(32), 0)
    backend.put(page.name, encode_object(page, [torch.zeros(64, 1, 16)] * 2))
    assert main(["prefix-store", "--model", "/", "--prompt-file", "/dev/null", "--store", f"file:{tmp_path}/store"]) == 2
    assert "has 1 pages; pass an empty store" in capsys.readouterr().err
