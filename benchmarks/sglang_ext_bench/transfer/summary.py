"""Figures of a method over one link at one context, from its requests."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext_bench.transfer.clocks import CLOCKS, Request

# Tokens that tables show.
SHOWN = (1, 8, 16, 32, 64)


@dataclass(frozen=True)
class Figures:
    """Medians over requests, unless said; seconds from the end of prefill.

    Attributes:
        method: its name.
        gbps: of the link; None without a limit.
        context: tokens of a prompt.
        cold: the prompts were not cached on the prefill server, so that chunks travelled during the prefill.
        requests: how many.
        times: by clock, of each token from the first after the prefill's.
        step: seconds of a decode step.
        bits_anchor, bits: of a number of the pool, of what decoding can begin on and of all; None of stock's transfers.
        complete: when all was written.
        residual_steps: decode steps that the residual took.
        encode: seconds from the first page to the last, encoded.
        efficiency: bytes over the link's rate, over the time from the first page to the last written; None without a limit.
        rate: bytes per second in that time.
        drafted, accepted: mean on the anchor, at the verification; None where none were.
        survival: element k - 1: share of these verifications that accepted at least k of those that were offered so many.
    """

    method: str
    gbps: float | None
    context: int
    cold: bool
    requests: int
    times: dict[str, tuple[float, ...]]
    step: float
    bits_anchor: float | None
    bits: float | None
    complete: float
    residual_steps: float
    encode: float
    efficiency: float | None
    rate: float
    drafted: float | None
    accepted: float | None
    survival: tuple[float, ...]

    def at(self, clock: str, k: int) -> float | None:
        """Seconds until the k-th token; None where fewer were looked at."""
        times = self.times[clock]
        return times[k - 1] if k <= len(times) else None


def summarize(method: str, gbps: float | None, requests: Sequence[Request], numbers_per_token: int) -> Figures:
    """Of requests with equal contexts, all of them cold or none.

    Args:
        numbers_per_token: of the pool's keys and values.
    """
    one = requests[0]
    numbers = one.tokens * numbers_per_token
    spans = [(request.complete - request.sending, request.bytes_all) for request in requests]
    early = [request for request in requests if request.drafted]
    steps = statistics.median(request.step for request in requests)
    residual = statistics.median(request.complete - request.anchor for request in requests)
    ideal = [8e-9 * size / gbps / span for span, size in spans if size] if gbps else []
    return Figures(
        method=method,
        gbps=gbps,
        context=one.tokens,
        cold=one.cold,
        requests=len(requests),
        times={clock: _medians([request.times(clock) for request in requests]) for clock in CLOCKS},
        step=steps,
        bits_anchor=_median([8 * request.bytes_anchor / numbers for request in requests if request.bytes_anchor]),
        bits=_median([8 * request.bytes_all / numbers for request in requests if request.bytes_all]),
        complete=statistics.median(request.complete for request in requests),
        residual_steps=residual / steps if steps else 0.0,
        encode=statistics.median(request.encoded - request.sending for request in requests),
        efficiency=_median(ideal),
        rate=statistics.median(size / span for span, size in spans),
        drafted=statistics.fmean(request.drafted for request in early) if early else None,
        accepted=statistics.fmean(request.accepted for request in early) if early else None,
        survival=survival(early),
    )


def survival(requests: Sequence[Request]) -> tuple[float, ...]:
    """P(accepted >= k), k = 1, 2, ..., of the drafts on anchors; of each k those that were offered so many count."""
    found = []
    for k in range(1, max((request.drafted for request in requests), default=0) + 1):
        offered = [request for request in requests if request.drafted >= k]
        found.append(sum(request.accepted >= k for request in offered) / len(offered))
    return tuple(found)


def _medians(clocks: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Of each token that all requests have."""
    return tuple(statistics.median(times) for times in zip(*clocks))


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
