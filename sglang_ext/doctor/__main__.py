"""Checks whether this machine can serve with sglang-ext, and what is enabled.

``python -m sglang_ext.doctor [--model M]`` prints a table with one line per check. A failing line shows the remedy. The exit code is 1 if a
requirement is missing or unsupported, else 0.
"""

import argparse
import io
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from sglang_ext.config import options
from sglang_ext.doctor.checks import (
    CACHE_RANKS,
    INSTALL,
    PLATFORM,
    PLATFORM_GROUP,
    PLUGIN,
    PLUGIN_GROUP,
    Check,
    check_attention_backends,
    check_cache_ranks,
    check_device,
    check_entry_point,
    check_hooks,
    check_kernels,
    check_model,
    check_not_filtered,
    check_package,
    check_python,
    check_router,
    check_transfer,
    make_check,
    one_line,
    package_version,
    read_model,
)  # fmt: skip
from sglang_ext.hooks.activation import required_names

SGLANG_VERSION = "0.5.17"

logger = logging.getLogger(__name__)

CheckFunction = Callable[[], Check | Iterable[Check]]


def checks_for(model: str | None, sglang: str | None, torch: str | None) -> dict[str, CheckFunction]:
    """All checks by name, in the order of the report. Checks that need SGLang or ``model`` are left out without them.

    ``sglang`` and ``torch`` are the installed versions. None for a package that is not installed.
    """
    wanted: dict[str, CheckFunction] = {
        "Python": check_python,
        "SGLang": lambda: check_package("SGLang", sglang, SGLANG_VERSION),
        "torch": lambda: check_package("torch", torch),
        "plugin": lambda: check_entry_point("plugin", PLUGIN_GROUP, PLUGIN),
        "platform": lambda: check_entry_point("platform", PLATFORM_GROUP, PLATFORM),
        "plugin selection": check_not_filtered,
    }
    if sglang and torch:
        wanted |= {"device": check_device, "attention backends": check_attention_backends, "KV transfer": check_transfer}
        wanted |= {"router": check_router, "hooks": lambda: check_hooks(required_names(), SGLANG_VERSION), CACHE_RANKS: check_cache_ranks}
        if model is not None:
            read = cache(lambda: read_model(model))
            wanted |= {"model": lambda: check_model(model, read()), "kernels": lambda: check_kernels(read())}
    return wanted


def examine(wanted: Mapping[str, CheckFunction]) -> list[Check]:
    """Run the checks. The last line says which ``--kv-mode`` values can be used."""
    checks = [line for name, check in wanted.items() for line in _guarded(name, check)]
    # All modes work without cache ranks.
    failed = [check.name for check in checks if not check.ok and check.name != CACHE_RANKS]
    found = ", ".join(options.MODES) if not failed else "full, if SGLang itself starts"
    return [*checks, make_check("kv modes", not failed, found, f"see {', '.join(failed)}")]


def _guarded(name: str, check: CheckFunction) -> list[Check]:
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


def report(checks: list[Check]) -> int:
    """Print the checks. Return the exit code: 0 if all are fulfilled, else 1."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A path may have characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    Console().print(render(checks))
    return 0 if all(check.ok for check in checks) else 1


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sglang_ext.doctor", description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a Hugging Face folder or name, as for --model-path")
    model = parser.parse_args(arguments).model
    return report(examine(checks_for(model, package_version("sglang"), package_version("torch"))))


if __name__ == "__main__":
    sys.exit(main())
