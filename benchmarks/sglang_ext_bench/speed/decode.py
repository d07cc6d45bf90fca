"""Measure the decode speed of stock SGLang and of verified decoding, on the same prompts in one run.

A server is started for each setting. Each batch decodes --repeats times, with streaming responses. Its prompts are put into the prefix
cache one after another before, as far as they fit, which measures the time to the first token. The table shows the median, its ratio to
stock, and the least time per token that the GPU's measured read bandwidth allows. If a batch does not fit into the KV pool, as many
requests as fit are measured. With --prompt-file each wave has other prompts, because some servers learn from outputs (SGLang's NGRAM).

With --force-acceptance P each draft token is accepted with probability P if all earlier ones of its round were, whatever verification
finds. This measures the speed at the acceptance of a trained model with random weights. Verification still runs on the full KV, and
rejected tokens are rolled back. Several probabilities are measured on one server.
"""

import argparse
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from sglang_ext_bench import drawing
from sglang_ext_bench.client import SamplingSettings, readings
from sglang_ext_bench.options import numbers
from sglang_ext_bench.prompts import Waves, make_prompts
from sglang_ext_bench.speed import decode_limit, decode_wave, settings
from sglang_ext_bench.speed.decode_limit import ModelBytes
from sglang_ext_bench.speed.decode_wave import Wave
from sglang_ext_bench.speed.settings import ServerSetting


@dataclass(frozen=True)
class DecodeResult:
    """The decode speed of one batch on one server.

    Attributes:
        setting: Name of the setting.
        context: Prompt tokens of each request.
        batch: Requests that were sent.
        running: Requests that decoded at the same time.
        tokens_per_second: Tokens per second of all requests, median of the waves.
        token_ms: Milliseconds per output token of each running request.
        gain: Tokens per second over stock's. None before stock was measured.
        limit_ms: Least milliseconds per token that the read bandwidth allows. None without a GPU, and if the full KV is in tiers.
        waves: The single measurements.
        allowed: Tokens per second that bandwidths and memory allow if the full KV is in tiers. None without a forced acceptance.
        steady: Tokens per second of all requests between the first and the last verification of each, median of the waves.
        acceptance: Forced acceptance probability. None if it was not forced.
        prefill: Seconds to the first token of one prompt that is not in the prefix cache, median. None if there was only one prompt
            of the length, because the first one warms up the server.
        parts_ms: Milliseconds of the parts of the last round: draft, rest, step (metrics.py).
        memory_gib: GiB of device memory in use after the waves. PyTorch keeps freed memory, so this is the largest value so far.
            None without a GPU.
    """

    setting: str
    context: int
    batch: int
    running: int
    tokens_per_second: float
    token_ms: float
    gain: float | None
    limit_ms: float | None
    waves: list[Wave]
    allowed: float | None = None
    steady: float = 0.0
    acceptance: float | None = None
    prefill: float | None = None
    parts_ms: dict[str, float] = field(default_factory=dict)
    memory_gib: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``decode``."""
    add = parser.add_argument
    add("--context-len", default="32768", help="prompt tokens of each request, separated by commas (default: %(default)s)")
    add("--batch", default="8,16", help="requests at once, separated by commas (default: %(default)s)")
    add("--output-len", type=int, default=256, help="output tokens of each request (default: %(default)s)")
    settings.add_arguments(parser)
    add("--prompt-file", type=Path, help="text from which prompts are cut; default: random tokens")
    add("--repeats", type=int, default=3, help="waves of each batch (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure all settings and print their results. Returns 0 if all were measured, else 1."""
    contexts, batches = numbers(args.context_len, "--context-len"), numbers(args.batch, "--batch")
    servers = settings.checked_settings(args)
    waves = Waves(batches, args.repeats, fresh=args.prompt_file is not None)
    prompts = make_prompts(args, waves.prompts, contexts)
    bandwidth = decode_limit.measure_bandwidth()
    if bandwidth:
        print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    results: list[DecodeResult] = []

    def measure(setting: ServerSetting, logs: Path) -> None:
        for result in run_setting(args, setting, prompts, waves, results, bandwidth, logs):
            results.append(result)
            print(line(result), flush=True)

    return settings.finish(args, results, settings.each(args, servers, measure), write_plot, bandwidth=bandwidth)


