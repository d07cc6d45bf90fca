"""Counts the contexts that run at once in one pool, with stock SGLang and with lossy methods that free the full KV.

    sglang-ext-bench lossy-contexts --model MODEL --tokens 2048 --contexts 6 --methods int4,kivi:2,hack:2:quantized

The pool has room for --contexts contexts of --tokens tokens in bfloat16. Each server gets more prompts than it can hold, all of different
random tokens, with long outputs. When no further request has started for --patience seconds, the largest number of running requests counts.

A method has the name of --kv-compressor. After a colon follow the bits of its codes, and after another one the value of --kv-prefill. With
`spade`, a cache rank holds the full KV, and the value of --kv-select follows the colon.

The table has the requests that ran at once, and their ratio to stock.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from sglang_ext.tools import CommandError, split_flags
from sglang_ext_bench.client import SamplingSettings, total
from sglang_ext_bench.options import check_counts, names
from sglang_ext_bench.prompts import random_prompts
from sglang_ext_bench.server import BenchServer

STOCK = "stock"
OUTPUT_TOKENS, VOCABULARY = 256, 20000
LOG_INTERVAL = ("--decode-log-interval", "4")
"""SGLang updates the number of running requests only when it logs a decode round."""
POLL_SECONDS = 1.0
REQUEST_TIMEOUT = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face folder")
    add("--tokens", type=int, default=2048, help="tokens of a context (default: %(default)s)")
    add("--contexts", type=int, default=12, help="contexts that fit into the pool (default: %(default)s)")
    add("--methods", default="int4,kivi,hack,kivi:2,hack:2", help="separated by commas (default: %(default)s)")
    add("--patience", type=float, default=60.0, help="seconds without a further request (default: %(default)s)")
    add("--most", type=float, default=8.0, help="prompts that are sent, over --contexts (default: %(default)s)")
    add("--server-arg", action="append", default=[], metavar="FLAGS", help="flags of all servers")


def run(args: argparse.Namespace) -> int:
    """Measure one server after another, and print the table. Returns 0."""
    check_counts({"--tokens": args.tokens, "--contexts": args.contexts})
    if args.patience <= 0:
        raise CommandError(f"--patience {args.patience:g}: pass seconds above 0")
    if args.most < 1:
        raise CommandError(f"--most {args.most:g}: pass 1 or more")
    prompts = random_prompts(int(args.most * args.contexts), args.tokens, VOCABULARY)
    pool = str(args.tokens * args.contexts)
    common = ("--dtype", "bfloat16", "--max-total-tokens", pool, "--enable-metrics", *LOG_INTERVAL, *split_flags(args.server_arg))
    counts: dict[str, int] = {}
    for name in dict.fromkeys((STOCK, *names(args.methods))):
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "server.log")
            with BenchServer(args.model, (*common, *method_flags(name)), log, request_timeout=REQUEST_TIMEOUT) as server:
                counts[name] = count_running(server, prompts, args.patience)
    print("\n| method | at once | over stock |\n|---|---|---|")
    for name, count in counts.items():
        ratio = f"{count / counts[STOCK]:.2f}" if counts[STOCK] else "-"
        print(f"| `{name}` | {count} | {ratio} |")
    return 0


def count_running(server: BenchServer, prompts: Sequence[tuple[int, ...]], patience: float) -> int:
    """Send all prompts. Returns the largest number of running requests, once it has not grown for ``patience`` seconds."""
    params = SamplingSettings().as_json(OUTPUT_TOKENS)

    def send(input_ids: tuple[int, ...]) -> None:
        try:
            server.request("generate", {"input_ids": list(input_ids), "sampling_params": params})
        except (CommandError, ConnectionError):
            pass  # The server is stopped before the output ends.

    for input_ids in prompts:
        threading.Thread(target=send, args=(input_ids,), daemon=True).start()
    largest, grown_at = 0, time.monotonic()
    while time.monotonic() - grown_at < patience and largest < len(prompts):
        time.sleep(POLL_SECONDS)
        running = int(total(server.request("metrics"), "sglang:num_running_reqs"))
        if running > largest:
            largest, grown_at = running, time.monotonic()
            print(f"  {largest} run", flush=True)
    fallback_tokens = total(server.request("metrics"), "sglang_ext:fallback_tokens_total")
    if fallback_tokens:
        print(f"  {fallback_tokens:.0f} tokens were decoded on the full KV")
    return largest


def method_flags(name: str) -> tuple[str, ...]:
    """The flags of the server of a method. Empty for stock."""
    if name == STOCK:
        return ()
    method, *values = name.split(":")
    lossy = ("--kv-mode", "lossy", "--kv-compressor", method)
    if method == "spade":
        return (*lossy, "--kv-cache-ranks", "1", "--kv-select", *(values or ["0.125"]))
    return (*lossy, *chain.from_iterable(zip(("--kv-bits", "--kv-prefill"), values)))
