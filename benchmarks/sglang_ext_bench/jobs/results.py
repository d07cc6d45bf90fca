"""Results of jobs: the phases of a job (HACK, Figure 10), summaries of a run, and their tables."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang_ext_bench.timelines import TransferEvent


class Phases(NamedTuple):
    """Consecutive phases of a job, in seconds. Their sum is the job's completion time.

    Attributes:
        waiting: Until the decode server has slots for the job. Prefill does not start before.
        prefill: Until all of its KV is computed, the time in the prefill server's queue included.
        encoding: Until the link has all of its KV, or until decoding starts, whichever is earlier.
        transfer: Until decoding can start.
        decode: Until the last token.
    """

    waiting: float
    prefill: float
    encoding: float
    transfer: float
    decode: float


@dataclass(frozen=True)
class Job:
    """One request that was computed by a prefill server and a decode server. Its fields are keys of the JSON file.

    Attributes:
        tokens: Tokens of the prompt.
        arrived: Seconds from the first arrival to the arrival of this job.
        completion: Seconds from its arrival to its last token.
        first_token: Seconds from its arrival to its first token at the client.
        prefill_server: Index of the prefill server.
        decode_server: Index of the decode server.
        phases: Phases of the completion time. None without a timeline.
    """

    tokens: int
    arrived: float
    completion: float
    first_token: float
    prefill_server: int
    decode_server: int
    phases: Phases | None


def job_phases(events: Sequence[TransferEvent], arrival: float, end: float) -> Phases | None:
    """Compute the phases of a job. Returns None if an event is missing that starts a phase.

    Args:
        events: Events of this job on both servers.
        arrival: Arrival time in seconds, on the clock of the timeline.
        end: Time of the last token, on the same clock.
    """
    times = {event.kind: event.at for event in reversed(events)}
    # With an anchor, decoding starts before the residual has arrived.
    decode_start = min((times[kind] for kind in ("anchor", "complete") if kind in times), default=math.nan)
    if math.isnan(decode_start) or "computed" not in times:
        return None
    # Several processes read the clock, one after another. So no event counts as earlier than those before it.
    expected = max(times.get("expected", arrival), arrival)
    computed = max(times["computed"], expected)
    decode_start = max(decode_start, computed)
    encoded = min(max(times.get("encoded", computed), computed), decode_start)
    return Phases(expected - arrival, computed - expected, encoded - computed, decode_start - encoded, end - decode_start)


HEAD = (
    "method", "jobs/s", "completion, s: mean", "p50", "p99", "first token", *Phases._fields, "peak tokens used", "of the pool",
)  # fmt: skip


@dataclass(frozen=True)
class JobSummary:
    """Summary of the jobs of one method at one rate. Its fields are keys of the JSON file. Times are in seconds.

    Attributes:
        method: Name of the method.
        servers: Number of prefill servers and of decode servers.
        gbps: Rate of each prefill server's link in Gbit/s. None without a limit.
        rate: Arrivals per second. None if all jobs arrive at once.
        jobs: Number of jobs.
        held: Completed jobs per second, from the first arrival to the end of the last job.
        mean: Mean completion time.
        median: Median completion time.
        p99: 99th percentile of completion times.
        first_token: Mean time to the first token.
        phases: Mean phases. None without a timeline.
        peak: Peak of used tokens of a decode server's pool, and the pool's size in tokens.
    """

    method: str
    servers: tuple[int, int]
    gbps: float | None
    rate: float | None
    jobs: int
    held: float
    mean: float
    median: float
    p99: float
    first_token: float
    phases: Phases | None
    peak: tuple[int, int]

    @property
    def setting(self) -> tuple[tuple[int, int], float | None, float | None]:
        """Servers, link and rate. Summaries of one setting are compared in one table."""
        return self.servers, self.gbps, self.rate


def summarize(
    method: str, servers: tuple[int, int], gbps: float | None, rate: float | None, jobs: Sequence[Job], peak: tuple[int, int]
) -> JobSummary:
    """Summarize all jobs of one run."""
    completions = sorted(job.completion for job in jobs)
    phases = [job.phases for job in jobs if job.phases is not None]
    end = max(job.arrived + job.completion for job in jobs)
    return JobSummary(
        method=method,
        servers=servers,
        gbps=gbps,
        rate=rate,
        jobs=len(jobs),
        held=len(jobs) / end,
        mean=statistics.fmean(completions),
        median=statistics.median(completions),
        p99=completions[min(len(completions) - 1, int(0.99 * len(completions)))],
        first_token=statistics.fmean(job.first_token for job in jobs),
        phases=Phases(*map(statistics.fmean, zip(*phases))) if len(phases) == len(jobs) else None,
        peak=peak,
    )


def tables(summaries: Sequence[JobSummary]) -> Iterator[str]:
    """Yield the lines of one Markdown table per setting, each with completion times relative to the first method's."""
    for setting in dict.fromkeys(each.setting for each in summaries):
        selected = [each for each in summaries if each.setting == setting]
        (prefill, decode), gbps, rate = setting
        link = "no limit" if gbps is None else f"{gbps:g} Gbit/s"
        arrivals = "all at once" if rate is None else f"{rate:.3g} a second"
        yield f"\n{prefill} prefill and {decode} decode servers, {link}, {selected[0].jobs} jobs, {arrivals}; means in seconds:\n"
        yield "| " + " | ".join(HEAD) + " |"
        yield "|---" * len(HEAD) + "|"
        yield from map(row, selected)
        if len(selected) > 1:
            yield ""
        for other in selected[1:]:
            yield f"- {other.method}: jobs take {other.mean / selected[0].mean:.2f} of {selected[0].method}'s time"


def row(summary: JobSummary) -> str:
    """One row of the table."""
    seconds = (summary.mean, summary.median, summary.p99, summary.first_token, *(summary.phases or ()))
    blank = () if summary.phases else ("",) * len(Phases._fields)
    used, size = summary.peak
    pool = (str(used), f"{used / size:.0%}" if size else "")
    cells = (summary.method, f"{summary.held:.3g}", *(f"{each:.2f}" for each in seconds), *blank, *pool)
    return "| " + " | ".join(cells) + " |"
