"""The servers that a speed benchmark compares: stock SGLang, other baselines, and verified decoding."""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from sglang_ext.core import DEFAULT_BUDGET, OptionError
from sglang_ext.tools import CommandError, split_flags
from sglang_ext_bench.options import DTYPES, add_start_timeout, check_budgets, file_name, find_repeated_flag, numbers, probabilities
from sglang_ext.tools.server_process import check_servers
from sglang_ext_bench import report
from sglang_ext_bench.server import BenchServer


@dataclass(frozen=True)
class Tier:
    """Where the full KV of running requests is stored.

    Attributes:
        name: Value of ``--kv-full-tier``.
        max_drafts: Draft tokens before the full KV is loaded. 0 for tier ``device``.
    """

    name: str = "device"
    max_drafts: int = 0


@dataclass(frozen=True)
class ServerSetting:
    """One server of the comparison.

    Attributes:
        name: Name in tables and logs.
        arguments: Its flags, in addition to those of all servers.
        budget: Share of the KV bytes that a draft step reads. None for servers without verified decoding.
        draft_length: Draft length. None for ``auto`` and for servers without verified decoding.
        tier: Where the full KV is stored.
    """

    name: str
    arguments: tuple[str, ...] = ()
    budget: float | None = None
    draft_length: int | None = None
    tier: Tier = Tier()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that the speed benchmarks share: the compared servers, and the output files."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder; with --load-format dummy only its config.json is needed")
    add("--compressor", default="snapkv", help="names separated by commas (default: %(default)s)")
    add("--budget", default=str(DEFAULT_BUDGET), help="shares separated by commas (default: %(default)s, as the server's)")
    add("--draft-length", default="15", help="numbers, or auto, separated by commas (default: %(default)s)")
    add("--full-tier", default="device", help="where the full KV of running requests is stored: device, auto, host, separated by commas")
    add("--offload-draft-length", default="64", help="draft tokens before the full KV is loaded, separated by commas (default: %(default)s)")
    add("--host-gb", type=float, default=0.0, help="host memory for the full KV, with --full-tier auto or host")
    pair = "also run the first compressor with this pair, in addition to all combinations"
    add("--also", action="append", default=[], metavar="BUDGET:DRAFTS", help=pair)
    add("--force-acceptance", metavar="P", help="accept each draft token with this probability; several separated by commas")
    stock = "also run stock SGLang with these flags, for example '--speculative-algorithm NGRAM'"
    add("--baseline", action="append", default=[], metavar="FLAGS", help=stock)
    add("--server-arg", action="append", default=[], metavar="FLAGS", help="flags of all servers")
    add("--dtype", default="bfloat16", choices=DTYPES, help="(default: %(default)s)")
    add_start_timeout(parser)
    add("--logs", type=Path, help="folder for the servers' logs; default: none are kept")
    add("--json", type=Path, help="write all measurements to this file")
    add("--plot", type=Path, help="write a plot to this PNG file")


def forced_acceptances(args: argparse.Namespace) -> list[float]:
    """The probabilities of --force-acceptance. Empty if acceptance is not forced."""
    if args.force_acceptance is None:
        return []
    return probabilities(args.force_acceptance, "--force-acceptance")


def acceptances(args: argparse.Namespace, setting: ServerSetting) -> list[float | None]:
    """The acceptance probabilities to force on a server. None stands for acceptance that is not forced."""
    return (forced_acceptances(args) if setting.budget is not None else []) or [None]


@contextmanager
def log_folder(args: argparse.Namespace) -> Iterator[Path]:
    """The folder for logs: --logs, or a temporary folder that is deleted at the end."""
    with tempfile.TemporaryDirectory() as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        yield logs


def flags_of(args: argparse.Namespace, setting: ServerSetting) -> tuple[str, ...]:
    """All flags of a server.

    Raises:
        CommandError: --server-arg has a flag that the setting has too, and that would have no effect.
    """
    if flag := find_repeated_flag(args.server_arg, setting.arguments):
        raise CommandError(
            f"--server-arg has {flag}, which the benchmark sets for the server {setting.name} itself, in its flags "
            f"{' '.join(setting.arguments)}: leave it out, and pass the benchmark's own option if it has one"
        )
    return ("--dtype", args.dtype, "--enable-metrics", *split_flags(args.server_arg), *setting.arguments)


def server(args: argparse.Namespace, setting: ServerSetting, logs: Path) -> BenchServer:
    """The server of a setting, not started yet. Its log is in the folder ``logs``."""
    return BenchServer(
        str(args.model),
        flags_of(args, setting),
        logs / f"{file_name(setting.name)}.log",
        start_timeout=args.start_timeout,
    )


def each(
    args: argparse.Namespace, servers: Sequence[ServerSetting], measure: Callable[[ServerSetting, Path], None]
) -> dict[str, str]:
    """Measure one setting after another. If a server fails, the others are still measured.

    Args:
        args: The options.
        servers: The settings.
        measure: Called with a setting and the folder for logs.

    Returns:
        The error of each failed setting, by name.
    """
    failed = {}
    with log_folder(args) as logs:
        for setting in servers:
            print(f"{setting.name}: starting", flush=True)
            try:
                measure(setting, logs)
            except CommandError as error:
                failed[setting.name] = str(error)
                print(f"{setting.name}: failed: {error}", flush=True)
    return failed


