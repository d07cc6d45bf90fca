"""Measures the times of rounds, and chooses the draft length and the selection interval of the next round."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sglang_ext.core import RETRYABLE, NO_QUERIES, NO_SELECTION, RequestState
from sglang_ext.device import Mark
from sglang_ext.managers.metrics import KVMetrics
from sglang_ext.managers.spec_decode.draft_length import DraftLength, FixedDraftLength
from sglang_ext.managers.spec_decode.cost_model import BatchLoad, RecentTimes, RoundCosts, RoundTimes
from sglang_ext.core import TPRanks

if TYPE_CHECKING:
    from sglang_ext.managers.spec_decode.draft_report import DraftReport
    from sglang_ext.managers.spec_decode.selection_interval import SelectionInterval
    from sglang_ext.managers.spec_decode.planner import RoundPlan

# Fallback reasons that end after a few rounds. The time of a round with such a request does not predict later rounds.
TRANSIENT_FALLBACKS = (NO_QUERIES, NO_SELECTION)


@dataclass
class RoundMarks:
    """The marks of a round on the device. The host sets each one when it launches the work.

    Attributes:
        plan: Plan of the round.
        load: Load of its batch.
        follows_drafts: Whether the round before had draft steps.
        start: The round begins; compressed KV is created and refreshed.
        planned: Compressed KV is complete; drafting begins.
        first_step: The first step is done; None if no other follows.
        drafted: The last step is done.
        ended: The round is done.
        next: The next round of the same requests begins; :attr:`ended` if other work came between.
    """

    plan: "RoundPlan"
    load: BatchLoad
    follows_drafts: bool
    start: Mark
    planned: Mark
    first_step: Mark | None = None
    drafted: Mark | None = None
    ended: Mark | None = None
    next: Mark | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the device passed all marks."""
        return self.next is not None and self.next.reached


