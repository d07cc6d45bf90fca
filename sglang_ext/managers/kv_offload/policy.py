"""How much full KV may leave the device, and how long its requests draft, by what rounds and loads were measured to take.

``--kv-full-tier auto``: full KV stays on the device while it fits. For more requests than fit, some of it leaves where
VeriCache's optimum (equations (5)-(11), throughput_model.py) says that more tokens a second come of it; else the others
wait, as in stock SGLang. ``host``: all of it leaves, and the optimum says after how many drafts it is loaded.

A draft's time tells how fast the device reads: weights and copies, launches among it. What a round takes beside its drafts
and beside reading full KV at that speed is computing the verified tokens, and a turnaround: the host's part.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from sglang_ext.managers.kv_offload import throughput_model
from sglang_ext.managers.kv_offload.costs import CostError, Costs
from sglang_ext.managers.spec_decode.planner import RoundPlan
from sglang_ext.managers.spec_decode.cost_model import RoundTimes

# Seconds per byte are no shorter than this share of what a draft's time tells.
LEAST_SHARE = 1e-3


class DraftTiming(NamedTuple):
    """A draft step.

    Attributes:
        requests: in it.
        seconds: that it took.
    """

    requests: int
    seconds: float


class VerifyTiming(NamedTuple):
    """A round without its drafts.

    Attributes:
        requests: that verified.
        tokens: that were verified.
        seconds: that it took.
    """

    requests: int
    tokens: int
    seconds: float


def fit_costs(
    draft: DraftTiming, rests: Sequence[VerifyTiming], *, weights: float, context: float, link: float, memory: float, budget: float, drafts: int
) -> Costs:
    """Costs that explain the times best (least squares, nothing below 0).

    Where launches last longer than reading, as with small models, a verification takes less than reading at the speed of a draft:
    then it tells the speed, and weights stand for what each forward takes whatever it reads.

    Args:
        draft: as of now.
        rests: of some rounds, of which one at least has a verification.
        weights: bytes of the model.
        context: bytes of full KV of a request; the others as of :class:`~sglang_ext.managers.kv_offload.costs.Costs`.

    Raises:
        CostError: a time is not above 0.
    """
    known = Costs(weights, context, 1.0, link, memory, budget, drafts)
    copies = draft.requests * known.copy
    verifying = np.array([rest.requests > 0 for rest in rests])
    # Beside what a forward takes that reads as much as a draft does.
    seconds = np.array([rest.seconds for rest in rests]) - verifying * draft.seconds
    read = np.array([rest.requests * context for rest in rests]) - verifying * copies
    tokens = np.array([rest.tokens for rest in rests], dtype=float)
    per_byte = longest = draft.seconds / (weights + copies)
    if (seconds - longest * read).sum() < 0:
        _, seen = _fit(read / context, seconds)
        per_byte = min(longest, max(seen / context, LEAST_SHARE * longest))
    turnaround, per_token = _fit(tokens, seconds - per_byte * read)
    bandwidth = 1 / per_byte if per_byte else 0.0
    each = max(0.0, draft.seconds * bandwidth - copies)
    return replace(known, weights=each, bandwidth=bandwidth, turnaround=turnaround, token_seconds=per_token)


def _fit(amounts: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """A constant and a factor of ``amounts``, neither below 0, that sum up to ``seconds`` best."""
    found, _ = nnls(np.stack([np.ones_like(amounts), amounts], axis=1), seconds)
    return float(found[0]), float(found[1])


# Times as many tokens a second as with all full KV on the device that the equations must have of both tiers, before any leaves
# and for it to stay away. Of what they say two thirds to four fifths are reached (docs/benchmarks.md).
OFFLOAD_GAIN, KEEP_OFFLOAD_GAIN = 1.5, 1.25
# Drafts before a load until times are known.
FIRST_DRAFTS = 64
# Rounds that are remembered, and those that tell enough.
RECENT_ROUNDS, ENOUGH_ROUNDS = 32, 3


class OffloadDecision(NamedTuple):
    """What may leave the device.

    Attributes:
        requests: whose full KV may be off the device at once; None for any number.
        drafts: that such a request gathers before its full KV is loaded.
    """

    requests: int | None
    drafts: int


class ObservedRound(NamedTuple):
    """A round that was measured.

    Attributes:
        draft: a step of it.
        rest: all else.
        context: mean tokens of its requests.
    """

    draft: DraftTiming
    rest: VerifyTiming
    context: float


@dataclass
class OffloadPolicy:
    """Learns from rounds, and chooses.

    Attributes:
        weights: bytes of the model.
        bytes_per_token: of full KV.
        memory: tokens that the device's pool holds.
        drafts: of a round.
        longest: drafts that a request gathers at most.
        requests: that run at once at most.
        tier: ``auto`` or ``host``.
        is_offloading: full KV leaves the device where ``auto`` is asked, as of the last choice.
    """

    weights: float
    bytes_per_token: int
    memory: int
    drafts: int
    longest: int
    requests: int
    tier: throughput_model.Tier = "auto"
    is_offloading: bool = False
    _seen: deque[ObservedRound] = field(default_factory=lambda: deque(maxlen=RECENT_ROUNDS))

    @property
    def unknown(self) -> OffloadDecision:
        """What may leave the device before enough was measured."""
        return OffloadDecision(None if self.tier == "host" else 0, min(self.longest, FIRST_DRAFTS))

    def observe(self, plan: RoundPlan, spent: RoundTimes) -> None:
        """Take a round's seconds."""
        if not spent.drafts:
            return
        draft = DraftTiming(len(plan.states), spent.drafting / spent.drafts)
        tokens = sum(plan.num_draft_tokens(i) + 1 for i in plan.verify_reqs)
        rest = VerifyTiming(len(plan.verify_reqs), tokens, spent.whole - spent.drafting)
        self._seen.append(ObservedRound(draft, rest, sum(plan.lengths) / len(plan.lengths)))

    def choose(self, probability: float, link: float, share: float) -> OffloadDecision:
        """What may leave the device from now on; :attr:`unknown` before enough was measured.

        Args:
            probability: that a draft is accepted when those before it were.
            link: bytes of full KV per second of loads.
            share: of full KV that copies keep.
        """
        telling = self._telling()
        if not any(seen.rest.requests for seen in telling):
            return self.unknown
        running = telling[-1].draft.requests
        try:
            costs = fit_costs(
                DraftTiming(running, median_low(seen.draft.seconds for seen in telling)),
                _quickest([seen.rest for seen in telling]),
                weights=self.weights,
                context=telling[-1].context * self.bytes_per_token,
                link=link,
                memory=self.memory * self.bytes_per_token,
                budget=share,
                drafts=self.drafts,
            )
        except CostError:
            return self.unknown

        def best(requests: int, tier: throughput_model.Tier) -> throughput_model.OffloadPlan:
            return throughput_model.best_plan(costs, round(probability, 3), requests, tier, self.longest)

        if self.tier == "auto":
            both, device = best(self.requests, "auto"), best(self.requests, "device")
            self.is_offloading = both.tokens_per_second >= (KEEP_OFFLOAD_GAIN if self.is_offloading else OFFLOAD_GAIN) * device.tokens_per_second
            if self.is_offloading:
                return OffloadDecision(both.offloaded, both.drafts_offloaded or self.longest)
        # Of those that run: more may not come. With ``auto`` these are left from before, until they are done.
        host = best(running, "host")
        return OffloadDecision(self.unknown.requests, host.drafts_offloaded or self.longest)

    def _telling(self) -> list[ObservedRound]:
        """Rounds of as many requests as the newest, where there are enough of them, else all."""
        rounds = list(self._seen)
        alike = [seen for seen in rounds if seen.draft.requests == rounds[-1].draft.requests]
        return alike if sum(seen.rest.requests > 0 for seen in alike) >= ENOUGH_ROUNDS else rounds


def _quickest(rests: list[VerifyTiming]) -> list[VerifyTiming]:
    """The quicker half of those with as many verifications: what waits, for link or host, takes longer, never shorter."""
    found = []
    for requests in {rest.requests for rest in rests}:
        alike = sorted((rest for rest in rests if rest.requests == requests), key=lambda rest: rest.seconds)
        found += alike[: (len(alike) + 1) // 2]
    return found
