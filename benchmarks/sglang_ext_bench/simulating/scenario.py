"""What a simulation is of: a machine, a policy, and requests."""

import math
from dataclasses import dataclass
from typing import Literal

from sglang_ext.managers.kv_offload.costs import Costs
from sglang_ext.managers.kv_offload.throughput_model import (
    MAX_DRAFTS,
    OffloadPlan,
    Tier,
    best_plan,
    plain_decoding_plan,
)

Policy = Literal["stock", "resident", "host", "auto"]
TIERS: dict[str, Tier] = {"resident": "device", "host": "host", "auto": "auto"}


class SimulationError(ValueError):
    """A scenario that cannot run; the message says what to change."""


@dataclass(frozen=True)
class Scenario:
    """What is simulated.

    Attributes:
        costs: of the machine; ``context`` and ``recent`` are those of the mean request, for the placement alone.
        kv_token: bytes of full KV of a token.
        acceptance: probability per token that a draft is accepted when those before it were.
        policy: where full KV lies; ``stock`` drafts nothing.
        concurrency: requests that are sent at once, at most.
        staggered: whether requests verify in iterations of their own; if not, all in the same one, between drafts.
        longest: drafts until a verification, at most.
        prefill_rate: prompt tokens per second; infinite for none to be counted.
        horizon: iterations that the admission plans.
        seed: of acceptance.
    """

    costs: Costs
    kv_token: float
    acceptance: float
    policy: Policy
    concurrency: int
    staggered: bool = True
    longest: int = MAX_DRAFTS
    prefill_rate: float = math.inf
    horizon: int = 64
    seed: int = 0

    @property
    def placement(self) -> OffloadPlan:
        """What the equations would do with so many mean requests."""
        if self.policy == "stock":
            return plain_decoding_plan(self.costs, self.concurrency)
        return best_plan(self.costs, self.acceptance, self.concurrency, TIERS[self.policy], self.longest)


@dataclass
class Request:
    """A request, as the simulation knows it; tokens.

    Attributes:
        prompt: in it.
        output: that it will have.
        arrival: seconds from the beginning.
        offloaded: whether its full KV is not on the device.
        produced: of the output.
        drafts: since its last verification.
        asked: when its load went to the link, in seconds.
        ends: of its load, in seconds.
        ready: iteration at whose beginning the load was complete; None before.
    """

    prompt: int
    output: int
    arrival: float = 0.0
    offloaded: bool = False
    produced: int = 0
    drafts: int = 0
    asked: float = 0.0
    ends: float = 0.0
    ready: int | None = None
