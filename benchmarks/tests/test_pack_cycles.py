"""The command pack-cycles: on a CPU, for a tiny model, it starts cache rank processes and reports their cycles and the bytes they send."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_ext_bench.__main__ import main
from sglang_ext_bench.packs import pack_cycles, pack_ranks
from sglang_ext_bench.packs.pack_cycles import PackResult
from sglang_ext_bench.packs.pack_layers import LayerPack, Load
from sglang_ext_bench.packs.pack_ranks import CycleTimes, PackRank, RankKind


def test_cycles_of_a_rank_are_reported_with_the_bytes_that_it_sends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "packs.json"
    options = "--device cpu --model tiny --load 4:1000:250 2:600:150 --score-bits 16 8 --cycles 3 --json".split()
    # Few staging slots, so that the full KV is sent in several batches.
    monkeypatch.setattr(pack_ranks, "TRAVELING_BYTES", 200_000)
    assert main(["pack-cycles", *options, str(file)]) == 0
    found = json.loads(file.read_text())["packs"]
    assert [(each["rows"], each["bits"], each["batch"]) for each in found] == [
        (rows, bits, batch) for rows in (True, False) for bits in (16, 8) for batch in (4, 2)
    ]
    for each in found:
        # Two layers of two KV heads of 16 channels, in float32.
        selected, queries = each["batch"] * 2 * 2 * each["keep"], each["batch"] * 2 * 6 * 16 * 4
        assert each["whole"] == selected * 2 * 16 * 4
        assert each["agrees"] > (0.99 if each["bits"] == 16 else 0.97)
        assert min(each["inference"], each["selection"], each["cycle"], each["taking"]) > 0 and each["answers"] >= 1
        if each["rows"]:
            assert 0.15 < each["moved"] < 0.35, "three quarters of a selection stay"
            assert each["up"] == queries + 4 * selected
            assert each["down"] == pytest.approx(each["moved"] * selected * (2 * 16 * 4 + 8) + 4 * each["batch"] * 2 * 2)
        else:
            assert (each["up"], each["down"], each["moved"]) == (queries, 4 * selected, 0)
        assert each["rates"][0] == pytest.approx((each["up"] + each["down"]) / each["inference"])
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(table) == 1 + len(found) and len({line.count("|") for line in table}) == 1


def test_a_cycle_shorter_than_inference_is_hidden_and_the_row_has_the_papers_figures() -> None:
    times = CycleTimes(0.002, 0.0025, 0.0001, 1.0, 0.25, 10**6, 2.0 * 10**6, 8 * 10**6, 1.0)
    kind, load = RankKind(True, 8, "current"), Load(8, 32768, 2048)
    result = PackResult("qwen3-8b", load, 6, kind, 0.003, times)
    assert result.cells == (
        "qwen3-8b, 8 x 32768, 2048", "6", "rows, 8", "3.00", "2.00", "0.50", "2.50", "yes", "0.83", "0.10", "0.25", "1.0", "3.0",
        "5.47", "3.92", "140.40", "1.000",
    )  # fmt: skip
    slower = PackResult("tiny", load, 6, kind, 0.002, times)
    assert not slower.hidden and slower.cells[7:9] == ("no", "1.25") and slower.cells[13:16] == ("", "", "")


def test_processes_start_together_if_their_full_kv_fits() -> None:
    ranks = [SimpleNamespace(held_bytes=size) for size in (5, 4, 3, 20, 1)]
    assert [[each.held_bytes for each in group] for group in pack_cycles.fitting_groups(ranks, 10)] == [[5, 4], [3], [20], [1]]


def test_a_rank_whose_process_has_not_started_is_an_error() -> None:
    load = Load(1, 100, 40)
    pack = LayerPack("tiny", 1, [load], torch.device("cpu"))
    rank = PackRank(pack, RankKind(True, 16, "current"), "cpu", 1.0)
    with pytest.raises(RuntimeError, match="cache rank of rows, 16 bits: it did not become ready: starting"):
        rank.send_full_kv()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cycles", "0"], "--cycles 0: must be at least 1"), (["--pack", "6", "0"], "--pack 0: must be at least 1"),
        (["--load", "8:16:17"], "--load 8:16:17: 17 tokens are selected of 16"), (["--stay", "1"], "--stay 1.0: pass a share from 0 to below 1"),
        (["--json", "/proc/nowhere/x.json"], "--json is '/proc/nowhere/x.json', which cannot be written"),
        (["--device", "mps"], "--device mps: pass cpu, or a GPU"), (["--rank-device", "cuda:1"], "--rank-device cuda:1: pass cpu, or a GPU"),
        (["--device", "cuda:7"], "--device cuda:7: PyTorch finds 2 GPUs here"), (["--device", "cuda"], "--model tiny with --device cuda"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_before_the_measurement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert main(["pack-cycles", "--device", "cpu", "--model", "tiny", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "options", "devices"), [(2, [], ("cuda:0", "cuda:1")), (1, ["--device", "cuda"], ("cuda:0", "cuda:0"))]
)  # fmt: skip
def test_the_rank_runs_on_a_second_gpu_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch, gpus: int, options: list[str], devices: tuple[str, str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    parser = argparse.ArgumentParser()
    pack_cycles.add_arguments(parser)
    assert tuple(str(each) for each in pack_cycles.settle_devices(parser.parse_args(options))) == devices
