"""Runs ``quality --suite``: builds the cases, sends them to the servers and writes the reports."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.tools import CommandError, split_flags
from sglang_ext_bench import report
from sglang_ext_bench.longcot.arms import on_gpus
from sglang_ext_bench.options import check_counts, check_port, names, numbers
from sglang_ext_bench.prompts import Tokenizer, load_tokenizer
from sglang_ext_bench.quality.suites import gsm8k, ruler, suite_report
from sglang_ext_bench.quality.suites.arms import SuiteArm, group_arms, parse_arms
from sglang_ext_bench.quality.suites.case import SuiteCase
from sglang_ext_bench.quality.suites.comparison import compare
from sglang_ext_bench.quality.suites.options import GSM8K, RULER, RULER_TASKS, SUITES
from sglang_ext_bench.quality.suites.runner import ServerSettings, run_cases
from sglang_ext_bench.quality.suites.stored_results import StoredResults
from sglang_ext_bench.server import check_servers


@dataclass(frozen=True)
class SuiteConfig:
    """The checked command line of a suite. Fields have the meaning of the option of the same name."""

    suites: tuple[str, ...]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    cases: int
    seed: int
    arms: tuple[SuiteArm, ...]
    results: Path


def suite_config_from(args: argparse.Namespace) -> SuiteConfig:
    """Check the parsed options of a suite.

    Raises:
        CommandError: An option has an invalid value.
    """
    suites, tasks = names(args.suite), names(args.ruler_tasks)
    for option, given, allowed in (("--suite", suites, SUITES), ("--ruler-tasks", tasks, RULER_TASKS)):
        wrong = [each for each in given if each not in allowed]
        if wrong or not given:
            raise CommandError(f"{option} {(wrong or [''])[0]!r}: pass some of {', '.join(allowed)}, separated by commas")
    check_counts({"--cases": args.cases, "--servers-at-once": args.servers_at_once, "--concurrency": args.concurrency})
    check_port(args.port)
    if args.port and args.servers_at_once > 1:
        several = f"--servers-at-once {args.servers_at_once}"
        raise CommandError(f"--port {args.port} with {several}: these servers need different ports; pass 0 for free ones")
    if args.results is None:
        raise CommandError("--suite needs --results, a folder with a JSON file for each arm; pass for example --results results/quality")
    lengths = tuple(numbers(args.lengths, "--lengths"))
    return SuiteConfig(suites, tasks, lengths, args.cases, args.seed, parse_arms(args.arms), args.results)


def build_cases(config: SuiteConfig, tokenizer: Tokenizer) -> tuple[SuiteCase, ...]:
    """Build the cases of all suites.

    Raises:
        CommandError: A package is missing, or a length is too short.
    """
    found: tuple[SuiteCase, ...] = ()
    if GSM8K in config.suites:
        problems = gsm8k.read_problems(gsm8k.problems_file())
        found += gsm8k.build(tokenizer, problems, config.cases, config.seed)
    if RULER in config.suites:
        found += ruler.build(tokenizer, config.tasks, config.lengths, config.cases, config.seed)
    return found


def run_suites(args: argparse.Namespace) -> int:
    """Collect the missing answers, print the tables and write the reports. Return 0 if no answer is missing, else 1."""
    config = suite_config_from(args)
    console = report.make_console()
    cases = build_cases(config, load_tokenizer(args.model))
    settings = ServerSettings(
        model=args.model,
        dtype=args.dtype,
        flags=split_flags(args.server_arg),
        on_gpus=on_gpus(args),
        at_once=args.servers_at_once,
        concurrency=args.concurrency,
        port=args.port,
        start_timeout=args.start_timeout,
        request_timeout=args.request_timeout,
        logs=args.logs,
    )
    servers = group_arms(config.arms)
    longest = max(len(case.input_ids) + case.new_tokens for case in cases)
    check_servers(args.model, {server.name: settings.server_flags(server) for server in servers}, longest, "--lengths")
    results = _stored_results(config, args)
    console.print(f"{len(cases)} cases, {len(config.arms)} arms, {len(servers)} servers", markup=False)
    failed = run_cases(settings, servers, cases, results, console)
    _write_reports(args, config, cases, list(results.values()), failed)
    return 1 if any(each.missing(cases) for each in results.values()) else 0


def _stored_results(config: SuiteConfig, args: argparse.Namespace) -> dict[str, StoredResults]:
    """The stored results of each arm, in the order of the command line."""
    common = {"model": Path(args.model).resolve().name, "dtype": args.dtype, "server_args": list(split_flags(args.server_arg))}
    config.results.mkdir(parents=True, exist_ok=True)
    return {arm.name: StoredResults(config.results, arm.name, common) for arm in config.arms}


def _write_reports(
    args: argparse.Namespace, config: SuiteConfig, cases: Sequence[SuiteCase], results: Sequence[StoredResults], failed: dict[str, str]
) -> None:
    arms = [each for each in compare(cases, results) if each.suites]
    for name, error in failed.items():
        print(f"{name}: not measured: {error.splitlines()[0]}")
    for arm in compare(cases, results):
        if arm.missing:
            print(f"{arm.name}: {arm.missing} of {len(cases)} answers are missing; run the same command again for the rest")
    if not arms:
        return
    machine = suite_report.origins({each.arm: each.origin for each in results})
    settings = f"{Path(args.model).resolve().name}, {args.dtype}, {config.cases} cases of each task and length, seed {config.seed}"
    print(suite_report.tables(arms, settings, machine))
    if args.json:
        found = {"settings": settings, "measured_on": machine, "failed": failed, "arms": suite_report.as_json(arms)}
        report.write_json(args.json, {**report.origin(), **found})
    if args.plot:
        suite_report.plot(args.plot, arms, settings, machine)
