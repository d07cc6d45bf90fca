"""Runs ``sglang-ext-bench methods``: measures the servers that are missing in ``--json``, and prints the table."""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_ext.config.model_folder import read_config
from sglang_ext.tools import CommandError, split_flags
from sglang_ext_bench import corpus, report
from sglang_ext_bench.longcot.arms import on_gpus
from sglang_ext_bench.methods.measurement import MethodFigures, Prompts, measure
from sglang_ext_bench.methods.servers import KINDS, SERVER_NAMES, STOCK, MethodServer, all_servers
from sglang_ext_bench.options import check_counts, numbers
from sglang_ext_bench.prompts import cut_prompts, load_tokenizer, read_text
from sglang_ext_bench.server import BenchServer, check_servers
from sglang_ext_bench.speed.decode_limit import kv_token_bytes
from sglang_ext_bench.speed.settings import log_folder

INSTALLED_TEXTS = {"code": (corpus.code_documents,), "prose": (corpus.reference_documents, corpus.description_documents)}
"""Sources of each kind of text if no file is passed."""
EQUAL_OPTIONS = ("context_len", "temperature", "requests", "output_len", "draft_length", "select_every", "dtype", "server_arg")
"""Options that must be equal for all figures of one --json file."""
NOTHING = "-"
"""An empty cell of the table."""


def run(args: argparse.Namespace) -> int:
    """Measure the servers that are missing in --json, and print the table. Returns 0 if no server failed, else 1."""
    kept = load(args)
    failed = measure_missing(args, kept) if args.model else {}
    if figures := stored_figures(kept):
        print("\n".join(table(figures, kept["told"])))
    elif not failed:
        raise CommandError("nothing is measured: pass --model, or a --json file with figures")
    return 1 if failed else 0


def load(args: argparse.Namespace) -> dict[str, Any]:
    """Read the figures of --json, or begin a new report.

    Raises:
        CommandError: The file cannot be read, or its figures were measured with other options.
    """
    if args.json is None or not args.json.exists():
        return {"settings": None, "told": {}, "servers": {}}
    kept = report.read_json(args.json, "--json")
    if args.model and kept["settings"] != equal_options(args):
        changed = [name for name, value in equal_options(args).items() if kept["settings"].get(name) != value]
        raise CommandError(
            f"--json {args.json} has figures with other values of {', '.join(f'--{name}' for name in changed).replace('_', '-')}: pass the same "
            "options for the missing servers, or another file"
        )
    return kept


def stored_figures(kept: Mapping[str, Any]) -> list[MethodFigures]:
    """The figures of a report, in the order of the table."""
    in_order = sorted(kept["servers"], key=SERVER_NAMES.index)
    return [MethodFigures(**each) for name in in_order for each in kept["servers"][name]]


def equal_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that must be equal for all figures of a table, with the model's name and the names of the text files."""
    files = {f"{kind}_file": (path := getattr(args, f"{kind}_file")) and path.name for kind in KINDS}
    return {"model": args.model.resolve().name, **{name: getattr(args, name) for name in EQUAL_OPTIONS}, **files}


