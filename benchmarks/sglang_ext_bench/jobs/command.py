"""Runs ``python -m sglang_ext_bench jobs``: starts the servers, sends the jobs, writes tables and JSON."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from sglang_ext.managers.kv_transfer import timeline
from sglang_ext.tools import ROLES, CommandError
from sglang_ext.tools.server_process import check_servers
from sglang_ext_bench import report
from sglang_ext.tools.options import split_flags as words
from sglang_ext_bench.jobs.options import AUTO, add_arguments
from sglang_ext_bench.jobs.phases import Job, phases_of
from sglang_ext_bench.jobs.sending import Answered, PoolUse, arrivals, send
from sglang_ext_bench.jobs.summary import Figures, summarize, tables
from sglang_ext_bench.options import check_counts, check_port, numbers
from sglang_ext_bench.servers_apart import ServersApart, ports_taken
from sglang_ext_bench.prompts import make_prompts
from sglang_ext_bench.speed.settings import log_folder
from sglang_ext_bench.transfer.methods import Method, flags_of, method, obstacle
from sglang_ext_bench.transfer.pair import timeline_file

__all__ = ["add_arguments", "run"]

# SGLang tells how much of a pool is used in one round of 15, between which a short job comes and goes.
WATCHED = ("--load-snapshot-publish-interval", "1")


def run(args: argparse.Namespace) -> int:
    """Measure all methods, print tables; 0 when all could be measured, else 1 after the others."""
    contexts, counts = numbers(args.context_len, "--context-len"), [ratio(text) for text in args.servers]
    links = [rate or None for rate in numbers(args.link_gbps, "--link-gbps", float, zero=True)]
    rates = None if args.rate == AUTO else [rate or None for rate in numbers(args.rate, "--rate", float, zero=True)]
    check(args, counts)
    chosen = [method(name, words(args.draft_arg)) for name in args.method]
    asked = [(each, link) for each in chosen for link in links if obstacle(each, link) is None]
    # Which folder timelines go to does not matter here.
    timed = timeline_file(args.logs or Path(), "any")
    flags = {f"{each.name} {role}": flags_of(args, each, link, timed)[role] for each, link in asked for role in ROLES}
    check_servers(str(args.model), flags, max(contexts) + args.output_len)
    prompts = make_prompts(args, args.jobs, contexts)
    mixed = [prompts[contexts[place % len(contexts)]][place] for place in range(args.jobs)]
    found: list[Figures] = []
    jobs: list[dict] = []
    failed: dict[str, str] = {}
    left = [label(each, count, link) for count in counts for link in links for each in chosen]
    with log_folder(args) as logs:
        for count in counts:
            for link in links:
                chosen_rates = rates
                for each in chosen:
                    name = left.pop(0)
                    why = obstacle(each, link)
                    if why is None:
                        try:
                            chosen_rates = measure(args, each, count, link, chosen_rates, mixed, logs, found, jobs)
                        except CommandError as error:
                            why = str(error)
                    if why is not None:
                        failed[name] = why
                        print(f"{name}: left out: {why}", flush=True)
                    # Whoever ends the run keeps what was measured.
                    write_measured(args, found, jobs, failed, left)
    for line in tables(found):
        print(line)
    return 1 if failed else 0


def write_measured(
    args: argparse.Namespace, found: Sequence[Figures], jobs: Sequence[dict], failed: dict[str, str], left: Sequence[str]
) -> None:
    """--json, where ``left`` are servers that have yet to be measured."""
    if args.json:
        measured = {"figures": [asdict(each) for each in found], "jobs": jobs, "left": left, "failed": failed}
        report.write_json(args.json, {"arguments": vars(args), **report.origin(), **measured})


def check(args: argparse.Namespace, counts: Sequence[tuple[int, int]]) -> None:
    """Refuse numbers that cannot be.

    Raises:
        CommandError: names the option.
    """
    check_counts({"--jobs": args.jobs, "--output-len": args.output_len})
    check_port(args.port, max(ports_taken(*count) for count in counts))
    if not 0 < args.share <= 1:
        raise CommandError(f"--share {args.share:g}: pass a share in (0, 1]")


def ratio(text: str) -> tuple[int, int]:
    """Prefill and decode servers, of ``2:1``.

    Raises:
        CommandError: it is none.
    """
    prefill, colon, decode = text.partition(":")
    if not (colon and prefill.isdecimal() and decode.isdecimal() and int(prefill) and int(decode)):
        raise CommandError(f"--servers {text!r}: pass prefill servers:decode servers, both at least 1, for example 2:1")
    return int(prefill), int(decode)


def label(chosen: Method, count: tuple[int, int], gbps: float | None) -> str:
    """Of servers, for lines and files."""
    return f"{chosen.name}-{count[0]}-{count[1]}-{'unlimited' if gbps is None else f'{gbps:g}'}"


def measure(
    args: argparse.Namespace,
    chosen: Method,
    count: tuple[int, int],
    gbps: float | None,
    rates: Sequence[float | None] | None,
    prompts: Sequence[tuple[int, ...]],
    logs: Path,
    found: list[Figures],
    jobs: list[dict],
) -> Sequence[float | None]:
    """Start the servers of a method, send jobs at each rate, and add what they showed; the rates, which the first method chooses.

    Raises:
        CommandError: servers did not start, or a job failed.
    """
    name = label(chosen, count, gbps)
    file = logs / f"{name}-timeline.jsonl"
    file.unlink(missing_ok=True)
    flags = {
        role: [(*(WATCHED if role == "decode" else ()), *own)] * number
        for (role, own), number in zip(flags_of(args, chosen, gbps, file).items(), count, strict=True)
    }
    print(f"{name}: starting", flush=True)
    with ServersApart(str(args.model), flags, logs, name, args.port, start_timeout=args.start_timeout) as servers:
        # What a first job waits for, such as connections, is none of the figures.
        send(servers, [prompts[0][:64]] * max(count), [0.0] * max(count), 4)

        def at_rate(rate: float | None) -> Figures:
            for server in servers.of["prefill"]:
                server.flush_cache()
            with PoolUse(servers.of["decode"]) as used:
                answered = send(servers, prompts, arrivals(len(prompts), rate, args.seed), args.output_len)
            mine = jobs_of(answered, file)
            jobs.extend({"method": chosen.name, "servers": count, "gbps": gbps, "rate": rate, **asdict(job)} for job in mine)
            figures = summarize(chosen.name, count, gbps, rate, mine, used.peak)
            print(f"{name}: {'all at once' if rate is None else f'{rate:.3g} jobs a second'}: {figures.mean:.2f} s a job", flush=True)
            return figures

        if rates is None:
            rates = [args.share * at_rate(None).held]
        found.extend(at_rate(rate) for rate in rates)
    return rates


def jobs_of(answered: Sequence[Answered], file: Path) -> list[Job]:
    """What a run's jobs showed, with what the timeline says of each."""
    events: dict[int, list] = {}
    for event in timeline.read(file):
        events.setdefault(event.room, []).append(event)
    first = min(each.arrived for each in answered)
    return [
        Job(
            tokens=each.tokens,
            arrived=each.arrived - first,
            completion=each.stream.times[-1] - each.arrived,
            first_token=each.stream.times[0] - each.arrived,
            prefill_server=each.prefill,
            decode_server=each.decode,
            phases=phases_of(events.get(each.room, []), each.arrived, each.stream.times[-1]),
        )
        for each in answered
    ]
