"""Runs ``python -m sglang_ext_bench methods``: measures the servers that ``--json`` lacks, and prints the table."""

import argparse
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_ext.config.model_folder import read_config
from sglang_ext.tools import CommandError
from sglang_ext.tools.server_process import ServerProcess, check_servers
from sglang_ext_bench import corpus, report
from sglang_ext_bench.comparing.identity_options import words
from sglang_ext_bench.longcot.arms import on_gpus
from sglang_ext_bench.methods import table
from sglang_ext_bench.methods.measurement import MethodFigures, Prompts, measure
from sglang_ext_bench.methods.servers import (
    KINDS,
    SERVER_NAMES,
    MethodServer,
    all_servers,
)
from sglang_ext_bench.options import check_counts, numbers
from sglang_ext_bench.prompts import load_tokenizer
from sglang_ext_bench.speed.decode_limit import kv_token_bytes
from sglang_ext_bench.speed.decode_prompts import cut, read_text
from sglang_ext_bench.speed.settings import log_folder

# Sources of the text of each kind if no file is given.
OWN_TEXTS = {"code": (corpus.code_documents,), "prose": (corpus.reference_documents, corpus.description_documents)}
# Options that must be equal for all figures of one --json file.
SETTINGS = ("context_len", "temperature", "requests", "output_len", "draft_length", "select_every", "dtype", "server_arg")


def run(args: argparse.Namespace) -> int:
    """Measure the servers that --json lacks, and print the table. Returns 0 if no server failed, else 1."""
    kept = load(args)
    failed = measure_missing(args, kept) if args.model else {}
    in_order = sorted(kept["servers"], key=SERVER_NAMES.index)
    figures = [MethodFigures(**each) for name in in_order for each in kept["servers"][name]]
    if figures:
        lines = list(table.table(figures, kept["told"]))
        print("\n".join(lines))
        if args.write:
            table.write(args.write, lines)
    elif not failed:
        raise CommandError("nothing is measured: pass --model, or a --json file with figures")
    return 1 if failed else 0


def load(args: argparse.Namespace) -> dict[str, Any]:
    """The figures that --json has already, or a new report.

    Raises:
        CommandError: The file cannot be read, or its figures were measured with other options.
    """
    if args.json is None or not args.json.exists():
        return {"settings": None, "told": {}, "servers": {}}
    kept = report.read_json(args.json, "--json")
    if args.model and kept["settings"] != settings_of(args):
        changed = [name for name, value in settings_of(args).items() if kept["settings"].get(name) != value]
        raise CommandError(
            f"--json {args.json} has figures with other values of {', '.join(f'--{name}' for name in changed).replace('_', '-')}: pass the same "
            "options for the missing servers, or another file"
        )
    return kept


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options that must be equal for all figures of a table, with the model's name and the names of the text files."""
    files = {f"{kind}_file": (path := getattr(args, f"{kind}_file")) and path.name for kind in KINDS}
    return {"model": args.model.resolve().name, **{name: getattr(args, name) for name in SETTINGS}, **files}


def measure_missing(args: argparse.Namespace, kept: dict[str, Any]) -> dict[str, str]:
    """Measure the servers that ``kept`` lacks, and add their figures to it. Returns the error of each that failed, by name."""
    check_counts({"--requests": args.requests, "--output-len": args.output_len, "--at-once": args.at_once, "--draft-length": args.draft_length})
    check_counts({"--select-every": args.select_every})
    contexts = sorted(numbers(args.context_len, "--context-len"))
    temperatures = sorted(numbers(args.temperature, "--temperature", float, zero=True))
    servers = [each for each in chosen(args) if each.name not in kept["servers"]]
    check_servers(str(args.model), {each.name: flags_of(args, each) for each in servers}, contexts[-1] + args.output_len)
    prompts = text_prompts(args, contexts) if servers else {}
    token_bytes = kv_token_bytes(read_config(args.model), 4 if args.dtype == "float32" else 2)
    kept["settings"], kept["told"] = settings_of(args), told(args)
    failed: dict[str, str] = {}
    with log_folder(args) as logs:
        for begin in range(0, len(servers), args.at_once):
            for each, start in start_together(args, servers[begin : begin + args.at_once], logs):
                try:
                    figures = measured(start.result(), each, prompts, temperatures, args.output_len, token_bytes)
                    kept["servers"][each.name] = [asdict(one) for one in figures]
                except CommandError as error:
                    failed[each.name] = str(error)
                    print(f"{each.name}: failed: {error}", flush=True)
                if args.json:
                    report.write_json(args.json, {**kept, "failed": failed, **report.origin()})
    return failed


