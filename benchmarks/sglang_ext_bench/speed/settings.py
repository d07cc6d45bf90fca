"""The servers that a speed benchmark compares: stock SGLang, other baselines, verified decoding."""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressors import catalogue
from sglang_ext.tools import CommandError
from sglang_ext.tools.server_process import ServerProcess, check_servers, file_name
from sglang_ext_bench import report
from sglang_ext_bench.comparing.identity_options import given_again, words
from sglang_ext_bench.options import check_budgets, numbers, probabilities
from sglang_ext_bench.speed.tiers import Tier, tiers


@dataclass(frozen=True)
class Setting:
    """One server of the comparison.

    Attributes:
        name: for tables and logs.
        arguments: its flags, beside those of all.
        budget: of verified decoding; None for others.
        draft_length: of verified decoding; None for others, and where it is chosen as it goes.
        tier: where full KV lies.
    """

    name: str
    arguments: tuple[str, ...] = ()
    budget: float | None = None
    draft_length: int | None = None
    tier: Tier = Tier()


def forced_acceptances(args: argparse.Namespace) -> list[float]:
    """What --force-acceptance asks for; empty where verification decides."""
    if args.force_acceptance is None:
        return []
    return probabilities(args.force_acceptance, "--force-acceptance")


def acceptances(args: argparse.Namespace, setting: Setting) -> list[float | None]:
    """Probabilities to force on a setting's server; None where verification decides."""
    return (forced_acceptances(args) if setting.budget is not None else []) or [None]


@contextmanager
def log_folder(args: argparse.Namespace) -> Iterator[Path]:
    """Where servers' logs lie: --logs, or a folder that is gone at the end."""
    with tempfile.TemporaryDirectory() as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        yield logs


def flags_of(args: argparse.Namespace, setting: Setting) -> tuple[str, ...]:
    """All flags of a setting's server.

    Raises:
        CommandError: --server-arg has one that the setting has, which would be of no effect.
    """
    if flag := given_again(args.server_arg, setting.arguments):
        raise CommandError(
            f"--server-arg has {flag}, which the benchmark says of the server {setting.name} itself, in its flags "
            f"{' '.join(setting.arguments)}: leave it out, and pass the benchmark's own option where it has one"
        )
    return ("--dtype", args.dtype, "--enable-metrics", *words(args.server_arg), *setting.arguments)


def server(args: argparse.Namespace, setting: Setting, logs: Path) -> ServerProcess:
    """A setting's server, to be entered; its log lies in ``logs``."""
    return ServerProcess(
        str(args.model),
        flags_of(args, setting),
        logs / f"{file_name(setting.name)}.log",
        start_timeout=args.start_timeout,
    )


def each(
    args: argparse.Namespace, servers: Sequence[Setting], measure: Callable[[Setting, Path], None]
) -> dict[str, str]:
    """Measure one setting after another; why some could not be measured, by name.

    A server that does not start costs its own figures, not those of the others.
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
    args: argparse.Namespace, results: Sequence[Any], failed: dict[str, str], plot: Callable, **more: Any
) -> int:
    """Write --json and --plot; the exit code, 0 when all could be measured, else 1.

    Args:
        results: dataclasses.
        failed: as :func:`each` gives it.
        plot: writes ``results`` to a path, under what :func:`told` says.
        more: what else was measured.
    """
    if args.json:
        measured = {**more, "results": [asdict(result) for result in results], "failed": failed}
        report.write_json(args.json, {"arguments": vars(args), **report.origin(), **measured})
    if args.plot and results:
        plot(args.plot, results, told(args))
    return 1 if failed else 0


def told(args: argparse.Namespace) -> str:
    """What all servers of a run share, in a line for its plot."""
    parts = [args.model.resolve().name, args.dtype, f"outputs of {args.output_len} tokens"]
    if args.force_acceptance is not None:
        parts.append(f"acceptance forced to {args.force_acceptance}")
    return ", ".join(parts)


def all_of(args: argparse.Namespace) -> Iterator[Setting]:
    """Stock first, then other baselines, then each combination of verified decoding.

    Raises:
        CommandError: an option is no number.
    """
    forced_acceptances(args)
    yield Setting("stock")
    for flags in args.baseline:
        yield Setting(flags.replace("--", "").replace(" ", "-"), words([flags]))
    compressors = args.compressor.split(",")
    budgets = [budget for budget in args.budget.split(",") if budget]
    kept = [(name, budget) for name in compressors for budget in (budgets if _methods(name)[0] else budgets[:1])]
    for (compressor, budget), drafts in product(kept, args.draft_length.split(",")):
        for tier in tiers(args):
            yield verified(args, compressor, budget, drafts, tier)
    for pair in args.also:
        budget, separator, drafts = pair.partition(":")
        if not separator:
            raise CommandError(f"--also {pair!r}: pass a budget and a draft length, for example 0.0625:24")
        yield verified(args, compressors[0], budget, drafts)


def checked(args: argparse.Namespace) -> list[Setting]:
    """:func:`all_of`, whose servers can start as far as their flags say.

    Raises:
        CommandError: an option is no number, a flag would be refused, or there is no such model.
    """
    found = list(all_of(args))
    check_servers(str(args.model), {setting.name: flags_of(args, setting) for setting in found})
    return found


def _methods(compressor: str) -> tuple[str | None, str | None]:
    """What drops tokens, and what packs them.

    Raises:
        CommandError: there is no such method.
    """
    try:
        return catalogue.parse(compressor, "--compressor")
    except OptionError as error:
        raise CommandError(str(error)) from error


def verified(args: argparse.Namespace, compressor: str, budget: str, drafts: str, tier: Tier = Tier()) -> Setting:
    """A server of verified decoding.

    What keeps all tokens, in few bits, has no ``budget``. Of packed tokens the bits count, without scales.
    """
    drops, packs = _methods(compressor)
    asked = numbers(budget, "--budget", float)[0]
    check_budgets([asked])
    share = 1.0 if drops is None else asked
    length = None if drafts == "auto" else numbers(drafts, "--draft-length")[0]
    flags = ["--kv-mode", "verified", "--kv-compressor", compressor, "--kv-draft-length", drafts]
    name = f"{compressor}-x{drafts}"
    if drops is not None:
        name, flags = f"{compressor}-{share:g}-x{drafts}", [*flags, "--kv-budget", f"{share:g}"]
    if packs is not None:
        share *= catalogue.code_bits(packs, None) / (32 if args.dtype == "float32" else 16)
    forced = forced_acceptances(args)
    if forced:
        # Each request asks for its own; the server has to force one to let it.
        flags += ["--kv-bench-acceptance", str(forced[0])]
    if tier.longest:
        name = f"{name}-{tier.name}-x{tier.longest}"
        flags += ["--kv-full-tier", tier.name, "--kv-host-gb", f"{args.host_gb:g}", "--kv-offload-draft-length", str(tier.longest)]
    return Setting(name, tuple(flags), share, length, tier)
