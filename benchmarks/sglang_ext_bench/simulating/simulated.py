"""What a simulation counts, round by round, and what it amounts to."""

from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_ext.managers.kv_offload.load_reservations import Occupancy


class Spent(NamedTuple):
    """A round.

    Attributes:
        seconds: without prefill.
        prefill: seconds of it.
        tokens: of the output, of all requests.
        verifications: in it.
        running: requests.
        busy: seconds of it in which the link brought full KV.
        occupancy: of the rings.
    """

    seconds: float
    prefill: float
    tokens: int
    verifications: int
    running: int
    busy: float
    occupancy: Occupancy


@dataclass
class Sums:
    """Of some rounds.

    Attributes:
        rounds: how many.
        seconds: without prefill.
        prefill: seconds of it.
        tokens: of the output.
        verifications: in them.
        running: requests times seconds.
        busy: seconds of the link.
        link: its ring's occupancy, summed over rounds.
        memory: that ring's.
        most: requests at once.
    """

    rounds: int = 0
    seconds: float = 0.0
    prefill: float = 0.0
    tokens: int = 0
    verifications: int = 0
    running: float = 0.0
    busy: float = 0.0
    link: float = 0.0
    memory: float = 0.0
    most: int = 0

    def add(self, spent: Spent) -> None:
        """Count a round."""
        self.rounds += 1
        self.seconds += spent.seconds
        self.prefill += spent.prefill
        self.tokens += spent.tokens
        self.verifications += spent.verifications
        self.running += spent.running * spent.seconds
        self.busy += spent.busy
        self.link += spent.occupancy.link
        self.memory += spent.occupancy.memory
        self.most = max(self.most, spent.running)


@dataclass
class Rounds:
    """Of a simulation.

    Attributes:
        whole: of all rounds.
        full: of those in the steady state: all places were taken, and each request had verified twice.
        finished: requests.
        loads: that were verified.
        latency: seconds from asking the link for a load to its end, of all loads.
        slack: iterations from a load's end to its verification, of all loads.
    """

    whole: Sums = field(default_factory=Sums)
    full: Sums = field(default_factory=Sums)
    finished: int = 0
    loads: int = 0
    latency: float = 0.0
    slack: int = 0

    def add(self, spent: Spent, full: bool) -> None:
        """Count a round.

        Args:
            full: no request had left a place empty.
        """
        if full and self.whole.verifications >= 2 * self.whole.most > 0:
            self.full.add(spent)
        self.whole.add(spent)

    def loaded(self, seconds: float, slack: int) -> None:
        """Count a load that is verified now."""
        self.loads += 1
        self.latency += seconds
        self.slack += slack

    @property
    def steady(self) -> Sums:
        """The steady state; all rounds where it was never reached."""
        return self.full if self.full.tokens else self.whole


@dataclass(frozen=True)
class Result:
    """What one scenario amounts to.

    Attributes:
        policy: where full KV lay.
        schedule: staggered, lock-step, or plain without drafts.
        acceptance: probability per token.
        memory_tokens: of the device's memory for KV.
        link_bandwidth: bytes per second.
        resident: requests with full KV on the device, as placed.
        offloaded: requests that load it, as placed.
        drafts_resident: until a verification, as placed.
        drafts_offloaded: the same of those that load.
        tokens_per_second: in the steady state, without prefill.
        allowed: what the equations say of that.
        overall: tokens per second from the first request to the last, with prefill.
        tokens: of the output.
        requests_mean: at once, in the steady state.
        requests_most: at once.
        link_used: share of the time in which full KV was loaded.
        link_reserved: mean occupancy of the link's ring.
        memory_reserved: mean occupancy of the memory's ring.
        load_ms: mean milliseconds from asking for a load to its end.
        slack: mean iterations from a load's end to its verification.
        verifications: of all requests.
        waits: placements that were refused, each iteration.
        slips: verifications that were put off by late loads.
    """

    policy: str
    schedule: str
    acceptance: float
    memory_tokens: float
    link_bandwidth: float
    resident: int
    offloaded: int
    drafts_resident: int
    drafts_offloaded: int
    tokens_per_second: float
    allowed: float
    overall: float
    tokens: int
    requests_mean: float
    requests_most: int
    link_used: float
    link_reserved: float
    memory_reserved: float
    load_ms: float
    slack: float
    verifications: int
    waits: int
    slips: int

    @property
    def ratio(self) -> float:
        """Of what was simulated to what the equations say."""
        return self.tokens_per_second / self.allowed if self.allowed else 0.0
