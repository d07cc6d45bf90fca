"""Rounds of verified decoding without a model: costs tell the time, a random number accepts drafts.

:class:`VerificationScheduler` is the engine's own. Memory and time are the machine's (simulated_machine.py). A request is prefilled when
there is room for its full KV and its copy (simulated_intake.py); where the full KV is to leave the device, it leaves over the
link's other direction.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_ext.managers.kv_offload.costs import draft_seconds
from sglang_ext.managers.kv_offload.verification_scheduler import VerificationScheduler
from sglang_ext_bench.simulating.scenario import Request, Scenario
from sglang_ext_bench.simulating.simulated import Rounds, Spent
from sglang_ext_bench.simulating.simulated_intake import Intake
from sglang_ext_bench.simulating.simulated_machine import Room, Seconds

# What is left of an older round's weight in the measured seconds when the next one ends.
DECAY = 0.9


@dataclass
class Engine:
    """Runs a scenario's requests, one iteration after the other.

    Attributes:
        now: seconds from the beginning.
        iteration: number of the current one.
        running: by number, in the order in which they were taken in.
        rounds: what is counted.
    """

    scenario: Scenario
    requests: Sequence[Request]
    now: float = 0.0
    iteration: int = 0
    running: dict[int, Request] = field(default_factory=dict)
    rounds: Rounds = field(default_factory=Rounds)

    def __post_init__(self):
        scenario, costs = self.scenario, self.scenario.costs
        self.placement = scenario.placement
        self.plain = not self.placement.drafts_resident and not self.placement.offloaded
        budget = 0.0 if self.plain else costs.budget
        self.seconds, self.room = Seconds(costs, scenario.kv_token, budget), Room(costs.memory / scenario.kv_token, budget)
        self.noise = random.Random(scenario.seed)
        self.intake = Intake(self.requests, self.placement, self.room, self.seconds)
        placed = self.placement.resident + self.placement.offloaded
        expected = costs.drafts * draft_seconds(costs, placed) + costs.turnaround
        self.admission = VerificationScheduler(expected, self.room.pool, scenario.horizon, 0.25 if scenario.staggered else 0.0)
        self.link_free = 0.0
        self.unplanned: dict[int, None] = {}

    def run(self) -> Rounds:
        """Until all requests have their output.

        Raises:
            SimulationError: a request does not fit in the memory, even alone.
        """
        while self.intake.queue or self.running:
            self.step()
        return self.rounds

    def step(self) -> None:
        """One iteration: loads are looked at, requests taken in and placed, drafts made and verified."""
        if not self.running:
            self.now = max(self.now, self.intake.next_arrival)
        self.iteration += 1
        self.admission.advance()
        self._look_at_loads()
        verifying = self.admission.due()
        fresh = self._take_in()
        if not self.running:
            self.now = self.intake.room_at()
            return
        prefill = sum(self.requests[i].prompt for i in fresh) / self.scenario.prefill_rate
        if self.plain:
            steps = min([self.scenario.costs.drafts, *(each.output - each.produced for each in self.running.values())])
            seconds, verified = self.seconds.plain(self.running.values(), steps), dict.fromkeys(self.running, steps)
        else:
            drafting = [each for i, each in self.running.items() if i not in fresh and each.drafts < self.scenario.longest]
            self._place(verifying)
            self._start_loads()
            seconds = self._round(drafting, [self.running[i] for i in verifying])
            verified = {i: self._accepted(self.running[i].drafts) + 1 for i in verifying}
            if drafting:
                estimate = self.admission.iteration_seconds
                self.admission.iteration_seconds = DECAY * estimate + (1 - DECAY) * seconds
        self._count(prefill, seconds, verified)
        self.now += prefill + seconds

    def _take_in(self) -> list[int]:
        """Let the next requests in; numbers of those that were."""
        taken = self.intake.take(self.now, self.running, self.admission.memory_peak)
        self.unplanned.update(dict.fromkeys(taken))
        # What waits for room gets it: loads that are not planned yet leave it free.
        self.admission.memory = max(0.0, self.room.pool - self._committed - self.intake.wanted)
        return taken

    @property
    def _committed(self) -> float:
        return self.room.committed(self.running.values())

    def _look_at_loads(self) -> None:
        """Loads that are complete by now; late ones are put off."""
        for request in self.running.values():
            if request.ready is None and 0 < request.ends <= self.now:
                request.ready = self.iteration
        for number in self.admission.due():
            request = self.running[number]
            if not request.offloaded or not self.scenario.staggered:
                continue
            if request.ready is None:
                self.unplanned.update(dict.fromkeys(self.admission.late(number)))
            else:
                self.rounds.loaded(request.ends - request.asked, self.iteration - request.ready)

    def _place(self, verifying: Sequence[int]) -> None:
        """The next verification of those that verify now, of new ones, and of those that got no place before."""
        # What may be finished by this verification needs no other one.
        drafts = self.scenario.costs.drafts
        again = [i for i in verifying if self.running[i].drafts + drafts < self.running[i].output - self.running[i].produced]
        waiting = [i for i in self.unplanned if i not in verifying]
        self.unplanned.update(dict.fromkeys(i for i in verifying if i not in again))
        for number in [*waiting, *again]:
            request = self.running[number]
            gathered = 0 if number in verifying else request.drafts
            load = request.offloaded and self.scenario.staggered
            needs = (self.seconds.loading(request.prompt), request.prompt) if load else (0.0, 0.0)
            slot = self.admission.admit(number, *needs, self._wanted(request, gathered))
            self.unplanned.pop(number, None) if slot else self.unplanned.setdefault(number)

    def _wanted(self, request: Request, gathered: int) -> int:
        """Rounds until a request's verification, by the placement, and by what is left of its output."""
        y = self.scenario.costs.drafts
        drafts = self.placement.drafts_offloaded if request.offloaded else self.placement.drafts_resident
        if not self.scenario.staggered:
            return drafts // y - self.iteration % (drafts // y)
        left = request.output - request.produced
        return max(1, min(drafts, y * math.ceil(left / y)) // y - gathered // y)

    def _start_loads(self) -> None:
        for number in self.admission.loads_to_start():
            request = self.running[number]
            self.link_free = max(self.link_free, self.now) + self.seconds.loading(request.prompt)
            request.asked, request.ends, request.ready = self.now, self.link_free, None

    def _round(self, drafting: Sequence[Request], verifying: Sequence[Request]) -> float:
        """Seconds of a round; its drafts are made."""
        costs = self.scenario.costs
        seconds = costs.turnaround + (self.seconds.drafting(drafting) if drafting else 0.0)
        for each in drafting:
            each.drafts += costs.drafts
        if not verifying:
            # With nothing to draft, either, loads are waited for.
            return seconds if drafting else max(seconds, self.link_free - self.now)
        computing = self.seconds.verifying(verifying)
        return seconds + (computing if self.scenario.staggered else self._load_between(verifying, computing))

    def _load_between(self, verifying: Sequence[Request], computing: float) -> float:
        """Seconds of a verification of all at once: loads come in groups that fit, beside the forwards of those before."""
        loads = sum(each.prompt for each in verifying if each.offloaded)
        if not loads:
            return computing
        costs = self.scenario.costs
        groups = math.ceil(loads / max(1.0, self.room.pool - self._committed))
        seconds = self.seconds.loading(loads)
        self.link_free = self.now + seconds
        return max(seconds, computing + (groups - 1) * costs.weights / costs.bandwidth)

    def _accepted(self, drafts: int) -> int:
        p = self.scenario.acceptance
        if p >= 1 or not drafts:
            return drafts
        return min(drafts, int(math.log(1 - self.noise.random()) / math.log(p))) if p > 0 else 0

    def _count(self, prefill: float, seconds: float, verified: dict[int, int]) -> None:
        """Give requests their tokens; those that are finished leave."""
        tokens, running = 0, len(self.running)
        busy = min(max(0.0, self.link_free - self.now), prefill + seconds)
        occupancy = self.admission.occupancy
        for number, count in verified.items():
            request = self.running[number]
            gained = min(count, request.output - request.produced)
            tokens += gained
            request.produced, request.drafts = request.produced + gained, 0
            if request.produced >= request.output:
                self.admission.cancel(number)
                self.unplanned.pop(number, None)
                del self.running[number]
        self.rounds.finished += running - len(self.running)
        spent = Spent(seconds, prefill, tokens, len(verified), running, busy, occupancy)
        self.rounds.add(spent, full=bool(self.intake.queue) or not self.rounds.finished)
