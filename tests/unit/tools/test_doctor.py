"""The doctor: what it finds wrong, which remedy it tells, and its exit code."""

import dataclasses
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import zmq

from sglang_ext.doctor import __main__ as doctor
from sglang_ext.doctor import checks
from sglang_ext.doctor.__main__ import CheckFunction, examine
from sglang_ext.doctor.checks import Check
from sglang_ext.hooks import table as hooks

SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
LLAMA = SMALL | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
MLA = SMALL | {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
}
SLIDING = SMALL | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 128}
HYBRID = SMALL | {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "linear_num_key_heads": 2,
}
ENCODER = SMALL | {"model_type": "bert", "architectures": ["BertModel"]}


@pytest.fixture(autouse=True)
def no_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody chose among the installed plugins."""
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)


# A machine whose device is fine, whatever runs the tests. No process is started for each of these tests; test_doctor_ranks.py starts some.
MACHINE: Mapping[str, CheckFunction] = {
    "device": lambda: Check("device", True, "plain CPU"),
    "attention backends": lambda: Check("attention backends", True, "all"),
    "cache ranks": lambda: Check("cache ranks", True, "up to 2"),
}


def planned(model: str | None = None, sglang: str | None = "0.5.17", **changed: CheckFunction) -> dict[str, CheckFunction]:
    """The checks of a machine with these versions. Those of :data:`MACHINE` and ``changed`` take the place of the real ones."""
    made = doctor.checks_for(model, sglang, "2.13.0")
    return made | {name: check for name, check in {**MACHINE, **changed}.items() if name in made}


def config_folder(folder: Path, config: dict[str, object]) -> str:
    """A model folder that holds nothing but its configuration."""
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, **modules: str | None) -> None:
    """Let these packages be installed, with one module each whose source is given, or not be installed at all (None)."""
    monkeypatch.syspath_prepend(folder)
    for name, source in modules.items():
        package, _, module = name.partition("__")
        if source is None:
            monkeypatch.setitem(sys.modules, package, None)
            continue
        for loaded in (package, f"{package}.{module}"):
            monkeypatch.delitem(sys.modules, loaded, raising=False)
        (folder / package).mkdir()
        (folder / package / "__init__.py").touch()
        (folder / package / f"{module}.py").write_text(source)


def test_a_supported_setup_passes_every_check(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert doctor.report(examine(planned(config_folder(tmp_path, LLAMA)))) == 0
    report = capsys.readouterr().out
    assert "0.5.17" in report and "LlamaForCausalLM" in report and "full, lossy, verified" in report
    assert "no │" not in report


def test_without_a_model_the_model_is_not_judged() -> None:
    checks = examine(planned())
    assert all(check.ok for check in checks)
    assert "model" not in [check.name for check in checks]


def test_another_sglang_version_fails_with_the_supported_one_as_remedy(capsys: pytest.CaptureFixture) -> None:
    assert doctor.report(examine(planned(sglang="0.5.16"))) == 1
    report = capsys.readouterr().out
    assert "0.5.16" in report and "sglang==0.5.17" in report and "see SGLang" in report


def test_a_missing_sglang_is_reported_and_nothing_of_it_imported() -> None:
    made = planned("any", sglang=None)
    checks = {check.name: check for check in examine(made)}
    assert checks["SGLang"] == Check("SGLang", False, "not installed", checks["SGLang"].remedy)
    assert not {"device", "hooks", "model"} & made.keys() and not checks["kv modes"].ok


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert checks.package_version("no-such-package") is None and checks.package_version("sglang") == doctor.SGLANG_VERSION


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"target": "sglang.srt.managers.schedule_batch.Req.gone"}, "no such name"),
        ({"expects": ("self", "other")}, "expected self, other"),
    ],
    ids=["moved", "new-signature"],
)
def test_a_hook_that_does_not_fit_gets_a_line_of_its_own(change: dict[str, object], problem: str) -> None:
    table = (dataclasses.replace(hooks.HOOKS[0], **change), *hooks.HOOKS[1:], *hooks.PRIVATE_NAMES)
    found = examine({"hooks": lambda: checks.check_hooks(table, "0.5.17")})
    summary, line, _ = found
    assert summary.found == f"{len(table) - 1} of {len(table)} fit" and not summary.ok
    assert problem in line.found and table[0].target in line.found
    assert "sglang==0.5.17" in line.remedy
    assert doctor.report(found) == 1


def test_a_patched_fork_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    # This module exists in the fork alone.
    monkeypatch.setitem(sys.modules, "sglang.srt.kv_seams", SimpleNamespace(__spec__=object()))
    (summary,) = checks.check_hooks(hooks.PRIVATE_NAMES, "0.5.17")
    assert summary.ok and summary.found.endswith("called by this patched fork")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MLA, "multi-head latent attention"),
        (SLIDING, "sliding-window attention"),
        (HYBRID, "hybrid of attention and recurrent layers"),
        (ENCODER, "does not generate"),
    ],
    ids=["mla", "sliding-window", "hybrid", "encoder"],
)
def test_unsupported_models_are_named_with_the_reason(
    tmp_path: Path, config: dict[str, object], reason: str
) -> None:
    folder = config_folder(tmp_path, config)
    check = checks.check_model(folder, checks.read_model(folder))
    assert not check.ok and reason in check.found
    assert "--kv-mode full" in check.remedy


@pytest.mark.parametrize("path", ["/proc/nope", "./nope", "../nope", "{tmp_path}/nope"])
def test_a_path_that_is_not_there_is_no_name_on_the_hub(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = path.format(tmp_path=tmp_path)
    check = checks.check_model(path, checks.read_model(path))
    assert (check.ok, check.found) == (False, f"{path}: no such folder") and check.remedy


def test_a_folder_without_a_model_is_a_failing_line_not_a_traceback(tmp_path: Path) -> None:
    checks = {check.name: check for check in examine(planned(str(tmp_path)))}
    assert not checks["model"].ok and str(tmp_path) in checks["model"].found
    assert "\n" not in checks["model"].found


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("[1]", "list indices"),
        ("null", "NoneType"),
        ("{", "not a valid JSON"),
        (LLAMA | {"num_attention_heads": "four"}, "num_attention_heads"),
        (LLAMA | {"num_attention_heads": 0}, "zero"),
        (LLAMA | {"hidden_size": 63}, "hidden size (63)"),
        (LLAMA | {"rope_scaling": 3}, "rope_parameters"),
        (LLAMA | {"architectures": []}, "IndexError"),
        (LLAMA | {"dtype": "odd"}, "odd"),
        (LLAMA | {"quantization_config": 3}, "int"),
        (SMALL | {"model_type": "llama"}, "TypeError"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_a_config_that_cannot_be_read_is_one_failing_line_and_the_others_stand(
    tmp_path: Path, capsys: pytest.CaptureFixture, config: dict[str, object] | str, named: str
) -> None:
    folder = config_folder(tmp_path, config)
    if isinstance(config, str):
        (tmp_path / "config.json").write_text(config)
    examined = examine(planned(folder))
    (found,) = [check for check in examined if not check.ok and check.name != "kv modes"]
    assert found.name == "model" and found.remedy
    assert named in found.found and "\n" not in found.found and len(found.found) < 400
    assert doctor.report(examined) == 1
    assert "LlamaForCausalLM │" not in capsys.readouterr().out


@pytest.mark.parametrize("path", ["/proc/nonexistent", "", "\0", "odd\udcff", "a/b/c", "~"])
def test_a_path_that_is_no_model_is_one_failing_line(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [check.name for check in examine(planned(path)) if not check.ok] == ["model", "kv modes"]


def test_the_command_prints_a_model_that_is_not_there_and_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert doctor.main(["--model", "/proc/nope"]) == 1
    assert "/proc/nope: no such folder" in capsys.readouterr().out


def test_what_the_terminal_cannot_show_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii", write_through=True))
    monkeypatch.setenv("COLUMNS", "100")
    assert doctor.report([Check("model", True, "odd\udcff ä")]) == 0
    assert rb"odd\udcff \xe4" in printed.getvalue()


@pytest.mark.parametrize("name", ["torch", "hooks", "plugin selection", "attention backends", "device"])
def test_a_check_that_fails_itself_is_a_line_and_the_others_run(name: str) -> None:
    def broken() -> Check:
        raise RuntimeError("Multiple platform plugins\nactivated")

    found = examine(planned(**{name: broken}))
    failing = [check for check in found if not check.ok and check.name != "kv modes"]
    assert len(found) == 13 and [each.name for each in failing] == [name]
    assert failing[0].found == "RuntimeError: Multiple platform plugins activated" and failing[0].remedy


@pytest.mark.parametrize(("minor", "ok"), [(10, False), (11, True), (12, True), (13, False)])
def test_python_versions(minor: int, ok: bool) -> None:
    check = checks.check_python((3, minor))
    assert check.ok is ok
    assert bool(check.remedy) is not ok


def test_an_entry_point_that_is_not_installed_fails() -> None:
    check = checks.check_entry_point("plugin", checks.PLUGIN[0], "sglang_ext.plugin:no_such_function")
    assert not check.ok and "pip install -e ." in check.remedy


@pytest.mark.parametrize(
    ("variable", "value", "ok"),
    [
        ("SGLANG_PLUGINS", "somebody_else", False),
        ("SGLANG_PLUGINS", "somebody_else, sglang_ext", True),
        ("SGLANG_PLATFORM", "somebody_else", False),
        ("SGLANG_PLATFORM", "sglang_ext_plain_cpu", True),
    ],
)
def test_environment_variables_that_leave_the_plugin_out_are_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, ok: bool
) -> None:
    monkeypatch.setenv(variable, value)
    check = checks.check_not_filtered()
    assert check.ok is ok
    assert ok or f"{variable}={value}" in check.found


@pytest.mark.parametrize(("cuda", "ok"), [("13.0", True), (None, False)], ids=["nvidia", "rocm"])
def test_of_gpus_nvidias_are_supported(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, ok: bool
) -> None:
    import sglang.srt.platforms as platforms

    monkeypatch.setattr(platforms, "_current_platform", SimpleNamespace())
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    check = checks.check_device()
    assert check.ok is ok
    assert "H200" in check.found if ok else "SGLANG_USE_CPU_ENGINE" in check.remedy


@pytest.mark.parametrize(("threads", "told"), [(1, "1 thread"), (2, "2 threads")])
def test_of_a_cpu_it_tells_the_threads_that_attention_takes(monkeypatch: pytest.MonkeyPatch, threads: int, told: str) -> None:
    import sglang.srt.platforms as platforms

    from sglang_ext.platforms.plain_cpu import PlainCpuPlatform

    monkeypatch.setattr(platforms, "_current_platform", PlainCpuPlatform())
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert checks.check_device() == Check("device", True, f"plain CPU, {told}")


@pytest.mark.parametrize(
    ("cuda", "installed", "kernels", "found", "ok"),
    [
        (False, False, [], "torch_native", True),
        (False, False, ["flash_ops.abi3.so"], "torch_native", True),
        (True, True, ["spatial_ops.abi3.so"], "torch_native, flashinfer, triton", True),
        (True, True, ["flash_ops.abi3.so"], "torch_native, flashinfer, triton, fa3", True),
        (True, False, [], "torch_native, triton", False),
    ],
)
def test_a_gpu_needs_flashinfer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: bool, installed: bool, kernels: list, found: str, ok: bool
) -> None:
    install(monkeypatch, tmp_path, sgl_kernel__ops="", flashinfer__ops="" if installed else None)
    for name in kernels:
        (tmp_path / "sgl_kernel" / name).touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    check = checks.check_attention_backends()
    assert (check.found, check.ok) == (found, ok)
    assert bool(check.remedy) is not ok


def test_every_failing_line_has_a_remedy_and_no_other_line_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "somebody_else")
    checks = examine(planned(config_folder(tmp_path, MLA), sglang="0.4"))
    failing = [check.name for check in checks if not check.ok]
    assert failing == ["SGLang", "plugin selection", "model", "kv modes"]
    assert all(bool(check.remedy) is not check.ok for check in checks)


def test_text_in_brackets_is_shown_as_it_is(capsys: pytest.CaptureFixture) -> None:
    from rich.console import Console

    Console(width=120).print(doctor.render([Check("model", False, "[red]odd[/name]", "[none]")]))
    report = capsys.readouterr().out
    assert "[red]odd[/name]" in report and "[none]" in report


def test_a_long_word_is_whole_on_a_narrow_terminal(capsys: pytest.CaptureFixture) -> None:
    from rich.console import Console

    word = "mooncake-transfer-engine-non-cuda-of-some-other-name"
    Console(width=60).print(doctor.render([Check("KV transfer", False, word, f"pip install {word}")]))
    _, found, remedy = zip(*(line.split("│")[2:5] for line in capsys.readouterr().out.splitlines() if line.startswith("│")))
    assert [text.replace(" ", "") for text in ("".join(found), "".join(remedy))] == [word, f"pipinstall{word}"]


def test_transports_of_kv_are_named_and_what_one_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, nixl___api="", mooncake__engine=None)
    monkeypatch.setattr(zmq, "has", lambda feature: feature == "curve")
    found = checks.check_transfer().found
    assert "encrypted with --kv-link-keys), nixl; not mooncake_tcp: the package mooncake is not installed: pip install" in found

    install(monkeypatch, tmp_path, mooncake__engine='raise ImportError("librdmacm.so.1: cannot open shared object file")')
    assert "; not mooncake_tcp: mooncake.engine does not load (ImportError: librdmacm.so.1" in checks.check_transfer().found
    (tmp_path / "mooncake/engine.py").write_text("LOADED = True")
    monkeypatch.setattr(zmq, "has", lambda feature: False)
    found = checks.check_transfer()
    assert found.ok and "no CURVE), mooncake, mooncake_tcp, nixl" in found.found and found.found.startswith("progressive (ZMQ ")


@pytest.mark.parametrize("there", [True, False])
def test_the_router_that_serve_pd_starts_is_looked_for_and_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: bool
) -> None:
    install(monkeypatch, tmp_path, sglang_router__launch="" if there else None)
    found = checks.check_router()
    assert found.ok and (found.found == "sglang_router") == there
    assert there or found.found == "none, which serve_pd needs: pip install --no-deps -r requirements/pd.txt, or run make serve-pd"
    assert "router" in planned()
