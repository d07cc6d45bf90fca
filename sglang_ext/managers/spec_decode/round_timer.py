"""Measures rounds, and chooses the draft length (``--kv-draft-length auto``) and the selection interval (``--kv-select-every auto``).

*Draft length.* All requests of a batch have the one with the most tokens per second (VeriCache, equation (11), with measured times); 0 is
plain decoding on the full KV. A cost model (cost_model.py) predicts times at any load. While drafting does not pay, the batch decodes
plainly, and now and then runs a *probe*: a short round with drafts, which measures drafting again.

*Selection interval.* With few draft steps between two selections, steps are slow, because a selection reads all keys. With many, fewer drafts
are accepted. Both effects are measured for each interval, from the longest to the shortest. The next shorter one is tried only if it could
win: if it avoided half of the rejections and its selections took no time.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sglang_ext.core import NO_QUERIES, NO_SELECTION, RETRYABLE, SLOW_DECAY, AcceptanceTracker, RequestState, TPRanks
from sglang_ext.device import Mark
from sglang_ext.managers.spec_decode.cost_model import BatchLoad, RecentTimes, RoundCosts, RoundTimes, expected_tokens
from sglang_ext.managers.spec_decode.planner import RoundPlan

# Times are noisy, and compression takes time. So another length replaces the last choice only if its rate is HYSTERESIS times as high, and
# a draft length replaces plain decoding only if its rate is MIN_GAIN times as high.
HYSTERESIS, MIN_GAIN = 1.02, 1.03
# Fewest and most draft steps of a probe: enough to measure a draft step, and few that may be lost.
PROBE_DRAFTS = 2, 4
# Share of the time that probes may lose: compression, rounds that gain less than plain steps, and the wait before the next plain step.
PROBE_SHARE = 0.01
# While drafting pays, a plain step is measured after this number of draft steps.
PLAIN_AFTER = 1024
# A plain step is measured at a load that is further than this number of doublings from all measured ones.
PLAIN_REACH = 1.0
# The acceptance of an interval counts after ENOUGH_VERIFIES verifications. Before that the interval is tried in at most MOST_TRIES rounds.
ENOUGH_VERIFIES, MOST_TRIES = 48, 64
# Fallback reasons that end after a few rounds. The time of a round with such a request does not predict later rounds.
TRANSIENT_FALLBACKS = (NO_QUERIES, NO_SELECTION)


@dataclass
class DraftLength:
    """Chooses the draft length of each round, at most ``longest``. Probes and measurements of plain steps do not change the ``chosen`` one.

    ``is_fixed``: each round has the longest (``--kv-draft-length N``). ``predicted_gain``: predicted speed of the best length over that of
    plain decoding, at the last choice; None before the first.
    """

    longest: int
    is_fixed: bool = False
    chosen: int = 0
    predicted_gain: float | None = None
    # Draft steps since the last plain step.
    _since_plain: int = 0
    # Loads, in whole doublings, at which a plain step was requested.
    _asked: set[tuple[int, ...]] = field(default_factory=set)
    # Seconds that probes may lose now. The first probe may run at once.
    _allowance: float = float("inf")

    def choose(self, costs: RoundCosts, load: BatchLoad, probabilities: Sequence[float]) -> int:
        """Return the draft length of the next round; 0 for plain decoding. ``probabilities``: acceptance probability of each request."""
        if self.is_fixed:
            return self.longest
        drafts = np.arange(self.longest + 1)
        tokens = expected_tokens(np.asarray(probabilities)[:, None], drafts).sum(0)
        seconds = costs.round_seconds(load, drafts.tolist())
        rates = tokens / seconds
        self.predicted_gain = float(rates[1:].max() / rates[0])
        self.chosen = self._best(rates)
        if self.chosen:
            return 0 if self._plain_is_due(costs, load) else self.chosen
        if costs.draft_times.cells and not costs.plain_step_times.is_near(load.coordinates, PLAIN_REACH):
            # The loss of a probe is not known before a plain step is measured.
            return 0
        # A probe uses the short length with the smallest loss.
        least, most = (min(each, self.longest) for each in PROBE_DRAFTS)
        probe = least + int(rates[least : most + 1].argmax())
        slower = seconds[probe] * (1 - rates[probe] / rates[0])
        loss = max(0.0, costs.compressing_seconds(load) + slower + costs.return_wait.seconds)
        # Save up seconds for one probe at most.
        self._allowance = min(self._allowance, loss)
        if self._allowance < loss:
            return 0
        self._allowance -= loss
        return probe

    def observe(self, spent: RoundTimes) -> None:
        """Record the seconds of a round."""
        self._allowance += PROBE_SHARE * (spent.compressing + spent.whole)
        self._since_plain = self._since_plain + spent.num_draft_steps if spent.num_draft_steps else 0

    def _best(self, rates: np.ndarray) -> int:
        """The length with the highest rate. The last choice stays if it is nearly as good, and better than plain decoding."""
        best, last = int(rates.argmax()), self.chosen
        if rates[last] < rates[0]:
            last = 0
        return last if (HYSTERESIS if last else MIN_GAIN) * rates[last] > rates[best] else best

    def _plain_is_due(self, costs: RoundCosts, load: BatchLoad) -> bool:
        """Whether to measure a plain step: none was measured for long, or none near this load."""
        if self._since_plain >= PLAIN_AFTER:
            self._since_plain = 0
            return True
        near = tuple(map(round, load.coordinates))
        if near in self._asked or costs.plain_step_times.is_near(load.coordinates, PLAIN_REACH):
            return False
        # Ask once: the measured time arrives some rounds later.
        self._asked.add(near)
        return True


@dataclass
class SelectionInterval:
    """Chooses the selection interval of each round, from ``intervals`` in steps, longest first. Tries do not change the ``chosen`` one."""

    intervals: Sequence[int]
    chosen: int = 0
    acceptance: dict[int, AcceptanceTracker] = field(default_factory=dict)
    verifies: Counter[int] = field(default_factory=Counter)
    _tries: Counter[int] = field(default_factory=Counter)

    def choose(self, costs: RoundCosts, load: BatchLoad, drafts: int) -> int:
        """Return the interval of the next round, in steps. ``drafts``: draft steps; 0 for plain decoding."""
        longest = self.intervals[0]
        self.chosen = self.chosen or longest
        if len(self.intervals) == 1 or not drafts:
            return self.chosen
        known = {each: self.acceptance[each].probability for each in self.intervals if self.verifies[each] >= ENOUGH_VERIFIES}
        rates = {each: self._rate(costs, load, drafts, each, probability) for each, probability in known.items()}
        best = max(rates, key=rates.get, default=longest)
        if self.chosen not in rates or rates[best] > HYSTERESIS * rates[self.chosen]:
            self.chosen = best
        return self._next_try(costs, load, drafts, rates) or self.chosen

    def observe(self, interval: int, offered: int, accepted: int) -> None:
        """Count a verification of one request, in a round with this interval."""
        self.acceptance.setdefault(interval, AcceptanceTracker(decay=SLOW_DECAY)).observe(offered, accepted)
        self.verifies[interval] += 1

    @staticmethod
    def _rate(costs: RoundCosts, load: BatchLoad, drafts: int, interval: int, probability: float) -> float:
        """Tokens per second of a request whose draft tokens are accepted with ``probability``."""
        seconds = costs.round_seconds(load._replace(selection_interval=interval), [drafts])
        return float(expected_tokens(probability, drafts)) / float(seconds[0])

    def _next_try(self, costs: RoundCosts, load: BatchLoad, drafts: int, rates: dict[int, float]) -> int | None:
        """The next interval to try; None if no other could win."""
        before = None
        for interval in self.intervals:
            if interval not in rates:
                if before is not None:
                    # A draft step takes at least as long as with the longer interval. Assume half of its rejections.
                    probability = (1 + self.acceptance[before].probability) / 2
                    if self._rate(costs, load, drafts, before, probability) <= HYSTERESIS * rates[self.chosen]:
                        return None
                if self._tries[interval] >= MOST_TRIES:
                    return None
                self._tries[interval] += 1
                return interval
            before = interval
        return None


@dataclass
class RoundMarks:
    """The marks of a round on the device: it starts, compressed KV is complete, the first of several steps is done, the last one, the round.

    ``follows_plain``: whether the round before was plain, and no prefill came between. ``next``: the next round of the same requests begins;
    :attr:`ended` if other work came between.
    """

    load: BatchLoad
    follows_plain: bool
    start: Mark
    plan: RoundPlan | None = None
    planned: Mark | None = None
    first_step: Mark | None = None
    drafted: Mark | None = None
    ended: Mark | None = None
    next: Mark | None = None


@dataclass
class RoundTimer:
    """Measures rounds, and chooses the draft length and the selection interval of the next one. All ranks use rank 0's choice.

    ``compresses_each_round``: whether the time to refresh compressed KV counts as the round's. ``selection_interval`` is None if no method
    selects by the queries of steps. ``observers`` are called with each measured round. ``running``: the newest round.
    """

    draft_length: DraftLength
    device: torch.device
    ranks: TPRanks = TPRanks()
    costs: RoundCosts = field(default_factory=RoundCosts)
    compresses_each_round: bool = False
    selection_interval: SelectionInterval | None = None
    observers: Sequence[Callable[[RoundPlan, RoundTimes], None]] = ()
    recent_rounds: RecentTimes = field(default_factory=RecentTimes)
    running: RoundMarks | None = None
    _drafts: int = 1
    _pending: list[RoundMarks] = field(default_factory=list)
    _short_rounds: RoundTimes | None = None

    def start_round(self, lengths: list[int], states: list[RequestState]) -> tuple[int, int]:
        """Begin a round of requests with these context lengths, in tokens. Returns the draft length, and the selection interval in steps."""
        plan, start = None if self.running is None else self.running.plan, Mark.now(self.device)
        same = plan is not None and len(plan.states) == len(states) and all(a is b for a, b in zip(plan.states, states))
        self._close(start if same else None)
        self._learn()
        # Requests that never draft do not count: no draft length changes their speed.
        able = [state.acceptance.probability for state in states if state.fallback in RETRYABLE]
        uncompressed = sum(length for length, state in zip(lengths, states) if not state.compressor and state.fallback in RETRYABLE)
        load = BatchLoad.of(lengths, uncompressed)
        if self.selection_interval is not None:
            load = load._replace(selection_interval=self.selection_interval.choose(self.costs, load, self._drafts))
        choice = self.draft_length.choose(self.costs, load, able or [0.0]), load.selection_interval
        drafts, interval = self.ranks.agree(choice)
        self._drafts = drafts or self._drafts
        self.running = RoundMarks(load._replace(selection_interval=interval), plan is not None and not plan.num_draft_steps, start)
        return drafts, interval

    def on_planned(self, plan: RoundPlan) -> None:
        """Record that drafting begins."""
        self.running.plan, self.running.planned = plan, Mark.now(self.device)

    def on_first_step(self) -> None:
        """Record that the first of several steps was launched."""
        self.running.first_step = Mark.now(self.device)

    def on_drafted(self) -> None:
        """Record that the last draft step was launched."""
        self.running.drafted = Mark.now(self.device)

    def on_launched(self) -> None:
        """Record that all work of the round was launched."""
        self.running.ended = Mark.now(self.device)

    def interrupt(self) -> None:
        """Record that other work begins. Its time does not count for the running round."""
        self._close(None)

    def _close(self, following: Mark | None) -> None:
        """End the running round at ``following``, the start of the next one; with None, after its own work."""
        running, self.running = self.running, None
        if running is not None and running.ended is not None:
            running.next = following or running.ended
            self._pending.append(running)

    def _learn(self) -> None:
        """Learn from the pending rounds whose marks the device passed."""
        reached = [timed.next.reached for timed in self._pending]
        done = [timed for timed, is_done in zip(self._pending, reached) if is_done]
        self._pending = [timed for timed, is_done in zip(self._pending, reached) if not is_done]
        for timed in done:
            spent = self._times_of(timed)
            if self._is_typical(timed.plan) and (learned := self._merge_short_rounds(timed.plan, spent)) is not None:
                self.draft_length.observe(learned)
                self.costs.observe(timed.load, learned)
            self.recent_rounds.times.append(spent.compressing + spent.whole)
            for observe in self.observers:
                observe(timed.plan, spent)

    def _times_of(self, timed: RoundMarks) -> RoundTimes:
        """The seconds of a round. Planning counts as the round's, unless compressed KV was created meanwhile."""
        plan, planning, whole = timed.plan, timed.start.until(timed.planned), timed.planned.until(timed.next)
        later_steps = None if timed.first_step is None else timed.first_step.until(timed.drafted)
        is_part = not (plan.num_draft_steps and timed.load.uncompressed) or self.compresses_each_round
        return RoundTimes(
            plan.num_draft_steps,
            plan.num_plain_steps,
            compressing=0.0 if is_part else planning,
            drafting=timed.planned.until(timed.drafted),
            whole=whole + planning if is_part else whole,
            later_steps=later_steps,
            follows_plain=timed.follows_plain,
        )

    @staticmethod
    def _is_typical(plan: RoundPlan) -> bool:
        """Whether the times of a round predict later rounds: no request waits for its compressed KV or for its full KV."""
        if not plan.num_draft_steps:
            return True
        return not (plan.early_reqs or plan.on_full_kv or any(reason in TRANSIENT_FALLBACKS for reason in plan.fallbacks))

    def _merge_short_rounds(self, plan: RoundPlan, spent: RoundTimes) -> RoundTimes | None:
        """The seconds to learn from, if any. Short rounds are added up until their drafts are verified."""
        if not plan.is_shortened:
            self._short_rounds = None
            # Without a verification, a round of full length misses the time of its verification.
            return spent if plan.verify_reqs or not plan.num_draft_steps else None
        if not plan.num_draft_steps:
            return spent
        whole = spent if self._short_rounds is None else self._short_rounds.plus(spent)
        self._short_rounds = None if plan.verify_reqs else whole
        return whole if plan.verify_reqs else None
