"""A wrong flag ends a command with one line and code 2, and raises in a program; a taken port is told before anything starts."""

import argparse
import json
import logging
import multiprocessing
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from preloaded import Preloaded
from sglang.srt.entrypoints import engine
from sglang.srt.server_args import ServerArgs

from sglang_ext import command_line
from sglang_ext.arguments import CheckedServerArgs
from sglang_ext.command_line import sample_request
from sglang_ext.config import rules
from sglang_ext.core import MIN_CONTEXT, HookError, OptionError

ROOT = Path(__file__).parents[3]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="sglang serve")
    CheckedServerArgs.add_cli_args(made)
    return made


def ended(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What a command line with these flags prints as it ends; the code is 2."""
    with pytest.raises(SystemExit) as raised:
        CheckedServerArgs.from_cli_args(parser().parse_args(["--model-path", "none", *flags]))
    assert raised.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kv-mode", "verified", "--kv-budget", "2"), "sglang-ext: error: --kv-budget is 2.0; "),
        (("--kv-mode", "verified", "--enable-lmcache"), "sglang-ext: error: --kv-mode verified cannot be combined with --enable-lm"),
        (("--kv-mode", "fast"), "sglang serve: error: argument --kv-mode: invalid choice: 'fast'"),
        (("--kv-bits", "four"), "sglang serve: error: argument --kv-bits: invalid int value: 'four'"),
        (("--kv-compresor", "kivi"), "sglang serve: error: unrecognized arguments: --kv-compresor kivi"),
    ],
    ids=["value", "combination", "choice", "type", "name"],
)
def test_a_wrong_flag_ends_with_one_line(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: str) -> None:
    printed = ended(capsys, *flags)
    assert printed.startswith(words) and printed.count("\n") == 1


def test_a_wrong_flag_of_sglangs_ends_as_in_stock(capsys: pytest.CaptureFixture[str]) -> None:
    stock = argparse.ArgumentParser(prog="sglang serve")
    super(CheckedServerArgs, CheckedServerArgs).add_cli_args(stock)
    found = []
    for each in (stock, parser()):
        with pytest.raises(SystemExit):
            each.parse_args(["--model-path", "none", "--tp-size", "two"])
        found.append(capsys.readouterr().err.splitlines())
    assert found[0][-1] == found[1][-1] and len(found[1]) > 10


def test_a_program_gets_an_exception_that_it_can_catch() -> None:
    with pytest.raises(OptionError, match="--kv-budget is 2"):
        CheckedServerArgs(model_path="none", kv_mode="verified", kv_budget=2)


def test_other_errors_stay_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    command_line.exit_if_refused(ValueError("of SGLang"))
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit):
        command_line.exit_if_refused(HookError("a target\nmoved"))
    assert capsys.readouterr().err == "sglang-ext: error: a target moved\n"


def test_sglangs_class_is_still_reached_once_ours_stands_in_its_place() -> None:
    # SGLang's registry has replaced the name in every loaded module, this plugin's too.
    assert rules.ServerArgs is CheckedServerArgs
    assert parser().parse_args(["--model-path", "m", "--kv-mode", "lossy"]).kv_mode == "lossy"
    assert issubclass(CheckedServerArgs, ServerArgs)


@pytest.mark.server
@pytest.mark.parametrize(
    "command",
    [(sys.executable, "-m", "sglang.launch_server"), (str(Path(sys.executable).with_name("sglang")), "serve")],
    ids=["module", "console"],
)
def test_a_command_that_is_refused_leaves_no_traceback(
    model: Path, command: tuple[str, ...], preloaded: Preloaded | None, tmp_path: Path
) -> None:
    line = [*command, "--model-path", str(model), "--kv-mode", "verified", "--enable-lmcache"]
    with (tmp_path / "log").open("wb") as log:
        if preloaded is not None and "-m" in command:
            started = preloaded.start(line, log, {})
        else:
            started = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT)
        code = started.wait(240)
    lines = (tmp_path / "log").read_text().splitlines()
    assert code == 2, lines
    assert "Traceback" not in "".join(lines)
    told = [text for text in lines if text.startswith("sglang-ext: error: ")]
    assert len(told) == 1 and "--enable-lmcache: it replaces our prefix tree" in told[0] and "--kv-host-gb" in told[0]


def test_a_port_that_is_taken_ends_the_command_before_weights_are_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        told = ended(capsys, "--kv-mode", "verified", "--port", port)
        assert told == f"sglang-ext: error: --port is {port}, where another program listens at 127.0.0.1: pass another, or end that program\n"
        # Stock says so by itself, another node listens nowhere, and an engine has no port.
        for flags in (("--kv-mode", "full"), ("--kv-mode", "verified", "--nnodes", "2", "--node-rank", "1", "--tp-size", "2")):
            CheckedServerArgs.from_cli_args(parser().parse_args(["--model-path", "none", "--port", port, *flags]))
        CheckedServerArgs(model_path="none", kv_mode="verified", port=int(port))
    CheckedServerArgs.from_cli_args(parser().parse_args(["--model-path", "none", "--kv-mode", "verified", "--port", port]))


def test_a_host_that_is_another_machines_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--host is 192.0.2.7, which is no address of this machine" in ended(capsys, "--kv-mode", "verified", "--host", "192.0.2.7")


def test_make_says_that_the_port_is_taken_before_it_starts_anything() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(["make", "serve", f"PORT={port}"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"port {port} is taken" in done.stderr and "make serve PORT=" in done.stderr
    assert "==>" not in done.stdout


def test_make_installs_quietly() -> None:
    commands = [text for text in (ROOT / "Makefile").read_text().splitlines() if "$(PIP) install" in text or text.startswith("PIP :=")]
    assert commands[0].startswith("PIP :=") and "--quiet" in commands[0] and len(commands) > 4


def test_hooks_are_told_in_one_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins import hook_registry

    from sglang_ext.hooks import activation as hooking

    def apply_hooks() -> None:
        hook_registry.logger.info("Applied 1 hook(s) to a.target")
        hook_registry.logger.warning("Multiple hooks")

    monkeypatch.setattr(hook_registry.HookRegistry, "apply_hooks", apply_hooks)
    with caplog.at_level(logging.INFO):
        hooking.apply(())
        hook_registry.logger.info("of another plugin")
    assert caplog.messages == ["Multiple hooks", "of another plugin"]


@command_line.exit_on_refusal
def refuse_like_a_scheduler(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(("error", "code"), [(OptionError("--kv-host-gb is\n9"), 2), (ValueError("of SGLang"), 1)], ids=["ours", "sglangs"])
def test_what_only_the_scheduler_refuses_ends_the_server_with_its_code(capfd: pytest.CaptureFixture[str], error: Exception, code: int) -> None:
    # A fork has SGLang loaded already.
    scheduler = multiprocessing.get_context("fork").Process(target=refuse_like_a_scheduler, args=(error,))
    scheduler.start()
    scheduler.join(120)
    if code == command_line.EXIT_CODE:
        with pytest.raises(SystemExit) as raised:
            command_line.exit_like_scheduler(engine._scheduler_died_error, 0, scheduler)
        assert raised.value.code == code
        printed = capfd.readouterr().err
        assert printed.splitlines()[-1] == "sglang-ext: error: --kv-host-gb is 9" and "Traceback" not in printed
    else:
        died = command_line.exit_like_scheduler(engine._scheduler_died_error, 0, scheduler)
        assert "exit code: 1" in str(died) and "ValueError: of SGLang" in capfd.readouterr().err


@pytest.mark.parametrize("takes_text", [True, False])
@pytest.mark.parametrize("has_key", [True, False])
def test_the_sample_request_is_a_shell_command_whose_prompt_is_long_enough_to_draft(takes_text, has_key):
    command = sample_request("http://127.0.0.1:1", takes_text, has_key)
    script = f"""API_KEY=secret; curl() {{ printf '%s\\n' "$@"; }}; {command}"""
    *arguments, body = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    asked = json.loads(body)
    prompt = asked["text"].split() if takes_text else asked["input_ids"]
    assert len(prompt) >= MIN_CONTEXT and ("Authorization: Bearer secret" in arguments) == has_key
