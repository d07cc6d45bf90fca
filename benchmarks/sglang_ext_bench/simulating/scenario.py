"""Inputs of a simulation: the scenario, its requests, and the times and memory of the simulated machine."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from sglang_ext.managers.kv_offload.throughput_model import Costs
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
    """A scenario that cannot run. The message names the remedy."""


@dataclass(frozen=True)
class Scenario:
    """The settings of one simulation.

    Attributes:
        costs: Costs of the machine. Its ``context`` and ``recent`` are those of the mean request. Only the placement uses them.
        kv_bytes_per_token: Bytes of full KV of a token.
        acceptance: Probability that a draft token is accepted if all previous ones were.
        policy: Where full KV is stored. ``stock`` does not draft.
        concurrency: Maximum number of requests sent at once.
        staggered: Requests verify in different rounds. Otherwise all requests verify in the same round.
        max_drafts: Maximum draft tokens before a verification.
        prefill_rate: Prompt tokens per second. Infinite: prefill takes no time.
        horizon: Rounds that the verification scheduler plans ahead.
        seed: Seed of acceptance.
    """

    costs: Costs
    kv_bytes_per_token: float
    acceptance: float
    policy: Policy
    concurrency: int
    staggered: bool = True
    max_drafts: int = MAX_DRAFTS
    prefill_rate: float = math.inf
    horizon: int = 64
    seed: int = 0

    @property
    def placement(self) -> OffloadPlan:
        """The plan of the cost model for ``concurrency`` mean requests."""
        if self.policy == "stock":
            return plain_decoding_plan(self.costs, self.concurrency)
        return best_plan(self.costs, self.acceptance, self.concurrency, TIERS[self.policy], self.max_drafts)


@dataclass
class SimulatedRequest:
    """A request of a simulation.

    Attributes:
        prompt_len: Tokens of the prompt.
        output_len: Tokens of the complete output.
        arrival: Arrival time in seconds.
        offloaded: The full KV is not on the device.
        generated: Output tokens so far.
        pending_drafts: Draft tokens since the last verification.
        load_queued: Time at which the load joined the link's queue, in seconds.
        load_end: Time at which the load ends, in seconds. 0 before the first load.
        load_ready: First round that began after the end of the load. None before.
    """

    prompt_len: int
    output_len: int
    arrival: float = 0.0
    offloaded: bool = False
    generated: int = 0
    pending_drafts: int = 0
    load_queued: float = 0.0
    load_end: float = 0.0
    load_ready: int | None = None

    @property
    def remaining(self) -> int:
        """Output tokens left to generate."""
        return self.output_len - self.generated


@dataclass(frozen=True)
class MachineTimes:
    """Times of forwards and loads, in seconds: :mod:`sglang_ext.managers.kv_offload.throughput_model` with the lengths of each request.

    Attributes:
        costs: Costs of the machine.
        kv_bytes_per_token: Bytes of full KV of a token.
        budget: Share of the prompt that compressed KV keeps.
    """

    costs: Costs
    kv_bytes_per_token: float
    budget: float

    def plain_seconds(self, requests: Collection[SimulatedRequest], steps: int) -> float:
        """Time of ``steps`` steps of plain decoding."""
        return steps * self._forward_seconds(sum(each.prompt_len + each.generated + (steps - 1) / 2 for each in requests))

    def draft_seconds(self, requests: Collection[SimulatedRequest]) -> float:
        """Time of the draft steps of a round."""
        drafts = self.costs.drafts
        # A draft step also reads the KV of the round's previous drafts: half of the drafts on average.
        tokens = sum(self.budget * each.prompt_len + each.generated + each.pending_drafts + drafts / 2 for each in requests)
        return drafts * self._forward_seconds(tokens)

    def verify_seconds(self, requests: Collection[SimulatedRequest]) -> float:
        """Time of one verification forward over the full KV of all ``requests``."""
        read = self._forward_seconds(sum(each.prompt_len + each.generated + each.pending_drafts for each in requests))
        return read + self.costs.token_seconds * sum(each.pending_drafts + 1 for each in requests)

    def transfer_seconds(self, tokens: float) -> float:
        """Time to transfer the full KV of ``tokens`` tokens over the link, in either direction."""
        return tokens * self.kv_bytes_per_token / self.costs.link

    def _forward_seconds(self, tokens: float) -> float:
        """Time of a forward that reads the weights and the KV of ``tokens`` tokens."""
        return (self.costs.weights + tokens * self.kv_bytes_per_token) / self.costs.bandwidth


@dataclass
class DeviceMemory:
    """The device's memory for KV, in tokens.

    Attributes:
        capacity: Tokens that fit.
        budget: Share of the prompt that compressed KV keeps.
        offloads: (end, tokens) of each transfer of full KV from the device to the host. Ends are in seconds.
    """

    capacity: float
    budget: float
    offloads: list[tuple[float, float]] = field(default_factory=list)

    def request_tokens(self, request: SimulatedRequest) -> float:
        """Tokens that a running request holds, without its loads. Half of its output counts: the mean while it runs."""
        return request.prompt_len * (self.budget + (not request.offloaded)) + request.output_len / 2

    @property
    def offload_tokens(self) -> float:
        """Tokens of full KV that are still being transferred to the host."""
        return sum(tokens for _, tokens in self.offloads)

    def used_tokens(self, running: Collection[SimulatedRequest]) -> float:
        """Tokens of all running requests and of unfinished transfers to the host."""
        return sum(self.request_tokens(each) for each in running) + self.offload_tokens

    def free_offloaded(self, now: float) -> None:
        """Free the full KV whose transfer to the host has ended by ``now``."""
        self.offloads = [(end, tokens) for end, tokens in self.offloads if end > now]
