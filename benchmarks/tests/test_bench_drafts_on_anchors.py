"""The bench of drafts on stored anchors: its table, and the store process that it starts."""

from contextlib import closing
from pathlib import Path

import pytest

from sglang_ext.mem_cache.prefix_store.backend import StoreError, open_backend
from sglang_ext.tools import CommandError
from sglang_ext_bench.serving.drafts_on_anchors import serving_store, table_rows


def answer(first: float, each: float, kept: float | None = None, accepted: int = 0) -> dict:
    return {"visible": [first + i * each for i in range(4)], "kept": kept, "stored": 4096, "accepted": accepted, "output": [1, 2, 3, 4]}


def test_ratios_are_those_to_exact_pages_and_a_visible_token_is_kept() -> None:
    found = {"exact": [answer(20, 1), answer(30, 1), answer(10, 2)], "drafts": [answer(22, 0.5, kept=5, accepted=3)] * 3}
    exact, drafts = table_rows(found, visible=4)
    assert exact == ("exact", "4096", "20.00 (1.00)", "20.00 (1.00)", "23.00 (1.00)", "0")
    assert drafts == ("drafts", "4096", "5.00 (0.25)", "22.00 (1.10)", "23.50 (1.02)", "3")


def test_the_store_ends_with_the_block(tmp_path: Path) -> None:
    with serving_store(tmp_path / "pages", 0.05, tmp_path / "log") as url, closing(open_backend(url)) as backend:
        assert backend.statistics().objects == 0
    with pytest.raises(StoreError):
        open_backend(url)


def test_a_store_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="pass 0.01 or more"), serving_store(tmp_path / "pages", 0.001, tmp_path / "log"):
        pass
