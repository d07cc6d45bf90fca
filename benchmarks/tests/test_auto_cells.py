"""The command that compares `auto` with fixed draft lengths: unknown speeds are marked, and stored arms are not measured again."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sglang_ext_bench.__main__ import main
from sglang_ext_bench.serving import auto_cells
from sglang_ext_bench.speed import decode_wave

DRAFT_LENGTHS = {"stock": 0, "auto": 3, "15": 15}
# Seconds of a round, and between the chunks of its burst, on the clock of the test.
ROUND, CHUNK = 0.05, 0.0001


class BurstServer:
    """A server that emits the tokens of a round in a burst of chunks, each of one token."""

    started: list[str] = []
    now = 0.0

    def __init__(self, model: str, flags: tuple[str, ...], log: Path) -> None:
        self.name = log.stem

    def __enter__(self) -> "BurstServer":
        self.started.append(self.name)
        return self

    def __exit__(self, *_: object) -> None: ...

    def request(self, path: str) -> str:
        return 'sglang_ext:draft_length{model_name="m"} 3\n'

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        burst = 1 + DRAFT_LENGTHS[self.name]
        for token in range(1, body["sampling_params"]["max_new_tokens"] + 1):
            BurstServer.now += ROUND if (token - 2) % burst == 0 else CHUNK
            yield {"meta_info": {"completion_tokens": token}}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, char_tokenizer: None) -> Callable[..., int]:
    """Run the command with one cell of one request."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 5000}))
    (tmp_path / "text").write_text("x" * 1000)
    monkeypatch.setattr(BurstServer, "started", [])
    monkeypatch.setattr(auto_cells, "BenchServer", BurstServer)
    monkeypatch.setattr(decode_wave, "run", partial(decode_wave.run, clock=lambda: BurstServer.now))
    inputs = [f"--model={tmp_path}", f"--prompt-file={tmp_path / 'text'}", f"--json={tmp_path / 'cells.json'}"]

    def run(*more: str) -> int:
        return main(["auto-cells", *inputs, "--context-len=10", "--batch=1", "--arms=stock,auto,15", *more])

    return run


def cells(out: str) -> list[str]:
    """The cells of the row for 10 tokens in the printed table."""
    (row,) = [line for line in out.splitlines() if line.startswith("│") and line.split("│")[1].strip() == "10"]
    return [cell.strip() for cell in row.strip("│").split("│")]


def test_the_speed_of_one_burst_is_unknown(bench, tmp_path, capsys):
    assert bench("--output-len=17", "--repeats=1") == 0
    context, batch, stock, auto, fixed, over_stock, over_fixed = cells(capsys.readouterr().out)
    assert (context, batch, fixed, over_fixed) == ("10", "1", "-", "- -")
    assert float(stock) == pytest.approx(1000 * ROUND, rel=0.5) and float(auto) < float(stock)
    assert all(float(ratio) > 1 for ratio in over_stock.split())
    (stored,) = json.loads((tmp_path / "cells.json").read_text())["arms"]["15"]
    assert stored["steady_ms"] == [None] and stored["token_ms"][0] < 1000 * ROUND


def test_stored_arms_are_not_measured_again(bench, capsys):
    more = "--output-len=33", "--repeats=1"
    assert bench(*more, "--arms=stock") == 0
    capsys.readouterr()
    assert bench(*more) == 0 and BurstServer.started == ["stock", "auto", "15"]
    assert "-" not in cells(capsys.readouterr().out)
    assert bench("--output-len=34", "--repeats=1") == 2 and "other values of --output-len: pass the same" in capsys.readouterr().err


def test_wrong_options_are_named(bench, capsys):
    assert bench("--arms=stock,fast") == 2 and "--arms 'fast': pass stock, auto or draft lengths above 0" in capsys.readouterr().err
    assert bench("--repeats=0") == 2 and "--repeats 0: must be at least 1" in capsys.readouterr().err
    assert bench("--budget=2") == 2 and "--budget 2" in capsys.readouterr().err
