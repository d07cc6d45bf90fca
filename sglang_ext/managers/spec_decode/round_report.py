"""Counts the outcomes of rounds: per request, as metrics, and in one log line a minute about what drafting gains.

The gain is the time that plain steps would have taken for the same tokens, over the time of the rounds. The cost model (cost_model.py)
predicts the time of plain steps, from plain steps that it measured near the load.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_batch import ScheduleBatch

from sglang_ext.core import FALLBACK_REASONS, FALLBACK_WORDS, SLOWER
from sglang_ext.managers.metrics import KVMetrics
from sglang_ext.managers.spec_decode.cost_model import BatchLoad, RoundCosts, RoundTimes
from sglang_ext.managers.spec_decode.planner import RoundPlan
from sglang_ext.managers.spec_decode.request_states import RequestStates, write_counters
from sglang_ext.managers.spec_decode.round_result import RoundResult
from sglang_ext.managers.spec_decode.round_timer import DraftLength, SelectionInterval

if TYPE_CHECKING:
    from sglang_ext.managers.kv_transfer.transfer_metrics import TransferTimeline

logger = logging.getLogger(__name__)

# Seconds between two log lines.
LOG_INTERVAL_SECONDS = 60.0
# A gain is reported at a load that is at most this number of doublings from a measured plain step.
MAX_LOAD_DISTANCE = 1.0


@dataclass
class DraftTotals:
    """Sums over the rounds with draft steps, and the last selection interval, in steps; 0 if the server does not choose it.

    ``seconds``: of rounds at loads near a measured plain step. ``plain_seconds``: predicted time of plain steps for their tokens.
    ``undrafted_tokens``: tokens without drafts in any round, by index into ``FALLBACK_REASONS``.
    """

    rounds: int = 0
    steps: int = 0
    selection_interval: int = 0
    verifies: int = 0
    offered: int = 0
    accepted: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    undrafted_tokens: Counter[int] = field(default_factory=Counter)

    @property
    def figures(self) -> dict[str, float | None]:
        """The metrics of drafting, by name, as in metrics.py; 0 without rounds or verifications. An unknown gain is None."""
        return {
            "draft_length": self.steps / self.rounds if self.rounds else 0.0,
            "draft_acceptance_rate": self.accepted / self.offered if self.offered else 0.0,
            "draft_accept_length": (self.accepted + self.verifies) / self.verifies if self.verifies else 0.0,
            "draft_gain": self.plain_seconds / self.seconds if self.seconds and self.plain_seconds else None,
            "selection_interval": self.selection_interval,
        }


@dataclass
class RoundReport:
    """Counts the outcomes of rounds, sets the metrics, and logs a line a minute.

    ``interval`` is None if no method selects by the queries of steps. ``reports_drafting``: what drafting gains; False in mode lossy.
    ``writes_log``: whether this process logs for all ranks. ``totals``: since the last log line.
    """

    lengths: DraftLength
    costs: RoundCosts
    metrics: KVMetrics
    requests: RequestStates
    interval: SelectionInterval | None = None
    reports_drafting: bool = True
    writes_log: bool = True
    timeline: "TransferTimeline | None" = None
    clock: Callable[[], float] = time.monotonic
    totals: DraftTotals = field(default_factory=DraftTotals)
    _last_totals: DraftTotals = field(default_factory=DraftTotals)
    _since: float | None = None

    def on_round_timed(self, plan: RoundPlan, spent: RoundTimes) -> None:
        """Record the times of a round."""
        self.metrics.observe_round(spent)
        if plan.num_draft_steps and self._is_measured(BatchLoad.of(plan.lengths)):
            self.totals.seconds += spent.compressing + spent.whole

    def account(self, batch: ScheduleBatch, result: RoundResult) -> None:
        """Count the outcome of a round, once it is on the host."""
        plan, tokens = result.plan, 0
        verify_reqs, full_kv_reqs = set(plan.verify_reqs), set(plan.full_kv_reqs)
        for i, (req, state, num_tokens) in enumerate(zip(batch.reqs, plan.states, result.accept_lens.tolist())):
            if req.finished() or req.is_retracted:
                continue  # the scheduler drops tokens after the end
            tokens += num_tokens
            if plan.fallbacks[i]:
                self.count_fallback(plan.fallbacks[i], num_tokens)
            elif plan.can_be_rejected(i) and i not in full_kv_reqs:
                self.metrics.count("drafts", plan.num_steps)
                if i in verify_reqs:
                    # Drafts after the end of the output were not rejected.
                    offered = num_tokens - 1 if i in result.finished_early else min(plan.num_draft_tokens(i), plan.remaining[i] - 1)
                    self.requests.count_verify(state, offered, num_tokens - 1)
                    if self.interval is not None:
                        self.interval.observe(plan.selection_interval, offered, num_tokens - 1)
                    self.count_verify(offered, num_tokens - 1)
                    if i in plan.early_reqs:
                        # Counted by servers with a prefix store.
                        self.metrics.count("store_early_accepted", num_tokens - 1)
            state.fallback = plan.fallbacks[i]
            write_counters(req, state)
            if self.timeline is not None:
                self._record_timeline(self.timeline, req.bootstrap_room, result, i, num_tokens)
        if tokens:
            self.on_round_end(plan, tokens)

    @staticmethod
    def _record_timeline(timeline: "TransferTimeline", room: int, result: RoundResult, i: int, num_tokens: int) -> None:
        plan, is_early = result.plan, i in result.plan.early_reqs
        drafted, ended = (timeline.at(mark) for mark in (result.marks.drafted, result.marks.ended))
        if i in plan.full_kv_reqs:
            timeline.add_event(room, "answered", drafted, num_tokens)
            return
        timeline.add_event(room, "drafted", drafted, plan.num_draft_tokens(i), plan.num_steps, early=is_early)
        if i in plan.verify_reqs:
            timeline.add_event(room, "verified", ended, num_tokens - 1, plan.num_draft_tokens(i), early=is_early)

    def count_verify(self, offered: int, accepted: int) -> None:
        """Count a verification of one request."""
        self.metrics.count_verify(accepted + 1)
        self.totals.verifies += 1
        self.totals.offered += offered
        self.totals.accepted += accepted

    def count_fallback(self, reason: int, tokens: int) -> None:
        """Count tokens without drafts; ``reason`` is an index into ``FALLBACK_REASONS``."""
        self.metrics.count("fallback_tokens", tokens, FALLBACK_REASONS[reason])
        self.totals.undrafted_tokens[reason] += tokens

    def on_round_end(self, plan: RoundPlan, tokens: int) -> None:
        """Count a round, and report if a minute has passed. ``tokens`` is the sum over its requests."""
        if not self.reports_drafting:
            return
        totals, now = self.totals, self.clock()
        self._since = now if self._since is None else self._since
        if plan.num_draft_steps:
            load = BatchLoad.of(plan.lengths)
            totals.rounds += 1
            totals.steps += plan.num_steps
            if self.interval is not None and len(self.interval.intervals) > 1:
                totals.selection_interval = plan.selection_interval
            if self._is_measured(load):
                totals.plain_seconds += tokens / len(plan.states) * self.costs.step_seconds(load)
        # Until a round drafts after a log line, report the figures of that line.
        shown = totals if totals.rounds else self._last_totals
        figures = shown.figures | {"draft_predicted_gain": self.lengths.predicted_gain}
        self.metrics.observe((name, value or 0.0) for name, value in figures.items())
        if now - self._since >= LOG_INTERVAL_SECONDS:
            if self.writes_log:
                logger.info("sglang-ext: %s", self._line(now - self._since))
            self._last_totals, self.totals, self._since = totals, DraftTotals(), None

    def _is_measured(self, load: BatchLoad) -> bool:
        return self.costs.plain_step_times.is_near(load.coordinates, MAX_LOAD_DISTANCE)

    def _line(self, seconds: float) -> str:
        totals, figures = self.totals, self.totals.figures
        plain, reasons = totals.undrafted_tokens.total(), [self._why(reason) for reason, _ in totals.undrafted_tokens.most_common(2)]
        if not totals.rounds:
            return f"drafting is off in the last {seconds:.0f} s, {plain} tokens: {'; '.join(reasons) or 'requests ended'}"
        gain = figures["draft_gain"]
        compared = "not known, as no plain step was measured near this load" if gain is None else f"{gain:.2f} over plain steps"
        parts = [
            f"drafting in the last {seconds:.0f} s: {totals.rounds} rounds, draft length {figures['draft_length']:.1f}",
            f"acceptance rate {figures['draft_acceptance_rate']:.2f}, accept length {figures['draft_accept_length']:.2f}, gain {compared}",
        ]
        if totals.selection_interval:
            parts.append(f"selection every {totals.selection_interval} steps")
        if plain:
            parts.append(f"{plain} tokens without drafts: {'; '.join(reasons)}")
        return ", ".join(parts)

    def _why(self, reason: int) -> str:
        words, predicted = FALLBACK_WORDS[FALLBACK_REASONS[reason]], self.lengths.predicted_gain
        if reason != SLOWER or predicted is None:
            return words
        if predicted > 1:
            return "plain steps were measured, or drafting was predicted to be slower"
        return f"{words} ({predicted:.2f} of plain steps predicted)"
