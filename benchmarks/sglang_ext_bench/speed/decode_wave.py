"""Sends a wave of requests at once, reads their streams, and measures the decode speed while all of them run.

Terms:
    chunk: One server-sent event of a streaming response.
    burst: Chunks that arrive together, because one round produced their tokens.
    wave: Requests that are sent at once.
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from sglang_ext.tools import CommandError
from sglang_ext_bench.client import SamplingSettings
from sglang_ext_bench.server import RequestClient

MIN_SPAN = 0.1
"""Least measured span, as a share of the time until the first request ends."""
BURST_GAP = 0.25
"""Chunks are one burst if the time between them is below this share of the mean time between chunks."""


@dataclass(frozen=True)
class Burst:
    """Chunks of a stream that arrived together.

    Attributes:
        begin: Time of the first chunk, in seconds.
        end: Time of the last chunk, in seconds.
        tokens: Output tokens up to and including the last chunk.
    """

    begin: float
    end: float
    tokens: int


@dataclass
class ResponseStream:
    """The streaming response to one request.

    Attributes:
        times: Arrival time of each chunk, in seconds since the start of the wave.
        tokens: Output tokens up to and including each chunk.
        meta: ``kv_*`` fields of ``meta_info`` in the last chunk.
    """

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)

    def add(self, seconds: float, meta_info: dict[str, Any]) -> None:
        """Add a chunk with its arrival time and its ``meta_info``."""
        self.times.append(seconds)
        self.tokens.append(meta_info["completion_tokens"])
        self.meta = {name: value for name, value in meta_info.items() if name.startswith("kv_")}

    @property
    def rounds(self) -> int:
        """Decode rounds of the request. Each one adds a token that is no accepted draft; the first token is the prefill's."""
        return self.tokens[-1] - 1 - self.meta.get("kv_accepted", 0)

    def tokens_at(self, seconds: float) -> int:
        """Output tokens that had arrived by this time."""
        return max((n for t, n in zip(self.times, self.tokens) if t <= seconds), default=0)

    def bursts(self, begin: float = -math.inf) -> list[Burst]:
        """The bursts after ``begin``.

        The mean time between chunks includes the gap before the first of these chunks. Without it, the chunks of a single burst would
        look like bursts of one token each.
        """
        chunks = [(t, n) for t, n in zip(self.times, self.tokens) if begin < t]
        times = [*[t for t in self.times if t <= begin][-1:], *(t for t, _ in chunks)]
        max_gap = BURST_GAP * (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
        found: list[Burst] = []
        for seconds, tokens in chunks:
            if found and seconds - found[-1].end < max_gap:
                found[-1] = Burst(found[-1].begin, seconds, tokens)
            else:
                found.append(Burst(seconds, seconds, tokens))
        return found

    def rate(self, begin: float, end: float) -> float:
        """Tokens per second from the first burst after ``begin`` to the last burst before ``end``. 0 for fewer than two bursts."""
        bursts = [burst for burst in self.bursts(begin) if burst.end <= end]
        if len(bursts) < 2:
            return 0.0
        first, last = bursts[0], bursts[-1]
        return (last.tokens - first.tokens) / (last.begin - first.begin)


@dataclass(frozen=True)
class Wave:
    """The decode speed of a wave.

    The measured span begins when all running requests have their first token, and ends when the first of them ends.

    Attributes:
        batch: Requests of the wave.
        running: Requests that decoded at the same time. The others waited for memory until one of them ended.
        seconds: Length of the measured span.
        tokens: Output tokens of the running requests in the span.
        steady: Tokens per second of all requests, for each request between its first and its last burst of the span. It excludes the wait
            for the first verification, and drafts that are not verified when the span ends.
        first_token: Seconds from the start of the wave to the start of the span.
        accept_length: Mean tokens per verification. None if nothing was drafted.
        fallbacks: Requests that the full KV served at their end.
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
        """Milliseconds per output token of each running request."""
        return 1000 * self.running / self.tokens_per_second

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all running requests."""
        return self.tokens / self.seconds


def read(server: RequestClient, body: dict[str, Any], began: float, clock: Callable[[], float] = time.perf_counter) -> ResponseStream:
    """Send a request to ``/generate``, and read its stream.

    Args:
        server: The server.
        body: JSON body of the request.
        began: Start of the wave, as a value of ``clock``.
        clock: Returns the time in seconds.

    Raises:
        OSError: As for :meth:`RequestClient.stream`, or the server sent an error.
    """
    stream = ResponseStream()
    for event in server.stream("generate", {**body, "stream": True}):
        if "meta_info" not in event:
            # SGLang checks a request after it has sent status 200.
            raise OSError(event.get("error", {}).get("message", event))
        stream.add(clock() - began, event["meta_info"])
    return stream


def measure(streams: Sequence[ResponseStream]) -> Wave:
    """Measure the span in which all running requests decode. The span begins and ends with a chunk.

    Raises:
        CommandError: The span is too short, compared with the time until the first request ended.
    """
    end = min(stream.times[-1] for stream in streams)
    running = [stream for stream in streams if stream.times[0] < end]
    begin = max(stream.times[0] for stream in running)
    tokens = sum(stream.tokens_at(end) - stream.tokens_at(begin) for stream in running)
    if begin > (1 - MIN_SPAN) * end or tokens <= 0:
        raise CommandError(
            f"{len(running)} requests of {len(streams)} decoded at the same time for {end - begin:.2f} s of the {end:.2f} s until the first "
            "one ended: pass a larger --output-len"
        )
    rates = [stream.rate(begin, end) for stream in running]
    verifies = sum(stream.meta.get("kv_verifies", 0) for stream in streams)
    accepted = sum(stream.meta.get("kv_accepted", 0) for stream in streams)
    return Wave(
        batch=len(streams),
        running=len(running),
        seconds=end - begin,
        tokens=tokens,
        steady=sum(rates),
        first_token=begin,
        accept_length=(accepted + verifies) / verifies if verifies else None,
        fallbacks=sum(bool(stream.meta.get("kv_fallback")) for stream in streams),
        steady_requests=sum(rate > 0 and stream.rounds > 1 for rate, stream in zip(rates, running)),
    )


def run(
    server: RequestClient,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingSettings,
    new_tokens: int,
    acceptance: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
    compressor: str | None = None,
) -> list[ResponseStream]:
    """Send all prompts at once, and read their streams.

    Args:
        server: The server.
        prompts: Token ids of each prompt.
        sampling: Sampling parameters.
        new_tokens: Output tokens of each request.
        acceptance: Forced acceptance probability, for a server with --kv-bench-acceptance (managers/spec_decode/draft.py).
        clock: Returns the time in seconds.
        compressor: Method that the requests ask for. None for the server's first method.

    Raises:
        CommandError: A request was refused or broke off.
    """
    # These modules load SGLang, which the help of a command must not do.
    from sglang_ext.config.request_params import ACCEPTANCE
    from sglang_ext.config.method_options import COMPRESSOR_PARAM

    began = clock()
    parameters = sampling.as_json(new_tokens)
    custom = {ACCEPTANCE: acceptance, COMPRESSOR_PARAM: compressor}
    if any(value is not None for value in custom.values()):
        parameters["custom_params"] = {name: value for name, value in custom.items() if value is not None}

    def send(input_ids: tuple[int, ...]) -> ResponseStream:
        try:
            stream = read(server, {"input_ids": list(input_ids), "sampling_params": parameters}, began, clock)
        except (OSError, KeyError) as error:
            raise CommandError(f"a request of {len(input_ids)} tokens failed: {error}") from error
        if not stream.tokens or stream.tokens[-1] < new_tokens:
            received = stream.tokens[-1] if stream.tokens else 0
            raise CommandError(f"a request ended after {received} of {new_tokens} tokens; see the server's log")
        return stream

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(send, prompts))
