"""Figures of a method's jobs at one rate, and their table."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_ext_bench.jobs.phases import Job, Phases

HEAD = (
    "method", "jobs/s", "completion, s: mean", "p50", "p99", "to the first", *Phases._fields, "tokens used at most", "of the pool",
)  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """Of jobs of one method, in seconds.

    Attributes:
        method: its name.
        servers: how many prefill and decode servers.
        gbps: of each prefill server's link; None without a limit.
        rate: of arrivals a second; None where all came at once.
        jobs: how many.
        held: jobs per second that ended, from the first arrival to the last end.
        mean, median, p99: of completion times.
        first_token: mean.
        phases: means, of completion times; None where no timeline was kept.
        peak: most tokens of a decode server's pool in use, and how many it has.
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
        """What figures must share to be compared."""
        return self.servers, self.gbps, self.rate


def summarize(
    method: str, servers: tuple[int, int], gbps: float | None, rate: float | None, jobs: Sequence[Job], peak: tuple[int, int]
) -> Figures:
    """Of all jobs of one run."""
    completions = sorted(job.completion for job in jobs)
    known = [job.phases for job in jobs if job.phases is not None]
    last = max(job.arrived + job.completion for job in jobs)
    return Figures(
        method=method,
        servers=servers,
        gbps=gbps,
        rate=rate,
        jobs=len(jobs),
        held=len(jobs) / last,
        mean=statistics.fmean(completions),
        median=statistics.median(completions),
        p99=completions[min(len(completions) - 1, int(0.99 * len(completions)))],
        first_token=statistics.fmean(job.first_token for job in jobs),
        phases=Phases(*map(statistics.fmean, zip(*known))) if len(known) == len(jobs) else None,
        peak=peak,
    )


def tables(found: Sequence[Figures]) -> Iterator[str]:
    """In Markdown, one for each setting; beneath it completion times over the first method's."""
    for setting in dict.fromkeys(each.setting for each in found):
        mine = [each for each in found if each.setting == setting]
        (prefill, decode), gbps, rate = setting
        link = "no limit" if gbps is None else f"{gbps:g} Gbit/s"
        arriving = "all at once" if rate is None else f"{rate:.3g} a second"
        yield f"\n{prefill} prefill and {decode} decode servers, {link}, {mine[0].jobs} jobs, {arriving}; means in seconds:\n"
        yield "| " + " | ".join(HEAD) + " |"
        yield "|---" * len(HEAD) + "|"
        yield from map(row, mine)
        if len(mine) > 1:
            yield ""
        for other in mine[1:]:
            yield f"- {other.method}: jobs take {other.mean / mine[0].mean:.2f} of {mine[0].method}'s time"


def row(figures: Figures) -> str:
    """A line of a table."""
    seconds = (figures.mean, figures.median, figures.p99, figures.first_token, *(figures.phases or ()))
    blank = () if figures.phases else ("",) * len(Phases._fields)
    used, size = figures.peak
    pool = (str(used), f"{used / size:.0%}" if size else "")
    cells = (figures.method, f"{figures.held:.3g}", *(f"{each:.2f}" for each in seconds), *blank, *pool)
    return "| " + " | ".join(cells) + " |"
