"""Says whether this machine can serve with sglang-ext, and what is switched on.

``python -m sglang_ext.doctor [--model M]`` prints a table, one line a check; a failing line tells the
remedy. The exit code is 1 when anything needed is missing or unsupported, else 0.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_ext import hooking, model_options, options

SGLANG_VERSION = "0.5.17"
PYTHON_VERSIONS = ((3, 11), (3, 12))
PLUGIN_GROUP, PLUGIN = "sglang.srt.plugins", "sglang_ext.plugin:register"
PLATFORM_GROUP, PLATFORM = "sglang.srt.platforms", "sglang_ext.platforms:activate"
INSTALL = "run `make install`, or `pip install -e .` in the environment that serves"


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: what was looked at.
        ok: whether sglang-ext can serve with what was found.
        found: what was found.
        remedy: what to do when not ``ok``; empty when it is.
    """

    name: str
    ok: bool
    found: str
    remedy: str = ""


def verdict(name: str, ok: bool, found: str, remedy: str) -> Check:
    """A check whose remedy is told only when it fails."""
    return Check(name, ok, found, "" if ok else remedy)


def check_python(running: tuple[int, int] = sys.version_info[:2]) -> Check:
    """Whether this Python is one that SGLang's packages are pinned for."""
    supported = [".".join(map(str, version)) for version in PYTHON_VERSIONS]
    remedy = f"make the environment with Python {' or '.join(supported)}: `make install PYTHON=python3.11`"
    return verdict("Python", running in PYTHON_VERSIONS, ".".join(map(str, running)), remedy)


def package_version(package: str) -> str | None:
    """Version of an installed package, None when it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_sglang() -> Check:
    """Whether SGLang is there, in the version that the hooks were written for."""
    found = package_version("sglang")
    remedy = f"install sglang=={SGLANG_VERSION}: `make install`"
    return verdict("SGLang", found == SGLANG_VERSION, found or "not installed", remedy)


def check_torch() -> Check:
    """Whether torch is there; SGLang's requirements say which."""
    found = package_version("torch")
    return verdict("torch", found is not None, found or "not installed", INSTALL)


def check_device() -> Check:
    """What SGLang would run on: an NVIDIA GPU, or the plain CPU platform."""
    import torch
    from sglang.srt.platforms import current_platform

    from sglang_ext.platforms.plain_cpu import PlainCpuPlatform

    if isinstance(current_platform, PlainCpuPlatform):
        return Check("device", True, f"plain CPU, {torch.get_num_threads()} threads")
    if torch.version.cuda is not None and torch.cuda.is_available():
        return Check("device", True, f"CUDA: {torch.cuda.get_device_name()}")
    found = f"SGLang's {type(current_platform).__name__}"
    remedy = (
        "use an NVIDIA GPU, or a CPU with SGLANG_PLUGINS, SGLANG_PLATFORM and SGLANG_USE_CPU_ENGINE "
        "unset; other accelerators serve with --kv-mode full"
    )
    return Check("device", False, found, remedy)


def check_attention_backends() -> Check:
    """Which attention backends that read compressed views are installed."""
    import torch

    # torch_native and triton come with SGLang, flashinfer is a package of its own; fa3 is a part of SGLang's kernels
    # that is compiled for some GPUs.
    on_gpu = torch.cuda.is_available()
    missing = {"flashinfer": not find_spec("flashinfer"), "triton": not on_gpu, "fa3": not (on_gpu and has_fa3())}
    there = [name for name in options.ATTENTION_BACKENDS if not missing.get(name)]
    needed = "flashinfer" if on_gpu else "torch_native"
    remedy = "install flashinfer (`make install`), or pass --attention-backend triton"
    return verdict("attention backends", needed in there, ", ".join(there), remedy)


def has_fa3() -> bool:
    """Whether SGLang's kernels hold FlashAttention-3; they are not loaded for it."""
    spec = find_spec("sgl_kernel")
    return spec is not None and any(
        any(Path(folder).glob("flash_ops*")) for folder in spec.submodule_search_locations
    )


def check_entry_point(name: str, group: str, value: str) -> Check:
    """Whether SGLang will find an entry point of ours."""
    known = [point.name for point in entry_points(group=group) if point.value == value]
    found = f"{known[0]} in {group}" if known else f"not in {group}"
    return verdict(name, bool(known), found, INSTALL)


