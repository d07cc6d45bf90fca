"""The script that runs what wants a GPU: its commands name what there is, and one that fails or hangs does not stop the next."""

import importlib.util
import multiprocessing
import re
import shlex
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import gpu_machine
import pytest
from check_names import OF_SGLANG, PLAIN

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def on_gpu():
    spec = importlib.util.spec_from_file_location("on_gpu", ROOT / "benchmarks/sglang_ext_bench/on_gpu.py")
    made = importlib.util.module_from_spec(spec)
    sys.modules["on_gpu"] = made  # dataclasses look it up
    spec.loader.exec_module(made)
    yield made
    del sys.modules["on_gpu"]


def test_commands_name_files_checks_and_benchmarks_that_exist(on_gpu):
    for step in on_gpu.STEPS.values():
        words = shlex.split(step.command)
        for word in words:
            if word.endswith(".py"):
                assert (ROOT / word).is_file(), word
        for name in re.findall(r"sglang_ext\.bench (\w+)", step.command):
            assert list((ROOT / "benchmarks/sglang_ext_bench").glob(f"**/{name}*")), name
        if "kernel_checks.py" in step.command:
            assert set(words[2:]) <= {*PLAIN, *OF_SGLANG}


def test_servers_of_all_steps_and_of_defaults_would_start_on_gpus_and_what_would_not_is_told_before(on_gpu, tmp_path):
    model, bench = on_gpu.shapes(tmp_path / "shapes"), "python -m sglang_ext_bench"
    benches = tuple(f"{bench} {each} " for each in ("jobs", "longcot", "methods", "transfer"))
    steps = {name: step.command for name, step in on_gpu.STEPS.items() if step.command.startswith(benches)}
    longcot = "python -m sglang_ext_bench longcot --model {model} --load 1:128:64 --server-arg='--attention-backend flashinfer'"
    others = {
        "defaults": longcot, "packs": f"{longcot} --method stock,spade-ranks --pack-layers auto,6", "queries": f"{longcot} --method true-query",
        "GPUs": f"{longcot} --ranks 2 --method spade-ranks", "unnamed GPUs": f"{longcot} --ranks 2",
    }  # fmt: skip
    commands = {name: text.format(model=model, out=tmp_path / name) for name, text in (steps | others).items()}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        found = apart.submit(gpu_machine.ask, commands).result()
    for name in steps:
        assert found[name].servers and not found[name].refused, (name, found[name])
    # Stock, spade, quest and ranks in both modes, verify-guided in one; the model has a GPU, a rank the other one.
    assert (found["defaults"], found["unnamed GPUs"]) == (gpu_machine.Asked(8), gpu_machine.Asked(6))
    for name, told in (
        ("packs", "--pack-layers '6': cache ranks on GPUs are asked for all layers .*: pass auto, or leave it out"),
        ("queries", "the server true-query lossy 64 cannot start: --device is cuda .* on a CPU alone: pass --kv-compressor spade"),
        ("GPUs", "the server spade-ranks lossy 64 cannot start: .* there are 2 GPUs: pass fewer ranks"),
    ):
        assert not found[name].servers and re.search(told, found[name].refused["the benchmark"]), found[name]


def test_a_step_that_fails_or_hangs_is_told_and_the_next_runs(on_gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(on_gpu, "STEPS", {
        "hangs": on_gpu.Step("echo begun; sleep 300 & wait", 1), "fails": on_gpu.Step("echo bad >&2; exit 3", 60),
        "well": on_gpu.Step("cp {model}/config.json {out}.json", 60),
    })  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", "hangs+fails", "well", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        on_gpu.main()
    assert ended.value.code == 1
    told = capsys.readouterr().out
    assert "== hangs: stopped after its limit of 1 s" in told and "begun" in told
    assert "== fails: exit code 3" in told and "bad" in (tmp_path / "fails.log").read_text()
    assert "== well: exit code 0" in told and '"num_hidden_layers": 36' in (tmp_path / "well.json").read_text()
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", "well", "nonsense", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        on_gpu.main()
    assert "unknown steps nonsense; --list tells which there are" in capsys.readouterr().err
