"""Compares the time to the first token of long prompts that are computed with that of prompts that a prefix store has.

    sglang-ext-bench prefix-store --model MODEL --prompt-file TEXT --store file:FOLDER --store tcp://127.0.0.1:7100 --json stores.json

One server without a store runs all the time. For each store, two servers with the same flags run one after another. With the first one the
store is *empty*: each prompt goes to both servers in turn, and its pages are written. Then the prompts are *stored*, and the same server reads
them, because its prefix cache was cleared. The *restarted* server is a new process that never saw the prompts. So it also stands for a second
server on the store.

Each prompt is sent alone, to an empty prefix cache: first for one token, whose time is measured, then for a greedy and a seeded answer. The
next prompt follows when the store has all pages. Further, shorter prompts only compare answers with those of the server without a store. The
exit code is 1 if an answer differs.

Start the stores of one machine before:

    redis-server --port 6379 --save ""                                              # redis://127.0.0.1:6379/0
    python -m sglang_ext.store serve --listen tcp://127.0.0.1:7100 --memory-gb 4    # tcp://127.0.0.1:7100
    moto_server -H 127.0.0.1 -p 5000                                                # s3://BUCKET?endpoint=http://127.0.0.1:5000
    mooncake_master --rpc_port 50051                                                # mooncake://127.0.0.1:50051
    MOONCAKE_MASTER=127.0.0.1:50051 python -m mooncake.mooncake_store_service

For S3, create the bucket first, and set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_DEFAULT_REGION, to any values for moto.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
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
from sglang_ext_bench.client import total
from sglang_ext_bench.options import DTYPES, check_counts
from sglang_ext_bench.prompts import make_prompts
from sglang_ext_bench.server import BenchServer

COMPUTED, EMPTY, STORED, RESTARTED = "computed", "empty", "stored", "restarted"
LABELS = {COMPUTED: "no store", EMPTY: "empty store", STORED: "same server", RESTARTED: "restarted server"}
"""What is measured of each store, and its name in the table."""
SEEDED = {"temperature": 0.8, "sampling_seed": 11}
QUIET_SECONDS = 1.0
"""The server has written all pages if the store has not grown for so long."""


@dataclass(frozen=True)
class PromptTimes:
    """Times and answers of one prompt on one server.

    Attributes:
        tokens: Tokens of the prompt.
        seconds: Seconds to its first token.
        answer_seconds: Seconds of all answers together. Their prompt is in the prefix cache, and its pages are written.
        stored: Tokens of the prompt that came from the store.
        answers: Token ids of the greedy answer, and of the seeded one if there is one.
    """

    tokens: int
    seconds: float
    answer_seconds: float
    stored: int
    answers: Sequence[list[int]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_common_arguments(parser, context_len=6000, output_len=16, host_gb=8.0)
    add = parser.add_argument
    add("--store", action="append", required=True, metavar="URL", help="an empty store, as for --kv-store; repeatable")
    add("--form", default="raw", choices=("raw", "anchored"), help="as --kv-store-form (default: %(default)s)")
    add("--short-prompts", type=int, default=24, help="number of further prompts, which only compare answers (default: %(default)s)")
    add("--short-len", type=int, default=512, help="tokens of each (default: %(default)s)")
    text = "compare no seeded answers, so that servers need no --enable-deterministic-inference, which slows down prefills on GPUs"
    add("--greedy-only", action="store_true", help=text)


def add_common_arguments(parser: argparse.ArgumentParser, context_len: int, output_len: int, host_gb: float) -> None:
    """Add the options of commands that compare servers with and without a store. The numbers are defaults."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder")
    add("--prompt-file", type=Path, help="text that prompts are taken from; default: random tokens")
    add("--context-len", type=int, default=context_len, help="tokens of a prompt (default: %(default)s)")
    add("--prompts", type=int, default=3, help="number of prompts (default: %(default)s)")
    add("--output-len", type=int, default=output_len, help="tokens of the answers that are compared (default: %(default)s)")
    add("--host-gb", type=float, default=host_gb, help="as --kv-host-gb (default: %(default)s)")
    add("--dtype", default="float32", choices=DTYPES, help="(default: %(default)s)")
    add("--server-arg", action="append", default=[], metavar="FLAGS", help="flags of all servers")
    add("--logs", type=Path, help="folder for the servers' logs; default: none are kept")
    add("--json", type=Path, help="keep the results here")


