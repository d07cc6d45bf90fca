"""Runs ``sglang-ext-bench transfer``: starts pairs of servers, sends the prompts, and writes tables, JSON and a plot."""

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from sglang_ext.config.model_folder import read_config
from sglang_ext.tools import CommandError, split_flags
from sglang_ext_bench import report
from sglang_ext_bench.options import check_counts, check_port, numbers
from sglang_ext_bench.server import check_servers
from sglang_ext_bench.servers_apart import ports_taken
from sglang_ext_bench.prompts import make_prompts
from sglang_ext_bench.speed.settings import log_folder
from sglang_ext_bench.transfer import accuracy, clocks
from sglang_ext_bench.transfer.accuracy import CodecAccuracy
from sglang_ext_bench.transfer.clocks import RequestTimes
from sglang_ext_bench.transfer.methods import LYNX, TransferMethod, make_flags, obstacle, parse_method
from sglang_ext_bench.transfer.options import add_arguments
from sglang_ext_bench.transfer.results import TransferSummary, accuracy_table, summarize, tables, write_plot
from sglang_ext_bench.transfer.server_pair import ServerPair, timeline_file

__all__ = ["add_arguments", "run"]

PORTS = ports_taken(1, 1)

MethodLink = tuple[TransferMethod, float | None]
"""A method and its link in Gbit/s; None without a limit. One pair of servers measures it."""
Requests = dict[tuple[str, float | None], list[RequestTimes]]
"""Measured requests by name of the method and link in Gbit/s."""
Prompts = Mapping[int, Sequence[tuple[int, ...]]]
"""Token ids of prompts by length."""


def run(args: argparse.Namespace) -> int:
    """Measure all methods over all links and print tables. Returns 0 if all were measured, else 1."""
    contexts = numbers(args.context_len, "--context-len")
    rates = [rate or None for rate in numbers(args.link_gbps, "--link-gbps", float, zero=True)]
    check_counts({"--prompts": args.prompts, "--output-len": args.output_len, "--at-once": args.at_once})
    check_counts({"--repeats": args.repeats, "--accuracy-tokens": args.accuracy_tokens}, least=0)
    check_port(args.port, PORTS * args.at_once)
    pairs = possible_pairs([parse_method(name, split_flags(args.draft_arg)) for name in args.method], rates)
    # The folder of timelines does not matter for this check.
    file = timeline_file(args.logs or Path(), "any")
    flags = {f"{method.name} {role}": found for method, gbps in pairs for role, found in make_flags(args, method, gbps, file).items()}
    check_servers(str(args.model), flags, max(contexts) + args.output_len)
    prompts = make_prompts(args, args.prompts, contexts)
    requests: Requests = {}
    failed: dict[str, str] = {}
    num_done = 0
    with log_folder(args) as logs:
        for begin in range(0, len(pairs), args.at_once):
            for (method, gbps), result in measure_together(args, pairs[begin : begin + args.at_once], prompts, logs):
                if isinstance(result, CommandError):
                    failed[label(method, gbps)] = str(result)
                    print(f"{label(method, gbps)}: failed: {result}", flush=True)
                else:
                    requests[method.name, gbps] = result
                num_done += 1
                # An interrupted run keeps its results.
                write_json(args, requests, (), failed, [label(*pair) for pair in pairs[num_done:]])
    summaries = summarize_all(args, requests)
    errors = codec_errors(args, prompts)
    for line in (*tables(summaries), *(accuracy_table(errors) if errors else ())):
        print(line)
    write_json(args, requests, errors, failed, ())
    if args.plot and summaries:
        plot(args, requests, summaries)
    return 1 if failed else 0


def possible_pairs(methods: Sequence[TransferMethod], rates: Sequence[float | None]) -> list[MethodLink]:
    """Return the methods and links that this machine can measure, one link after another. Prints why others are skipped."""
    pairs: list[MethodLink] = []
    for gbps in rates:
        for method in methods:
            reason = obstacle(method, gbps)
            if reason is None:
                pairs.append((method, gbps))
            else:
                print(f"{label(method, gbps)}: skipped: {reason}", flush=True)
    return pairs


def label(method: TransferMethod, gbps: float | None) -> str:
    """Label of a pair of servers, for printed lines and file names."""
    return f"{method.name}-{'unlimited' if gbps is None else f'{gbps:g}'}"


