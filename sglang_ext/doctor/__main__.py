"""Checks whether this machine can serve with sglang-ext, and what is enabled.

``python -m sglang_ext.doctor [--model M] [--kv-store URL]`` prints a table with one line per check. A failing line shows the remedy. The
exit code is 1 if a requirement is missing or unsupported, else 0.
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
from sglang_ext.core import OptionError
from sglang_ext.doctor import checks
from sglang_ext.doctor.checks import Check
from sglang_ext.hooks.activation import REQUIRED
from sglang_ext.mem_cache.prefix_store.backend import check_url

SGLANG_VERSION = "0.5.17"

logger = logging.getLogger(__name__)

CheckFunction = Callable[[], Check | Iterable[Check]]


def checks_for(model: str | None, sglang: str | None, torch: str | None, store: str | None = None) -> dict[str, CheckFunction]:
    """All checks by name, in the order of the report. Checks that need SGLang or ``model`` are left out without them.

    ``sglang`` and ``torch`` are the installed versions. None for a package that is not installed. ``store`` is the URL of a prefix store.
    """
    wanted: dict[str, CheckFunction] = {
        "Python": checks.check_python,
        "SGLang": lambda: checks.check_package("SGLang", sglang, SGLANG_VERSION),
        "torch": lambda: checks.check_package("torch", torch),
        "plugin": lambda: checks.check_entry_point("plugin", *checks.PLUGIN),
        "platform": lambda: checks.check_entry_point("platform", *checks.PLATFORM),
        "plugin selection": checks.check_not_filtered,
    }
    if sglang and torch:
        wanted |= {"device": checks.check_device, "attention backends": checks.check_attention_backends, "KV transfer": checks.check_transfer}
        wanted |= {"router": checks.check_router, "hooks": lambda: checks.check_hooks(REQUIRED, SGLANG_VERSION)}
        wanted[checks.CACHE_RANKS] = checks.check_cache_ranks
        if model is not None:
            read = cache(lambda: checks.read_model(model))
            wanted |= {"model": lambda: checks.check_model(model, read()), "kernels": lambda: checks.check_kernels(read())}
    if store is not None:
        wanted[checks.PREFIX_STORE] = lambda: checks.check_prefix_store(store)
    return wanted


def examine(wanted: Mapping[str, CheckFunction]) -> list[Check]:
    """Run the checks. The last line says which ``--kv-mode`` values can be used."""
    lines = [line for name, check in wanted.items() for line in _guarded(name, check)]
    failed = [line.name for line in lines if not line.ok and line.name not in checks.OPTIONAL]
    found = ", ".join(options.MODES) if not failed else "full, if SGLang itself starts"
    return [*lines, checks.make_check("kv modes", not failed, found, f"see {', '.join(failed)}")]


def _guarded(name: str, check: CheckFunction) -> list[Check]:
    """Run a check and return its lines. If it raises, as with a broken installation, return a failing line, so that the others still run."""
    try:
        found = check()
        return [found] if isinstance(found, Check) else list(found)
    except Exception as error:
        logger.debug("sglang-ext: the check of %s failed", name, exc_info=True)
        return [Check(name, False, checks.one_line(error), checks.INSTALL)]


def render(lines: list[Check]) -> Table:
    """The report as a table."""
    # Folded, not cut: a narrow terminal would hide the end of a remedy's command.
    columns = ("", *(Column(name, overflow="fold") for name in ("check", "found", "remedy")))
    table = Table(*columns, title="sglang-ext doctor")
    for line in lines:
        mark = "[green]ok[/]" if line.ok else "[red]no[/]"
        table.add_row(mark, *map(escape, (line.name, line.found, line.remedy)))
    return table


def report(lines: list[Check]) -> int:
    """Print the checks. Return the exit code: 0 if all are fulfilled, else 1."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A path may have characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    Console().print(render(lines))
    return 0 if all(line.ok for line in lines) else 1


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sglang_ext.doctor", description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a Hugging Face folder or name, as for --model-path")
    parser.add_argument("--kv-store", metavar="URL", help="a prefix store, as for --kv-store of a server; pages are written, read and deleted")
    args = parser.parse_args(arguments)
    if args.kv_store is not None:
        try:
            check_url(args.kv_store)
        except OptionError as error:
            parser.error(str(error))
    return report(examine(checks_for(args.model, checks.package_version("sglang"), checks.package_version("torch"), args.kv_store)))


if __name__ == "__main__":
    sys.exit(main())
