"""Runs ``python -m sglang_ext_bench transfer``: starts pairs of servers, sends the prompts, writes tables, JSON and plots."""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from sglang_ext.config.model_folder import read_config
from sglang_ext.tools import CommandError
from sglang_ext.tools.server_process import check_servers
from sglang_ext_bench import report
from sglang_ext.tools.options import split_flags as words
from sglang_ext_bench.options import check_counts, check_port, numbers
from sglang_ext_bench.servers_apart import ports_taken
from sglang_ext_bench.prompts import make_prompts
from sglang_ext_bench.speed.settings import log_folder
from sglang_ext_bench.transfer import accuracy, clocks, plots, tables
from sglang_ext_bench.transfer.accuracy import Accuracy
from sglang_ext_bench.transfer.clocks import Request
from sglang_ext_bench.transfer.methods import LYNX, Method, flags_of, method, obstacle
from sglang_ext_bench.transfer.options import add_arguments
from sglang_ext_bench.transfer.pair import Pair, timeline_file
from sglang_ext_bench.transfer.summary import Figures, summarize

__all__ = ["add_arguments", "run"]

PORTS = ports_taken(1, 1)


def run(args: argparse.Namespace) -> int:
    """Measure all methods over all links, print tables; 0 when all could be measured, else 1 after the others."""
    contexts = numbers(args.context_len, "--context-len")
    rates = [rate or None for rate in numbers(args.link_gbps, "--link-gbps", float, zero=True)]
    check_counts({"--prompts": args.prompts, "--output-len": args.output_len, "--at-once": args.at_once})
    check_counts({"--repeats": args.repeats, "--accuracy-tokens": args.accuracy_tokens}, least=0)
    check_port(args.port, PORTS * args.at_once)
    chosen = [method(name, words(args.draft_arg)) for name in args.method]
    asked, failed = runs(chosen, rates)
    # Which folder timelines go to does not matter here.
    timed = timeline_file(args.logs or Path(), "any")
    flags = {f"{each.name} {role}": found for each, gbps in asked for role, found in flags_of(args, each, gbps, timed).items()}
    check_servers(str(args.model), flags, max(contexts) + args.output_len)
    prompts = make_prompts(args, args.prompts, contexts)
    requests: dict[tuple[str, float | None], list[Request]] = {}
    done = 0
    with log_folder(args) as logs:
        for begin in range(0, len(asked), args.at_once):
            for (each, gbps), found_of in run_together(args, asked[begin : begin + args.at_once], prompts, logs):
                if isinstance(found_of, CommandError):
                    failed[label(each, gbps)] = str(found_of)
                    print(f"{label(each, gbps)}: failed: {found_of}", flush=True)
                else:
                    requests[each.name, gbps] = found_of
                done += 1
                # Whoever ends the run keeps what was measured.
                write_measured(args, requests, (), failed, [label(*pair) for pair in asked[done:]])
    found = all_figures(args, requests)
    exact = coded(args, prompts)
    for line in (*tables.tables(found), *(tables.accuracy_table(exact) if exact else ())):
        print(line)
    write(args, requests, found, exact, failed)
    return 1 if failed else 0


def runs(chosen: Sequence[Method], rates: Sequence[float | None]) -> tuple[list[tuple[Method, float | None]], dict[str, str]]:
    """Methods and links that can be measured here, one link after the other, and why others cannot; which is said, too."""
    asked, failed = [], {}
    for gbps in rates:
        for each in chosen:
            why = obstacle(each, gbps)
            if why is None:
                asked.append((each, gbps))
            else:
                print(f"{label(each, gbps)}: left out: {why}", flush=True)
    return asked, failed


def label(chosen: Method, gbps: float | None) -> str:
    """A pair's name, for lines and files."""
    return f"{chosen.name}-{'unlimited' if gbps is None else f'{gbps:g}'}"


def run_together(
    args: argparse.Namespace, asked: Sequence[tuple[Method, float | None]], prompts: dict[int, list[tuple[int, ...]]], logs: Path
) -> Iterator[tuple[tuple[Method, float | None], list[Request] | CommandError]]:
    """Start a pair for each of ``asked`` at once, and measure one after the other: its requests, or why it has none."""
    pairs = []
    for place, (each, gbps) in enumerate(asked):
        name, port = label(each, gbps), args.port and args.port + PORTS * place
        print(f"{name}: starting", flush=True)
        pairs.append(Pair(args.model, flags_of(args, each, gbps, timeline_file(logs, name)), logs, name, args.start_timeout, port))
    with ThreadPoolExecutor(len(pairs)) as pool, ExitStack() as running:
        starts = [pool.submit(pair.__enter__) for pair in pairs]
        for pair, start in zip(pairs, starts, strict=True):
            if start.exception() is None:
                running.push(pair)
        for pair, start, (each, gbps) in zip(pairs, starts, asked, strict=True):
            try:
                start.result()
                yield (each, gbps), list(measure_pair(args, pair, label(each, gbps), prompts))
            except CommandError as error:
                yield (each, gbps), error