def measure_together(
    args: argparse.Namespace, pairs: Sequence[MethodLink], prompts: Prompts, logs: Path
) -> Iterator[tuple[MethodLink, list[RequestTimes] | CommandError]]:
    """Start several pairs of servers at once, and measure one after another. Yields the requests of each, or its error."""
    servers = []
    for index, (method, gbps) in enumerate(pairs):
        name, port = label(method, gbps), args.port and args.port + PORTS * index
        print(f"{name}: starting", flush=True)
        flags = make_flags(args, method, gbps, timeline_file(logs, name))
        servers.append(ServerPair(args.model, flags, logs, name, args.start_timeout, port))
    with ThreadPoolExecutor(len(servers)) as pool, ExitStack() as running:
        starts = [pool.submit(server.__enter__) for server in servers]
        for server, start in zip(servers, starts, strict=True):
            if start.exception() is None:
                running.push(server)
        for server, start, (method, gbps) in zip(servers, starts, pairs, strict=True):
            try:
                start.result()
                yield (method, gbps), list(measure_pair(args, server, label(method, gbps), prompts))
            except CommandError as error:
                yield (method, gbps), error


def measure_pair(args: argparse.Namespace, servers: ServerPair, name: str, prompts: Prompts) -> Iterator[RequestTimes]:
    """Send all prompts to a running pair of servers, and yield the times of each request."""
    # The first request waits for one-time work, such as the link's connection. It does not count.
    servers.send(next(iter(prompts.values()))[0][:64], 4)
    for context, same_length in prompts.items():
        servers.flush_cache()
        for prompt in same_length:
            # The first request is cold, the others find the prompt in the prefix cache.
            responses = (servers.send(prompt, args.output_len + 1) for _ in range(1 + args.repeats))
            measured = [clocks.measure(response, context, args.output_len) for response in responses]
            yield from measured
        print(f"{name}: {context} tokens: {progress_line(measured[-1])}", flush=True)


def progress_line(request: RequestTimes) -> str:
    """The times of one request, printed while others are measured."""
    drafts = "" if request.drafted is None else f", {request.drafted} drafted, {request.accepted} accepted"
    first_token = f"first token {request.generated[0]:.2f} s, visible {request.visible[0]:.2f} s"
    return f"{first_token}, all KV {request.complete:.2f} s, a step {request.step:.3f} s{drafts}"


def summarize_groups(
    args: argparse.Namespace, name: str, gbps: float | None, requests: Sequence[RequestTimes]
) -> Iterator[TransferSummary]:
    """Summarize the requests of one pair by context, cold and cached prompts apart."""
    groups: dict[tuple[int, bool], list[RequestTimes]] = {}
    for each in requests:
        groups.setdefault((each.tokens, each.cold), []).append(each)
    for group in groups.values():
        yield summarize(name, gbps, group, numbers_per_token(args.model))


def summarize_all(args: argparse.Namespace, requests: Requests) -> list[TransferSummary]:
    """Summaries of all measured requests."""
    return [summary for (name, gbps), each in requests.items() for summary in summarize_groups(args, name, gbps, each)]


def numbers_per_token(model: Path) -> int:
    """Numbers of keys and values of a token, all layers."""
    config = read_config(model)
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * config["num_hidden_layers"] * heads * dim


def codec_errors(args: argparse.Namespace, prompts: Prompts) -> list[CodecAccuracy]:
    """Errors of the methods' codecs. Empty without ``--accuracy-tokens``."""
    if not args.accuracy_tokens:
        return []
    longest = prompts[max(prompts)][0]
    return list(accuracy.measure(args.model, args.dtype, longest[: args.accuracy_tokens], args.method))


def write_json(
    args: argparse.Namespace, requests: Requests, errors: Sequence[CodecAccuracy], failed: dict[str, str], remaining: Sequence[str]
) -> None:
    """Write ``--json``.

    Args:
        args: Options of the command.
        requests: Measured requests.
        errors: Errors of codecs.
        failed: Why pairs could not be measured, by label.
        remaining: Labels of the pairs that are not measured yet.
    """
    if args.json:
        measured = {
            "figures": [asdict(each) for each in summarize_all(args, requests)],
            "accuracy": [asdict(each) for each in errors],
            "requests": [{"method": name, "gbps": gbps, **asdict(each)} for (name, gbps), group in requests.items() for each in group],
            "left": list(remaining),
            "failed": failed,
        }
        report.write_json(args.json, {"arguments": vars(args), **report.origin(), **measured})


def plot(args: argparse.Namespace, requests: Requests, summaries: Sequence[TransferSummary]) -> None:
    """Write ``--plot``. Its timeline is that of the lynx request with the median number of accepted tokens."""
    drafted = [each for (name, _), group in requests.items() if name == LYNX for each in group if each.drafted and not each.cold]
    example = sorted(drafted, key=lambda each: each.accepted)[len(drafted) // 2] if drafted else None
    per_summary = statistics.median([each.requests for each in summaries])
    settings = f"{args.model.resolve().name}, {args.dtype}, {args.prompts} prompts, medians of {per_summary:g} requests"
    write_plot(args.plot, summaries, example, settings)