@dataclass
class RoundTimer:
    """Measures rounds, and chooses the draft length and the selection interval of the next one.

    Attributes:
        draft_length: Chooses the draft length.
        device: The device whose work is timed.
        metrics: Receives the times of each round.
        ranks: Ranks that must all use rank 0's choice.
        costs: Predicts the times of rounds from measured ones.
        compresses_each_round: Whether each round refreshes compressed KV; the time for it then counts as the round's.
        on_round_timed: Called with each round and its seconds.
        selection_interval: Chooses the selection interval; None if no method selects by the queries of steps.
        report: Receives the seconds of each round; None if nothing is reported.
        recent_rounds: Seconds of the newest rounds.
    """

    draft_length: DraftLength | FixedDraftLength
    device: torch.device
    metrics: KVMetrics
    ranks: TPRanks = TPRanks()
    costs: RoundCosts = field(default_factory=RoundCosts)
    compresses_each_round: bool = False
    on_round_timed: "Callable[[RoundPlan, RoundTimes], None] | None" = None
    selection_interval: "SelectionInterval | None" = None
    report: "DraftReport | None" = None
    recent_rounds: RecentTimes = field(default_factory=RecentTimes)
    _begun: Mark | None = None
    _load: BatchLoad = BatchLoad(0, 0)
    _drafts: int = 1
    _follows_drafts: bool = False
    _running: RoundMarks | None = None
    _pending: list[RoundMarks] = field(default_factory=list)
    _short_rounds: RoundTimes | None = None

    def start_round(self, lengths: list[int], states: list[RequestState]) -> int:
        """Begin a round, and choose its draft length.

        Args:
            lengths: Tokens of each request whose full KV is known.
            states: Draft states of the requests, in the same order.

        Returns:
            The draft length; 0 for plain decoding.
        """
        before = [] if self._running is None else self._running.plan.states
        self._follows_drafts = self._running is not None and self._running.plan.num_draft_steps > 0
        same = len(before) == len(states) and all(a is b for a, b in zip(before, states))
        self._begun = Mark.now(self.device)
        self._close(self._begun if same else None)
        self._learn()
        # Requests that never draft do not count: no draft length changes their speed.
        able = [state.acceptance.probability for state in states if state.fallback in RETRYABLE]
        uncompressed = sum(length for length, state in zip(lengths, states) if not state.compressor and state.fallback in RETRYABLE)
        load = BatchLoad.of(lengths, uncompressed)
        if self.selection_interval is not None:
            load = load._replace(every=self.selection_interval.choose(self.costs, load, self._drafts))
        drafts, every = self.ranks.agree((self.draft_length.choose(self.costs, load, able or [0.0]), load.every))
        self._load, self._drafts = load._replace(every=every), drafts or self._drafts
        return drafts

    @property
    def every(self) -> int:
        """Selection interval of the newest round, in steps."""
        return self._load.every

    @property
    def running(self) -> RoundMarks | None:
        """The newest planned round. Its marks are set while it runs."""
        return self._running

    def on_planned(self, plan: "RoundPlan") -> None:
        """Record that drafting begins. The round may have fewer draft steps than were chosen."""
        self._running = RoundMarks(plan, self._load, self._follows_drafts, self._begun, Mark.now(self.device))

    def on_first_step(self) -> None:
        """Record that the first of several steps was launched."""
        self._running.first_step = Mark.now(self.device)

    def on_drafted(self) -> None:
        """Record that the last draft step was launched."""
        self._running.drafted = Mark.now(self.device)

    def on_launched(self) -> None:
        """Record that all work of the round was launched."""
        self._running.ended = Mark.now(self.device)

    def interrupt(self) -> None:
        """Record that other work begins. Its time does not count for the running round."""
        self._close(None)

    def _close(self, following: Mark | None) -> None:
        """End the running round at ``following``, the start of the next one. With None it ends after its own work."""
        running, self._running = self._running, None
        if running is not None and running.ended is not None:
            running.next = following or running.ended
            self._pending.append(running)

    def _learn(self) -> None:
        done = [timed for timed in self._pending if timed.is_complete]
        self._pending = [timed for timed in self._pending if not timed.is_complete]
        for timed in done:
            plan = timed.plan
            spent = self._times_of(timed)
            if self._is_typical(plan) and (learned := self._merge_short_rounds(plan, spent)) is not None:
                self.draft_length.observe(learned)
                self.costs.observe(timed.load, learned)
            self.recent_rounds.newest.append(spent.compressing + spent.whole)
            if self.on_round_timed is not None:
                self.on_round_timed(plan, spent)
            if self.report is not None:
                self.report.add_seconds(plan, spent.compressing + spent.whole)
            self.metrics.observe_round(spent)

    def _times_of(self, timed: RoundMarks) -> RoundTimes:
        """The seconds of a round. Planning counts as the round's, unless compressed KV was created meanwhile."""
        plan = timed.plan
        planning = timed.start.until(timed.planned)
        whole = timed.planned.until(timed.next)
        later_steps = None if timed.first_step is None else timed.first_step.until(timed.drafted)
        is_part = not (plan.num_draft_steps and timed.load.uncompressed) or self.compresses_each_round
        return RoundTimes(
            plan.num_draft_steps,
            plan.num_plain_steps,
            compressing=0.0 if is_part else planning,
            drafting=timed.planned.until(timed.drafted),
            whole=whole + planning if is_part else whole,
            later_steps=later_steps,
            follows_drafts=timed.follows_drafts,
        )

    @staticmethod
    def _is_typical(plan: "RoundPlan") -> bool:
        """Whether the times of a round predict later rounds: no request waits for its compressed KV or for its full KV."""
        if not plan.num_draft_steps:
            return True
        return not (plan.early_reqs or plan.on_full_kv or any(reason in TRANSIENT_FALLBACKS for reason in plan.fallbacks))

    def _merge_short_rounds(self, plan: "RoundPlan", spent: RoundTimes) -> RoundTimes | None:
        """The seconds to learn from; None if there are none yet.

        Short rounds with pending drafts are added up until the drafts are verified. A round of full length without a verification is left
        out, because the time of its verification is missing.
        """
        if not plan.is_shortened:
            self._short_rounds = None
            return spent if plan.verify_reqs or not plan.num_draft_steps else None
        if not plan.num_draft_steps:
            return spent
        whole = spent if self._short_rounds is None else self._short_rounds.plus(spent)
        self._short_rounds = None if plan.verify_reqs else whole
        return whole if plan.verify_reqs else None
