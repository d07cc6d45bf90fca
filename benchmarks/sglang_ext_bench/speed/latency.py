"""Measure the latency of stock SGLang and of verified decoding against the request rate, under Poisson traffic.

Tokens of verified decoding arrive in bursts, so that throughput alone does not describe the latency of a stream. A server is started for
each setting, and SGLang's own benchmark (``sglang.benchmark.serving``) sends it random prompts at each rate. The table shows the time to
the first token, the inter-token latency and the request latency, each with median and 99th percentile. SGLang divides the time between
two chunks by the tokens of a chunk. *gap* is the undivided time between two chunks.
"""

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
from sglang_ext.tools.server_process import HOST
from sglang_ext_bench.options import file_name, numbers
from sglang_ext_bench import drawing
from sglang_ext_bench.server import RequestClient
from sglang_ext_bench.speed import settings
from sglang_ext_bench.speed.settings import ServerSetting

PERCENTILES = (50, 99)


@dataclass(frozen=True)
class Latency:
    """The latency of one server at one request rate. Times are milliseconds by percentile.

    Attributes:
        setting: Name of the setting.
        acceptance: Forced acceptance probability. None if it was not forced.
        rate: Requests per second. Infinite if all are sent at once.
        throughput: Output tokens per second.
        first_token: Time from the request to its first token.
        inter_token: Time between two chunks, divided by the tokens of the chunk.
        gap: Time between two chunks.
        request: Time from the request to its last token.
    """

    setting: str
    acceptance: float | None
    rate: float
    throughput: float
    first_token: dict[int, float]
    inter_token: dict[int, float]
    gap: dict[int, float]
    request: dict[int, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``latency``."""
    settings.add_arguments(parser)
    add = parser.add_argument
    add("--tokenizer", type=Path, help="folder of the tokenizer that makes the prompts; default: --model")
    add("--rate", default="1,2,4", help="requests per second, separated by commas (default: %(default)s)")
    add("--requests", type=int, default=64, help="requests at each rate (default: %(default)s)")
    add("--input-len", type=int, default=4096, help="tokens of each prompt (default: %(default)s)")
    add("--output-len", type=int, default=256, help="output tokens of each request (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of prompts and arrival times (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure all settings at all rates, and print a table. Returns 0 if all were measured, else 1."""
    rates = numbers(args.rate, "--rate", float)
    if len(settings.forced_acceptances(args)) > 1:
        raise CommandError(f"--force-acceptance {args.force_acceptance!r}: pass a single probability")
    servers = settings.checked_settings(args)
    results: list[Latency] = []

    def measure(setting: ServerSetting, logs: Path) -> None:
        for result in run_setting(args, setting, rates, logs):
            results.append(result)
            print(line(result), flush=True)

    return settings.finish(args, results, settings.each(args, servers, measure), write_plot)


def run_setting(
    args: argparse.Namespace, setting: ServerSetting, rates: Sequence[float], logs: Path
) -> Iterator[Latency]:
    """Start the server of a setting, and send it traffic at each rate. The prefix cache is empty before each rate."""
    acceptance = settings.acceptances(args, setting)[0]
    with settings.server(args, setting, logs) as server:
        for rate in rates:
            server.flush_cache()
            record = send(args, server, rate, logs / f"{file_name(setting.name)}-{rate:g}")
            yield summarize(setting.name, acceptance, rate, record)


def send(args: argparse.Namespace, server: RequestClient, rate: float, stem: Path) -> dict[str, Any]:
    """Run SGLang's benchmark against a server. Returns its JSON record of the run.

    Args:
        args: The options.
        server: The server.
        rate: Requests per second.
        stem: Path of the record, without its extension.

    Raises:
        CommandError: The benchmark or one of its requests failed. The message shows the end of the benchmark's output.
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
            "the server's responses have no text, from which SGLang's benchmark finds the first token: start the server with "
            "a tokenizer for all of the model's tokens, not with --skip-tokenizer-init"
        )
    return record


def summarize(setting: str, acceptance: float | None, rate: float, record: dict[str, Any]) -> Latency:
    """Compute the percentiles of a run from the record of SGLang's benchmark."""
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
    """Seconds between chunks, from the times of tokens: SGLang's benchmark gives all tokens of a chunk the same time."""
    gaps, last = [], None
    for seconds in times:
        if seconds == last:
            gaps[-1] += seconds
        else:
            gaps.append(seconds)
        last = seconds
    return gaps


def percentiles(seconds: Sequence[float]) -> dict[int, float]:
    """Compute :data:`PERCENTILES` of times in seconds. Returns milliseconds, and 0 without times."""
    if len(seconds) < 2:
        return {percentile: 1000 * sum(seconds) for percentile in PERCENTILES}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {percentile: 1000 * cuts[percentile - 1] for percentile in PERCENTILES}


def line(result: Latency) -> str:
    """Format a result as one line of text."""
    parts = [f"{result.setting:24} rate {result.rate:5g}/s  {result.throughput:8.1f} tokens/s"]
    for name in ("first_token", "inter_token", "gap", "request"):
        median, late = (getattr(result, name)[percentile] for percentile in PERCENTILES)
        parts.append(f"{name.replace('_', ' ')} {median:.1f} / {late:.1f} ms")
    return "  ".join(parts)


def write_plot(path: Path, results: Sequence[Latency], measured_with: str) -> None:
    """Plot the request latency over the rate, for each setting a line of the median and a dashed line of the 99th percentile.

    Args:
        path: PNG file.
        results: The results of all settings.
        measured_with: The settings that all servers share, for the subtitle.
    """
    curves = []
    for index, name in enumerate(dict.fromkeys(result.setting for result in results)):
        own = [result for result in results if result.setting == name]
        for percentile, style in zip(PERCENTILES, ("-", "--")):
            values = [result.request[percentile] / 1000 for result in own]
            label = f"{name}, {'median' if percentile == 50 else f'{percentile}th percentile'}"
            curves.append(drawing.Curve(label, [result.rate for result in own], values, style, f"C{index % 10}"))
    with drawing.png(path, (8, 4.5), drawing.Heading("Latency of requests", measured_with)) as axes:
        drawing.draw(axes, curves, "requests per second")
        axes.set(ylabel="seconds per request", ylim=(0, None))
