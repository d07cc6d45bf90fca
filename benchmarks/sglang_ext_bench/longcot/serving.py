"""Sends waves of requests to one server, and measures time per output token and the selections of its cache ranks.

Selections are counted while requests decode side by side. Steps with late selections do less work, so their share matters for the times.
"""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from statistics import fmean, median

from sglang_ext.core import run_periodically
from sglang_ext.tools import CommandError
from sglang_ext_bench.client import SamplingSettings
from sglang_ext_bench.longcot.arms import LongcotLoad
from sglang_ext_bench.speed import decode_wave
from sglang_ext_bench.speed.decode_wave import ResponseStream, Wave
from sglang_ext_bench.client import readings, total
from sglang_ext_bench.server import RequestClient

# Seconds between two readings of a server's metrics.
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class SelectionReading:
    """One reading of a server's metrics. Counters start with the server.

    Attributes:
        at: Time of the reading, in seconds of ``time.perf_counter``.
        taken: Selections that arrived in time.
        missed: Selections that did not, by reason.
        waited: Seconds that steps waited for selections.
        alone: Tokens of remote-only KV.
        every: Steps between two selections of a request, with cache ranks on GPUs. 0 otherwise.
    """

    at: float
    taken: float
    missed: dict[str, float]
    waited: float
    alone: float
    every: float = 0.0

    @classmethod
    def from_metrics(cls, page: str, at: float) -> "SelectionReading":
        """Parse a page of ``/metrics`` that was read at time ``at``."""
        by_reason = readings(page, "sglang_ext:missed_selections_total")
        missed = {re.findall(r'reason="([^"]*)"', labels)[0]: value for labels, value in by_reason}
        names = "selections_total", "selection_wait_seconds_total", "rank_alone_tokens", "selection_steps"
        taken, waited, alone, every = (total(page, f"sglang_ext:{name}") for name in names)
        return cls(at, taken, missed, waited, alone, every)


@dataclass(frozen=True)
class SelectionCounts:
    """Selections in a span of time. The fields are keys of the JSON file.

    Attributes:
        taken: Selections that arrived in time.
        missed: Selections that did not, by reason. Reasons without any are left out.
        waited: Seconds that steps waited for selections.
        alone: Tokens of remote-only KV at the end.
        every: Steps between two selections of a request at the end, with cache ranks on GPUs. 0 otherwise.
        seconds: Duration of the span.
    """

    taken: float
    missed: dict[str, float]
    waited: float
    alone: float
    every: float
    seconds: float

    def __str__(self) -> str:
        missed = sum(self.missed.values())
        reasons = f" ({', '.join(self.missed)})" if missed else ""
        interval = f", every {self.every:.0f} steps" if self.every > 1 else ""
        return f"{self.taken:.0f} of {self.taken + missed:.0f}{reasons}{interval}, waited {self.waited / self.seconds:.0%}"


def count_selections(polled: Sequence[SelectionReading], begin: float, end: float) -> SelectionCounts | None:
    """Count the selections between the first and the last reading in a span. None with fewer than two readings."""
    inside = [reading for reading in polled if begin <= reading.at <= end]
    if len(inside) < 2:
        return None
    first, last = inside[0], inside[-1]
    grown = {reason: count - first.missed.get(reason, 0) for reason, count in last.missed.items()}
    missed = {reason: count for reason, count in grown.items() if count}
    return SelectionCounts(last.taken - first.taken, missed, last.waited - first.waited, last.alone, last.every, last.at - first.at)


@contextmanager
def poll_selections(server: RequestClient, seconds: float = POLL_SECONDS) -> Iterator[list[SelectionReading]]:
    """Context manager that reads the metrics of a server with ``--enable-metrics`` every ``seconds``. Yields the growing list."""
    polled: list[SelectionReading] = []

    def poll() -> None:
        with suppress(OSError):
            polled.append(SelectionReading.from_metrics(server.request("metrics"), time.perf_counter()))

    with run_periodically(poll, seconds):
        yield polled


