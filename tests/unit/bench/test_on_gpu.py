"""The script that runs what wants a GPU: its commands name what there is, and one that fails or hangs does not stop the next."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from check_names import OF_SGLANG, PLAIN

from sglang_ext.bench import BenchError, server_flags
from sglang_ext.bench.__main__ import main
from sglang_ext.bench.longcot import command
from sglang_ext.bench.speed import settings
from sglang_ext.config import selection_options

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def on_gpu():
    spec = importlib.util.spec_from_file_location("on_gpu", ROOT / "docs/benchmarks/on_gpu.py")
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
            assert list((ROOT / "sglang_ext/bench").glob(f"**/{name}*")), name
        if "kernel_checks.py" in step.command:
            assert set(words[2:]) <= {*PLAIN, *OF_SGLANG}


def test_servers_of_long_answers_take_their_flags_on_gpus(on_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    model, checked = on_gpu.shapes(tmp_path / "shapes"), []

    def server(args, setting, logs):
        args = server_flags.parsed(str(model), [*settings.flags_of(args, setting), "--device", "cuda"], server_flags.parser())
        selection_options.check_resolved(args)
        checked.append(args)
        raise BenchError("no GPU is here")

    monkeypatch.setattr(command.settings, "server", server)
    monkeypatch.setattr(command, "check_servers", lambda model, servers: None)
    steps = [step.command for name, step in on_gpu.STEPS.items() if name.startswith("longcot")]
    for step in steps:
        words = shlex.split(step.format(model=model, out=tmp_path / "out"))
        assert main(words[3:]) == 1
    assert len(checked) >= 2 * len(steps) - 5 and sum(args.kv_cache_ranks for args in checked) == 2


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
    assert "unknown steps nonsense" in capsys.readouterr().err
