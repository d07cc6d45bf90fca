"""Runs ``sglang-ext-bench jobs``: starts the servers, sends the jobs, and writes tables and JSON."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_ext.tools import ROLES, CommandError, split_flags
from sglang_ext_bench import report
from sglang_ext_bench.jobs.options import AUTO, add_arguments, check_options, server_counts
from sglang_ext_bench.jobs.results import Job, JobSummary, job_phases, summarize, tables
from sglang_ext_bench.jobs.sending import JobResponse, PoolUsageMonitor, arrival_times, send_jobs
from sglang_ext_bench.options import check_port, numbers
from sglang_ext_bench.server import check_servers
from sglang_ext_bench.servers_apart import ServersApart, ports_taken
from sglang_ext_bench.prompts import make_prompts
from sglang_ext_bench.speed.settings import log_folder
from sglang_ext_bench.timelines import TransferEvent, read_timeline
from sglang_ext_bench.transfer.methods import TransferMethod, make_flags, obstacle, parse_method
from sglang_ext_bench.transfer.server_pair import timeline_file

__all__ = ["add_arguments", "run"]

# SGLang publishes the usage of a pool every 15 rounds by default. A short job may start and end in between.
PUBLISH_EACH_ROUND = ("--load-snapshot-publish-interval", "1")


@dataclass
class JobMeasurements:
    """Results so far. :meth:`write` is called after each group of servers, so that an interrupted run keeps its results.

    Attributes:
        remaining: Labels of the servers that are not measured yet.
        summaries: Summary of each method and rate.
        jobs: All jobs, with their method and setting.
        failed: Why servers could not be measured, by label.
    """

    remaining: list[str]
    summaries: list[JobSummary] = field(default_factory=list)
    jobs: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def write(self, args: argparse.Namespace) -> None:
        """Write ``--json``."""
        if args.json:
            figures = [asdict(each) for each in self.summaries]
            measured = {"figures": figures, "jobs": self.jobs, "left": self.remaining, "failed": self.failed}
            report.write_json(args.json, {"arguments": vars(args), **report.origin(), **measured})


def run(args: argparse.Namespace) -> int:
    """Measure all methods and print tables. Returns 0 if all were measured, else 1."""
    contexts, counts = numbers(args.context_len, "--context-len"), server_counts(args.servers)
    links = [rate or None for rate in numbers(args.link_gbps, "--link-gbps", float, zero=True)]
    rates = None if args.rate == AUTO else [rate or None for rate in numbers(args.rate, "--rate", float, zero=True)]
    check_options(args)
    check_port(args.port, max(ports_taken(*count) for count in counts))
    methods = [parse_method(name, split_flags(args.draft_arg)) for name in args.method]
    possible = [(method, link) for method in methods for link in links if obstacle(method, link) is None]
    # The folder of timelines does not matter for this check.
    file = timeline_file(args.logs or Path(), "any")
    flags = {f"{method.name} {role}": make_flags(args, method, link, file)[role] for method, link in possible for role in ROLES}
    check_servers(str(args.model), flags, max(contexts) + args.output_len)
    by_length = make_prompts(args, args.jobs, contexts)
    prompts = [by_length[contexts[index % len(contexts)]][index] for index in range(args.jobs)]
    measurements = JobMeasurements([label(method, count, link) for count in counts for link in links for method in methods])
    with log_folder(args) as logs:
        for count in counts:
            for link in links:
                method_rates: Sequence[float | None] | None = rates
                for method in methods:
                    name = measurements.remaining.pop(0)
                    reason = obstacle(method, link)
                    if reason is None:
                        try:
                            method_rates = measure_method(args, method, count, link, method_rates, prompts, logs, measurements)
                        except CommandError as error:
                            reason = str(error)
                    if reason is not None:
                        measurements.failed[name] = reason
                        print(f"{name}: skipped: {reason}", flush=True)
                    measurements.write(args)
    for line in tables(measurements.summaries):
        print(line)
    return 1 if measurements.failed else 0


def label(method: TransferMethod, count: tuple[int, int], gbps: float | None) -> str:
    """Label of a group of servers, for printed lines and file names."""
    return f"{method.name}-{count[0]}-{count[1]}-{'unlimited' if gbps is None else f'{gbps:g}'}"


def measure_method(
    args: argparse.Namespace,
    method: TransferMethod,
    count: tuple[int, int],
    gbps: float | None,
    rates: Sequence[float | None] | None,
    prompts: Sequence[tuple[int, ...]],
    logs: Path,
    measurements: JobMeasurements,
) -> Sequence[float | None]:
    """Start the servers of a method, send the jobs at each rate, and add the results to ``measurements``.

    Args:
        args: Options of the command.
        method: How KV is transferred.
        count: Number of prefill servers and of decode servers.
        gbps: Rate of each link in Gbit/s. None without a limit.
        rates: Jobs per second; an element of None sends all at once. None: choose the rate by ``--share``.
        prompts: Token ids of each job.
        logs: Folder for logs and timelines.
        measurements: Receives the results, also those before an error.

    Returns:
        The rates.

    Raises:
        CommandError: A server did not start, or a job failed.
    """
    name = label(method, count, gbps)
    file = logs / f"{name}-timeline.jsonl"
    file.unlink(missing_ok=True)
    flags = {
        role: [(*(PUBLISH_EACH_ROUND if role == "decode" else ()), *own)] * number
        for (role, own), number in zip(make_flags(args, method, gbps, file).items(), count, strict=True)
    }
    print(f"{name}: starting", flush=True)
    with ServersApart(str(args.model), flags, logs, name, args.port, start_timeout=args.start_timeout) as servers:
        # The first jobs wait for one-time work, such as connections. They do not count.
        send_jobs(servers, [prompts[0][:64]] * max(count), [0.0] * max(count), 4)

        def measure_rate(rate: float | None) -> JobSummary:
            for server in servers.of["prefill"]:
                server.flush_cache()
            with PoolUsageMonitor(servers.of["decode"]) as usage:
                responses = send_jobs(servers, prompts, arrival_times(len(prompts), rate, args.seed), args.output_len)
            jobs = make_jobs(responses, file)
            measurements.jobs += ({"method": method.name, "servers": count, "gbps": gbps, "rate": rate, **asdict(job)} for job in jobs)
            summary = summarize(method.name, count, gbps, rate, jobs, usage.peak)
            print(f"{name}: {'all at once' if rate is None else f'{rate:.3g} jobs a second'}: {summary.mean:.2f} s a job", flush=True)
            return summary

        if rates is None:
            rates = [args.share * measure_rate(None).held]
        measurements.summaries.extend(measure_rate(rate) for rate in rates)
    return rates


def make_jobs(responses: Sequence[JobResponse], file: Path) -> list[Job]:
    """Join the responses of a run with the events of the timeline ``file``."""
    events: dict[int, list[TransferEvent]] = {}
    for event in read_timeline(file):
        events.setdefault(event.room, []).append(event)
    first_arrival = min(each.arrival for each in responses)
    return [
        Job(
            tokens=each.prompt_len,
            arrived=each.arrival - first_arrival,
            completion=each.stream.times[-1] - each.arrival,
            first_token=each.stream.times[0] - each.arrival,
            prefill_server=each.prefill_server,
            decode_server=each.decode_server,
            phases=job_phases(events.get(each.room, []), each.arrival, each.stream.times[-1]),
        )
        for each in responses
    ]
