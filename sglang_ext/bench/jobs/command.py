"""How long jobs take whose prompts are computed on some servers and decoded on others, and where their time goes.

For each method, link rate and number of servers, prefill and decode servers are started on the loopback interface. Jobs of one output
length arrive as a Poisson process; each goes to the prefill server whose queue has the fewest tokens and to the decode server with the
fewest jobs (HACK, section 7.1). Methods are those of bench transfer; they differ in how KV travels.

--rate auto first sends all jobs at once to servers of the first method, which shows how many end in a second, and takes --share of that
for all methods: the highest rate that the first can hold. Name the slowest first.

A job's completion time is divided into waiting (for slots of the decode server), prefill (its queue among it), encoding (what is left of
it once the prompt is computed), transfer (until decoding can begin) and decode, in which a method that reads codes also corrects or
dequantizes. *Tokens used* counts slots of a decode server's pool that were taken at a time, those of copies among them.

JSON has all jobs; it is written after each method, with what is left to measure.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from sglang_ext.bench import ROLES, BenchError, report
from sglang_ext.bench.comparing.identity_options import words
from sglang_ext.bench.jobs.phases import Job, phases_of
from sglang_ext.bench.jobs.sending import Answered, PoolUse, arrivals, send
from sglang_ext.bench.jobs.summary import Figures, summarize, tables
from sglang_ext.bench.options import DTYPES, check_counts, check_port, names, numbers, seconds
from sglang_ext.bench.server import check_servers
from sglang_ext.bench.servers_apart import ServersApart, ports_taken
from sglang_ext.bench.speed.decode_prompts import make_prompts
from sglang_ext.bench.speed.settings import log_folder
from sglang_ext.bench.transfer.methods import Method, flags_of, method, obstacle
from sglang_ext.bench.transfer.pair import timeline_file
from sglang_ext.managers.disaggregation import timeline

DEFAULT = "raw,int8,int4"
AUTO = "auto"
# SGLang tells how much of a pool is used in one round of 15, between which a short job comes and goes.
WATCHED = ("--load-snapshot-publish-interval", "1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder")
    add("--method", type=names, default=DEFAULT, help="names of bench transfer, separated by commas (default: %(default)s)")
    add("--link-gbps", default="10", help="Gbit/s of each prefill server's link, separated by commas; 0: no limit (default: %(default)s)")
    add("--servers", type=names, default=("1:1",), help="prefill servers:decode servers, separated by commas (default: 1:1)")
    add("--rate", default=AUTO, help="jobs per second, separated by commas; 0: all at once (default: %(default)s)")
    add("--share", type=float, default=0.9, help="of what the first method holds, with --rate auto (default: %(default)s)")
    add("--jobs", type=int, default=32, help="of each run; no two have the same prompt (default: %(default)s)")
    add("--context-len", default="2048", help="prompt tokens, separated by commas; jobs take one after the other (default: %(default)s)")
    add("--output-len", type=int, default=160, help="tokens of each answer (default: %(default)s)")
    add("--prompt-file", type=Path, help="take prompts from this text, by the model's tokenizer; default: random tokens")
    add("--seed", type=int, default=0, help="of arrivals")
    add("--server-arg", action="append", default=[], metavar="FLAGS", help="flags of all servers")
    add("--draft-arg", action="append", default=[], metavar="FLAGS", help="flags of decode servers of lynx, as '--kv-compressor kivi'")
    add("--decode-arg", action="append", default=[], metavar="FLAGS", help="flags of all decode servers, for example '--base-gpu-id 1'")
    add("--dtype", default="bfloat16", choices=DTYPES, help="(default: %(default)s)")
    add("--port", type=int, default=0, help="of the first server; the next are taken as well (default: any)")
    add("--start-timeout", type=seconds, default=600, help="seconds until servers must be ready (default: %(default)s)")
    add("--logs", type=Path, help="folder for the servers' logs and timelines")
    add("--json", type=Path, help="write all measurements here")


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
                        except BenchError as error:
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
        BenchError: names the option.
    """
    check_counts({"--jobs": args.jobs, "--output-len": args.output_len})
    check_port(args.port, max(ports_taken(*count) for count in counts))
    if not 0 < args.share <= 1:
        raise BenchError(f"--share {args.share:g}: pass a share in (0, 1]")


def ratio(text: str) -> tuple[int, int]:
    """Prefill and decode servers, of ``2:1``.

    Raises:
        BenchError: it is none.
    """
    prefill, colon, decode = text.partition(":")
    if not (colon and prefill.isdecimal() and decode.isdecimal() and int(prefill) and int(decode)):
        raise BenchError(f"--servers {text!r}: pass prefill servers:decode servers, both at least 1, for example 2:1")
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
        BenchError: servers did not start, or a job failed.
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
