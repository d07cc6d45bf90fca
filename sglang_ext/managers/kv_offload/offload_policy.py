"""Decides how much full KV may leave the device, and how long its requests draft, from measured times of rounds and loads.

``--kv-full-tier auto``: full KV stays on the device while it fits. With more requests than fit, some of it leaves if VeriCache's optimum
(equations (5)-(11), throughput_model.py) predicts more tokens per second. Otherwise the other requests wait, as in stock SGLang.
``host``: all full KV leaves, and the optimum gives the number of drafts before a load.

The read bandwidth of the device is derived from the time of a draft step, which reads weights and compressed KV and includes launches. The
rest of a round excludes drafts, and reading full KV at that bandwidth. It is split into compute time of the verified tokens, and a
turnaround for the host's work.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median_low
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from sglang_ext.managers.kv_offload import throughput_model
from sglang_ext.managers.kv_offload.throughput_model import CostError, Costs
from sglang_ext.managers.spec_decode.cost_model import RoundTimes
from sglang_ext.managers.spec_decode.planner import RoundPlan

# Lower bound of the seconds per byte, as a share of the value derived from draft steps.
LEAST_SHARE = 1e-3


class VerifyTiming(NamedTuple):
    """Number of requests and of tokens that a round verified, and its duration without drafts in seconds."""

    requests: int
    tokens: int
    seconds: float


def fit_costs(known: Costs, drafting: int, draft_seconds: float, rests: Sequence[VerifyTiming]) -> Costs:
    """Return ``known`` with the bandwidth, the weights and the times that fit measured times (least squares, no negative costs).

    If launches take longer than reading, as with small models, a verification takes less time than reading at the speed of a draft step.
    Then the verification gives the bandwidth, and ``weights`` also includes the constant cost of each forward.

    A draft step of ``drafting`` requests now takes ``draft_seconds``. ``rests`` are times of some rounds, at least one of them with a
    verification.

    Raises:
        CostError: A time is not above 0.
    """
    copies = drafting * known.compressed_bytes
    verifying = np.array([rest.requests > 0 for rest in rests])
    # Time in addition to a forward that reads as many bytes as a draft step.
    seconds = np.array([rest.seconds for rest in rests]) - verifying * draft_seconds
    read = np.array([rest.requests * known.context for rest in rests]) - verifying * copies
    tokens = np.array([rest.tokens for rest in rests], dtype=float)
    per_byte = longest = draft_seconds / (known.weights + copies)
    if (seconds - longest * read).sum() < 0:
        _, seen = _fit(read / known.context, seconds)
        per_byte = min(longest, max(seen / known.context, LEAST_SHARE * longest))
    turnaround, per_token = _fit(tokens, seconds - per_byte * read)
    bandwidth = 1 / per_byte if per_byte else 0.0
    each = max(0.0, draft_seconds * bandwidth - copies)
    return replace(known, weights=each, bandwidth=bandwidth, turnaround=turnaround, token_seconds=per_token)


def _fit(amounts: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Fit a constant and a factor of ``amounts``, neither negative, to ``seconds``."""
    found, _ = nnls(np.stack([np.ones_like(amounts), amounts], axis=1), seconds)
    return float(found[0]), float(found[1])


# Predicted speedup over full KV on the device alone, from which full KV begins to leave, and from which it continues to.
# Measured speedups are two thirds to four fifths of the prediction (docs/benchmarks.md).
OFFLOAD_GAIN, KEEP_OFFLOAD_GAIN = 1.5, 1.25
# Drafts before a load until times are measured.
FIRST_DRAFTS = 64
# Number of rounds to remember, and number of rounds that are enough for a fit.
RECENT_ROUNDS, ENOUGH_ROUNDS = 32, 3


class OffloadDecision(NamedTuple):
    """How much full KV may leave the device.

    Attributes:
        requests: Requests whose full KV may be off the device at once. None for no limit.
        drafts: Pending drafts of such a request before its full KV is loaded.
    """

    requests: int | None
    drafts: int


class ObservedRound(NamedTuple):
    """A measured round: its requests, seconds of a draft step, the rest of the round, and the mean context length in tokens."""

    drafting: int
    draft_seconds: float
    rest: VerifyTiming
    context: float


