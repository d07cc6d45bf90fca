"""Decode speed: stock SGLang against verified decoding, on the same prompts in one run.

For each setting a server is started. Each batch decodes, streaming, --repeats times; its prompts are put into the
prefix cache before, one after another, as far as they fit, which measures the time to the first token. The table shows the
median, its ratio to stock, and the least time that the GPU's measured read bandwidth allows. Where a batch does not fit at once,
what is measured is as many requests as do. Prompts from a text are other ones in each wave, as some servers learn from
answers (SGLang's NGRAM).

With --force-acceptance P each draft is accepted with probability P when those before it were, whatever
verification finds: speed at the acceptance of a trained model, on weights without training. Verification
still runs on the full KV, and what is rejected is rolled back. Several P are measured on one server.
"""

import argparse
import json
import random
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from sglang_ext.bench import BenchError, decode_limit, decode_wave, report, settings
from sglang_ext.bench.client import SamplingSettings
from sglang_ext.bench.decode_limit import ModelBytes
from sglang_ext.bench.decode_wave import Wave
from sglang_ext.bench.metrics_page import readings
from sglang_ext.bench.prompts import encode, load_tokenizer
from sglang_ext.bench.settings import Setting, numbers


@dataclass(frozen=True)
class Result:
    """A batch's decode speed in one setting.

    Attributes:
        setting: its name.
        context: prompt tokens of each request.
        running: requests that decoded side by side.
        tokens_per_second: of all, median of the waves.
        token_ms: milliseconds per output token of each request that ran.
        steady: tokens per second of all between each request's first verification and its last, median of the waves.
        gain: these tokens per second over stock's; None before stock was measured.
        limit_ms: the least that the bandwidth allows; None without a GPU, and where full KV lies in tiers.
        allowed: tokens per second that bandwidths and memory allow where full KV lies in tiers, at a forced acceptance.
        waves: what was measured.
        acceptance: probability that a draft was forced to be accepted; None where verification decided.
        prefill: seconds to the first token of one prompt alone that is not in the prefix cache, median.
        parts_ms: milliseconds of the last round's parts: draft, rest, step (metrics.py).
        memory_gib: GiB of device memory in use after the waves, which is the most so far, as PyTorch gives none back;
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
    prefill: float = 0.0
    parts_ms: dict[str, float] = field(default_factory=dict)
    memory_gib: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    add = parser.add_argument
    add("--context-len", default="32768", help="prompt tokens of each request, separated by commas")
    add("--batch", default="8,16", help="requests at once, separated by commas")
    add("--output-len", type=int, default=256, help="output tokens of each request")
    settings.add_arguments(parser)
    add("--prompt-file", type=Path, help="take prompts from this text, by the model's tokenizer; default: random tokens")
    add("--repeats", type=int, default=3, help="waves of each batch")


def run(args: argparse.Namespace) -> int:
    """Measure all settings, print a table; 0 when all could be measured, else 1 after the others."""
    contexts, batches = numbers(args.context_len, "--context-len"), numbers(args.batch, "--batch")
    servers = list(settings.all_of(args))
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


@dataclass(frozen=True)
class Waves:
    """Which prompts each wave takes of all that there are of a length.

    Attributes:
        batches: requests at once.
        repeats: waves of each batch.
        fresh: whether each wave takes others; else all begin with the first.
    """

    batches: list[int]
    repeats: int
    fresh: bool

    @property
    def prompts(self) -> int:
        """Prompts that all waves need."""
        return self.repeats * sum(self.batches) if self.fresh else max(self.batches)

    def of(self, batch: int) -> list[slice]:
        """Where the prompts of a batch's waves lie."""
        if not self.fresh:
            return [slice(0, batch)] * self.repeats
        before = self.repeats * sum(self.batches[: self.batches.index(batch)])
        return [slice(first, first + batch) for first in range(before, before + self.repeats * batch, batch)]


def make_prompts(
    args: argparse.Namespace, count: int, contexts: list[int]
) -> dict[int, list[tuple[int, ...]]]:
    """``count`` different prompts of each length."""
    config = json.loads((args.model / "config.json").read_text())
    if args.prompt_file is None:
        draw = random.Random(0)
        # The first ids are special tokens in most vocabularies.
        lowest = min(1000, config["vocab_size"] // 2)
        return {
            length: [
                tuple(draw.randrange(lowest, config["vocab_size"]) for _ in range(length)) for _ in range(count)
            ]
            for length in contexts
        }
    ids = encode(load_tokenizer(str(args.model)), args.prompt_file.read_text())
    needed = max(contexts) + count
    if len(ids) < needed:
        raise BenchError(f"--prompt-file {args.prompt_file} has {len(ids)} tokens; these prompts need {needed}")
    stride = (len(ids) - max(contexts)) // count
    if stride < max(contexts):
        print(f"--prompt-file has {len(ids)} tokens: the {count} prompts overlap, each begins {stride} tokens after the last")
    return {
        length: [ids[i * stride : i * stride + length] for i in range(count)] for length in contexts
    }


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
                    prefill=statistics.median(prefills or [0.0]),
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


def line(result: Result) -> str:
    """A result as one line of text."""
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
    parts.append(f"first token {1000 * result.prefill:.0f} ms")
    if result.memory_gib is not None:
        parts.append(f"memory {result.memory_gib:.2f} GiB")
    return "  ".join(parts)


def write_plot(path: Path, results: list[Result]) -> None:
    """Bars of milliseconds per token, by context and batch."""
    names = list(dict.fromkeys(_label(result) for result in results))
    places = list(dict.fromkeys((result.context, result.batch) for result in results))
    with report.png(path, (8, 4.5)) as axes:
        for offset, name in enumerate(names):
            mine = [result for result in results if _label(result) == name]
            at = [places.index((result.context, result.batch)) + offset / (len(names) + 1) for result in mine]
            axes.bar(at, [result.token_ms for result in mine], width=0.9 / (len(names) + 1), label=name)
        axes.set_xticks(range(len(places)), [f"{context} tokens\nbatch {batch}" for context, batch in places])
        axes.set_ylabel("ms per token")
        axes.legend()


def _label(result: Result) -> str:
    return result.setting if result.acceptance is None else f"{result.setting} p={result.acceptance:g}"
