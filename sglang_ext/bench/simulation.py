"""Rounds of verified decoding without a model: costs tell the time, a random number accepts drafts, :class:`Admission` is the engine's own.

Memory and time are those of :mod:`sglang_ext.managers.costs`, with each request's own lengths. A request is prefilled
when there is room for its full KV and its copy; where the full KV is to leave the device, it leaves over the link's
other direction. Of its output, a request is charged half from the beginning: the mean while it runs.
"""

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_ext.bench.scenario import Request, Scenario, SimulationError
from sglang_ext.bench.simulated import Rounds, Spent
from sglang_ext.managers.admission import Admission
from sglang_ext.managers.costs import draft_seconds

# What is left of an older round's weight in the measured seconds when the next one ends.
DECAY = 0.9


@dataclass
class Engine:
    """Runs a scenario's requests, one iteration after the other.

    Attributes:
        now: seconds from the beginning.
        iteration: number of the current one.
        queue: requests that were not taken in yet, in the order of their arrival.
        running: by number, in the order in which they were taken in.
        leaving: seconds at which full KV has left the device, and its tokens.
        rounds: what is counted.
    """

    scenario: Scenario
    requests: Sequence[Request]
    now: float = 0.0
    iteration: int = 0
    queue: deque[int] = field(default_factory=deque)
    running: dict[int, Request] = field(default_factory=dict)
    leaving: list[tuple[float, float]] = field(default_factory=list)
    rounds: Rounds = field(default_factory=Rounds)

    def __post_init__(self):
        scenario, costs = self.scenario, self.scenario.costs
        self.placement = scenario.placement
        self.plain = not self.placement.drafts_resident and not self.placement.offloaded
        self.pool = costs.memory / scenario.kv_token
        self.budget = 0.0 if self.plain else costs.budget
        self.noise = random.Random(scenario.seed)
        self.queue.extend(sorted(range(len(self.requests)), key=lambda i: self.requests[i].arrival))
        placed = self.placement.resident + self.placement.offloaded
        expected = costs.drafts * draft_seconds(costs, placed) + costs.turnaround
        self.admission = Admission(expected, self.pool, scenario.horizon, 0.25 if scenario.staggered else 0.0)
        self.link_free = self.store_free = 0.0
        self.unplanned: dict[int, None] = {}

    def run(self) -> Rounds:
        """Until all requests have their output.

        Raises:
            SimulationError: a request does not fit in the memory, even alone.
        """
        while self.queue or self.running:
            self.step()
        return self.rounds

    def step(self) -> None:
        """One iteration: loads are looked at, requests taken in and placed, drafts made and verified."""
        if not self.running and self.requests[self.queue[0]].arrival > self.now:
            self.now = self.requests[self.queue[0]].arrival
        self.iteration += 1
        self.admission.advance()
        self._look_at_loads()
        verifying = self.admission.due()
        fresh = self._take_in()
        if not self.running:
            self._wait_for_room()
            return
        prefill = sum(self.requests[i].prompt for i in fresh) / self.scenario.prefill_rate
        if self.plain:
            steps = min([self.scenario.costs.drafts, *(each.output - each.produced for each in self.running.values())])
            seconds, verified = self._plain_steps(steps), dict.fromkeys(self.running, steps)
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
        """Prefill what waits, in order, while there is room; those that were taken in."""
        taken = []
        self.leaving = [(end, tokens) for end, tokens in self.leaving if end > self.now]
        wanted = 0.0
        while self.queue and self.requests[self.queue[0]].arrival <= self.now:
            number = self.queue[0]
            request = self.requests[number]
            residents = sum(not each.offloaded for each in self.running.values())
            if residents >= self.placement.resident and len(self.running) - residents >= self.placement.offloaded:
                break
            request.offloaded = residents >= self.placement.resident
            lasting = self._held(request)
            wanted = lasting + (request.prompt if request.offloaded else 0)
            loads = max((each.prompt for each in (*self.running.values(), request) if each.offloaded), default=0)
            held = self._committed()
            lasts = held - sum(tokens for _, tokens in self.leaving) + lasting + loads
            if max(lasts, held + wanted) > self.pool:
                # Others have to leave first; until then the room is of use for loads.
                wanted = 0.0
                break
            if held + self.admission.memory_peak + wanted > self.pool:
                break
            self.queue.popleft()
            self.running[number] = request
            self.unplanned[number] = None
            taken.append(number)
            wanted = 0.0
            if request.offloaded:
                self.store_free = max(self.store_free, self.now) + self._load_seconds(request)
                self.leaving.append((self.store_free, request.prompt))
        # What waits for room gets it: loads that are not planned yet leave it free.
        self.admission.memory = max(0.0, self.pool - self._committed() - wanted)
        return taken

    def _wait_for_room(self) -> None:
        """Nothing runs: what leaves the device is waited for."""
        if not self.leaving:
            request = self.requests[self.queue[0]]
            raise SimulationError(
                f"a request of {request.prompt} + {request.output} tokens does not fit in memory for {self.pool:.0f} tokens: "
                "pass more memory, or shorter requests"
            )
        self.now = min(end for end, _ in self.leaving)

    def _held(self, request: Request) -> float:
        """Tokens of the device's memory that a request holds while it runs, its loads aside."""
        return request.prompt * (self.budget + (not request.offloaded)) + request.output / 2

    def _committed(self) -> float:
        return sum(self._held(each) for each in self.running.values()) + sum(tokens for _, tokens in self.leaving)

    def _load_seconds(self, request: Request) -> float:
        return request.prompt * self.scenario.kv_token / self.scenario.costs.link

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
        again = [i for i in verifying if self.running[i].drafts + self.scenario.costs.drafts < self.running[i].output - self.running[i].produced]
        waiting = [i for i in self.unplanned if i not in verifying]
        self.unplanned.update(dict.fromkeys(i for i in verifying if i not in again))
        for number in [*waiting, *again]:
            request = self.running[number]
            gathered = 0 if number in verifying else request.drafts
            load = request.offloaded and self.scenario.staggered
            needs = (self._load_seconds(request), request.prompt) if load else (0.0, 0.0)
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
        for number in self.admission.starting():
            request, seconds = self.running[number], self._load_seconds(self.running[number])
            self.link_free = max(self.link_free, self.now) + seconds
            request.asked, request.ends, request.ready = self.now, self.link_free, None

    def _plain_steps(self, steps: int) -> float:
        costs = self.scenario.costs
        tokens = sum(each.prompt + each.produced + (steps - 1) / 2 for each in self.running.values())
        return steps * (costs.weights + tokens * self.scenario.kv_token) / costs.bandwidth

    def _round(self, drafting: Sequence[Request], verifying: Sequence[Request]) -> float:
        """Seconds of a round; its drafts are made."""
        costs, y = self.scenario.costs, self.scenario.costs.drafts
        seconds = costs.turnaround
        if drafting:
            # A draft step reads what drafts before it wrote, too: on average of a round half of them.
            tokens = sum(self.budget * each.prompt + each.produced + each.drafts + y / 2 for each in drafting)
            seconds += y * (costs.weights + tokens * self.scenario.kv_token) / costs.bandwidth
        for each in drafting:
            each.drafts += y
        if not verifying:
            # With nothing to draft, either, loads are waited for.
            return seconds if drafting else max(seconds, self.link_free - self.now)
        tokens = sum(each.prompt + each.produced + each.drafts for each in verifying)
        read = (costs.weights + tokens * self.scenario.kv_token) / costs.bandwidth
        computing = read + costs.token_seconds * sum(each.drafts + 1 for each in verifying)
        return seconds + (computing if self.scenario.staggered else self._load_between(verifying, computing))

    def _load_between(self, verifying: Sequence[Request], computing: float) -> float:
        """Seconds of a verification of all at once: loads come in groups that fit, beside the forwards of those before."""
        loads = sum(each.prompt for each in verifying if each.offloaded)
        if not loads:
            return computing
        costs = self.scenario.costs
        groups = math.ceil(loads / max(1.0, self.pool - self._committed()))
        seconds = loads * self.scenario.kv_token / costs.link
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
        self.rounds.add(spent, full=bool(self.queue) or not self.rounds.finished)
