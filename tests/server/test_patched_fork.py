"""A fork of SGLang with the series of ``patches/`` serves verified decoding without any plugin."""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from preloaded import Preloaded
from servers import OFFLINE, ON_GPU, QUICK_START
from waiting import tries

from sglang_ext import patched
from sglang_ext.config import flags
from sglang_ext.hooks import activation as hooking
from sglang_ext.hooks import table as hooks
from sglang_ext.hooks.transfer_table import TRANSFER_HOOKS

ROOT = Path(__file__).parents[2]
SERIES = sorted((ROOT / "patches/sglang-0.5.17").glob("*.patch"))
MARKED = hooks.HOOKS + TRANSFER_HOOKS
# Large, and not part of the server.
LEFT_OUT = ("multimodal_gen", "test", "benchmark", "eval")
FLAGS = ("--kv-mode", "verified", "--kv-budget", "0.5", "--kv-draft-length", "8", "--max-total-tokens", "8192")
# Source of a process: what of sglang-ext do these edits import while kv_mode is full? Then how does a wrong flag end?
FULL_MODE = """
import sys
from sglang.srt.managers import schedule_batch
from sglang.srt.plugins import GENERAL_PLUGINS_GROUP, load_plugins_by_group
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import ServerArgs, prepare_server_args
assert not load_plugins_by_group(GENERAL_PLUGINS_GROUP)
args = ServerArgs("none")
publish(args, role="test")
request = schedule_batch.Req.__new__(schedule_batch.Req)
request.return_logprob = False
assert args.kv_mode == "full" and request._compute_max_prefix_len(8) == 7
print([name for name in sys.modules if name.split(".")[0] == "sglang_ext"])
prepare_server_args(["--model-path", "none", "--kv-mode", "verified", "--enable-flexkv"])
"""


def installed() -> Path:
    """Folder of the installed ``sglang`` package."""
    return Path(next(iter(importlib.util.find_spec("sglang").submodule_search_locations)))


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder to import from, with a copy of the installed package and the series applied to it.

    Compiled files are copied too: they stay valid for the modules that no patch touches.
    """
    folder = tmp_path_factory.mktemp("fork")
    package = installed()

    def left_out(where: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(where) == package and name in LEFT_OUT]

    shutil.copytree(package, folder / "sglang", ignore=left_out)
    apply_series(folder)
    yield folder
    shutil.rmtree(folder)


def apply_series(folder: Path) -> None:
    """``git apply`` takes no fuzz: a context line that differs fails."""
    # Inside another repository git would skip the files in silence.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "apply", "-p2", "--whitespace=error-all", *map(str, SERIES)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / "sglang/srt/kv_seams.py").exists()


def environment(fork: Path) -> dict[str, str]:
    """The fork before the installed package, no general plugin, and the CPU platform where needed."""
    paths = [str(fork), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "SGLANG_PLUGINS": "none"}
    if importlib.import_module("sglang_ext.platforms").activate() is not None:
        env["SGLANG_PLATFORM"] = "sglang_ext_plain_cpu"
    return env


def marks(fork: Path, module: str) -> dict[str, str]:
    """Hook by qualified name of the function that is marked with it, from a module's source."""
    found: dict[str, str] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            for mark in child.decorator_list:
                if isinstance(mark, ast.Call) and getattr(mark.func, "id", "") == "kv_seam":
                    found[prefix + child.name] = ast.literal_eval(mark.args[0])
            visit(child, f"{prefix}{child.name}.")

    visit(ast.parse((fork / (module.replace(".", "/") + ".py")).read_text()), module + ".")
    return found


@pytest.mark.parametrize("hook", MARKED, ids=lambda hook: hook.target)
def test_each_hook_target_is_marked_with_its_hook(fork: Path, hook: hooks.Hook) -> None:
    module, name = hook.target.rsplit(".", 1)
    if not (fork / (module.replace(".", "/") + ".py")).exists():
        module = module.rsplit(".", 1)[0]  # a method: drop the class
    assert hook.kind == "around", "the series has marks for hooks around a function only"
    assert marks(fork, module).get(hook.target) == hook.hook
    assert any(f"def {name}(" in patch.read_text() for patch in SERIES)


