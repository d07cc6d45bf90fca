"""Simulated rounds of verified decoding: the machine's costs give the times, a random number accepts draft tokens.

:class:`VerificationScheduler` is the scheduler of the served package. :class:`RequestQueue` prefills a request once the device has memory
for its full KV and its compressed KV. If the full KV is placed in host memory, it leaves the device over the link's other direction.
"""

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_ext.managers.kv_offload.throughput_model import draft_seconds
from sglang_ext.managers.kv_offload.throughput_model import OffloadPlan
from sglang_ext.managers.kv_offload.verification_scheduler import VerificationScheduler
from sglang_ext_bench.simulating.scenario import DeviceMemory, MachineTimes, Scenario, SimulatedRequest, SimulationError

DECAY = 0.9  # weight of the previous estimate in the moving average of a round's duration


class RoundRecord(NamedTuple):
    """Counts of one round.

    Attributes:
        seconds: Duration without prefill.
        prefill_seconds: Duration of prefill.
        tokens: Output tokens of all requests.
        verifications: Requests that verified.
        running: Running requests.
        link_seconds: Time in which the link loaded full KV.
        link_reserved: Reserved share of link time.
        memory_reserved: Reserved share of memory.
    """

    seconds: float
    prefill_seconds: float
    tokens: int
    verifications: int
    running: int
    link_seconds: float
    link_reserved: float
    memory_reserved: float


@dataclass
class RoundTotals:
    """Sums over rounds.

    Attributes:
        rounds: Number of rounds.
        seconds: Duration without prefill.
        prefill_seconds: Duration of prefill.
        tokens: Output tokens.
        verifications: Verifications of requests.
        running_seconds: Running requests times seconds.
        link_seconds: Time in which the link loaded full KV.
        link_reserved: Reserved share of link time, summed over rounds.
        memory_reserved: Reserved share of memory, summed over rounds.
        max_running: Maximum number of running requests.
    """

    rounds: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    tokens: int = 0
    verifications: int = 0
    running_seconds: float = 0.0
    link_seconds: float = 0.0
    link_reserved: float = 0.0
    memory_reserved: float = 0.0
    max_running: int = 0

    def add(self, record: RoundRecord) -> None:
        """Add a round."""
        self.rounds += 1
        self.seconds += record.seconds
        self.prefill_seconds += record.prefill_seconds
        self.tokens += record.tokens
        self.verifications += record.verifications
        self.running_seconds += record.running * record.seconds
        self.link_seconds += record.link_seconds
        self.link_reserved += record.link_reserved
        self.memory_reserved += record.memory_reserved
        self.max_running = max(self.max_running, record.running)


@dataclass
class SimulationTotals:
    """Totals of a simulation.

    Attributes:
        all_rounds: Totals of all rounds.
        full_rounds: Totals of the rounds in the steady state: requests were waiting or none had finished, and each had verified twice.
        num_finished: Finished requests.
        num_loads: Loads that were verified.
        load_seconds: Time from queueing a load to its end, summed over loads.
        slack_rounds: Rounds from the end of a load to its verification, summed over loads.
    """

    all_rounds: RoundTotals = field(default_factory=RoundTotals)
    full_rounds: RoundTotals = field(default_factory=RoundTotals)
    num_finished: int = 0
    num_loads: int = 0
    load_seconds: float = 0.0
    slack_rounds: int = 0

    def add_round(self, record: RoundRecord, full: bool) -> None:
        """Add a round.

        Args:
            record: Counts of the round.
            full: As many requests run as the placement allows.
        """
        if full and self.all_rounds.verifications >= 2 * self.all_rounds.max_running > 0:
            self.full_rounds.add(record)
        self.all_rounds.add(record)

    def add_load(self, seconds: float, slack_rounds: int) -> None:
        """Add a load that is verified in this round."""
        self.num_loads += 1
        self.load_seconds += seconds
        self.slack_rounds += slack_rounds

    @property
    def steady(self) -> RoundTotals:
        """Totals of the steady state. All rounds if it was never reached."""
        return self.full_rounds if self.full_rounds.tokens else self.all_rounds


