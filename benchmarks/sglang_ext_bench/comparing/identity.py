"""Compare verified decoding with stock SGLang, token by token.

Starts one server at a time on the loopback interface: stock SGLang, then the controls (stock with other batch shapes), then one verified
server for each compressor and budget. All servers get the same prompts with the prefix cache in the same state. Runs with sampling use
the same seed.

The exit code is 1 if a prompt fails, or if an output differs in float32 beyond the tolerance. In another dtype it is 1 if outputs differ
more than the controls' outputs do.
"""

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
    run_arm,
    server_flags,
    stock_arm,
    try_arm,
    verified_arms,
)
from sglang_ext_bench.comparing.compare import Comparison, compare
from sglang_ext_bench.comparing.identity_config import (
    IdentityConfig,
    add_arguments,
    config_from,
)
from sglang_ext_bench.comparing.verdict import Rules, judge, measured_tolerance
from sglang_ext_bench.corpus import default_prompts
from sglang_ext_bench.prompts import Prompt, load_prompts, load_tokenizer

__all__ = ["add_arguments", "run"]


@dataclass(frozen=True)
class IdentityRun:
    """The prompts and settings that all arms of a run share.

    Attributes:
        config: The options.
        prompts: The prompts.
        logs: Folder for the servers' logs.
        console: Takes tables and progress lines.
    """

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
        """Print a table for each comparison."""
        for each in comparisons:
            identity_report.print_comparison(self.console, each, rules, self.config.draft_length)


def run_config(
    config: IdentityConfig, prompts: tuple[Prompt, ...], logs: Path, console: Console
) -> tuple[list[Comparison], Rules]:
    """Run stock, the controls and the verified arms, and print tables. Returns the comparisons and the rules of the verdict."""
    identity_run = IdentityRun(config, prompts, logs, console)
    stock = run_arm(config, stock_arm(config), prompts, logs, console)
    comparisons: list[Comparison] = []
    for arm in control_arms(config):
        comparisons += identity_run.compare_arm(arm, stock)
    tolerance = config.margin_tolerance
    if isinstance(tolerance, str):
        tolerance = measured_tolerance(comparisons)
        console.print(f"measured --margin-tolerance: {tolerance:.3g}", markup=False)
    rules = config.rules(tolerance)
    identity_run.show(comparisons, rules)
    for arm in verified_arms(config):
        found = identity_run.compare_arm(arm, stock)
        identity_run.show(found, rules)
        comparisons += found
    return comparisons, rules


def describe_settings(config: IdentityConfig, prompts: int) -> str:
    """The settings that all arms share, as one line for the plot."""
    sampling = f"temperature {config.temperature:g}, seed {config.seed}" if config.temperature else "greedy"
    return f"{Path(config.model).resolve().name}, {config.dtype}, {prompts} prompts, {config.output_len} tokens each, {sampling}"


def run(args: argparse.Namespace) -> int:
    """Run the comparison and write the reports. Returns 0 if the run passes, else 1."""
    config = config_from(args)
    servers = [stock_arm(config), *control_arms(config), *verified_arms(config)]
    check_servers(config.model, {arm.name: server_flags(config, arm) for arm in servers})
    console = report.make_console()
    tokenizer = load_tokenizer(config.model)
    prompts = (load_prompts(config.prompts, tokenizer) if config.prompts else default_prompts(tokenizer))[: config.limit]
    console.print(f"{len(prompts)} prompts for each of {len(servers)} servers: {', '.join(arm.name for arm in servers)}", markup=False)
    with ExitStack() as stack:
        logs = args.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        logs.mkdir(parents=True, exist_ok=True)
        comparisons, rules = run_config(config, prompts, logs, console)
    verdict = judge(comparisons, rules)
    if args.json:
        report.write_json(args.json, identity_report.as_json(dataclasses.asdict(config), comparisons, rules, verdict))
    if args.plot:
        identity_report.write_plot(args.plot, comparisons, describe_settings(config, len(prompts)))
    identity_report.print_verdict(console, verdict)
    return verdict.exit_code