def measure_missing(args: argparse.Namespace, kept: dict[str, Any]) -> dict[str, str]:
    """Measure the servers that are missing in ``kept``, and add their figures. Returns the error of each failed server, by name."""
    check_counts({"--requests": args.requests, "--output-len": args.output_len, "--at-once": args.at_once, "--draft-length": args.draft_length})
    check_counts({"--select-every": args.select_every})
    contexts = sorted(numbers(args.context_len, "--context-len"))
    temperatures = sorted(numbers(args.temperature, "--temperature", float, zero=True))
    servers = [each for each in selected_servers(args) if each.name not in kept["servers"]]
    check_servers(str(args.model), {each.name: flags_of(args, each) for each in servers}, contexts[-1] + args.output_len)
    prompts = text_prompts(args, contexts) if servers else {}
    token_bytes = kv_token_bytes(read_config(args.model), 4 if args.dtype == "float32" else 2)
    kept["settings"], kept["told"] = equal_options(args), shared_settings(args)
    failed: dict[str, str] = {}
    with log_folder(args) as logs:
        for begin in range(0, len(servers), args.at_once):
            for each, start in start_servers(args, servers[begin : begin + args.at_once], logs):
                try:
                    figures = measure_server(start.result(), each, prompts, temperatures, args.output_len, token_bytes)
                    kept["servers"][each.name] = [asdict(one) for one in figures]
                except CommandError as error:
                    failed[each.name] = str(error)
                    print(f"{each.name}: failed: {error}", flush=True)
                if args.json:
                    report.write_json(args.json, {**kept, "failed": failed, **report.origin()})
    return failed


