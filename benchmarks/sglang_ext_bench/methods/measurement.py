"""Measures one method of a running server: one wave of requests for each prompt length and temperature."""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sglang_ext_bench.client import SamplingSettings
from sglang_ext_bench.methods.servers import KINDS, MeasuredMethod, MethodServer
from sglang_ext_bench.quality.server_measurements import reported_bytes
from sglang_ext_bench.server import RequestClient
from sglang_ext_bench.speed import decode_wave
from sglang_ext_bench.speed.decode_wave import ResponseStream

SEED = 1
POLL_SECONDS = 0.1

Prompts = Mapping[str, Mapping[int, Sequence[tuple[int, ...]]]]
"""Token ids by kind of text and by length."""


@dataclass(frozen=True)
class MethodFigures:
    """One method at one prompt length and temperature.

    Attributes:
        label: First cell of its row, in Markdown.
        context: Prompt tokens of each request.
        temperature: Of sampling; 0 is greedy.
        drafts: Draft tokens that were verified, by kind of text.
        accepted: Accepted draft tokens, by kind of text.
        fallbacks: Requests that full KV served at their end. Their acceptance does not measure the method.
        token_ms: Milliseconds per output token of each request, without its first round. None if a request had fewer than two bursts
            of tokens, so that its speed is unknown.
        draft_share: Bytes of compressed or selected KV that a draft step reads, over those of the full KV. The newest tokens, which
            stay exact beside packed KV, are not counted.
    """

    label: str
    context: int
    temperature: float
    drafts: dict[str, int]
    accepted: dict[str, int]
    fallbacks: int
    token_ms: float | None
    draft_share: float

    def acceptance(self, kind: str) -> float | None:
        """Accepted over offered draft tokens. None if nothing was drafted."""
        return self.accepted[kind] / self.drafts[kind] if self.drafts[kind] else None


def measure(
    server: RequestClient, plan: MethodServer, prompts: Prompts, temperatures: Sequence[float], new_tokens: int, token_bytes: int
) -> Iterator[MethodFigures]:
    """Measure all methods of a server.

    A wave has the prompts of all kinds at once, and finds them in the prefix cache.

    Args:
        server: The running server, with ``--enable-metrics``.
        plan: The server's methods.
        prompts: Token ids by kind of text and by length.
        temperatures: Temperatures of sampling.
        new_tokens: Output tokens of each request.
        token_bytes: Bytes of the full KV of one token, over all layers.

    Yields:
        The figures of each length, method and temperature.

    Raises:
        CommandError: A request failed, or the wave was too short to be timed.
    """
    for context in prompts[KINDS[0]]:
        wave = [prompt for kind in KINDS for prompt in prompts[kind][context]]
        server.flush_cache()
        decode_wave.run(server, wave, SamplingSettings(), 1)
        for method in plan.methods:
            for temperature in temperatures:
                streams, held = run_wave(server, method, wave, temperature, new_tokens)
                share = held / (len(wave) * context * token_bytes) if method.draft_share is None else method.draft_share
                yield figures_of(method, context, temperature, streams, share)


def run_wave(
    server: RequestClient, method: MeasuredMethod, prompts: Sequence[tuple[int, ...]], temperature: float, new_tokens: int
) -> tuple[list[ResponseStream], float]:
    """Send all prompts at once. Returns their streams, and the largest number of bytes in compressed KV during the wave."""
    sampling = SamplingSettings(temperature, SEED if temperature else None)
    largest = 0.0
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(decode_wave.run, server, prompts, sampling, new_tokens, compressor=method.asked)
        while not answers.done():
            if method.draft_share is None:
                largest = max(largest, reported_bytes(server))
            time.sleep(POLL_SECONDS)
    return answers.result(), largest


def figures_of(
    method: MeasuredMethod, context: int, temperature: float, streams: Sequence[ResponseStream], draft_share: float
) -> MethodFigures:
    """The figures of a wave, in which the kinds of text have equally many requests, one kind after the other.

    Raises:
        CommandError: The wave was too short to be timed.
    """
    each = len(streams) // len(KINDS)
    by_kind = {kind: streams[each * place : each * (place + 1)] for place, kind in enumerate(KINDS)}
    wave = decode_wave.measure(streams)
    counted = {
        name: {kind: sum(stream.meta.get(name, 0) for stream in mine) for kind, mine in by_kind.items()}
        for name in ("kv_drafts", "kv_accepted")
    }
    return MethodFigures(
        label=method.label,
        context=context,
        temperature=temperature,
        drafts=counted["kv_drafts"],
        accepted=counted["kv_accepted"],
        fallbacks=wave.fallbacks,
        token_ms=wave.steady_ms,
        draft_share=draft_share,
    )
