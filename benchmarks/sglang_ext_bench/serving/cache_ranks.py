"""Measures acceptance and speed of long answers with cache ranks, beside stock SGLang and beside selections without cache ranks.

    sglang-ext-bench cache-ranks --model MODEL --prompts FOLDER --context 2048 --output 64 --ranks 1 --mode verified

Each server decodes the same prompts, the beginnings of the prompts in FOLDER, one at a time, on a CPU in float32. The servers are `stock`,
`between-steps` (spade selects between steps) and `cache-ranks` (spade selects at cache ranks).

A line for each prompt has milliseconds per token after the first one, whether the output equals stock's, and counts of drafts. After the
last prompt, a line has the acceptance rate, and further lines have the metrics of cache ranks that are not 0.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_ext.tools import CommandError
from sglang_ext_bench.client import SamplingSettings
from sglang_ext_bench.options import check_counts
from sglang_ext_bench.prompts import load_prompts, load_tokenizer
from sglang_ext_bench.server import BenchServer

STOCK, BETWEEN_STEPS, CACHE_RANKS = "stock", "between-steps", "cache-ranks"
SERVERS = (STOCK, BETWEEN_STEPS, CACHE_RANKS)
RANK_METRICS = ("missed_selections_total", "selection_wait_seconds_total", "choosing_seconds", "copies_total", "cache_rank_starts_total")
DRAFT_LENGTH = "16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder")
    add("--prompts", type=Path, required=True, help="folder of .txt files, or JSON lines (text / messages)")
    add("--context", type=int, default=2048, help="tokens of each prompt; shorter prompts are left out (default: %(default)s)")
    add("--output", type=int, default=64, help="output tokens of each prompt (default: %(default)s)")
    add("--most", type=int, default=2, help="largest number of prompts (default: %(default)s)")
    add("--ranks", type=int, default=1, help="cache ranks (default: %(default)s)")
    add("--mode", default="verified", choices=["verified", "lossy"], help="as --kv-mode of a server (default: %(default)s)")
    add("--select", default="0.125", help="as --kv-select of a server (default: %(default)s)")
    add("--flag", action="append", default=[], help="one more word of the flags of servers with spade: --flag=--kv-select-by --flag=regressed")
    add("--only", nargs="*", choices=SERVERS, default=list(SERVERS), help=f"servers to measure, of {', '.join(SERVERS)}; default: all")


def run(args: argparse.Namespace) -> int:
    """Measure the servers one after another. Returns 0."""
    check_counts({"--context": args.context, "--output": args.output, "--most": args.most, "--ranks": args.ranks})
    all_prompts = load_prompts(args.prompts, load_tokenizer(str(args.model)))
    prompts = [prompt.input_ids[: args.context] for prompt in all_prompts if len(prompt.input_ids) >= args.context][: args.most]
    if not prompts:
        raise CommandError(f"--prompts {args.prompts} has no prompt of --context {args.context} tokens: pass longer prompts, or fewer tokens")
    spade = ("--kv-mode", args.mode, "--kv-compressor", "spade", "--kv-select", args.select, *args.flag)
    if args.mode == "verified":
        spade = (*spade, "--kv-draft-length", DRAFT_LENGTH)
    flags = {STOCK: (), BETWEEN_STEPS: spade, CACHE_RANKS: (*spade, "--kv-cache-ranks", str(args.ranks))}
    stock_outputs = None
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            outputs = measure(name, flags[name], prompts, args, Path(folder, f"{name}.log"), stock_outputs)
            stock_outputs = outputs if name == STOCK else stock_outputs
    return 0


def measure(
    name: str,
    flags: Sequence[str],
    prompts: Sequence[tuple[int, ...]],
    args: argparse.Namespace,
    log: Path,
    stock_outputs: list[list[int]] | None,
) -> list[list[int]]:
    """Start a server, decode all prompts, and print a line for each. Returns the output tokens of each prompt.

    Args:
        name: Name of the server in the output.
        flags: Flags of the server beside those that all have.
        prompts: Token ids.
        args: The options.
        log: File of the server's log.
        stock_outputs: Output tokens of stock SGLang. None if it was not measured.
    """
    pool = 2 * (args.context + args.output)
    common = ("--device", "cpu", "--dtype", "float32", "--max-total-tokens", str(pool), "--enable-metrics")
    outputs, drafts, accepted = [], 0, 0
    with BenchServer(str(args.model), (*common, *flags), log) as server:
        for i, prompt in enumerate(prompts):
            server.flush_cache()
            tokens, meta, seconds = generate(server, prompt, args.output)
            outputs.append(tokens)
            drafts, accepted = drafts + meta.get("kv_drafts", 0), accepted + meta.get("kv_accepted", 0)
            equal = "" if stock_outputs is None else f", equal to stock: {tokens == stock_outputs[i]}"
            counts = {key: meta.get(f"kv_{key}") for key in ("drafts", "accepted", "fallback", "accept_length")}
            print(f"{name}: prompt {i}: {1e3 * seconds:.1f} ms a token{equal}, {counts}", flush=True)
        if drafts:
            print(f"{name}: {accepted} of {drafts} drafts accepted, {accepted / drafts:.3f}", flush=True)
        for line in rank_metrics(server):
            print("   ", line, flush=True)
    return outputs


def generate(server: BenchServer, prompt: tuple[int, ...], new_tokens: int) -> tuple[list[int], dict[str, Any], float]:
    """Decode a prompt. Returns the output tokens, the ``meta_info``, and the seconds per token after the first chunk.

    Raises:
        CommandError: The server sent no tokens.
    """
    body = {"input_ids": list(prompt), "sampling_params": SamplingSettings().as_json(new_tokens), "stream": True}
    first_seconds = first_tokens = last = None
    for last in server.stream("generate", body):
        if "output_ids" not in last:
            raise CommandError(f"a request failed: {last.get('error', last)}")
        if first_seconds is None:
            first_seconds, first_tokens = time.perf_counter(), len(last["output_ids"])
    if last is None:
        raise CommandError(f"a request ended without tokens\n{server.describe_log()}")
    seconds = time.perf_counter() - first_seconds
    return last["output_ids"], last["meta_info"], seconds / max(1, new_tokens - first_tokens)


def rank_metrics(server: BenchServer) -> list[str]:
    """Lines of the metrics page about cache ranks, without those that are 0."""
    prefixes = tuple(f"sglang_ext:{name}" for name in RANK_METRICS)
    return [line for line in server.request("metrics").splitlines() if line.startswith(prefixes) and not line.endswith(" 0.0")]