def run_setting(
    args: argparse.Namespace,
    setting: ServerSetting,
    prompts: dict[int, list[tuple[int, ...]]],
    waves: Waves,
    earlier: list[DecodeResult],
    bandwidth: float | None,
    logs: Path,
) -> Iterator[DecodeResult]:
    """Start the server of a setting, and decode each batch at each context length.

    Args:
        args: The options.
        setting: The setting.
        prompts: Token ids of all prompts, by length.
        waves: The prompts of each wave.
        earlier: Results of earlier settings, among them stock's.
        bandwidth: Read bandwidth of the GPU in bytes per second. None without a GPU.
        logs: Folder for logs.
    """
    with settings.server(args, setting, logs) as server:
        sampling = SamplingSettings()
        pool = int(server.request("server_info")["max_total_num_tokens"])
        for context, same_length in prompts.items():
            fitting = len(same_length) if setting.tier.max_drafts else pool // (context + 1)
            cached: dict[tuple[int, ...], float] = {}
            for batch, acceptance in product(waves.batches, settings.acceptances(args, setting)):
                measured = []
                for where in waves.of(batch):
                    for prompt in same_length[where][:fitting]:
                        if prompt not in cached:
                            cached[prompt] = decode_wave.run(server, [prompt], sampling, 1)[0].times[0]
                    streams = decode_wave.run(server, same_length[where], sampling, args.output_len, acceptance)
                    measured.append(decode_wave.measure(streams))
                # The first prompt of a length also warms up the server.
                prefills, metrics = list(cached.values())[1:], server.request("metrics")
                yield replace(
                    summarize(args, setting, context, measured, earlier, bandwidth),
                    steady=statistics.median(wave.steady for wave in measured),
                    acceptance=acceptance,
                    allowed=allowed(args, setting, context, batch, acceptance, bandwidth, pool, metrics),
                    prefill=statistics.median(prefills) if prefills else None,
                    parts_ms=read_parts(metrics),
                    memory_gib=decode_limit.memory_in_use(),
                )


def read_parts(metrics: str) -> dict[str, float]:
    """Milliseconds of the parts of the last round, from the text of a server's ``/metrics`` page."""
    found = readings(metrics, "sglang_ext:round_seconds")
    return {re.search(r'part="(\w+)"', labels)[1]: 1000 * seconds for labels, seconds in found}


def allowed(
    args: argparse.Namespace,
    setting: ServerSetting,
    context: int,
    batch: int,
    acceptance: float | None,
    bandwidth: float | None,
    pool: int,
    metrics: str,
) -> float | None:
    """Tokens per second that bandwidths and memory allow if the full KV is in tiers. None if an input is missing.

    Args:
        args: The options.
        setting: The setting.
        context: Prompt tokens of each request.
        batch: Requests at once.
        acceptance: Forced acceptance probability.
        bandwidth: Read bandwidth of the GPU in bytes per second.
        pool: Tokens that fit into the KV pool.
        metrics: Text of the server's ``/metrics`` page, which has the bandwidth of loads from host memory.
    """
    link = readings(metrics, "sglang_ext:host_load_bytes_per_second")
    if not (link and bandwidth and acceptance and setting.draft_length):
        return None
    machine = decode_limit.Machine(bandwidth, pool, link[0][1])
    return decode_limit.tiered_tokens_per_second(_model(args), machine, batch, context, args.output_len, setting, acceptance)


def _model(args: argparse.Namespace) -> ModelBytes:
    return ModelBytes.from_folder(args.model, 4 if args.dtype == "float32" else 2)


