"""One server's long answers: time per output token by how long the answer is, and drafts that were accepted."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from sglang_ext.bench import BenchError
from sglang_ext.bench.client import SamplingSettings, ServerClient
from sglang_ext.bench.longcot.arms import Load
from sglang_ext.bench.speed import decode_wave
from sglang_ext.bench.speed.decode_wave import Stream


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
    drafts: int
    accepted: int
    fallbacks: int
    flops: int

    @property
    def acceptance(self) -> float | None:
        """Accepted over offered drafts."""
        return self.accepted / self.drafts if self.drafts else None


def answer(server: ServerClient, prompts: Sequence[tuple[int, ...]], longest: int, repeats: int) -> list[list[Stream]]:
    """Waves of all prompts at once, whose KV is in the prefix cache before.

    Raises:
        BenchError: a request was refused or broke off.
    """
    sampling = SamplingSettings()
    for prompt in prompts:
        decode_wave.run(server, [prompt], sampling, 1)
    return [decode_wave.run(server, prompts, sampling, longest) for _ in range(repeats)]


def spans(waves: Sequence[Sequence[Stream]], lengths: Sequence[int]) -> tuple[float, ...]:
    """:attr:`LongFigures.token_ms` of some waves."""
    edges = [1, *lengths]
    found = []
    for before, until in zip(edges, edges[1:]):
        means = [fmean(1000 * token_seconds(stream, before, until) for stream in wave) for wave in waves]
        found.append(median(means))
    return tuple(found)


def together(waves: Sequence[Sequence[Stream]]) -> tuple[int, float] | tuple[None, None]:
    """:attr:`LongFigures.running` and :attr:`LongFigures.together_ms` of some waves."""
    try:
        found = sorted((decode_wave.measure(wave) for wave in waves), key=lambda wave: wave.token_ms)
    except BenchError:
        return None, None
    middle = found[len(found) // 2]
    return middle.running, middle.token_ms


def token_seconds(stream: Stream, before: int, until: int) -> float:
    """Seconds per token from that of number ``before`` to ``until``; of tokens that come together the first decides when all are there."""
    first = _chunk(stream, before)
    last = _chunk(stream, until)
    tokens = stream.tokens[last] - stream.tokens[first]
    return (stream.times[last] - stream.times[first]) / tokens if tokens else 0.0


def _chunk(stream: Stream, token: int) -> int:
    """The first chunk with which a token is there."""
    return next(place for place, count in enumerate(stream.tokens) if count >= token)
