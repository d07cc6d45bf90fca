"""The command that runs steps on a GPU: its steps name existing commands and options, and a step that fails or hangs does not stop the next."""

import argparse
import importlib
import multiprocessing
import re
import shlex
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import gpu_machine
import pytest
from check_names import CHECK_NAMES

from sglang_ext.tools import CommandError
from sglang_ext_bench import on_gpu
from sglang_ext_bench.__main__ import COMMANDS, main
from sglang_ext_bench.on_gpu import ROOT, STEPS, Step

BENCH = "python -m sglang_ext_bench"


def bench_arguments(command: str) -> Iterator[list[str]]:
    """Arguments of each call of the package in a command line of bash, whose variable R may stand for one."""
    variable = re.search(r"^R='([^']*)'; ", command)
    if variable:
        command = command[variable.end() :].replace("$R", variable[1]).replace("$codec", "raw")
    for part in re.split(r"(?:;|&) (?:do )?", command):
        _, found, arguments = part.partition(f"{BENCH} ")
        if found:
            yield shlex.split(arguments)


def arguments(*words: str) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser()
    on_gpu.add_arguments(parser)
    return parser.parse_args(words)


def test_commands_name_files_checks_and_options_that_exist():
    assert (ROOT / "pyproject.toml").is_file()
    for name, step in STEPS.items():
        for word in shlex.split(step.command):
            if word.endswith(".py") and "*" not in word:
                assert (ROOT / word).is_file(), word
        if "kernel_checks.py" in step.command:
            assert set(shlex.split(step.command)[2:]) <= {*CHECK_NAMES}
        calls = list(bench_arguments(step.command))
        assert calls or BENCH not in step.command, name
        for command, *options in calls:
            module = importlib.import_module(f"sglang_ext_bench.{COMMANDS[command].module}")
            if hasattr(module, "add_arguments"):
                parser = argparse.ArgumentParser(exit_on_error=False)
                module.add_arguments(parser)
                parser.parse_args(options)


def test_steps_find_the_packages_and_the_helpers_of_tests(monkeypatch, tmp_path, capsys):
    names = "sglang_ext, sglang_ext_bench, check_names, gpu_machine"
    monkeypatch.delenv("PYTHONPATH", raising=False)
    steps = {"imports": Step(f"python -c 'import {names}'", 120)}
    assert on_gpu.run(arguments("imports", "--out", str(tmp_path)), steps) == 0, capsys.readouterr().out


def test_the_list_runs_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["on-gpu", "--list"]) == 0
    assert "link-rate        1 GPU, 300 s: R='python -m sglang_ext_bench backend-rate" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_servers_of_all_steps_and_of_defaults_would_start_on_gpus_and_others_are_refused_before(tmp_path):
    model = on_gpu.make_model_folder(tmp_path / "shapes")
    benches = tuple(f"{BENCH} {each} " for each in ("jobs", "longcot", "methods", "transfer"))
    steps = {name: step.command for name, step in STEPS.items() if step.command.startswith(benches)}
    longcot = f"{BENCH} longcot --model {{model}} --load 1:128:64 --server-arg='--attention-backend flashinfer'"
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
        ("packs", "--pack-layers '6': cache ranks on GPUs .*: pass auto, or leave it out"),
        ("queries", "the server true-query lossy 64 cannot start: --kv-compressor .*TrueQuery.* pass --kv-compressor spade.* or --device cpu"),
        ("GPUs", "the server spade-ranks lossy 64 cannot start: .* there are 2 GPUs: pass fewer ranks"),
    ):
        assert not found[name].servers and re.search(told, found[name].refused["the benchmark"]), found[name]


def test_a_step_that_fails_or_hangs_does_not_stop_the_next(tmp_path, capsys):
    steps = {
        "hangs": Step("echo begun; sleep 300 & wait", 1), "fails": Step("echo bad >&2; exit 3", 60),
        "well": Step("cp {model}/config.json {out}.json", 60),
    }  # fmt: skip
    assert on_gpu.run(arguments("hangs+fails", "well", "--out", str(tmp_path)), steps) == 1
    printed = capsys.readouterr().out
    assert "== hangs: stopped after its limit of 1 s" in printed and "begun" in printed
    assert "== fails: exit code 3" in printed and "bad" in (tmp_path / "fails.log").read_text()
    assert "== well: exit code 0" in printed and '"num_hidden_layers": 36' in (tmp_path / "well.json").read_text()
    with pytest.raises(CommandError, match="unknown steps nonsense: pass some of hangs, fails, well; --list prints their commands"):
        on_gpu.run(arguments("well", "nonsense", "--out", str(tmp_path)), steps)
    assert main(["on-gpu", "nonsense", "--out", str(tmp_path)]) == 2 and "unknown steps nonsense" in capsys.readouterr().err
    assert main(["on-gpu"]) == 2 and "no step is named" in capsys.readouterr().err