@dataclass(frozen=True)
class LongcotSummary:
    """Summary of a server and a load. Its fields are keys of the JSON file.

    Attributes:
        name: Name of the server.
        method: Method of the server.
        mode: Mode of the server.
        load: Requests of a wave.
        lengths: Output lengths, ascending.
        token_ms: Milliseconds per output token of each request, from the previous length (or the first token) to each of
            :attr:`lengths`. Median over waves of the mean over requests.
        running: Requests that decoded side by side (speed/decode_wave.py), in the wave with the median time. None if they hardly did,
            for example because one is prefilled after the other.
        together_ms: Milliseconds per output token of each request in that time. None as above.
        choices: Selections of cache ranks in that time. None without cache ranks.
        drafts: Draft tokens of all requests. 0 without drafts.
        accepted: Accepted draft tokens.
        fallbacks: Requests that decoded on full KV at the end.
        flops: Operations of a token on the critical path of a step.
    """

    name: str
    method: str
    mode: str
    load: LongcotLoad
    lengths: tuple[int, ...]
    token_ms: tuple[float, ...]
    running: int | None
    together_ms: float | None
    choices: SelectionCounts | None
    drafts: int
    accepted: int
    fallbacks: int
    flops: int

    @property
    def acceptance(self) -> float | None:
        """Acceptance rate. None without drafts."""
        return self.accepted / self.drafts if self.drafts else None


@dataclass(frozen=True)
class WaveResult:
    """The responses of a wave of requests.

    Attributes:
        streams: Response of each request.
        wave: Measurements while all requests decoded side by side. None if they hardly did.
        selections: Selections of cache ranks in that time. None without cache ranks.
    """

    streams: Sequence[ResponseStream]
    wave: Wave | None
    selections: SelectionCounts | None

    @classmethod
    def from_streams(cls, streams: Sequence[ResponseStream], polled: Sequence[SelectionReading] = (), start: float = 0.0) -> "WaveResult":
        """Measure a wave.

        Args:
            streams: Responses, whose times count from ``start``.
            polled: Readings of the server's metrics.
            start: Start of the wave, in seconds of ``time.perf_counter``.
        """
        try:
            wave = decode_wave.measure(streams)
        except CommandError:
            return cls(streams, None, None)
        begin = start + wave.first_token
        return cls(streams, wave, count_selections(polled, begin, begin + wave.seconds))


def send_waves(
    server: RequestClient, prompts: Sequence[tuple[int, ...]], new_tokens: int, num_waves: int, has_ranks: bool
) -> list[WaveResult]:
    """Send waves of all prompts at once. Before that, it sends each prompt alone, so that the prefix cache has its KV.

    Args:
        server: The server. With cache ranks it needs ``--enable-metrics``.
        prompts: Token ids of each request.
        new_tokens: Output tokens of each request.
        num_waves: Number of waves.
        has_ranks: The server has cache ranks.

    Raises:
        CommandError: The server refused a request, or a request broke off.
    """
    for prompt in prompts:
        decode_wave.run(server, [prompt], SamplingSettings(), 1)
    return [_send_wave(server, prompts, new_tokens, has_ranks) for _ in range(num_waves)]


def _send_wave(server: RequestClient, prompts: Sequence[tuple[int, ...]], new_tokens: int, has_ranks: bool) -> WaveResult:
    polling: AbstractContextManager[list[SelectionReading]] = poll_selections(server) if has_ranks else nullcontext([])
    with polling as polled:
        start = time.perf_counter()
        streams = decode_wave.run(server, prompts, SamplingSettings(), new_tokens)
    return WaveResult.from_streams(streams, polled, start)


def token_ms(waves: Sequence[WaveResult], lengths: Sequence[int]) -> tuple[float, ...]:
    """Compute :attr:`LongcotSummary.token_ms` of some waves."""
    edges = [1, *lengths]
    times = []
    for before, until in zip(edges, edges[1:]):
        means = [fmean(1000 * token_seconds(stream, before, until) for stream in wave.streams) for wave in waves]
        times.append(median(means))
    return tuple(times)


def median_wave(waves: Sequence[WaveResult]) -> WaveResult | None:
    """The wave with the median time per token while requests decoded side by side. None if they hardly did in all waves."""
    times = sorted((each.wave.token_ms, index) for index, each in enumerate(waves) if each.wave is not None)
    return waves[times[len(times) // 2][1]] if times else None


def token_seconds(stream: ResponseStream, before: int, until: int) -> float:
    """Seconds per token, from token number ``before`` to token number ``until``. Tokens of one burst count from its first chunk."""
    bursts = stream.bursts()
    first, last = (next(burst for burst in bursts if burst.tokens >= token) for token in (before, until))
    tokens = last.tokens - first.tokens
    return (last.begin - first.begin) / tokens if tokens else 0.0