def run(args: argparse.Namespace) -> int:
    """Measure all stores, and print the table. Returns 1 if answers differ, else 0."""
    from sglang_ext_bench.speed.settings import log_folder

    check_counts({"--prompts": args.prompts, "--context-len": args.context_len, "--output-len": args.output_len, "--short-len": args.short_len})
    check_counts({"--short-prompts": args.short_prompts}, least=0)
    for url in args.store:
        open_empty_store(url).close()
    prompts = all_prompts(args)
    found: dict[str, dict[str, list[PromptTimes]]] = {}
    seeded = not args.greedy_only
    with log_folder(args) as logs, running(args, logs / "computed.log", seeded=seeded) as computed:
        for number, url in enumerate(args.store, 1):
            flags = ("--kv-store", url, "--kv-store-form", args.form)
            servers = [running(args, logs / f"store-{number}-{name}.log", *flags, seeded=seeded) for name in ("first", RESTARTED)]
            found[url] = measure_store(computed, servers, prompts, args.output_len, seeded)
            if args.json is not None:
                write_results(args, found)
    columns = ("store", "server", "first token, s", "of computing", "answers, of computing", "from the store")
    rows = [row for url, arms in found.items() for row in table_rows(url, arms, args.prompts)]
    report.make_console().print(report.make_table(f"{args.prompts} prompts of {args.context_len} tokens, medians", columns, rows))
    differing = sum(map(count_differing, found.values()))
    answers = (2 if seeded else 1) * 3 * len(prompts) * len(found)
    print(f"{differing} of {answers} answers differ from those of the server without a store")
    return 1 if differing else 0


def open_empty_store(url: str) -> StoreBackend:
    """Open a store.

    Raises:
        CommandError: It cannot be reached, or has pages.
    """
    try:
        backend = open_backend(url)
        # Mooncake's clients cannot count objects.
        count = 0 if url.startswith("mooncake:") else backend.statistics().objects
    except StoreError as error:
        raise CommandError(f"--store {url}: {error}") from error
    if count:
        raise CommandError(f"--store {url} has {count} pages; pass an empty store")
    return backend


def all_prompts(args: argparse.Namespace) -> list[list[int]]:
    """The long prompts, then the short ones. They begin differently, so that none has pages of another one."""
    found = [list(ids) for ids in make_prompts(args, args.prompts, [args.context_len])[args.context_len]]
    if args.short_prompts:
        # The first prompt of each length begins at the same token. So the short ones begin one token later.
        found += [list(ids[1:]) for ids in make_prompts(args, args.short_prompts, [args.short_len + 1])[args.short_len + 1]]
    return found


def host_flags(args: argparse.Namespace) -> tuple[str, ...]:
    """Flags of a server without a store. It has host memory, so that only the store differs."""
    return ("--dtype", args.dtype, "--kv-mode", "verified", "--kv-host-gb", str(args.host_gb), "--enable-cache-report")


@contextmanager
def running(args: argparse.Namespace, log: Path, *flags: str, seeded: bool = True) -> Iterator[BenchServer]:
    """A server with further ``flags`` that has answered a request. With ``seeded``, equal seeds give equal answers."""
    # SGLang ignores seeds without --enable-deterministic-inference.
    seeds = ("--enable-deterministic-inference",) if seeded else ()
    own = (*host_flags(args), "--enable-metrics", *seeds, *flags, *split_flags(args.server_arg))
    with BenchServer(str(args.model), own, log) as server:
        # The first long prefill of a server compiles and allocates.
        ask(server, list(range(100, 100 + args.context_len)), 1)
        yield server


