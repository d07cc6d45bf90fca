"""The script that times a pack of layers at a cache rank: on a CPU, of a tiny model, it asks real processes and tells what travelled."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "sglang_ext_bench/scripts"


@pytest.fixture
def scripts(monkeypatch):
    """Its modules."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import pack_cycles
    import pack_layers
    import pack_ranks

    return argparse.Namespace(cycles=pack_cycles, layers=pack_layers, ranks=pack_ranks)


def test_cycles_of_a_rank_s_process_are_told_with_what_travelled(scripts, monkeypatch, tmp_path, capsys):
    file = tmp_path / "packs.json"
    words = "pack_cycles.py --device cpu --model tiny --load 4:1000:250 2:600:150 --score-bits 16 8 --cycles 3 --json".split()
    monkeypatch.setattr(sys, "argv", [*words, str(file)])
    # Full KV goes in several turns.
    monkeypatch.setattr(scripts.ranks, "TRAVELING_BYTES", 200_000)
    scripts.cycles.main()
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


def test_a_cycle_shorter_than_inference_is_hidden_and_the_paper_s_figures_stand_beside(scripts):
    of_rank = scripts.ranks.Cycle(0.002, 0.0025, 0.0001, 1.0, 0.25, 10**6, 2.0 * 10**6, 8 * 10**6, 1.0)
    kind, load = scripts.ranks.Kind(True, 8, "current"), scripts.layers.Load(8, 32768, 2048)
    figures = scripts.cycles.Figures("qwen3-8b", load, 6, kind, 0.003, of_rank)
    assert figures.cells == (
        "qwen3-8b, 8 x 32768, 2048", "6", "rows, 8", "3.00", "2.00", "0.50", "2.50", "yes", "0.83", "0.10", "0.25", "1.0", "3.0",
        "5.47", "3.92", "140.40", "1.000",
    )  # fmt: skip
    slower = scripts.cycles.Figures("tiny", load, 6, kind, 0.002, of_rank)
    assert not slower.hidden and slower.cells[7:9] == ("no", "1.25") and slower.cells[13:16] == ("", "", "")


def test_processes_start_together_as_far_as_their_gpu_has_room(scripts):
    ranks = [argparse.Namespace(held_bytes=size) for size in (5, 4, 3, 20, 1)]
    assert [[each.held_bytes for each in some] for some in scripts.cycles.together(ranks, 10)] == [[5, 4], [3], [20], [1]]


def test_the_next_query_lets_as_much_of_a_selection_stay_as_was_asked_for(scripts):
    load = scripts.layers.Load(1, 2000, 200)
    layers = scripts.layers.Layers("tiny", 1, [load], torch.device("cpu"))
    little, much = (layers.persistence(load, stay) for stay in (0.5, 0.9))
    assert 0 < little < much < 1


@pytest.mark.parametrize("text", ["8", "8:32768", "8:16:x", "0:16:4", "8:16:17", "8:16:0"])
def test_loads_that_are_none_are_refused(scripts, text):
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        scripts.layers.Load.of(text)


def test_a_rank_that_is_not_there_is_told(scripts):
    load = scripts.layers.Load(1, 100, 40)
    layers = scripts.layers.Layers("tiny", 1, [load], torch.device("cpu"))
    rank = scripts.ranks.Rank(layers, scripts.ranks.Kind(True, 16, "current"), "cpu", 1.0)
    with pytest.raises(RuntimeError, match="cache rank of rows, 16 bits: it did not become ready: starting"):
        rank.hand_over()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--cycles", "0"], "--cycles 0: a whole number from 1"), (["--pack", "6", "0"], "--pack 0: a whole number from 1"),
        (["--stay", "1"], "--stay 1.0: a share from 0 to below 1"), (["--json", "/proc/nowhere/x.json"], "there is no folder /proc/nowhere: make it"),
        (["--device", "mps"], "--device mps: cpu, or a GPU"), (["--rank-device", "cuda:1"], "--rank-device cuda:1: cpu, or a GPU"),
        (["--device", "cuda:7"], "--device cuda:7: PyTorch finds 2 GPUs here"),
        (["--device", "cuda"], "--model tiny is for --device cpu"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_before_anything_is_made(scripts, monkeypatch, capsys, words, told):
    monkeypatch.setattr(sys, "argv", ["pack_cycles.py", "--device", "cpu", "--model", "tiny", *words])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        scripts.cycles.parsed()
    assert told in capsys.readouterr().err


def test_the_rank_is_on_the_gpu_after_the_model_s_where_there_is_one(scripts, monkeypatch):
    for gpus, given, devices in ((2, [], ("cuda:0", "cuda:1")), (1, ["--device", "cuda"], ("cuda:0", "cuda:0"))):
        monkeypatch.setattr(sys, "argv", ["pack_cycles.py", *given])
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        options = scripts.cycles.parsed()
        assert (str(options.device), options.rank_device) == devices