def selected_servers(args: argparse.Namespace) -> list[MethodServer]:
    """The servers that --server names, or all servers of the table.

    Raises:
        CommandError: There is no such server.
    """
    known = {each.name: each for each in all_servers(args.draft_length, args.select_every, on_gpus(args))}
    if wrong := [name for name in args.server or () if name not in known]:
        raise CommandError(f"--server {wrong[0]!r}: pass some of {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(args.server or known)]


def flags_of(args: argparse.Namespace, server: MethodServer) -> tuple[str, ...]:
    """All flags of a server. Servers that share a GPU sleep while another one is measured."""
    sleeping = ("--sleep-on-idle",) if args.at_once > 1 else ()
    return ("--dtype", args.dtype, "--enable-metrics", *sleeping, *split_flags(args.server_arg), *server.flags)


def start_servers(
    args: argparse.Namespace, servers: Sequence[MethodServer], logs: Path
) -> Iterator[tuple[MethodServer, "Future[BenchServer]"]]:
    """Start several servers at once, and yield one after another, with the running server or the error of its start.

    A server is stopped before the next one is yielded.
    """
    with ThreadPoolExecutor(len(servers)) as pool, ExitStack() as running:
        starts = []
        for each in servers:
            print(f"{each.name}: starting", flush=True)
            process = BenchServer(str(args.model), flags_of(args, each), logs / f"{each.name}.log", start_timeout=args.start_timeout)
            running.callback(process.stop)
            starts.append((each, process, pool.submit(process.__enter__)))
        # Measuring begins when all servers have started, because compilation and graph capture would disturb it.
        wait([start for _, _, start in starts])
        for each, process, start in starts:
            yield each, start
            process.stop()


def measure_server(
    server: BenchServer, plan: MethodServer, prompts: Prompts, temperatures: Sequence[float], new_tokens: int, token_bytes: int
) -> list[MethodFigures]:
    """Measure all methods of a running server, and print the figures of each one. Arguments as for :func:`measure`."""
    found = []
    for figures in measure(server, plan, prompts, temperatures, new_tokens, token_bytes):
        found.append(figures)
        print(f"{plan.name}: {line(figures)}", flush=True)
    return found


def text_prompts(args: argparse.Namespace, contexts: list[int]) -> Prompts:
    """Cut the prompts of each kind of text out of --code-file and --prose-file, or out of text in this Python installation."""
    tokenizer = load_tokenizer(str(args.model))
    prompts = {}
    for kind in KINDS:
        file = getattr(args, f"{kind}_file")
        installed = (document.text for source in INSTALLED_TEXTS[kind] for document in source())
        text = "\n\n".join(installed) if file is None else read_text(f"--{kind}-file", file)
        prompts[kind] = cut_prompts(text, tokenizer, args.requests, contexts, f"the text of --{kind}-file")
    return prompts


def shared_settings(args: argparse.Namespace) -> dict[str, str]:
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
    """Format figures as one line of text."""
    shares = [f"{kind} {'-' if (share := figures.acceptance(kind)) is None else f'{share:.3f}'}" for kind in KINDS]
    full = f", {figures.fallbacks} on full KV" if figures.fallbacks else ""
    time_per_token = "- ms a token (fewer than two bursts: raise --output-len)" if figures.token_ms is None else f"{figures.token_ms:.2f} ms a token"
    return (
        f"{figures.label}, {figures.context} tokens, T = {figures.temperature:g}: accepted {', '.join(shares)}; "
        f"bytes {figures.draft_share:.3f}, {time_per_token}{full}"
    )


def table(found: Sequence[MethodFigures], shared: Mapping[str, str]) -> Iterator[str]:
    """The lines of the table in Markdown: one row for each method, in the order of ``found``, then a line with the shared settings.

    Args:
        found: Figures of all methods, lengths and temperatures.
        shared: Shared settings: ``model``, ``dtype``, ``device``, ``date``, ``requests`` (at once), ``output_len`` and ``draft_length``.
    """
    contexts = sorted({each.context for each in found})
    temperatures = sorted({each.temperature for each in found})
    lengths = " / ".join(f"{context:,}" for context in contexts)
    columns = [(kind, temperature) for kind in KINDS for temperature in temperatures]
    head = ["method", "bytes", *(f"{kind}, {_sampling(temperature)}" for kind, temperature in columns), "ms/token", "gain"]
    rows = []
    stock = _timed(found, STOCK)
    for label in dict.fromkeys(each.label for each in found):
        own = [each for each in found if each.label == label]
        timed = _timed(found, label)
        cells = [_acceptances(own, contexts, kind, temperature) for kind, temperature in columns]
        token_ms = NOTHING if timed is None else f"{timed.token_ms:.2f}"
        gain = NOTHING if timed is None or stock is None or timed is stock else f"{stock.token_ms / timed.token_ms:.2f}"
        share = _plain(own[-1].draft_share)
        rows.append([label, share, *cells, token_ms, gain])
    yield from report.markdown_table(head, rows)
    yield ""
    yield (
        f"Acceptance (accepted over offered draft tokens) at {lengths} prompt tokens. *Bytes*: compressed or selected KV that a draft "
        f"step reads, over the full KV, at {contexts[-1]:,} tokens, without the newest tokens that stay exact. *ms/token* and *gain* over "
        f"stock: {_sampling(temperatures[0])}, {contexts[-1]:,} tokens, "
        f"{shared['requests']} requests at once, half of them code. {shared['model']}, {shared['dtype']}, {shared['draft_length']} drafts, "
        f"{shared['output_len']} output tokens, prompts in the prefix cache, {shared['device']}, {shared['date']}."
    )
    if shown := [each for each in found if each.fallbacks and each.label != STOCK]:
        yield ""
        counts = ", ".join(f"{each.label} {each.fallbacks} ({each.context:,} tokens, {_sampling(each.temperature)})" for each in shown)
        yield f"Requests that full KV served at their end: {counts}."


def _timed(found: Sequence[MethodFigures], label: str) -> MethodFigures | None:
    """The figures whose time the table shows: longest prompts, lowest temperature. None if their time is unknown."""
    own = [each for each in found if each.label == label]
    longest = max(own, key=lambda each: (each.context, -each.temperature), default=None)
    return None if longest is None or longest.token_ms is None else longest


def _acceptances(own: Sequence[MethodFigures], contexts: Sequence[int], kind: str, temperature: float) -> str:
    by_context = {each.context: each.acceptance(kind) for each in own if each.temperature == temperature}
    values = [by_context.get(context) for context in contexts]
    if all(value is None for value in values):
        return NOTHING
    return " / ".join(NOTHING if value is None else _plain(value) for value in values)


def _plain(value: float) -> str:
    """A share with two decimals, without the zero before the point."""
    return f"{value:.2f}".removeprefix("0")


def _sampling(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"T = {temperature:g}".replace("0.", ".")