@dataclass
class OffloadPolicy:
    """Learns costs from rounds, and decides how much full KV may leave the device.

    Attributes:
        weights: Bytes of the model.
        bytes_per_token: Bytes of full KV per token.
        memory: Capacity of the device's pool, tokens.
        drafts: Drafts per round.
        longest: Maximum pending drafts of a request.
        requests: Maximum number of running requests.
        tier: ``auto`` or ``host``.
        is_offloading: Whether full KV leaves the device with ``auto``, according to the last decision.
    """

    weights: float
    bytes_per_token: int
    memory: int
    drafts: int
    longest: int
    requests: int
    tier: throughput_model.Tier = "auto"
    is_offloading: bool = False
    _rounds: deque[ObservedRound] = field(default_factory=lambda: deque(maxlen=RECENT_ROUNDS))

    @property
    def initial_decision(self) -> OffloadDecision:
        """The decision before there are enough measurements."""
        return OffloadDecision(None if self.tier == "host" else 0, min(self.longest, FIRST_DRAFTS))

    def observe(self, plan: RoundPlan, spent: RoundTimes) -> None:
        """Record the times of a round."""
        if spent.num_draft_steps:
            tokens = sum(plan.num_draft_tokens(i) + 1 for i in plan.verify_reqs)
            rest = VerifyTiming(len(plan.verify_reqs), tokens, spent.rest)
            self._rounds.append(ObservedRound(len(plan.states), spent.draft_step, rest, sum(plan.lengths) / len(plan.lengths)))

    def choose(self, probability: float, link: float, share: float) -> OffloadDecision:
        """Decide what may leave the device from now on. :attr:`initial_decision` before there are enough measurements.

        ``probability``: that a draft is accepted if all previous ones were. ``link``: bandwidth of loads, bytes of full KV per second.
        ``share``: share of full KV that compressed KV keeps.
        """
        usable = self._usable_rounds()
        if not any(seen.rest.requests for seen in usable):
            return self.initial_decision
        running = usable[-1].drafting
        try:
            context, memory = (tokens * self.bytes_per_token for tokens in (usable[-1].context, self.memory))
            # The bandwidth is fitted.
            known = Costs(self.weights, context, 1.0, link, memory, share, self.drafts)
            step = median_low(seen.draft_seconds for seen in usable)
            costs = fit_costs(known, running, step, _fastest_half([seen.rest for seen in usable]))
        except CostError:
            return self.initial_decision

        best = partial(throughput_model.best_plan, costs, round(probability, 3), longest=self.longest)
        if self.tier == "auto":
            mixed, device = best(self.requests, "auto"), best(self.requests, "device")
            self.is_offloading = mixed.tokens_per_second >= (KEEP_OFFLOAD_GAIN if self.is_offloading else OFFLOAD_GAIN) * device.tokens_per_second
            if self.is_offloading:
                return OffloadDecision(mixed.offloaded, mixed.drafts_offloaded or self.longest)
        # Uses the running requests, because more may not arrive. With ``auto`` these were offloaded earlier, and stay so until they finish.
        host = best(running, "host")
        return OffloadDecision(self.initial_decision.requests, host.drafts_offloaded or self.longest)

    def _usable_rounds(self) -> list[ObservedRound]:
        """Return the rounds with as many requests as the last one, if there are enough. Otherwise return all rounds."""
        rounds = list(self._rounds)
        alike = [seen for seen in rounds if seen.drafting == rounds[-1].drafting]
        return alike if sum(seen.rest.requests > 0 for seen in alike) >= ENOUGH_ROUNDS else rounds


def _fastest_half(rests: list[VerifyTiming]) -> list[VerifyTiming]:
    """The faster half of the rounds for each number of verifications. Waiting for the link or the host only makes rounds slower."""
    found = []
    for requests in {rest.requests for rest in rests}:
        alike = sorted((rest for rest in rests if rest.requests == requests), key=lambda rest: rest.seconds)
        found += alike[: (len(alike) + 1) // 2]
    return found