def finish(
    args: argparse.Namespace, results: Sequence[Any], failed: dict[str, str], plot: Callable[[Path, Any, str], None], **more: Any
) -> int:
    """Write --json and --plot. Returns the exit code: 0 if all settings were measured, else 1.

    Args:
        args: The options.
        results: The measurements, as dataclasses.
        failed: The errors that :func:`each` returned.
        plot: Writes a plot of ``results`` to a path, with a line of settings.
        more: Further values for the JSON file.
    """
    if args.json:
        measured = {**more, "results": [asdict(result) for result in results], "failed": failed}
        report.write_json(args.json, {"arguments": vars(args), **report.origin(), **measured})
    if args.plot and results:
        plot(args.plot, results, describe_settings(args))
    return 1 if failed else 0


def describe_settings(args: argparse.Namespace) -> str:
    """The settings that all servers of a run share, as one line for its plot."""
    parts = [args.model.resolve().name, args.dtype, f"outputs of {args.output_len} tokens"]
    if args.force_acceptance is not None:
        parts.append(f"acceptance forced to {args.force_acceptance}")
    return ", ".join(parts)


def all_settings(args: argparse.Namespace) -> Iterator[ServerSetting]:
    """The servers of a run: stock, other baselines, and each combination of verified decoding.

    Raises:
        CommandError: A value is not allowed.
    """
    forced_acceptances(args)
    yield ServerSetting("stock")
    for flags in args.baseline:
        yield ServerSetting(flags.replace("--", "").replace(" ", "-"), split_flags([flags]))
    compressors = args.compressor.split(",")
    budgets = [budget for budget in args.budget.split(",") if budget]
    # A compressor that keeps all tokens has no budget, so it runs once.
    pairs = [(name, budget) for name in compressors for budget in (budgets if _parse_method(name)[0] else budgets[:1])]
    for (compressor, budget), drafts in product(pairs, args.draft_length.split(",")):
        for tier in tiers(args):
            yield verified(args, compressor, budget, drafts, tier)
    for pair in args.also:
        budget, separator, drafts = pair.partition(":")
        if not separator:
            raise CommandError(f"--also {pair!r}: pass a budget and a draft length, for example 0.0625:24")
        yield verified(args, compressors[0], budget, drafts)


def checked_settings(args: argparse.Namespace) -> list[ServerSetting]:
    """Return :func:`all_settings` after a check of the model and of the servers' flags.

    Raises:
        CommandError: A value is not allowed, a server would refuse a flag, or the model is missing.
    """
    found = list(all_settings(args))
    check_servers(str(args.model), {setting.name: flags_of(args, setting) for setting in found})
    return found


def tiers(args: argparse.Namespace) -> list[Tier]:
    """Combine --full-tier and --offload-draft-length.

    Raises:
        CommandError: A tier is unknown, or --host-gb is missing.
    """
    from sglang_ext.config.options import FULL_TIERS

    found = []
    for name in args.full_tier.split(","):
        if name not in FULL_TIERS:
            raise CommandError(f"--full-tier {args.full_tier!r}: pass {', '.join(FULL_TIERS)}, separated by commas")
        if name != "device" and not args.host_gb:
            raise CommandError(f"--full-tier {name} stores the full KV in host memory: pass --host-gb")
        max_drafts = [0] if name == "device" else numbers(args.offload_draft_length, "--offload-draft-length")
        found += [Tier(name, drafts) for drafts in max_drafts]
    return found


def _parse_method(compressor: str) -> tuple[str | None, str | None]:
    """Return the method that drops tokens and the method that quantizes them. One of them may be None.

    Raises:
        CommandError: There is no such method.
    """
    from sglang_ext.mem_cache.compressors import catalogue

    try:
        return catalogue.parse(compressor, "--compressor")
    except OptionError as error:
        raise CommandError(str(error)) from error


def verified(args: argparse.Namespace, compressor: str, budget: str, drafts: str, tier: Tier = Tier()) -> ServerSetting:
    """A server with verified decoding.

    The budget of the setting is the share of the KV bytes that a draft step reads. A method that keeps all tokens has no ``--kv-budget``.
    For a method that quantizes, the share counts its bits without scales.
    """
    from sglang_ext.mem_cache.compressors import catalogue

    dropping, quantizing = _parse_method(compressor)
    kept = numbers(budget, "--budget", float)[0]
    check_budgets([kept])
    share = 1.0 if dropping is None else kept
    length = None if drafts == "auto" else numbers(drafts, "--draft-length")[0]
    flags = ["--kv-mode", "verified", "--kv-compressor", compressor, "--kv-draft-length", drafts]
    name = f"{compressor}-x{drafts}"
    if dropping is not None:
        name, flags = f"{compressor}-{share:g}-x{drafts}", [*flags, "--kv-budget", f"{share:g}"]
    if quantizing is not None:
        share *= catalogue.code_bits(quantizing, None) / (32 if args.dtype == "float32" else 16)
    forced = forced_acceptances(args)
    if forced:
        # Each request passes its own probability, which the server allows only with this flag.
        flags += ["--kv-bench-acceptance", str(forced[0])]
    if tier.max_drafts:
        name = f"{name}-{tier.name}-x{tier.max_drafts}"
        flags += ["--kv-full-tier", tier.name, "--kv-host-gb", f"{args.host_gb:g}", "--kv-offload-draft-length", str(tier.max_drafts)]
    return ServerSetting(name, tuple(flags), share, length, tier)
