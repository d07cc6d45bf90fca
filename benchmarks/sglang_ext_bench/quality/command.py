"""Runs the parts of ``quality``: measures each server, then attention in this process, and writes the reports."""

import argparse
import dataclasses
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_ext.tools import CommandError
from sglang_ext.tools.server_process import check_servers
from sglang_ext_bench import report
from sglang_ext_bench.client import TopLogprobs
from sglang_ext_bench.prompts import Prompt, Tokenizer, load_prompts, load_tokenizer
from sglang_ext_bench.quality.arms import (
    FULL,
    ArmAnswers,
    QualityArm,
    arm_server,
    build_arms,
    collect_answers,
    server_flags,
)
from sglang_ext_bench.quality.attention import AttentionError, measure_errors
from sglang_ext_bench.quality.capture import CapturedModel
from sglang_ext_bench.quality.named_method import NamedMethod
from sglang_ext_bench.quality.options import QualityConfig, config_from
from sglang_ext_bench.quality.reporting import plots, tables
from sglang_ext_bench.quality.reporting.results import Results, arm_quality
from sglang_ext_bench.quality.server_measurements import score_answer
from sglang_ext_bench.quality.tasks import Task, build_tasks, load_benchmark
from sglang_ext_bench.server import BenchServer


class QualityRun:
    """A run in progress: the prompts and tasks of all servers, and the answers so far.

    Args:
        config: The command line.
        tokenizer: The model's tokenizer.
        logs: Folder of the servers' logs.
        console: Shows the progress.
    """

    def __init__(self, config: QualityConfig, tokenizer: Tokenizer, logs: Path, console: Console) -> None:
        self._config, self._logs, self._console = config, logs, console
        self._prompts: tuple[Prompt, ...] = ()
        if config.prompts is not None:
            self._prompts = load_prompts(config.prompts, tokenizer)[: config.limit]
        self._tasks = load_tasks(config, tokenizer)
        self._answers: dict[QualityArm, ArmAnswers] = {}
        self._scores: dict[QualityArm, list[tuple[TopLogprobs, ...]]] = {}

    def run(self) -> Results:
        """Measure all servers, then attention in this process."""
        failed: dict[str, str] = {}
        for arm in build_arms(self._config):
            self._console.print(f"{arm.name}: starting", markup=False)
            try:
                self._measure_arm(arm)
            except CommandError as error:
                failed[arm.name] = str(error)
                self._console.print(f"{arm.name}: failed: {error}", markup=False)
        measured = tuple(
            arm_quality(self._config, arm, self._answers, self._scores, self._tasks) for arm in self._answers
        )
        return Results(measured, self._measure_attention(), failed)

    def _measure_arm(self, arm: QualityArm) -> None:
        with arm_server(self._config, arm, self._logs) as server:
            self._answers[arm] = collect_answers(self._config, arm, server, self._prompts, self._tasks)
            if arm == FULL and self._config.has_part("kl"):
                self._score_answers(server)

    def _score_answers(self, stock: BenchServer) -> None:
        """Let stock score all greedy answers that have log-probabilities. Its prefix cache contains the prompts."""
        for arm, answers in self._answers.items():
            greedy = answers.prompts.get(0.0, ())
            if greedy and all(answer.top_logprobs is not None for answer in greedy):
                pairs = zip(self._prompts, greedy, strict=True)
                self._scores[arm] = [
                    score_answer(stock, prompt, answer.output_ids, self._config.top) for prompt, answer in pairs
                ]

    def _measure_attention(self) -> tuple[AttentionError, ...]:
        config = self._config
        if not config.has_part("attention"):
            return ()
        self._console.print("attention: measuring in this process", markup=False)
        measured = [name for name in config.compressors if NamedMethod.parse(name).runs_without_server]
        for name in config.compressors:
            if name not in measured:
                self._console.print(f"attention: {name} is left out, because it runs only in a server", markup=False)
        model = CapturedModel(config.model, config.dtype)
        return tuple(measure_errors(model, self._prompts, measured, config.budgets, config.output_len, config.tails))


def load_tasks(config: QualityConfig, tokenizer: Tokenizer) -> tuple[Task, ...]:
    """The functional tasks and those of the user's benchmark. Empty if part functional is not measured."""
    if not config.has_part("functional"):
        return ()
    tasks = build_tasks(tokenizer, config.tasks, config.task_tokens)
    return tasks + (load_benchmark(config.benchmark, tokenizer, config.limit) if config.benchmark else ())


def as_json(config: QualityConfig, results: Results) -> Mapping[str, Any]:
    """The report as JSON values."""
    return {
        "config": dataclasses.asdict(config),
        **report.origin(),
        "above_noise": results.above_noise,
        "failed": results.failed,
        "arms": [tables.arm_json(each) for each in results.arms],
        "attention": [tables.attention_json(each) for each in results.attention],
    }


def describe_settings(config: QualityConfig) -> str:
    """The settings of all servers, in one line for the plot."""
    model = Path(config.model).resolve().name
    return f"{model}, {config.dtype}, {config.output_len} tokens per prompt, {config.concurrency} requests in flight"


def run(args: argparse.Namespace) -> int:
    """Measure, print tables and write the reports. Return 0 if all servers were measured and verified decoding cost nothing, else 1."""
    config = config_from(args)
    check_servers(config.model, {arm.name: server_flags(config, arm) for arm in build_arms(config)})
    console = report.make_console()
    with ExitStack() as stack:
        logs = args.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        logs.mkdir(parents=True, exist_ok=True)
        results = QualityRun(config, load_tokenizer(config.model), logs, console).run()
    tables.print_results(console, results)
    if args.json:
        report.write_json(args.json, as_json(config, results))
    if args.plot:
        plots.write(args.plot, results, describe_settings(config))
    return results.exit_code