def summarize(
    args: argparse.Namespace,
    setting: ServerSetting,
    context: int,
    waves: list[Wave],
    earlier: list[DecodeResult],
    bandwidth: float | None,
) -> DecodeResult:
    """Return the median of the waves, its ratio to stock, and the limit of the bandwidth. Arguments as for :func:`run_setting`."""
    batch, running = waves[0].batch, round(statistics.median(wave.running for wave in waves))
    speed = statistics.median(wave.tokens_per_second for wave in waves)
    stock = [r.tokens_per_second for r in earlier if (r.setting, r.context, r.batch) == ("stock", context, batch)]
    limit = None
    if bandwidth:
        model = _model(args)
        mean_context = context + args.output_len / 2
        lengths = [wave.accept_length for wave in waves if wave.accept_length]
        if setting.budget is None:
            limit = decode_limit.stock_ms(model, bandwidth, running, mean_context) if setting.name == "stock" else None
        elif lengths and setting.draft_length and not setting.tier.max_drafts:
            accepted = statistics.mean(lengths)
            limit = decode_limit.verified_ms(
                model, bandwidth, running, mean_context, setting.budget, setting.draft_length, accepted
            )
    gain = speed / stock[0] if stock else None
    return DecodeResult(setting.name, context, batch, running, speed, 1000 * running / speed, gain, limit, waves)


def line(result: DecodeResult) -> str:
    """Format a result as one line of text."""
    parts = [f"{result.setting:24} context {result.context:6} batch {result.batch:3}"]
    if result.acceptance is not None:
        parts.append(f"p {result.acceptance:g}")
    if result.running < result.batch:
        parts.append(f"{result.running} at once")
    parts.append(f"{result.token_ms:8.2f} ms/token")
    parts.append(f"{result.tokens_per_second:7.0f} tokens/s")
    if result.gain:
        parts.append(f"gain {result.gain:5.2f}")
    if result.limit_ms:
        parts.append(f"limit {result.limit_ms:6.2f} ms ({result.limit_ms / result.token_ms:4.0%})")
    if result.allowed:
        steady = f"steady {result.steady:.0f} ({result.steady / result.allowed:4.0%})"
        parts.append(f"allowed {result.allowed:.0f} tokens/s ({result.tokens_per_second / result.allowed:4.0%}), {steady}")
    lengths = [f"{wave.accept_length:.2f}" for wave in result.waves if wave.accept_length]
    if lengths:
        parts.append(f"accept length {' '.join(lengths)}")
    fallbacks = sum(wave.fallbacks for wave in result.waves)
    if fallbacks:
        parts.append(f"{fallbacks} requests ended on full KV")
    parts += [f"{part} {ms:.2f} ms" for part, ms in result.parts_ms.items()]
    if result.prefill is not None:
        parts.append(f"first token {1000 * result.prefill:.0f} ms")
    if result.memory_gib is not None:
        parts.append(f"memory {result.memory_gib:.2f} GiB")
    return "  ".join(parts)


def write_plot(path: Path, results: list[DecodeResult], measured_with: str) -> None:
    """Draw bars of milliseconds per token, grouped by context and batch.

    Args:
        path: PNG file.
        results: The results of all settings.
        measured_with: The settings that all servers share, for the subtitle.
    """
    names = list(dict.fromkeys(_label(result) for result in results))
    groups = list(dict.fromkeys((result.context, result.batch) for result in results))
    with drawing.png(path, (8, 4.5), drawing.Heading("Time per output token of each request", measured_with)) as axes:
        for name, centres in zip(names, drawing.centres(len(groups), len(names))):
            own = [result for result in results if _label(result) == name]
            places = [centres[groups.index((result.context, result.batch))] for result in own]
            axes.bar(places, [result.token_ms for result in own], width=0.9 * drawing.bar_width(len(names)), label=name)
        axes.set_xticks(range(len(groups)), [f"{context} tokens\nbatch {batch}" for context, batch in groups])
        axes.set_ylabel("ms per token")
        axes.legend()


def _label(result: DecodeResult) -> str:
    return result.setting if result.acceptance is None else f"{result.setting} p={result.acceptance:g}"
