"""Runs ``python -m sglang_ext_bench identity``: asks stock and each verified server, and compares their tokens."""

import argparse
import dataclasses
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from sglang_ext.tools.server_process import check_servers
from sglang_ext_bench import report
from sglang_ext_bench.comparing import identity_report
from sglang_ext_bench.comparing.arms import (
    Arm,
    ArmOutputs,
    control_arms,
    flags_of,
    run_arm,
    stock_arm,
    try_arm,
    verified_arms,
)
from sglang_ext_bench.comparing.compare import Comparison, compare
from sglang_ext_bench.comparing.identity_config import IdentityConfig
from sglang_ext_bench.comparing.identity_options import add_arguments, config_from
from sglang_ext_bench.comparing.tolerance import Rules, measured_tolerance
from sglang_ext_bench.comparing.verdict import judge
from sglang_ext_bench.corpus import own_prompts
from sglang_ext_bench.prompts import Prompt, load_prompts, load_tokenizer

__all__ = ["add_arguments", "run"]


@dataclass(frozen=True)
class Bench:
    """What all arms of a run share; ``logs`` is the folder of the servers' logs."""

    config: IdentityConfig
    prompts: tuple[Prompt, ...]
    logs: Path
    console: Console

    def compare_arm(self, arm: Arm, stock: ArmOutputs) -> list[Comparison]:
        """Run an arm and compare it with stock, at each concurrency."""
        outputs = try_arm(self.config, arm, self.prompts, self.logs, self.console)
        return [
            compare(arm.setting(width), self.prompts, stock[width], outputs[width], self.config.draft_length)
            for width in self.config.concurrency
        ]

    def show(self, comparisons: list[Comparison], rules: Rules) -> None:
        """Print a table for each."""
        for each in comparisons:
            identity_report.print_comparison(self.console, each, rules, self.config.draft_length)


def run_config(
    config: IdentityConfig, prompts: tuple[Prompt, ...], logs: Path, console: Console
) -> tuple[list[Comparison], Rules]:
    """Run stock, the controls and the arms under test, printing tables; the rules to judge them by."""
    bench = Bench(config, prompts, logs, console)
    stock = run_arm(config, stock_arm(config), prompts, logs, console)
    comparisons: list[Comparison] = []
    for arm in control_arms(config):
        comparisons += bench.compare_arm(arm, stock)
    tolerance = config.margin_tolerance
    if isinstance(tolerance, str):
        tolerance = measured_tolerance(comparisons)
        console.print(f"measured --margin-tolerance: {tolerance:.3g}", markup=False)
    rules = config.rules(tolerance)
    bench.show(comparisons, rules)
    for arm in verified_arms(config):
        found = bench.compare_arm(arm, stock)
        bench.show(found, rules)
        comparisons += found
    return comparisons, rules


def told(config: IdentityConfig, prompts: int) -> str:
    """What all arms share, in a line for the plot."""
    chosen = f"temperature {config.temperature:g}, seed {config.seed}" if config.temperature else "greedy"
    return f"{Path(config.model).resolve().name}, {config.dtype}, {prompts} prompts, {config.output_len} tokens each, {chosen}"


def run(args: argparse.Namespace) -> int:
    """Run the comparison, write the reports, and return 0 (all as promised) or 1."""
    config = config_from(args)
    servers = [stock_arm(config), *control_arms(config), *verified_arms(config)]
    check_servers(config.model, {arm.name: flags_of(config, arm) for arm in servers})
    console = report.make_console()
    tokenizer = load_tokenizer(config.model)
    prompts = (load_prompts(config.prompts, tokenizer) if config.prompts else own_prompts(tokenizer))[: config.limit]
    console.print(f"{len(prompts)} prompts for each of {len(servers)} servers: {', '.join(arm.name for arm in servers)}", markup=False)
    with ExitStack() as stack:
        logs = args.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        logs.mkdir(parents=True, exist_ok=True)
        comparisons, rules = run_config(config, prompts, logs, console)
    verdict = judge(comparisons, rules)
    if args.json:
        report.write_json(args.json, identity_report.as_json(dataclasses.asdict(config), comparisons, rules, verdict))
    if args.plot:
        identity_report.write_plot(args.plot, comparisons, told(config, len(prompts)))
    identity_report.print_verdict(console, verdict)
    return verdict.exit_code
