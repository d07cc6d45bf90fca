"""Runs ``python -m sglang_ext_bench decode``: starts the servers, times the waves, writes a table, JSON and plots."""

import argparse
import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from sglang_ext_bench.client import SamplingSettings
from sglang_ext_bench.speed import decode_limit, decode_wave, settings
from sglang_ext_bench.speed.decode_limit import ModelBytes
from sglang_ext_bench.speed.decode_options import add_arguments
from sglang_ext_bench.speed.decode_prompts import Waves, make_prompts
from sglang_ext_bench.speed.decode_report import Result, line, write_plot
from sglang_ext_bench.speed.decode_wave import Wave
from sglang_ext_bench.speed.metrics_page import readings
from sglang_ext_bench.speed.settings import Setting, numbers

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Measure all settings, print a table; 0 when all could be measured, else 1 after the others."""
    contexts, batches = numbers(args.context_len, "--context-len"), numbers(args.batch, "--batch")
    servers = settings.checked(args)
    waves = Waves(batches, args.repeats, fresh=args.prompt_file is not None)
    prompts = make_prompts(args, waves.prompts, contexts)
    bandwidth = decode_limit.measure_bandwidth()
    if bandwidth:
        print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    results: list[Result] = []

    def measure(setting: Setting, logs: Path) -> None:
        for result in run_setting(args, setting, prompts, waves, results, bandwidth, logs):
            results.append(result)
            print(line(result), flush=True)

    return settings.finish(args, results, settings.each(args, servers, measure), write_plot, bandwidth=bandwidth)


def run_setting(
    args: argparse.Namespace,
    setting: Setting,
    prompts: dict[int, list[tuple[int, ...]]],
    waves: Waves,
    before: list[Result],
    bandwidth: float | None,
    logs: Path,
) -> Iterator[Result]:
    """Start the setting's server and decode each batch at each context."""
    with settings.server(args, setting, logs) as server:
        sampling = SamplingSettings()
        pool = int(server.request("server_info")["max_total_num_tokens"])
        for context, of_length in prompts.items():
            fitting = len(of_length) if setting.tier.longest else pool // (context + 1)
            cached: dict[tuple[int, ...], float] = {}
            for batch, acceptance in product(waves.batches, settings.acceptances(args, setting)):
                measured = []
                for where in waves.of(batch):
                    for prompt in of_length[where][:fitting]:
                        if prompt not in cached:
                            cached[prompt] = decode_wave.run(server, [prompt], sampling, 1)[0].times[0]
                    streams = decode_wave.run(server, of_length[where], sampling, args.output_len, acceptance)
                    measured.append(decode_wave.measure(streams))
                # The first prompt of a length also makes the server ready for it.
                prefills, metrics = list(cached.values())[1:], server.request("metrics")
                yield replace(
                    summarize(args, setting, context, measured, before, bandwidth),
                    steady=statistics.median(wave.steady for wave in measured),
                    acceptance=acceptance,
                    allowed=allowed(args, setting, context, batch, acceptance, bandwidth, pool, metrics),
                    prefill=statistics.median(prefills) if prefills else None,
                    parts_ms=read_parts(metrics),
                    memory_gib=decode_limit.memory_in_use(),
                )


def read_parts(metrics: str) -> dict[str, float]:
    """Milliseconds of the last round's parts, from a server's ``/metrics`` page."""
    found = readings(metrics, "sglang_ext:round_seconds")
    return {re.search(r'part="(\w+)"', labels)[1]: 1000 * seconds for labels, seconds in found}


def allowed(
    args: argparse.Namespace,
    setting: Setting,
    context: int,
    batch: int,
    acceptance: float | None,
    bandwidth: float | None,
    pool: int,
    metrics: str,
) -> float | None:
    """Tokens per second that the bandwidths allow where full KV lies in tiers; None where that cannot be said."""
    link = readings(metrics, "sglang_ext:host_load_bytes_per_second")
    if not (link and bandwidth and acceptance and setting.draft_length):
        return None
    machine = decode_limit.Machine(bandwidth, pool, link[0][1])
    return decode_limit.tiered_tokens_per_second(_model(args), machine, batch, context, args.output_len, setting, acceptance)


def _model(args: argparse.Namespace) -> ModelBytes:
    return ModelBytes.of(args.model, 4 if args.dtype == "float32" else 2)


def summarize(
    args: argparse.Namespace,
    setting: Setting,
    context: int,
    waves: list[Wave],
    before: list[Result],
    bandwidth: float | None,
) -> Result:
    """The waves' median, beside stock's and the bandwidth's limit."""
    batch, running = waves[0].batch, round(statistics.median(wave.running for wave in waves))
    speed = statistics.median(wave.tokens_per_second for wave in waves)
    stock = [r.tokens_per_second for r in before if (r.setting, r.context, r.batch) == ("stock", context, batch)]
    limit = None
    if bandwidth:
        model = _model(args)
        grown = context + args.output_len / 2
        lengths = [wave.accept_length for wave in waves if wave.accept_length]
        if setting.budget is None:
            limit = decode_limit.stock_ms(model, bandwidth, running, grown) if setting.name == "stock" else None
        elif lengths and setting.draft_length and not setting.tier.longest:
            accepted = statistics.mean(lengths)
            limit = decode_limit.verified_ms(
                model, bandwidth, running, grown, setting.budget, setting.draft_length, accepted
            )
    gain = speed / stock[0] if stock else None
    return Result(setting.name, context, batch, running, speed, 1000 * running / speed, gain, limit, waves)
