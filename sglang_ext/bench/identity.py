"""Compare verified decoding with stock SGLang, token by token.

Starts one server at a time on the loopback interface: stock SGLang once, then one server for each
compressor and budget. All get the same prompts with caches in the same state, and for a seeded
run the same sampling seed. Ends with code 1 if an output differs in float32 or a prompt fails.
"""

import argparse
import dataclasses
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from sglang_ext.bench import BenchError, report
from sglang_ext.bench.compare import Comparison, Setting, compare, exit_code
from sglang_ext.bench.generation import Generation
from sglang_ext.bench.identity_options import IdentityConfig, add_arguments, config_from
from sglang_ext.bench.prompts import Prompt, load_prompts, load_tokenizer
from sglang_ext.bench.server import ServerProcess

CONTROL = "control"

__all__ = ["add_arguments", "run"]


@dataclass(frozen=True)
class Arm:
    """One server: its name, its arguments beyond the common ones, and whether to ask for margins."""

    name: str
    compressor: str
    budget: float
    arguments: tuple[str, ...]
    with_margins: bool = False


def stock_arm(config: IdentityConfig) -> Arm:
    """The reference: the full KV cache, one token per step."""
    arguments = () if config.control else ("--kv-mode", "full")
    return Arm("stock", "none", 1.0, arguments, with_margins=True)


def verified_arms(config: IdentityConfig) -> list[Arm]:
    """The arms under test; for a control, a second stock server, which shows stock's own noise."""
    control = [Arm(CONTROL, CONTROL, 1.0, config.control_args)]
    if config.control:
        return control
    return (control if config.control_args else []) + [
        Arm(
            f"verified-{compressor}-{budget:g}",
            compressor,
            budget,
            (
                *("--kv-mode", "verified", "--kv-compressor", compressor),
                *("--kv-budget", f"{budget:g}", "--kv-draft-length", str(config.draft_length)),
            ),
        )
        for compressor in config.compressors
        for budget in config.budgets
    ]


ArmOutputs = dict[int, list[Generation]]
"""Answers in the order of the prompts, by concurrency."""


def run_wave(
    server: ServerProcess, prompts: tuple[Prompt, ...], config: IdentityConfig, with_margins: bool
) -> list[Generation]:
    """Send a batch of prompts at once, with an empty cache or one that holds these prompts only."""

    def ask(prompt: Prompt) -> Generation:
        return server.generate(prompt.input_ids, config.sampling, config.output_len, with_margins)

    def warm(prompt: Prompt) -> Generation:
        return server.generate(prompt.input_ids, config.sampling, new_tokens=1)

    server.flush_cache()
    with ThreadPoolExecutor(len(prompts)) as pool:
        if config.cache == "warm":
            list(pool.map(warm, prompts))
        return list(pool.map(ask, prompts))


def run_arm(
    config: IdentityConfig, arm: Arm, prompts: tuple[Prompt, ...], logs: Path, console: Console
) -> ArmOutputs:
    """Start the arm's server and send it all prompts at each concurrency.

    Raises:
        BenchError: the server did not start, or ended.
    """
    console.print(f"{arm.name}: starting", markup=False)
    outputs: ArmOutputs = {}
    with ServerProcess(
        config.model,
        (*config.common_server_arguments, *arm.arguments),
        logs / f"{arm.name}.log",
        config.port,
        config.start_timeout,
        config.request_timeout,
    ) as server:
        for width in config.concurrency:
            answers: list[Generation] = []
            for start in range(0, len(prompts), width):
                wave = prompts[start : start + width]
                answers += run_wave(server, wave, config, arm.with_margins)
            outputs[width] = answers
            seconds = sum(answer.seconds for answer in answers)
            console.print(f"{arm.name}: {len(answers)} answers, {seconds:.1f} request seconds", markup=False)
    return outputs


def run_verified_arm(
    config: IdentityConfig, arm: Arm, prompts: tuple[Prompt, ...], logs: Path, console: Console
) -> ArmOutputs:
    """Like :func:`run_arm`; a server that fails becomes an error of each prompt, so others still run."""
    try:
        return run_arm(config, arm, prompts, logs, console)
    except BenchError as error:
        console.print(f"{arm.name}: {error}", markup=False)
        failed = [Generation(error=str(error).split("\n")[0])] * len(prompts)
        return {width: failed for width in config.concurrency}


def run_config(
    config: IdentityConfig, prompts: tuple[Prompt, ...], logs: Path, console: Console
) -> list[Comparison]:
    """Run the stock arm once and each arm under test against it, printing a table for each."""
    stock = run_arm(config, stock_arm(config), prompts, logs, console)
    comparisons = []
    for arm in verified_arms(config):
        outputs = run_verified_arm(config, arm, prompts, logs, console)
        for width in config.concurrency:
            comparison = compare(
                Setting(arm.compressor, arm.budget, width),
                prompts,
                stock[width],
                outputs[width],
                config.draft_length,
                needs_verify=arm.compressor != CONTROL,
            )
            report.print_comparison(
                console, comparison, config.dtype, config.margin_tolerance, config.draft_length
            )
            comparisons.append(comparison)
    return comparisons


def run(args: argparse.Namespace) -> int:
    """Run the comparison, write the reports, and return 0 (all as promised) or 1."""
    config = config_from(args)
    console = report.make_console()
    prompts = load_prompts(config.prompts, load_tokenizer(config.model))[: config.limit]
    with ExitStack() as stack:
        logs = args.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        logs.mkdir(parents=True, exist_ok=True)
        comparisons = run_config(config, prompts, logs, console)
    if args.json:
        settings = dataclasses.asdict(config)
        report.write_json(
            args.json, report.as_json(settings, comparisons, config.dtype, config.margin_tolerance)
        )
    if args.plot:
        report.write_plot(args.plot, comparisons)
    code = exit_code(comparisons, config.dtype, config.margin_tolerance)
    console.print("FAILED" if code else "passed", markup=False)
    return code