def test_each_marked_function_is_a_hook_target() -> None:
    added = "".join(patch.read_text() for patch in SERIES)
    assert added.count("\n+    @kv_seam(") + added.count("\n+@kv_seam(") == len(MARKED)


def test_a_fork_without_a_mark_that_is_needed_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patched.flag_checks, "check_resolved", lambda args: None)
    unmarked = SimpleNamespace(kv_mode="verified")  # the installed SGLang has no marks
    with pytest.raises(hooking.HookError, match="--kv-mode verified.*_calculate_spec_decoding_metrics with None"):
        patched.check(unmarked)


def test_the_fork_has_the_flags_of_the_plugin(fork: Path) -> None:
    expected = {flag.name: flag.default for flag in flags.FLAGS}
    tree = ast.parse((fork / "sglang/srt/server_args.py").read_text())
    arguments = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "ServerArgs")
    found = {
        item.target.id: ast.literal_eval(item.value)
        for item in arguments.body
        if isinstance(item, ast.AnnAssign) and item.target.id in expected
    }
    assert found == expected


@pytest.mark.server
def test_full_mode_in_the_fork_runs_nothing_of_sglang_ext_and_a_wrong_flag_ends_with_one_line(fork: Path) -> None:
    # What the CPU platform imports is not these edits' doing: SGLang's base platform will do here.
    env = {**os.environ, **environment(fork)}
    env.pop("SGLANG_PLATFORM", None)
    command = [sys.executable, "-P", "-c", FULL_MODE]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert "sglang-ext: error: --kv-mode verified cannot be combined with --enable-flexkv: " in done.stderr.splitlines()[-1]
    loaded = ast.literal_eval(done.stdout.splitlines()[-1])
    # The hook that lets torchvision load on a CPU is part of the environment, not of the fork.
    assert set(loaded) <= {"sglang_ext", "sglang_ext.platforms", "sglang_ext.platforms.torchvision_cpu"}


@pytest.fixture(scope="module")
def loaded(fork: Path) -> Iterator[Preloaded | None]:
    """A process that has loaded the fork, as ``preloaded`` has loaded the installed package."""
    made = None if ON_GPU else Preloaded({**OFFLINE, **QUICK_START, **environment(fork)})
    yield made
    if made is not None:
        made.stop()


@pytest.mark.server
def test_the_fork_drafts_and_verifies_without_plugins(
    fork: Path, launch: Callable, loaded: Preloaded | None, prompts: list[list[int]]
) -> None:
    server = launch(*FLAGS, env=environment(fork), preloaded=loaded)
    try:
        info = server.request("/server_info")
        sampling = {"max_new_tokens": 32, "temperature": 0, "ignore_eos": True}
        answer = server.ask(input_ids=prompts[1][:400], sampling_params=sampling)
    finally:
        server.stop()
    log = server.log.read_text()
    assert "functions of SGLang are hooked" not in log and "hook(s) to" not in log
    assert f"sglang-ext: listening on {server.url}; try: curl" in log
    assert (info["kv_mode"], info["kv_budget"], info["kv_compressor"]) == ("verified", 0.5, "snapkv")
    assert answer["meta_info"]["completion_tokens"] == 32
    assert answer["meta_info"]["kv_drafts"] > 0
    assert answer["meta_info"]["kv_accept_length"] > 1


@pytest.mark.server
def test_the_fork_in_mode_full_reads_prefixes_from_a_store(
    fork: Path, launch: Callable, loaded: Preloaded | None, prompts: list[list[int]], tmp_path: Path
) -> None:
    given = ("--kv-host-gb", "0.2", "--kv-store", f"file:{tmp_path}", "--enable-cache-report", "--max-total-tokens", "8192")
    server = launch(*given, env=environment(fork), preloaded=loaded)
    try:
        info = server.request("/server_info")
        body = {"input_ids": prompts[1][:400], "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}
        for _ in tries(5, "the prompt comes from the store"):
            server.flush_cache()
            answer = server.ask(**body)
            if (answer["meta_info"].get("cached_tokens_details") or {}).get("storage", 0) == 384:
                break
    finally:
        server.stop()
    assert (info["kv_mode"], info["radix_cache_backend"], info["speculative_algorithm"]) == ("full", "kv_views", None)
    assert "kv_drafts" not in answer["meta_info"]
