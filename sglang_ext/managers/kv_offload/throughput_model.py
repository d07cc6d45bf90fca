"""Cost model for the number of requests with full KV on the device, the number that load it to verify, and their draft lengths.

This is the cost model of VeriCache (section 4.2, equations (3) and (5)-(11)), in rounds of this engine. In a round all B requests draft
``y`` tokens each, then the due requests verify. Requests with full KV on the device verify every ``x_g`` drafts, those that load it every
``x_c``. Both are multiples of ``y``. Where the paper leaves a choice:

- A verification shares its round with drafts. So a request verifies every ``x / y`` rounds, and (9) becomes ``B_c * l <= x_c / y``, with
  ``l`` the rounds that a load takes. If the link is slower, rounds last as long as their loads (10): more drafts in that time gain nothing.
- A draft step and a verification are separate forwards: each reads the weights.
- Compressed KV has its own slots, in addition to full KV on the device: such a request holds both.
- A load holds memory for its full KV in all S rounds that it spans, and while it is verified. This memory is counted in whole contexts,
  because a part of one is of no use. (Paper: correction of (5).)
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal, NamedTuple

import numpy as np

from sglang_ext.managers.spec_decode.cost_model import expected_tokens

# Default of the maximum draft length before a verification, in tokens.
MAX_DRAFTS = 256


class CostError(ValueError):
    """Impossible costs. The message names the value and the allowed range."""


@dataclass(frozen=True)
class Costs:
    """Costs of a machine under a load of equal requests.

    Attributes:
        weights: Bytes that each forward reads (M).
        context: Bytes of full KV per request.
        bandwidth: Read bandwidth of the device, bytes per second.
        link: Bandwidth from the host, bytes per second.
        memory: Device memory for full KV, compressed KV and loads in progress, bytes.
        budget: Share of the context that compressed KV keeps (c).
        drafts: Drafts per request and round (y).
        turnaround: Time of a round outside its forwards, seconds.
        token_seconds: Compute time per verified token, in addition to reading, seconds.
        recent: Bytes of the context's newest tokens, which stay on the device and in all compressed KV.
    """

    weights: float
    context: float
    bandwidth: float
    link: float
    memory: float
    budget: float
    drafts: int = 16
    turnaround: float = 0.0
    token_seconds: float = 0.0
    recent: float = 0.0

    def __post_init__(self):
        for name in ("weights", "memory", "turnaround", "token_seconds", "recent"):
            self._check(name, getattr(self, name) >= 0, "0 or above")
        for name in ("context", "bandwidth", "link"):
            self._check(name, getattr(self, name) > 0, "above 0")
        self._check("budget", 0 < self.budget <= 1, "a share above 0 and up to 1")
        self._check("drafts", self.drafts >= 1, "at least 1")
        self._check("recent", self.recent < self.context, f"below the context's {self.context:g}")

    def _check(self, name: str, holds: bool, allowed: str) -> None:
        value = getattr(self, name)
        if not (math.isfinite(value) and holds):
            raise CostError(f"{name} {value!r}: pass a finite number, {allowed}")

    @property
    def loaded(self) -> float:
        """Bytes of full KV that an offloaded request loads to verify."""
        return self.context - self.recent

    @property
    def compressed_bytes(self) -> float:
        """Bytes that a request reads in a draft step. An offloaded request holds as many."""
        return self.budget * self.loaded + self.recent

    @property
    def resident(self) -> float:
        """Bytes that a request holds if its full KV is on the device."""
        return self.context + self.budget * self.loaded

    @property
    def load_seconds(self) -> float:
        """Link time of a load, seconds."""
        return self.loaded / self.link


def draft_seconds(costs: Costs, requests: float) -> float:
    """Seconds of a draft step of ``requests`` requests."""
    return (costs.weights + requests * costs.compressed_bytes) / costs.bandwidth


def verify_seconds(costs: Costs, requests: float, tokens: float = 0.0) -> float:
    """Seconds of a verification of so many requests with ``tokens`` in total. Below 1 request, the mean over rounds, some of which verify none."""
    read = np.minimum(requests, 1) * costs.weights + requests * costs.context
    return read / costs.bandwidth + tokens * costs.token_seconds


def round_seconds(costs: Costs, requests: float, verifying: float, tokens: float) -> float:
    """Seconds of a round in which ``requests`` draft, and ``verifying`` requests verify ``tokens`` tokens (7)."""
    return costs.drafts * draft_seconds(costs, requests) + verify_seconds(costs, verifying, tokens) + costs.turnaround


Tier = Literal["auto", "device", "host"]

# Grid points per axis (requests, or multiples of y). Wider ranges are searched on a grid, then again around the best point.
POINTS = 25
ROUNDING = 1e-9


class OffloadPlan(NamedTuple):
    """Number of requests in each tier, and drafts before a verification.

    Attributes:
        resident: Requests with full KV on the device (B_g).
        offloaded: Requests that load it (B_c).
        drafts_resident: Drafts of each resident request (x_g). 0 for plain decoding.
        drafts_offloaded: Drafts of each offloaded request (x_c). 0 if there are none.
        tokens_per_second: Throughput of all requests.
    """

    resident: int
    offloaded: int
    drafts_resident: int
    drafts_offloaded: int
    tokens_per_second: float


def plain_decoding_plan(costs: Costs, requests: int) -> OffloadPlan:
    """Plan for plain decoding of up to ``requests`` requests, as many as fit."""
    running = _max_requests(costs, requests, costs.context)
    rate = running * costs.bandwidth / (costs.weights + running * costs.context) if running else 0.0
    return OffloadPlan(running, 0, 0, 0, rate)


@lru_cache(maxsize=1024)
def best_plan(costs: Costs, p: float, requests: int, tier: Tier = "auto", longest: int = MAX_DRAFTS) -> OffloadPlan:
    """Return the plan for up to ``requests`` requests, with at most ``longest`` drafts until a verification, with the most tokens per second.

    The search is exhaustive if all ranges have at most :data:`POINTS` values. Plain decoding is a candidate unless ``tier`` is ``host``, so
    that all full KV must leave the device. Of equal plans it takes the one with fewer loads. A plan without requests: not even one fits.

    Raises:
        CostError: A round has more drafts than ``longest``.
    """
    if longest < costs.drafts:
        raise CostError(f"at most {longest} drafts: pass at least {costs.drafts}, those of a round")
    most = [_max_requests(costs, requests, size) for size in (costs.compressed_bytes, costs.resident)]
    ranges = [
        (0, 0 if tier == "device" else most[0]),
        (0, 0 if tier == "host" else most[1]),
        *[(1, longest // costs.drafts)] * 2,
    ]
    found = _search(costs, p, requests, ranges) if any(high for _, high in ranges[:2]) else OffloadPlan(0, 0, 0, 0, 0.0)
    undrafted = plain_decoding_plan(costs, requests)
    return undrafted if tier != "host" and undrafted.tokens_per_second >= found.tokens_per_second else found


def _max_requests(costs: Costs, requests: int, size: float) -> int:
    """Number of requests that fit if each holds ``size`` bytes."""
    return int(min(requests, costs.memory / size + ROUNDING)) if size else requests


def _search(costs: Costs, p: float, requests: int, ranges: list[tuple[int, int]]) -> OffloadPlan:
    """Search the best plan in ranges of (offloaded, resident, rounds of offloaded, rounds of resident)."""
    around = ranges
    while True:
        axes = [_points(*each) for each in around]
        pairs = np.array([pair for pair in product(*axes[:2]) if 0 < sum(pair) <= requests])
        offloaded, resident = pairs[:, 0, None, None], pairs[:, 1, None, None]
        rates = throughput(costs, p, resident, offloaded, axes[3][:, None], axes[2])
        i, g, c = np.unravel_index(rates.argmax(), rates.shape)
        chosen = (int(pairs[i, 0]), int(pairs[i, 1]), int(axes[2][c]), int(axes[3][g]))
        if all(len(axis) == high - low + 1 for axis, (low, high) in zip(axes, around)):
            break
        steps = [int(np.diff(axis).max(initial=1)) for axis in axes]
        around = [(max(low, at - step), min(high, at + step)) for at, step, (low, high) in zip(chosen, steps, ranges)]
    rate = float(rates[i, g, c])
    offloaded, resident, rounds_c, rounds_g = chosen if rate else (0, 0, 0, 0)
    y = costs.drafts
    return OffloadPlan(resident, offloaded, y * rounds_g if resident else 0, y * rounds_c if offloaded else 0, rate)


def _points(low: int, high: int) -> np.ndarray:
    """At most :data:`POINTS` whole numbers of a range, including both ends."""
    return np.unique(np.linspace(low, high, min(POINTS, high - low + 1)).round().astype(int))


def throughput(
    costs: Costs,
    p: float,
    resident: np.ndarray | int,
    offloaded: np.ndarray | int,
    rounds_resident: np.ndarray | int,
    rounds_offloaded: np.ndarray | int,
) -> np.ndarray:
    """Tokens per second in the steady state (11), for arrays that broadcast. 0 where memory does not suffice.

    ``p``: probability that a draft is accepted if all previous ones were. ``rounds_resident``, ``rounds_offloaded``: rounds between two
    verifications of a request, at least 1 (x_g / y, x_c / y).
    """
    due_g, due_c = resident / rounds_resident, offloaded / rounds_offloaded
    drafts_g, drafts_c = costs.drafts * np.asarray(rounds_resident), costs.drafts * np.asarray(rounds_offloaded)
    tokens = due_g * expected_tokens(p, drafts_g) + due_c * expected_tokens(p, drafts_c)
    verified = due_g * (drafts_g + 1) + due_c * (drafts_c + 1)
    computing = round_seconds(costs, resident + offloaded, due_g + due_c, verified)
    seconds = np.maximum(computing, due_c * costs.load_seconds)
    spans = np.maximum(1, np.ceil(costs.load_seconds / seconds - ROUNDING))
    buffers = np.ceil(due_c * (spans + 1) - ROUNDING)
    memory = resident * costs.resident + offloaded * costs.compressed_bytes + buffers * costs.loaded
    return np.where(memory <= costs.memory * (1 + ROUNDING), tokens / seconds, 0.0)