def all_of(args: argparse.Namespace) -> tuple[MethodServer, ...]:
    """All servers of the table."""
    return all_servers(args.draft_length, args.select_every, on_gpus(args))


def chosen(args: argparse.Namespace) -> list[MethodServer]:
    """The servers that --server names.

    Raises:
        CommandError: There is no such server.
    """
    known = {each.name: each for each in all_of(args)}
    if wrong := [name for name in args.server or () if name not in known]:
        raise CommandError(f"--server {wrong[0]!r}: pass some of {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(args.server or known)]


def flags_of(args: argparse.Namespace, server: MethodServer) -> tuple[str, ...]:
    """All flags of a server. Servers that share a GPU sleep while another one is measured."""
    sleeping = ("--sleep-on-idle",) if args.at_once > 1 else ()
    return ("--dtype", args.dtype, "--enable-metrics", *sleeping, *words(args.server_arg), *server.flags)


def start_together(
    args: argparse.Namespace, servers: Sequence[MethodServer], logs: Path
) -> Iterator[tuple[MethodServer, "Future[ServerProcess]"]]:
    """Start servers at once, and yield one after another: a running server, or the error of its start.

    A server is stopped before the next one is yielded.
    """
    with ThreadPoolExecutor(len(servers)) as pool, ExitStack() as running:
        starts = []
        for each in servers:
            print(f"{each.name}: starting", flush=True)
            process = ServerProcess(str(args.model), flags_of(args, each), logs / f"{each.name}.log", start_timeout=args.start_timeout)
            running.callback(process.stop)
            starts.append((each, process, pool.submit(process.__enter__)))
        # Compiling and capturing disturb a measurement: it begins when all servers have started.
        wait([start for _, _, start in starts])
        for each, process, start in starts:
            yield each, start
            process.stop()


def measured(
    server: ServerProcess, plan: MethodServer, prompts: Prompts, temperatures: Sequence[float], new_tokens: int, token_bytes: int
) -> list[MethodFigures]:
    """The figures of all methods of a running server. Prints each one at once. Arguments as for :func:`measure`."""
    found = []
    for figures in measure(server, plan, prompts, temperatures, new_tokens, token_bytes):
        found.append(figures)
        print(f"{plan.name}: {line(figures)}", flush=True)
    return found


def text_prompts(args: argparse.Namespace, contexts: list[int]) -> Prompts:
    """The prompts of each kind of text: pieces of --code-file and --prose-file, or of text in this Python installation."""
    tokenizer = load_tokenizer(str(args.model))
    prompts = {}
    for kind in KINDS:
        file = getattr(args, f"{kind}_file")
        own = (document.text for source in OWN_TEXTS[kind] for document in source())
        text = "\n\n".join(own) if file is None else read_text(f"--{kind}-file", file)
        prompts[kind] = cut(text, tokenizer, args.requests, contexts, f"the text of --{kind}-file")
    return prompts


def told(args: argparse.Namespace) -> dict[str, str]:
    """The settings in the line below the table."""
    import torch

    return {
        "model": args.model.resolve().name,
        "dtype": args.dtype,
        "device": f"one {torch.cuda.get_device_name()}" if torch.cuda.is_available() and on_gpus(args) else "a CPU",
        "date": time.strftime("%Y-%m-%d"),
        "requests": str(args.requests * len(KINDS)),
        "output_len": str(args.output_len),
        "draft_length": str(args.draft_length),
    }


def line(figures: MethodFigures) -> str:
    """Figures as one line of text."""
    shares = [f"{kind} {'-' if (share := figures.acceptance(kind)) is None else f'{share:.3f}'}" for kind in KINDS]
    full = f", {figures.fallbacks} on full KV" if figures.fallbacks else ""
    time_per_token = "- ms a token (fewer than two bursts: raise --output-len)" if figures.token_ms is None else f"{figures.token_ms:.2f} ms a token"
    return (
        f"{figures.label}, {figures.context} tokens, T = {figures.temperature:g}: accepted {', '.join(shares)}; "
        f"bytes {figures.draft_share:.3f}, {time_per_token}{full}"
    )