def check_not_filtered() -> Check:
    """Whether SGLang's environment variables let it load the plugin."""
    ours = {point.name for point in entry_points(group=PLUGIN_GROUP) if point.value == PLUGIN}
    platforms = {point.name for point in entry_points(group=PLATFORM_GROUP) if point.value == PLATFORM}
    asked = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    if asked and not asked & ours:
        found = f"SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']} leaves it out"
        return Check("plugin selection", False, found, "add sglang_ext to SGLANG_PLUGINS, or unset it")
    platform = os.environ.get("SGLANG_PLATFORM")
    if platform and platform not in platforms:
        found = f"SGLANG_PLATFORM={platform} leaves it out"
        return Check("plugin selection", False, found, "unset SGLANG_PLATFORM")
    return Check("plugin selection", True, "SGLang loads it")


def check_hooks() -> Iterator[Check]:
    """One line for each hook or use that does not fit, or one that says that all do."""
    table = hooking.entries()
    problems = {entry.target: hooking.find_problem(entry) for entry in table}
    remedy = f"install sglang=={SGLANG_VERSION}, or serve with --kv-mode full"
    fitting = sum(problem is None for problem in problems.values())
    caller = ", called by this patched fork" if hooking.is_patched_fork() else ""
    yield verdict("hooks", fitting == len(table), f"{fitting} of {len(table)} fit{caller}", remedy)
    for target, problem in problems.items():
        if problem is not None:
            yield Check(f"hook {target.rsplit('.', 1)[-1]}", False, f"{target}: {problem}", remedy)


def check_model(path: str) -> Check:
    """Whether a model's ``config.json`` is of a family that can be compressed.

    Args:
        path: a Hugging Face folder or name, as for ``--model-path``. Its code is not run.
    """
    from sglang.srt.configs.model_config import ModelConfig

    try:
        config = ModelConfig(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        found = f"{path}: {str(error).strip().splitlines()[0]}"
        return Check("model", False, found, "pass a Hugging Face folder or name that SGLang serves")
    reason = model_options.unsupported_model(config)
    found = f"{path}: {reason or config.hf_config.architectures[0]}"
    return verdict("model", reason is None, found, "serve this model with --kv-mode full")


def check_modes(others: Iterable[Check]) -> Check:
    """Which ``--kv-mode`` values can be asked for, given what the other checks found."""
    failed = [check.name for check in others if not check.ok]
    found = ", ".join(options.MODES) if not failed else "full, if SGLang itself starts"
    return verdict("kv modes", not failed, found, f"see {', '.join(failed)}")


def examine(model: str | None = None) -> list[Check]:
    """All checks, in the order of the report; those that need SGLang only when it is installed."""
    checks = [check_python(), check_sglang(), check_torch()]
    checks.append(check_entry_point("plugin", PLUGIN_GROUP, PLUGIN))
    checks.append(check_entry_point("platform", PLATFORM_GROUP, PLATFORM))
    checks.append(check_not_filtered())
    if package_version("sglang") and package_version("torch"):
        checks += _guarded("device", check_device)
        checks.append(check_attention_backends())
        checks += check_hooks()
        if model is not None:
            checks.append(check_model(model))
    return [*checks, check_modes(checks)]


def _guarded(name: str, check: Callable[[], Check]) -> list[Check]:
    """A check of what SGLang resolves at import: an SGLang that does not load is a failing line."""
    try:
        return [check()]
    except (ImportError, RuntimeError) as error:
        return [Check(name, False, f"{type(error).__name__}: {error}", INSTALL)]


def render(checks: list[Check]) -> Table:
    """The report as a table."""
    table = Table("", "check", "found", "remedy", title="sglang-ext doctor")
    for check in checks:
        mark = "[green]ok[/]" if check.ok else "[red]no[/]"
        table.add_row(mark, *map(escape, (check.name, check.found, check.remedy)))
    return table


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sglang_ext.doctor", description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a Hugging Face folder or name, as for --model-path")
    checks = examine(parser.parse_args(arguments).model)
    Console().print(render(checks))
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
