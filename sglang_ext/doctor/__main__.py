"""Checks whether this machine can serve with sglang-ext, and what is enabled.

``python -m sglang_ext.doctor [--model M]`` prints a table with one line per check. A failing line shows the remedy. The exit code is 1 if a
requirement is missing or unsupported, else 0.
"""

import argparse
import io
import logging
import sys
from collections.abc import Callable, Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from sglang_ext.config import options
from sglang_ext.doctor.checks import (
    CACHE_RANKS, INSTALL, PLATFORM, PLATFORM_GROUP, PLUGIN, PLUGIN_GROUP, Check, check_attention_backends, check_cache_ranks, check_device,
    check_entry_point, check_hooks, check_kernels, check_model, check_not_filtered, check_python, check_router, check_sglang, check_torch,
    check_transfer, make_check, one_line, package_version,
)  # fmt: skip

logger = logging.getLogger(__name__)


def check_modes(others: Iterable[Check]) -> Check:
    """Check which ``--kv-mode`` values can be used, given the other checks."""
    # All modes work without cache ranks.
    failed = [check.name for check in others if not check.ok and check.name != CACHE_RANKS]
    found = ", ".join(options.MODES) if not failed else "full, if SGLang itself starts"
    return make_check("kv modes", not failed, found, f"see {', '.join(failed)}")


def examine(model: str | None = None) -> list[Check]:
    """Run all checks, in the order of the report. Checks that need SGLang run only if it is installed."""
    wanted: list[tuple[str, Callable[[], Check | Iterable[Check]]]] = [
        *(("Python", check_python), ("SGLang", check_sglang), ("torch", check_torch)),
        ("plugin", lambda: check_entry_point("plugin", PLUGIN_GROUP, PLUGIN)),
        ("platform", lambda: check_entry_point("platform", PLATFORM_GROUP, PLATFORM)),
        ("plugin selection", check_not_filtered),
    ]
    if package_version("sglang") and package_version("torch"):
        wanted += [("device", check_device), ("attention backends", check_attention_backends), ("KV transfer", check_transfer)]
        wanted += [("router", check_router)]
        wanted += [("hooks", check_hooks), (CACHE_RANKS, check_cache_ranks)]
        if model is not None:
            wanted += [("model", lambda: check_model(model)), ("kernels", lambda: check_kernels(model))]
    checks = [line for name, check in wanted for line in _guarded(name, check)]
    return [*checks, check_modes(checks)]


def _guarded(name: str, check: Callable[[], Check | Iterable[Check]]) -> list[Check]:
    """Run a check and return its lines. If it raises, as with a broken installation, return a failing line, so that the others still run."""
    try:
        found = check()
        return [found] if isinstance(found, Check) else list(found)
    except Exception as error:
        logger.debug("sglang-ext: the check of %s failed", name, exc_info=True)
        return [Check(name, False, one_line(error), INSTALL)]


def render(checks: list[Check]) -> Table:
    """The report as a table."""
    # Folded, not cut: a narrow terminal would hide the end of a remedy's command.
    columns = ("", *(Column(name, overflow="fold") for name in ("check", "found", "remedy")))
    table = Table(*columns, title="sglang-ext doctor")
    for check in checks:
        mark = "[green]ok[/]" if check.ok else "[red]no[/]"
        table.add_row(mark, *map(escape, (check.name, check.found, check.remedy)))
    return table


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sglang_ext.doctor", description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a Hugging Face folder or name, as for --model-path")
    checks = examine(parser.parse_args(arguments).model)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A path may have characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    Console().print(render(checks))
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
