"""Runs ``python -m sglang_ext_bench quality``: asks each server, then measures attention in this process."""

import argparse
import dataclasses
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_ext.tools import CommandError
from sglang_ext.tools.server_process import ServerProcess, check_servers
from sglang_ext_bench import report
from sglang_ext_bench.client import TopLogprobs
from sglang_ext_bench.prompts import Prompt, Tokenizer, load_prompts, load_tokenizer
from sglang_ext_bench.quality.arms import (
    FULL,
    Answers,
    QualityArm,
    arms_of,
    ask,
    flags_of,
    server,
)
from sglang_ext_bench.quality.attention import AttentionError, measure
from sglang_ext_bench.quality.benchmark_file import load_benchmark
from sglang_ext_bench.quality.capture import CapturedModel
from sglang_ext_bench.quality.config import QualityConfig
from sglang_ext_bench.quality.named import Named
from sglang_ext_bench.quality.options import add_arguments, config_from
from sglang_ext_bench.quality.reporting import plots, tables
from sglang_ext_bench.quality.reporting.results import Results, arm_quality
from sglang_ext_bench.quality.stock_scores import score
from sglang_ext_bench.quality.tasks import Task, build_tasks

__all__ = ["add_arguments", "run"]


class Bench:
    """A run in progress: what all servers share, and what they answered so far."""

    def __init__(self, config: QualityConfig, tokenizer: Tokenizer, logs: Path, console: Console) -> None:
        self._config, self._logs, self._console = config, logs, console
        self._prompts: tuple[Prompt, ...] = ()
        if config.prompts is not None:
            self._prompts = load_prompts(config.prompts, tokenizer)[: config.limit]
        self._tasks = load_tasks(config, tokenizer)
        self._answers: dict[QualityArm, Answers] = {}
        self._scores: dict[QualityArm, list[tuple[TopLogprobs, ...]]] = {}

    def run(self) -> Results:
        """Measure all servers, then attention in this process."""
        failed: dict[str, str] = {}
        for arm in arms_of(self._config):
            self._console.print(f"{arm.name}: starting", markup=False)
            try:
                self._run_arm(arm)
            except CommandError as error:
                failed[arm.name] = str(error)
                self._console.print(f"{arm.name}: failed: {error}", markup=False)
        figures = tuple(
            arm_quality(self._config, arm, self._answers, self._scores, self._tasks) for arm in self._answers
        )
        return Results(figures, self._attention(), failed)

    def _run_arm(self, arm: QualityArm) -> None:
        with server(self._config, arm, self._logs) as running:
            self._answers[arm] = ask(self._config, arm, running, self._prompts, self._tasks)
            if arm == FULL and self._config.asks("kl"):
                self._score(running)

    def _score(self, running: ServerProcess) -> None:
        """Let stock score all greedy answers that have log-probabilities; its prefix cache holds the prompts."""
        for arm, answers in self._answers.items():
            greedy = answers.prompts.get(0.0, ())
            if greedy and all(answer.top_logprobs is not None for answer in greedy):
                pairs = zip(self._prompts, greedy, strict=True)
                self._scores[arm] = [
                    score(running, prompt, answer.output_ids, self._config.top) for prompt, answer in pairs
                ]

    def _attention(self) -> tuple[AttentionError, ...]:
        config = self._config
        if not config.asks("attention"):
            return ()
        self._console.print("attention: in this process", markup=False)
        chosen = [name for name in config.compressors if Named.of(name).chooses_here]
        for name in config.compressors:
            if name not in chosen:
                self._console.print(f"attention: {name} needs what only a server has and is left out", markup=False)
        model = CapturedModel(config.model, config.dtype)
        return tuple(measure(model, self._prompts, chosen, config.budgets, config.output_len, config.tails))


def load_tasks(config: QualityConfig, tokenizer: Tokenizer) -> tuple[Task, ...]:
    """The functional tasks, and those of the user's benchmark; none where they are not asked for."""
    if not config.asks("functional"):
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


def told(config: QualityConfig) -> str:
    """What all servers share, in a line for the plot."""
    return f"{Path(config.model).resolve().name}, {config.dtype}, {config.output_len} tokens a prompt, {config.concurrency} at once"


def run(args: argparse.Namespace) -> int:
    """Measure, print tables, write the reports; 0 when all was measured and verified decoding cost nothing, else 1."""
    config = config_from(args)
    check_servers(config.model, {arm.name: flags_of(config, arm) for arm in arms_of(config)})
    console = report.make_console()
    with ExitStack() as stack:
        logs = args.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        logs.mkdir(parents=True, exist_ok=True)
        results = Bench(config, load_tokenizer(config.model), logs, console).run()
    tables.print_results(console, results)
    if args.json:
        report.write_json(args.json, as_json(config, results))
    if args.plot:
        plots.write(args.plot, results, told(config))
    return results.exit_code