def measure_pair(args: argparse.Namespace, pair: Pair, name: str, prompts: dict[int, list[tuple[int, ...]]]) -> Iterator[Request]:
    """Send all prompts to a pair that runs."""
    # What a first request waits for, such as a link's connection, is none of the figures.
    pair.ask(next(iter(prompts.values()))[0][:64], 4)
    for context, of_length in prompts.items():
        pair.forget_prompts()
        for prompt in of_length:
            cold = pair.ask(prompt, args.output_len + 1)
            measured = [clocks.measure(cold, context, args.output_len)]
            for _ in range(args.repeats):
                measured.append(clocks.measure(pair.ask(prompt, args.output_len + 1), context, args.output_len))
            yield from measured
        print(f"{name}: {context} tokens: {line(measured)}", flush=True)


def line(requests: Sequence[Request]) -> str:
    """What the newest requests showed, while others are measured."""
    last = requests[-1]
    drafts = "" if last.drafted is None else f", {last.drafted} drafted, {last.accepted} accepted"
    return f"first token {last.generated[0]:.2f} s, visible {last.visible[0]:.2f} s, all KV {last.complete:.2f} s, a step {last.step:.3f} s{drafts}"


def figures_of(args: argparse.Namespace, name: str, gbps: float | None, requests: Sequence[Request]) -> Iterator[Figures]:
    """By context, of cached prompts and of those that were not."""
    groups: dict[tuple[int, bool], list[Request]] = {}
    for each in requests:
        groups.setdefault((each.tokens, each.cold), []).append(each)
    for of_group in groups.values():
        yield summarize(name, gbps, of_group, numbers_per_token(args.model))


def all_figures(args: argparse.Namespace, requests: dict[tuple[str, float | None], list[Request]]) -> list[Figures]:
    """Of all that was measured."""
    return [figures for (name, gbps), each in requests.items() for figures in figures_of(args, name, gbps, each)]


def numbers_per_token(model: Path) -> int:
    """Of keys and values, over all layers."""
    config = read_config(model)
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * config["num_hidden_layers"] * heads * dim


def coded(args: argparse.Namespace, prompts: dict[int, list[tuple[int, ...]]]) -> list[Accuracy]:
    """Errors of the methods' codecs; none unless asked for."""
    if not args.accuracy_tokens:
        return []
    longest = prompts[max(prompts)][0]
    return list(accuracy.measure(args.model, args.dtype, longest[: args.accuracy_tokens], args.method))


def write_measured(
    args: argparse.Namespace,
    requests: dict[tuple[str, float | None], list[Request]],
    exact: Sequence[Accuracy],
    failed: dict[str, str],
    left: Sequence[str],
) -> None:
    """--json, where ``left`` are pairs that have yet to be measured."""
    if args.json:
        figures = [asdict(each) for each in all_figures(args, requests)]
        all_of = [{"method": name, "gbps": gbps, **asdict(each)} for (name, gbps), mine in requests.items() for each in mine]
        measured = {"figures": figures, "accuracy": [asdict(each) for each in exact], "requests": all_of, "left": list(left)}
        report.write_json(args.json, {"arguments": vars(args), **report.origin(), **measured, "failed": failed})


def write(
    args: argparse.Namespace,
    requests: dict[tuple[str, float | None], list[Request]],
    found: Sequence[Figures],
    exact: Sequence[Accuracy],
    failed: dict[str, str],
) -> None:
    """--json and --plot."""
    write_measured(args, requests, exact, failed, ())
    if args.plot and found:
        split = [each for (name, _), mine in requests.items() if name == LYNX for each in mine if each.drafted and not each.cold]
        typical = sorted(split, key=lambda each: each.accepted)[len(split) // 2] if split else None
        settings = f"{args.model.resolve().name}, {args.dtype}, {args.prompts} prompts, medians of {statistics.median([e.requests for e in found]):g} requests"
        plots.write(args.plot, found, typical, settings)