class RequestQueue:
    """Admits waiting requests in the order of their arrival, as memory allows.

    Attributes:
        requests: All requests.
        placement: Maximum number of running requests with full KV on the device, and of others.
        memory: The device's memory.
        times: Times of the link, over which full KV leaves the device.
        waiting: Indices of waiting requests, by arrival.
        wanted_tokens: Memory that the next request waits for, in tokens. 0 if another request must finish first.
    """

    def __init__(self, requests: Sequence[SimulatedRequest], placement: OffloadPlan, memory: DeviceMemory, times: MachineTimes) -> None:
        self.requests = requests
        self.placement = placement
        self.memory = memory
        self.times = times
        self.waiting = deque(sorted(range(len(requests)), key=lambda i: requests[i].arrival))
        self.wanted_tokens = 0.0
        self._offload_end = 0.0

    @property
    def next_arrival(self) -> float:
        """Arrival time of the next request, in seconds."""
        return self.requests[self.waiting[0]].arrival

    def admit(self, now: float, running: dict[int, SimulatedRequest], reserved: float) -> list[int]:
        """Add waiting requests to ``running`` while memory suffices. Returns their indices.

        Args:
            now: Time in seconds.
            running: Running requests by index.
            reserved: Maximum memory that loads hold in coming rounds, in tokens.
        """
        admitted = []
        self.memory.free_offloaded(now)
        self.wanted_tokens = 0.0
        while self.waiting and self.next_arrival <= now:
            index = self.waiting[0]
            request = self.requests[index]
            residents = sum(not each.offloaded for each in running.values())
            if residents >= self.placement.resident and len(running) - residents >= self.placement.offloaded:
                break
            request.offloaded = residents >= self.placement.resident
            lasting = self.memory.request_tokens(request)
            wanted = lasting + (request.prompt_len if request.offloaded else 0)
            largest_load = max((each.prompt_len for each in (*running.values(), request) if each.offloaded), default=0)
            used = self.memory.used_tokens(running.values())
            used_later = used - self.memory.offload_tokens + lasting + largest_load
            if max(used_later, used + wanted) > self.memory.capacity:
                # Another request must finish first. Until then loads may use the free memory.
                break
            if used + reserved + wanted > self.memory.capacity:
                self.wanted_tokens = wanted
                break
            self.waiting.popleft()
            running[index] = request
            admitted.append(index)
            if request.offloaded:
                self._offload_end = max(self._offload_end, now) + self.times.transfer_seconds(request.prompt_len)
                self.memory.offloads.append((self._offload_end, request.prompt_len))
        return admitted

    def next_offload_end(self) -> float:
        """Time in seconds at which the next full KV has left the device. Call it if no request runs.

        Raises:
            SimulationError: No full KV is leaving the device, so the next request never fits.
        """
        if not self.memory.offloads:
            request = self.requests[self.waiting[0]]
            raise SimulationError(
                f"a request of {request.prompt_len} + {request.output_len} tokens does not fit in memory for "
                f"{self.memory.capacity:.0f} tokens: pass more memory, or shorter requests"
            )
        return min(end for end, _ in self.memory.offloads)


