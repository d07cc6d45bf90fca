"""Runs ``python -m sglang_ext_bench latency``: starts the servers, runs SGLang's own benchmark, writes a table, JSON and plots."""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext.tools import CommandError
from sglang_ext.tools.server_client import HOST, ServerClient
from sglang_ext.tools.server_process import file_name
from sglang_ext_bench.speed import drawing, settings
from sglang_ext_bench.speed.latency_options import add_arguments
from sglang_ext_bench.speed.settings import Setting, numbers

__all__ = ["add_arguments", "run"]

PERCENTILES = (50, 99)


@dataclass(frozen=True)
class Latency:
    """What one setting showed at one rate; milliseconds by percentile.

    Attributes:
        setting: its name.
        acceptance: probability that a draft was forced to be accepted; None where verification decided.
        rate: requests per second that were sent; infinite for all at once.
        throughput: output tokens per second.
        first_token: from the request to its first token.
        inter_token: a chunk's time over its tokens.
        gap: from one chunk to the next.
        request: from the request to its last token.
    """

    setting: str
    acceptance: float | None
    rate: float
    throughput: float
    first_token: dict[int, float]
    inter_token: dict[int, float]
    gap: dict[int, float]
    request: dict[int, float]


def run(args: argparse.Namespace) -> int:
    """Measure all settings at all rates, print a table; 0 when all could be measured, else 1 after the others."""
    rates = numbers(args.rate, "--rate", float)
    if len(settings.forced_acceptances(args)) > 1:
        raise CommandError(f"--force-acceptance {args.force_acceptance!r}: pass a single probability")
    servers = settings.checked(args)
    results: list[Latency] = []

    def measure(setting: Setting, logs: Path) -> None:
        for result in run_setting(args, setting, rates, logs):
            results.append(result)
            print(line(result), flush=True)

    return settings.finish(args, results, settings.each(args, servers, measure), write_plot)


def run_setting(
    args: argparse.Namespace, setting: Setting, rates: Sequence[float], logs: Path
) -> Iterator[Latency]:
    """Start the setting's server and send it traffic at each rate, with an empty prefix cache at first."""
    acceptance = settings.acceptances(args, setting)[0]
    with settings.server(args, setting, logs) as server:
        for rate in rates:
            server.flush_cache()
            record = send(args, server, rate, logs / f"{file_name(setting.name)}-{rate:g}")
            yield summarize(setting.name, acceptance, rate, record)


def send(args: argparse.Namespace, server: ServerClient, rate: float, stem: Path) -> dict[str, Any]:
    """Run SGLang's benchmark against a server; its record of the run.

    Raises:
        CommandError: it failed, or some requests did; the message shows the end of its output.
    """
    out = stem.parent / f"{stem.name}.jsonl"
    out.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang", "--host", HOST),
        *("--port", str(server.port), "--model", "model", "--tokenizer", str(args.tokenizer or args.model)),
        *("--dataset-name", "random-ids", "--tokenize-prompt", "--random-range-ratio", "1"),
        *("--random-input-len", str(args.input_len), "--random-output-len", str(args.output_len)),
        *("--num-prompts", str(args.requests), "--request-rate", f"{rate:g}", "--seed", str(args.seed)),
        *("--warmup-requests", "1", "--disable-tqdm", "--output-details", "--output-file", str(out)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    end = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
    if done.returncode or not out.exists():
        raise CommandError(f"sglang.benchmark.serving ended with code {done.returncode}:\n{end}")
    record = json.loads(out.read_text().splitlines()[-1])
    if record["completed"] < args.requests:
        raise CommandError(f"{record['completed']} of {args.requests} requests were answered at rate {rate:g}:\n{end}")
    if not all(record["ttfts"]):
        raise CommandError(
            "the server's answers have no text, by which SGLang's benchmark tells the first token: start it with a "
            "tokenizer that knows all of the model's tokens, not with --skip-tokenizer-init"
        )
    return record


def summarize(setting: str, acceptance: float | None, rate: float, record: dict[str, Any]) -> Latency:
    """Percentiles of a run, from the record of SGLang's benchmark."""
    between = [times for times in record["itls"] if times]
    return Latency(
        setting,
        acceptance,
        rate,
        record["output_throughput"],
        first_token=percentiles(record["ttfts"]),
        inter_token=percentiles([seconds for times in between for seconds in times]),
        gap=percentiles([seconds for times in between for seconds in chunks(times)]),
        request=percentiles([first + sum(times) for first, times in zip(record["ttfts"], record["itls"])]),
    )


def chunks(times: Sequence[float]) -> list[float]:
    """Seconds of each chunk, from those of its tokens, which SGLang's benchmark made equal."""
    gaps, last = [], None
    for seconds in times:
        if seconds == last:
            gaps[-1] += seconds
        else:
            gaps.append(seconds)
        last = seconds
    return gaps


def percentiles(seconds: Sequence[float]) -> dict[int, float]:
    """:data:`PERCENTILES` of times, in milliseconds; 0 of none."""
    if len(seconds) < 2:
        return {percentile: 1000 * sum(seconds) for percentile in PERCENTILES}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {percentile: 1000 * cuts[percentile - 1] for percentile in PERCENTILES}


def line(result: Latency) -> str:
    """A result as one line of text."""
    parts = [f"{result.setting:24} rate {result.rate:5g}/s  {result.throughput:8.1f} tokens/s"]
    for name in ("first_token", "inter_token", "gap", "request"):
        median, late = (getattr(result, name)[percentile] for percentile in PERCENTILES)
        parts.append(f"{name.replace('_', ' ')} {median:.1f} / {late:.1f} ms")
    return "  ".join(parts)


def write_plot(path: Path, results: Sequence[Latency], measured_with: str) -> None:
    """Request latency over rate, one line per setting: median, and 99th percentile dashed; ``measured_with``: what all share."""
    curves = []
    for place, name in enumerate(dict.fromkeys(result.setting for result in results)):
        mine = [result for result in results if result.setting == name]
        for percentile, style in zip(PERCENTILES, ("-", "--")):
            values = [result.request[percentile] / 1000 for result in mine]
            label = f"{name}, {'median' if percentile == 50 else f'{percentile}th percentile'}"
            curves.append(drawing.Curve(label, [result.rate for result in mine], values, style, f"C{place % 10}"))
    with drawing.png(path, (8, 4.5), drawing.Heading("Latency of requests", measured_with)) as axes:
        drawing.draw(axes, curves, "requests per second")
        axes.set(ylabel="seconds per request", ylim=(0, None))