def measure_store(
    computed: BenchServer, servers: Sequence[AbstractContextManager[BenchServer]], prompts: Sequence[Sequence[int]], output_len: int, seeded: bool
) -> dict[str, list[PromptTimes]]:
    """Measure all prompts without a store, with an empty store, and from the store.

    Args:
        computed: The server without a store.
        servers: The server that writes the prompts, and the one that starts after its end. Both are started here.
        prompts: Token ids of the prompts.
        output_len: Tokens of each answer.
        seeded: Whether each prompt also gets a seeded answer.

    Returns:
        For each label of :data:`LABELS` the measurements of all prompts.
    """
    found: dict[str, list[PromptTimes]] = {COMPUTED: [], EMPTY: []}
    writing, restarted = servers
    with writing as server:
        pair = [(COMPUTED, computed), (EMPTY, server)]
        for prompt in prompts:
            for arm, each in pair:
                found[arm].append(measure(each, prompt, output_len, seeded))
            # The next prompt goes to the other server first.
            pair.reverse()
            wait_until_constant(lambda: written_pages(server))
        found[STORED] = [measure(server, prompt, output_len, seeded) for prompt in prompts]
    with restarted as server:
        found[RESTARTED] = [measure(server, prompt, output_len, seeded) for prompt in prompts]
    return found


def measure(server: BenchServer, prompt: Sequence[int], output_len: int, seeded: bool = True) -> PromptTimes:
    """Send a prompt alone to an empty prefix cache."""
    server.flush_cache()
    begin = time.perf_counter()
    first = ask(server, prompt, 1)
    middle = time.perf_counter()
    answers = [ask(server, prompt, output_len, **params)["output_ids"] for params in ([{}, SEEDED] if seeded else [{}])]
    end = time.perf_counter()
    stored = (first["meta_info"].get("cached_tokens_details") or {}).get("storage", 0)
    return PromptTimes(len(prompt), middle - begin, end - middle, stored, answers)


def ask(server: BenchServer, ids: Sequence[int], tokens: int, **params: Any) -> dict[str, Any]:
    """Generate, greedily unless sampling ``params`` say otherwise."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **params}
    return server.request("generate", {"input_ids": list(ids), "sampling_params": sampling})


def written_pages(server: BenchServer) -> float:
    """Pages that a server has written to its store."""
    # A decode round updates the metrics.
    ask(server, [5, 6, 7], 4)
    return total(server.request("metrics"), "sglang_ext:store_written_pages_total")


def wait_until_quiet(backend: StoreBackend) -> None:
    """Wait until the store does not grow any more."""
    wait_until_constant(lambda: backend.statistics().objects)


def wait_until_constant(count: Callable[[], float]) -> None:
    """Wait until a count has not changed for :data:`QUIET_SECONDS`."""
    last, since = count(), time.monotonic()
    while time.monotonic() - since < QUIET_SECONDS:
        time.sleep(0.1)
        if (now := count()) != last:
            last, since = now, time.monotonic()


def table_rows(url: str, found: dict[str, list[PromptTimes]], count: int) -> list[tuple[str, ...]]:
    """Rows of one store, of the first ``count`` prompts: median seconds, medians of each prompt's ratios, and tokens from the store."""
    rows = []
    for arm, label in LABELS.items():
        pairs = list(zip(found[arm][:count], found[COMPUTED][:count], strict=True))
        values = (
            median(each.seconds for each, _ in pairs),
            median(each.seconds / base.seconds for each, base in pairs),
            median(each.answer_seconds / base.answer_seconds for each, base in pairs),
        )
        rows.append((url, label, *(f"{value:.3f}" for value in values), str(int(median(each.stored for each, _ in pairs)))))
    return rows


def count_differing(found: Mapping[str, Sequence[PromptTimes]]) -> int:
    """Answers that differ from those of the server without a store."""
    pairs = [(each, base) for times in found.values() for each, base in zip(times, found[COMPUTED], strict=True)]
    return sum(answer != expected for each, base in pairs for answer, expected in zip(each.answers, base.answers, strict=True))


def write_results(args: argparse.Namespace, found: dict[str, dict[str, list[PromptTimes]]]) -> None:
    """Write the measurements of the stores so far, without the answers."""
    settings = {name: str(value) for name, value in vars(args).items() if name not in ("json", "logs", "command")}
    kept = [each.name for each in fields(PromptTimes) if each.name != "answers"]
    stores = {
        url: {arm: [{name: getattr(each, name) for name in kept} for each in times] for arm, times in arms.items()} for url, arms in found.items()
    }
    differing = {url: count_differing(arms) for url, arms in found.items()}
    report.write_json(args.json, {"settings": settings, **report.origin(), "stores": stores, "differing_answers": differing})