@dataclass
class Simulation:
    """Runs the requests of a scenario, round by round.

    Attributes:
        now: Time in seconds.
        round: Number of the current round.
        running: Running requests by index, in the order of admission.
        totals: Counts of all rounds so far.
    """

    scenario: Scenario
    requests: Sequence[SimulatedRequest]
    now: float = 0.0
    round: int = 0
    running: dict[int, SimulatedRequest] = field(default_factory=dict)
    totals: SimulationTotals = field(default_factory=SimulationTotals)

    def __post_init__(self) -> None:
        scenario, costs = self.scenario, self.scenario.costs
        self.placement = scenario.placement
        self.is_plain = not self.placement.drafts_resident and not self.placement.offloaded
        budget = 0.0 if self.is_plain else costs.budget
        self.times = MachineTimes(costs, scenario.kv_bytes_per_token, budget)
        self.memory = DeviceMemory(costs.memory / scenario.kv_bytes_per_token, budget)
        self.random = random.Random(scenario.seed)
        self.queue = RequestQueue(self.requests, self.placement, self.memory, self.times)
        placed = self.placement.resident + self.placement.offloaded
        expected = costs.drafts * draft_seconds(costs, placed) + costs.turnaround
        self.scheduler = VerificationScheduler(expected, self.memory.capacity, scenario.horizon, 0.25 if scenario.staggered else 0.0)
        self.link_free = 0.0
        self.unplanned: dict[int, None] = {}

    @property
    def is_finished(self) -> bool:
        """All requests have their complete output."""
        return not self.queue.waiting and not self.running

    def run(self) -> SimulationTotals:
        """Run rounds until all requests have finished.

        Raises:
            SimulationError: A request does not fit in memory, even alone.
        """
        while not self.is_finished:
            self.run_round()
        return self.totals

    def run_round(self) -> None:
        """Run one round: check loads, admit requests, schedule verifications, draft and verify."""
        if not self.running:
            self.now = max(self.now, self.queue.next_arrival)
        self.round += 1
        self.scheduler.advance()
        self._check_loads()
        verifying = self.scheduler.due()
        admitted = self._admit()
        if not self.running:
            self.now = self.queue.next_offload_end()
            return
        prefill = sum(self.requests[i].prompt_len for i in admitted) / self.scenario.prefill_rate
        if self.is_plain:
            steps = min([self.scenario.costs.drafts, *(each.remaining for each in self.running.values())])
            seconds, verified = self.times.plain_seconds(self.running.values(), steps), dict.fromkeys(self.running, steps)
        else:
            drafting = [each for i, each in self.running.items() if i not in admitted and each.pending_drafts < self.scenario.max_drafts]
            self._schedule(verifying)
            self._start_loads()
            seconds = self._draft_and_verify(drafting, [self.running[i] for i in verifying])
            verified = {i: self.draw_accepted(self.running[i].pending_drafts) + 1 for i in verifying}
            if drafting:
                estimate = self.scheduler.link.capacity
                self.scheduler.link.capacity = DECAY * estimate + (1 - DECAY) * seconds
        self._finish_round(prefill, seconds, verified)
        self.now += prefill + seconds

    def _admit(self) -> list[int]:
        """Admit waiting requests. Returns their indices."""
        admitted = self.queue.admit(self.now, self.running, self.scheduler.memory.peak)
        self.unplanned.update(dict.fromkeys(admitted))
        # Keep the memory for the next waiting request: loads that are not planned yet may not use it.
        self.scheduler.memory.capacity = max(0.0, self.memory.capacity - self._used_tokens - self.queue.wanted_tokens)
        return admitted

    @property
    def _used_tokens(self) -> float:
        return self.memory.used_tokens(self.running.values())

    def _check_loads(self) -> None:
        """Mark loads that have ended. If a load is late, postpone its verification."""
        for request in self.running.values():
            if request.load_ready is None and 0 < request.load_end <= self.now:
                request.load_ready = self.round
        for index in self.scheduler.due():
            request = self.running[index]
            if not request.offloaded or not self.scenario.staggered:
                continue
            if request.load_ready is None:
                self.unplanned.update(dict.fromkeys(self.scheduler.late(index)))
            else:
                self.totals.add_load(request.load_end - request.load_queued, self.round - request.load_ready)

    def _schedule(self, verifying: Sequence[int]) -> None:
        """Schedule the next verification of requests that verify now, and of requests without a scheduled one."""
        # A request that may finish with this verification needs no other one.
        drafts = self.scenario.costs.drafts
        again = [i for i in verifying if self.running[i].pending_drafts + drafts < self.running[i].remaining]
        waiting = [i for i in self.unplanned if i not in verifying]
        self.unplanned.update(dict.fromkeys(i for i in verifying if i not in again))
        for index in [*waiting, *again]:
            request = self.running[index]
            pending = 0 if index in verifying else request.pending_drafts
            needs_load = request.offloaded and self.scenario.staggered
            needs = (self.times.transfer_seconds(request.prompt_len), request.prompt_len) if needs_load else (0.0, 0.0)
            slot = self.scheduler.admit(index, *needs, self._rounds_to_verify(request, pending))
            self.unplanned.pop(index, None) if slot else self.unplanned.setdefault(index)

    def _rounds_to_verify(self, request: SimulatedRequest, pending: int) -> int:
        """Rounds until the next verification of a request, by the placement and by its remaining tokens."""
        y = self.scenario.costs.drafts
        drafts = self.placement.drafts_offloaded if request.offloaded else self.placement.drafts_resident
        if not self.scenario.staggered:
            return drafts // y - self.round % (drafts // y)
        return max(1, min(drafts, y * math.ceil(request.remaining / y)) // y - pending // y)

    def _start_loads(self) -> None:
        """Add the loads that start in this round to the link's queue."""
        for index in self.scheduler.loads_to_start():
            request = self.running[index]
            self.link_free = max(self.link_free, self.now) + self.times.transfer_seconds(request.prompt_len)
            request.load_queued, request.load_end, request.load_ready = self.now, self.link_free, None

    def _draft_and_verify(self, drafting: Sequence[SimulatedRequest], verifying: Sequence[SimulatedRequest]) -> float:
        """Add the round's draft tokens to ``drafting``. Returns the duration of the round in seconds."""
        costs = self.scenario.costs
        seconds = costs.turnaround + (self.times.draft_seconds(drafting) if drafting else 0.0)
        for each in drafting:
            each.pending_drafts += costs.drafts
        if not verifying:
            # Without drafts, the round waits for loads.
            return seconds if drafting else max(seconds, self.link_free - self.now)
        computing = self.times.verify_seconds(verifying)
        return seconds + (computing if self.scenario.staggered else self._lock_step_seconds(verifying, computing))

    def _lock_step_seconds(self, verifying: Sequence[SimulatedRequest], computing: float) -> float:
        """Time to verify all requests at once. Loads arrive in groups that fit in memory, during the forwards of earlier groups.

        ``computing`` is the time of one forward for all requests, in seconds.
        """
        loads = sum(each.prompt_len for each in verifying if each.offloaded)
        if not loads:
            return computing
        costs = self.scenario.costs
        groups = math.ceil(loads / max(1.0, self.memory.capacity - self._used_tokens))
        seconds = self.times.transfer_seconds(loads)
        self.link_free = self.now + seconds
        return max(seconds, computing + (groups - 1) * costs.weights / costs.bandwidth)

    def draw_accepted(self, drafts: int) -> int:
        """Draw the number of accepted tokens of ``drafts`` draft tokens."""
        p = self.scenario.acceptance
        if p >= 1 or not drafts:
            return drafts
        return min(drafts, int(math.log(1 - self.random.random()) / math.log(p))) if p > 0 else 0

    def _finish_round(self, prefill_seconds: float, seconds: float, verified: dict[int, int]) -> None:
        """Add the output tokens to the requests, remove finished requests, and record the round.

        Args:
            prefill_seconds: Duration of prefill.
            seconds: Duration of the rest of the round.
            verified: Output tokens by request index.
        """
        tokens, running = 0, len(self.running)
        link_seconds = min(max(0.0, self.link_free - self.now), prefill_seconds + seconds)
        reserved = self.scheduler.link.occupancy(), self.scheduler.memory.occupancy()
        for index, count in verified.items():
            request = self.running[index]
            added = min(count, request.remaining)
            tokens += added
            request.generated, request.pending_drafts = request.generated + added, 0
            if not request.remaining:
                self.scheduler.cancel(index)
                self.unplanned.pop(index, None)
                del self.running[index]
        self.totals.num_finished += running - len(self.running)
        record = RoundRecord(seconds, prefill_seconds, tokens, len(verified), running, link_seconds, *reserved)
        self.totals.add_round(record, full=bool(self.queue.waiting) or not self.totals.num_finished)
