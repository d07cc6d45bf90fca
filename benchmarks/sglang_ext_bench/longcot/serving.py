"""One server's long answers: time per output token by how long the answer is, drafts that were accepted, choices that came in time."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import fmean, median

from sglang_ext.tools import CommandError
from sglang_ext.tools.server_client import ServerClient
from sglang_ext_bench.client import SamplingSettings
from sglang_ext_bench.longcot.arms import Load
from sglang_ext_bench.longcot.choices import ChoicesTaken, Look, between, looking
from sglang_ext_bench.speed import decode_wave
from sglang_ext_bench.speed.decode_wave import Stream, Wave


@dataclass(frozen=True)
class LongFigures:
    """Of one server and load.

    Attributes:
        name: the server's.
        method, mode: its.
        load: what it was asked for.
        lengths: of answers, ascending.
        token_ms: milliseconds of each request per output token from the length before (the first token) to each of :attr:`lengths`; the
            median over waves of the mean over requests.
        running, together_ms: requests that decoded side by side, and milliseconds of each per output token meanwhile
            (speed/decode_wave.py), of the wave with the median; None where they hardly did, as where one is prefilled after the other.
        choices: of cache ranks in that wave, while requests decoded side by side; None without ranks.
        drafts, accepted: of all requests; 0 where nothing is drafted.
        fallbacks: requests that were last served with full KV.
        flops: operations of a token on the path that answers.
    """

    name: str
    method: str
    mode: str
    load: Load
    lengths: tuple[int, ...]
    token_ms: tuple[float, ...]
    running: int | None
    together_ms: float | None
    choices: ChoicesTaken | None
    drafts: int
    accepted: int
    fallbacks: int
    flops: int

    @property
    def acceptance(self) -> float | None:
        """Accepted over offered drafts."""
        return self.accepted / self.drafts if self.drafts else None


@dataclass(frozen=True)
class Answers:
    """A wave of requests.

    Attributes:
        streams: of each.
        wave: what they showed while they decoded side by side; None where they hardly did.
        choices: of cache ranks meanwhile.
    """

    streams: Sequence[Stream]
    wave: Wave | None
    choices: ChoicesTaken | None

    @classmethod
    def of(cls, streams: Sequence[Stream], looks: Sequence[Look] = (), began: float = 0.0) -> "Answers":
        """Of streams whose times count from ``began``, and looks at what became of choices."""
        try:
            wave = decode_wave.measure(streams)
        except CommandError:
            return cls(streams, None, None)
        begin = began + wave.first_token
        return cls(streams, wave, between(looks, begin, begin + wave.seconds))


def answer(server: ServerClient, prompts: Sequence[tuple[int, ...]], longest: int, repeats: int, ranks: bool) -> list[Answers]:
    """Waves of all prompts at once, whose KV is in the prefix cache before.

    Args:
        server: that is asked, with ``--enable-metrics`` where it has ranks.
        prompts: of each request.
        longest: tokens of an answer.
        repeats: waves.
        ranks: whether cache ranks choose.

    Raises:
        CommandError: a request was refused or broke off.
    """
    for prompt in prompts:
        decode_wave.run(server, [prompt], SamplingSettings(), 1)
    return [_wave(server, prompts, longest, ranks) for _ in range(repeats)]


def _wave(server: ServerClient, prompts: Sequence[tuple[int, ...]], longest: int, ranks: bool) -> Answers:
    with looking(server) if ranks else nullcontext([]) as looks:
        began = time.perf_counter()
        streams = decode_wave.run(server, prompts, SamplingSettings(), longest)
    return Answers.of(streams, looks, began)


def spans(waves: Sequence[Answers], lengths: Sequence[int]) -> tuple[float, ...]:
    """:attr:`LongFigures.token_ms` of some waves."""
    edges = [1, *lengths]
    found = []
    for before, until in zip(edges, edges[1:]):
        means = [fmean(1000 * token_seconds(stream, before, until) for stream in wave.streams) for wave in waves]
        found.append(median(means))
    return tuple(found)


def together(waves: Sequence[Answers]) -> Answers | None:
    """The wave with the median time of a token while requests decoded side by side; None where they hardly did in any."""
    found = sorted((each for each in waves if each.wave is not None), key=lambda each: each.wave.token_ms)
    return found[len(found) // 2] if found else None


def token_seconds(stream: Stream, before: int, until: int) -> float:
    """Seconds per token from that of number ``before`` to ``until``; of tokens that come together the first decides when all are there."""
    bursts = stream.bursts()
    first, last = (next(burst for burst in bursts if burst.tokens >= token) for token in (before, until))
    tokens = last.tokens - first.tokens
    return (last.begin - first.begin) / tokens if tokens else 0.0
