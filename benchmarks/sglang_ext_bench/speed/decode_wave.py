"""Requests that decode side by side, and how fast they do."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from sglang_ext.config.benchmark_options import PARAMETER
from sglang_ext.config.method_options import COMPRESSOR_PARAM
from sglang_ext.tools import CommandError
from sglang_ext.tools.server_client import ServerClient
from sglang_ext_bench.client import SamplingSettings

# Share of the time until a first request ends in which all must have run side by side.
SHORTEST = 0.1
# Share of the mean time between chunks. Chunks that are closer came together: a stream has a chunk for each token of a round.
TOGETHER = 0.25


@dataclass(frozen=True)
class Burst:
    """Chunks of a stream that came together.

    Attributes:
        begin, end: seconds of its first and its last chunk.
        tokens: output tokens up to and with its last chunk.
    """

    begin: float
    end: float
    tokens: int


@dataclass
class Stream:
    """One request's answer as it came.

    Attributes:
        times: seconds since the wave began, of each chunk.
        tokens: output tokens up to and with each chunk.
        meta: ``kv_*`` fields of the last chunk's ``meta_info``.
    """

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)

    def add(self, seconds: float, meta_info: dict[str, Any]) -> None:
        """Take a chunk's time and ``meta_info``."""
        self.times.append(seconds)
        self.tokens.append(meta_info["completion_tokens"])
        self.meta = {name: value for name, value in meta_info.items() if name.startswith("kv_")}

    @property
    def rounds(self) -> int:
        """Decode rounds of the request. Each one adds a token that is no accepted draft; the first token is the prefill's."""
        return self.tokens[-1] - 1 - self.meta.get("kv_accepted", 0)

    def tokens_at(self, seconds: float) -> int:
        """Output tokens that had come by then."""
        return max((n for t, n in zip(self.times, self.tokens) if t <= seconds), default=0)

    def bursts(self, begin: float = -math.inf) -> list[Burst]:
        """The bursts after ``begin``.

        The mean time between chunks includes the gap before the first of these chunks. Without it, the chunks of a single burst would
        look like bursts of one token each.
        """
        chunks = [(t, n) for t, n in zip(self.times, self.tokens) if begin < t]
        times = [*[t for t in self.times if t <= begin][-1:], *(t for t, _ in chunks)]
        near = TOGETHER * (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
        found: list[Burst] = []
        for time, tokens in chunks:
            if found and time - found[-1].end < near:
                found[-1] = Burst(found[-1].begin, time, tokens)
            else:
                found.append(Burst(time, time, tokens))
        return found

    def rate(self, begin: float, end: float) -> float:
        """Tokens per second from the first burst after ``begin`` until the last one up to ``end``; 0 where these are not two."""
        bursts = [burst for burst in self.bursts(begin) if burst.end <= end]
        if len(bursts) < 2:
            return 0.0
        first, last = bursts[0], bursts[-1]
        return (last.tokens - first.tokens) / (last.begin - first.begin)


@dataclass(frozen=True)
class Wave:
    """What a wave of requests showed.

    Attributes:
        batch: requests.
        running: those that decoded side by side; the others waited, for lack of room, until one of them had ended.
        seconds: from the first token of the last of these to the last token of the first to end.
        tokens: their output tokens in these seconds.
        steady: tokens per second of all, each request from its first burst after that until its last: without the wait for a first
            verification, and without drafts that are not verified yet when the span ends.
        first_token: seconds until the first token of the last of these.
        accept_length: mean tokens per verification; None when nothing was drafted.
        fallbacks: requests that were last served with full KV, though they could draft.
        steady_requests: Requests with two bursts or more in the span. The others add nothing to :attr:`steady`.
    """

    batch: int
    running: int
    seconds: float
    tokens: int
    steady: float
    first_token: float
    accept_length: float | None
    fallbacks: int
    steady_requests: int = 0

    @property
    def steady_ms(self) -> float | None:
        """Milliseconds per output token of each request, without its first round. None if a request has fewer than two bursts."""
        return 1000 * self.running / self.steady if self.steady_requests == self.running else None

    @property
    def token_ms(self) -> float:
        """Milliseconds per output token of each request that runs."""
        return 1000 * self.running / self.tokens_per_second

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together."""
        return self.tokens / self.seconds


def read(server: ServerClient, body: dict[str, Any], began: float, clock: Callable[[], float] = time.perf_counter) -> Stream:
    """The stream that a request for ``/generate`` gets, timed from ``began`` on.

    Raises:
        OSError: as :meth:`ServerClient.stream`, or the server answered with an error.
    """
    stream = Stream()
    for event in server.stream("generate", {**body, "stream": True}):
        if "meta_info" not in event:
            # SGLang has begun a stream, with status 200, before it looks at a request.
            raise OSError(event.get("error", {}).get("message", event))
        stream.add(clock() - began, event["meta_info"])
    return stream


def measure(streams: Sequence[Stream]) -> Wave:
    """The span in which as many requests decoded as there was room for.

    Tokens come in bursts, so the span begins and ends with a chunk.

    Raises:
        CommandError: it is short beside the time in which they began.
    """
    end = min(stream.times[-1] for stream in streams)
    together = [stream for stream in streams if stream.times[0] < end]
    begin = max(stream.times[0] for stream in together)
    tokens = sum(stream.tokens_at(end) - stream.tokens_at(begin) for stream in together)
    if begin > (1 - SHORTEST) * end or tokens <= 0:
        raise CommandError(
            f"{len(together)} requests of {len(streams)} decoded side by side for {end - begin:.2f} s of the {end:.2f} s until the first "
            "had ended; ask for a longer output (--output-len)"
        )
    rates = [stream.rate(begin, end) for stream in together]
    verifies = sum(stream.meta.get("kv_verifies", 0) for stream in streams)
    accepted = sum(stream.meta.get("kv_accepted", 0) for stream in streams)
    return Wave(
        batch=len(streams),
        running=len(together),
        seconds=end - begin,
        tokens=tokens,
        steady=sum(rates),
        first_token=begin,
        accept_length=(accepted + verifies) / verifies if verifies else None,
        fallbacks=sum(bool(stream.meta.get("kv_fallback")) for stream in streams),
        steady_requests=sum(rate > 0 and stream.rounds > 1 for rate, stream in zip(rates, together)),
    )


def run(
    server: ServerClient,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingSettings,
    new_tokens: int,
    acceptance: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
    compressor: str | None = None,
) -> list[Stream]:
    """Send all prompts at once and read their streams.

    Args:
        server: where to.
        prompts: token ids.
        sampling: how to sample.
        new_tokens: output tokens of each, whatever they are.
        acceptance: forced on a server with --kv-bench-acceptance (managers/simulated_acceptance.py).
        clock: seconds.
        compressor: Method that the requests ask for. None for the server's first.

    Raises:
        CommandError: a request was refused or broke off.
    """
    began = clock()
    parameters = sampling.as_json(new_tokens)
    asked = {PARAMETER: acceptance, COMPRESSOR_PARAM: compressor}
    if custom := {name: value for name, value in asked.items() if value is not None}:
        parameters["custom_params"] = custom

    def ask(input_ids: tuple[int, ...]) -> Stream:
        try:
            stream = read(server, {"input_ids": list(input_ids), "sampling_params": parameters}, began, clock)
        except (OSError, KeyError) as error:
            raise CommandError(f"a request of {len(input_ids)} tokens failed: {error}") from error
        if not stream.tokens or stream.tokens[-1] < new_tokens:
            got = stream.tokens[-1] if stream.tokens else 0
            raise CommandError(f"a request ended after {got} of {new_tokens} tokens; see the server's log")
        return stream

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, prompts))
