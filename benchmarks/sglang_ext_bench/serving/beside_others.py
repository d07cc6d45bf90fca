"""Measures what a request with a JSON schema and one with a penalty cost the other requests of the batch.

    sglang-ext-bench beside-others --model MODEL --context-len 32768 --server-arg=FLAGS

Eight requests decode at once on one server. Six are plain. The two others are plain, too, or one has a schema, a penalty, or both occur. The
model folder needs a tokenizer, for schemas. Its weights may be random, because acceptance is forced.

A line for each wave has its seconds, and chunks, tokens, drafts and accepted drafts of a plain request and of the two others. The last lines
have tokens per second of the six requests, the ratio to that beside plain requests, and the values of all waves. The first wave of each
kind is not counted.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sglang_ext.tools import CommandError, split_flags
from sglang_ext_bench.client import SamplingSettings
from sglang_ext_bench.options import check_counts, probabilities
from sglang_ext_bench.prompts import LOWEST_RANDOM_ID, random_prompts
from sglang_ext_bench.server import BenchServer

PLAIN = 6
BATCH = PLAIN + 2
SCHEMA = '{"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 200}'
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "schema": ({"json_schema": SCHEMA}, {}),
    "penalty": ({}, {"frequency_penalty": 0.1}),
    "schema and penalty": ({"json_schema": SCHEMA}, {"frequency_penalty": 0.1}),
}
"""Sampling parameters of the two other requests."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder with a tokenizer")
    add("--context-len", type=int, default=32768, help="tokens of a prompt (default: %(default)s)")
    add("--output-len", type=int, default=256, help="output tokens of each request (default: %(default)s)")
    add("--acceptance", type=float, default=0.99, help="probability with which each draft is accepted (default: %(default)s)")
    add("--vocabulary", type=int, default=49152, help="token ids of random prompts are below (default: %(default)s)")
    add("--repeats", type=int, default=3, help="waves of each kind that are counted (default: %(default)s)")
    add("--server-arg", action="append", default=[], metavar="FLAGS", help="flags of the server")


def run(args: argparse.Namespace) -> int:
    """Measure all kinds in turn, several times, on one server. Returns 0."""
    check_counts({"--context-len": args.context_len, "--output-len": args.output_len, "--repeats": args.repeats})
    check_counts({"--vocabulary": args.vocabulary}, least=LOWEST_RANDOM_ID + 1)
    probabilities(str(args.acceptance), "--acceptance")
    prompts = random_prompts(BATCH, args.context_len, args.vocabulary)
    flags = ("--kv-mode", "verified", "--kv-bench-acceptance", str(args.acceptance), *split_flags(args.server_arg))
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder, BenchServer(str(args.model), flags, Path(folder) / "server.log") as server:
        for prompt in prompts:
            server.request("generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}})
        for repeat in range(args.repeats + 1):
            for kind, others in KINDS.items():
                rate = plain_rate(server, prompts, others, args)
                # The first wave compiles kernels.
                if repeat:
                    rates[kind].append(rate)
    plain = statistics.median(rates["plain"])
    for kind, values in rates.items():
        median = statistics.median(values)
        waves = ", ".join(f"{value:.1f}" for value in values)
        print(f"beside {kind}: {median:.1f} tokens/s of the six ({median / plain:.2f}); {waves}")
    return 0


def plain_rate(
    server: BenchServer, prompts: Sequence[tuple[int, ...]], others: Sequence[Mapping[str, Any]], args: argparse.Namespace
) -> float:
    """Tokens per second of the plain requests, while all requests decode.

    Args:
        server: The server, with all prompts in its prefix cache.
        prompts: Token ids of all requests.
        others: Sampling parameters of the two other requests.
        args: The options.

    Raises:
        CommandError: A plain request had fewer than two bursts of tokens.
    """
    from sglang_ext.config.request_params import ACCEPTANCE
    from sglang_ext_bench.speed import decode_wave

    common = {**SamplingSettings().as_json(args.output_len), "custom_params": {ACCEPTANCE: args.acceptance}}
    sampling = [common] * PLAIN + [{**common, **more} for more in others]
    bodies = [{"input_ids": list(prompt), "sampling_params": params} for prompt, params in zip(prompts, sampling)]
    started = time.perf_counter()
    with ThreadPoolExecutor(BATCH) as pool:
        streams = list(pool.map(lambda body: decode_wave.read(server, body, started), bodies))
    begin, end = max(stream.times[0] for stream in streams), min(stream.times[-1] for stream in streams)
    counts = [(len(stream.times), stream.tokens[-1], stream.meta.get("kv_drafts"), stream.meta.get("kv_accepted")) for stream in streams]
    print(f"    {end - begin:.2f} s; chunks, tokens, drafts, accepted: {counts[0]}, {counts[-2]}, {counts[-1]}", flush=True)
    rates = [stream.rate(begin, end) for stream in streams[:PLAIN]]
    if not all(rates):
        raise CommandError(f"--output-len {args.output_len}: a request had fewer than two bursts of tokens while all decoded: pass a larger one")
    return sum(rates)
