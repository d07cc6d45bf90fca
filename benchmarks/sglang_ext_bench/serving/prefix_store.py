"""Compares the time to the first token of a long prompt that is computed with that of a prompt that a prefix store has.

    sglang-ext-bench prefix-store --model MODEL --prompt-file TEXT --store file:FOLDER --context-len 6000 --json store.json

Three servers run one after another. `computed` has no store. `writing` begins with an empty store, computes the prompts, and writes them.
`reading` never saw the prompts. Each prompt is sent alone, and once more after the prefix cache was cleared, so that the second time measures
the store of `writing`. The store must be empty. Answers of all servers are compared.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from sglang_ext.mem_cache.prefix_store.backend import (
    StoreBackend,
    StoreError,
    open_backend,
)
from sglang_ext.tools import CommandError, split_flags
from sglang_ext_bench import report
from sglang_ext_bench.options import DTYPES, check_counts
from sglang_ext_bench.prompts import make_prompts
from sglang_ext_bench.server import BenchServer

COMPUTED, WRITING, READING = "computed", "writing", "reading"
QUIET_SECONDS = 1.0
"""The server has written all pages if the store has not grown for so long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_common_arguments(parser, context_len=6000, output_len=16, host_gb=8.0)
    parser.add_argument("--store", required=True, metavar="URL", help="an empty store, as for --kv-store")
    parser.add_argument("--form", default="raw", choices=("raw", "anchored"), help="as --kv-store-form (default: %(default)s)")


def add_common_arguments(parser: argparse.ArgumentParser, context_len: int, output_len: int, host_gb: float) -> None:
    """Add the options of commands that compare servers with and without a store. The numbers are defaults."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder")
    add("--prompt-file", type=Path, required=True, help="text that prompts are taken from")
    add("--context-len", type=int, default=context_len, help="tokens of a prompt (default: %(default)s)")
    add("--prompts", type=int, default=3, help="number of prompts (default: %(default)s)")
    add("--output-len", type=int, default=output_len, help="tokens of the answers that are compared (default: %(default)s)")
    add("--host-gb", type=float, default=host_gb, help="as --kv-host-gb (default: %(default)s)")
    add("--dtype", default="float32", choices=DTYPES, help="(default: %(default)s)")
    add("--server-arg", action="append", default=[], metavar="FLAGS", help="flags of all servers")
    add("--logs", type=Path, help="folder for the servers' logs; default: none are kept")
    add("--json", type=Path, help="keep the results here")


def run(args: argparse.Namespace) -> int:
    """Measure the servers, and print the table. Returns 1 if answers differ, else 0."""
    from sglang_ext_bench.speed.settings import log_folder

    check_counts({"--prompts": args.prompts, "--context-len": args.context_len, "--output-len": args.output_len})
    backend = open_empty_store(args.store)
    prompts = [list(ids) for ids in make_prompts(args, args.prompts, [args.context_len])[args.context_len]]
    found: dict[str, list[dict[str, Any]]] = {}
    with log_folder(args) as logs:
        for arm in (COMPUTED, WRITING, READING):
            flags = (*server_flags(args, arm), *split_flags(args.server_arg))
            with BenchServer(str(args.model), flags, logs / f"{arm}.log") as server:
                found[arm] = measure(server, prompts, args.output_len, backend if arm == WRITING else None)
    backend.close()
    rows, differing = table_rows(found), count_differing(found)
    if args.json is not None:
        settings = {name: str(value) for name, value in vars(args).items() if name not in ("json", "logs", "command")}
        report.write_json(args.json, {"settings": settings, **report.origin(), "servers": found, "differing_answers": differing})
    columns = ("prompts", "first token, s", "of computing", "from the store")
    report.make_console().print(report.make_table(f"{args.prompts} prompts of {args.context_len} tokens, medians", columns, rows))
    print(f"{differing} of {2 * args.prompts * len(found)} answers differ from those of the server without a store")
    return 1 if differing else 0


def open_empty_store(url: str) -> StoreBackend:
    """Open a store.

    Raises:
        CommandError: It cannot be reached, or has pages.
    """
    try:
        backend = open_backend(url)
        count = backend.statistics().objects
    except StoreError as error:
        raise CommandError(f"--store {url}: {error}") from error
    if count:
        raise CommandError(f"--store {url} has {count} pages; pass an empty store")
    return backend


def host_flags(args: argparse.Namespace) -> tuple[str, ...]:
    """Flags of a server without a store. It has host memory, so that only the store differs."""
    return ("--dtype", args.dtype, "--kv-mode", "verified", "--kv-host-gb", str(args.host_gb), "--enable-cache-report")


def server_flags(args: argparse.Namespace, arm: str) -> tuple[str, ...]:
    """Flags of a server."""
    return host_flags(args) if arm == COMPUTED else (*host_flags(args), "--kv-store", args.store, "--kv-store-form", args.form)


def measure(server: BenchServer, prompts: Sequence[Sequence[int]], output_len: int, backend: StoreBackend | None) -> list[dict[str, Any]]:
    """Send each prompt alone to an empty prefix cache, twice.

    Args:
        backend: The store that the server writes, to wait until it has all pages before the second time. None if it writes none.
    """
    # The first prefill of a server compiles and allocates.
    ask(server, list(reversed(prompts[0])), 1)
    found = []
    for time_index in range(2):
        server.flush_cache()
        for prompt in prompts:
            seconds, stored = first_token(server, prompt)
            output = ask(server, prompt, output_len)["output_ids"]
            found.append({"time": time_index, "seconds": seconds, "stored": stored, "output": output})
        if backend is not None:
            wait_until_quiet(backend)
    return found


def ask(server: BenchServer, ids: Sequence[int], tokens: int) -> dict[str, Any]:
    """Generate greedily."""
    return server.request("generate", {"input_ids": list(ids), "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}})


def first_token(server: BenchServer, prompt: Sequence[int]) -> tuple[float, int]:
    """Seconds to the first token of a prompt, and the tokens of the prompt that came from the store."""
    begin = time.perf_counter()
    answer = ask(server, prompt, 1)
    seconds = time.perf_counter() - begin
    return seconds, (answer["meta_info"].get("cached_tokens_details") or {}).get("storage", 0)


def wait_until_quiet(backend: StoreBackend) -> None:
    """Wait until the store does not grow any more."""
    count, since = -1, time.monotonic()
    while time.monotonic() - since < QUIET_SECONDS:
        if (now := backend.statistics().objects) != count:
            count, since = now, time.monotonic()
        time.sleep(0.1)


def table_rows(found: dict[str, list[dict[str, Any]]]) -> list[tuple[str, ...]]:
    """Rows of the table: what is measured, median seconds, the ratio to computing, and tokens of a prompt from the store."""
    labels = {
        (COMPUTED, 0): "computed, without a store", (WRITING, 0): "computed, store empty", (WRITING, 1): "stored, same server",
        (READING, 0): "stored, another server",
    }  # fmt: skip
    rows, base = [], None
    for (arm, time_index), label in labels.items():
        same = [each for each in found[arm] if each["time"] == time_index]
        seconds = median(each["seconds"] for each in same)
        base = base or seconds
        rows.append((label, f"{seconds:.3f}", f"{seconds / base:.3f}", str(int(median(each["stored"] for each in same)))))
    return rows


def count_differing(found: dict[str, list[dict[str, Any]]]) -> int:
    """Answers that differ from those of the server without a store."""
    expected = [each["output"] for each in found[COMPUTED]]
    return sum(each["output"] != output for answers in found.values() for each, output in zip(answers, expected))
