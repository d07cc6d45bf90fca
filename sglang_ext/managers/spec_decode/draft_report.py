"""Reports what drafting gains: one log line a minute, and metrics.

The gain compares measured rounds with plain decoding: the time that plain steps would have taken for the same tokens, over the time of the
rounds. The cost model (cost_model.py) predicts the time of plain steps, from plain steps that it measured near the load.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_ext.core import FALLBACK_REASONS, SLOWER
from sglang_ext.managers.metrics import KVMetrics
from sglang_ext.managers.spec_decode.cost_model import BatchLoad, RoundCosts

if TYPE_CHECKING:
    from sglang_ext.managers.spec_decode.draft_length import DraftLength, FixedDraftLength
    from sglang_ext.managers.spec_decode.planner import RoundPlan

logger = logging.getLogger(__name__)

# Seconds between two log lines.
LOG_INTERVAL_SECONDS = 60.0
# A gain is reported at a load that is at most this number of doublings from a measured plain step.
MAX_LOAD_DISTANCE = 1.0
# Fallback reasons in words, for the log.
REASON_WORDS = {
    "short-context": "contexts are too short to compress",
    "no-free-slots": "the KV pool has no room for compressed KV",
    "no-queries": "too few queries are kept to compress",
    "slower": "drafting would be slower",
    "min-p": "requests use min_p",
    "custom-logit-processor": "requests use a custom logit processor",
    "grammar": "the grammar backend cannot take drafts back",
    "hidden-states": "requests ask for hidden states",
    "wrong-scores": "the compressor's scores cannot be used",
    "no-selection": "no cache rank can select tokens",
}


@dataclass
class DraftTotals:
    """Sums over some rounds.

    Attributes:
        rounds: Rounds with draft steps.
        steps: Draft steps of all rounds.
        selection_interval: Selection interval of the last round with draft steps, in steps; 0 if the server does not choose it.
        verifies: Verifications, counted for each request.
        offered, accepted: Draft tokens that were verified, and accepted.
        seconds: Measured time of the rounds with draft steps at loads near a measured plain step.
        plain_seconds: Predicted time of plain steps for the tokens of the same rounds.
        undrafted_tokens: Tokens without drafts, by index into ``FALLBACK_REASONS``.
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
    def draft_length(self) -> float:
        """Mean draft steps of a round; 0 if no round drafted."""
        return self.steps / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens over verified draft tokens; 0 if none were verified."""
        return self.accepted / self.offered if self.offered else 0.0

    @property
    def accept_length(self) -> float:
        """Mean tokens of a verification, with the bonus token; 0 if none ran."""
        return (self.accepted + self.verifies) / self.verifies if self.verifies else 0.0

    @property
    def gain(self) -> float | None:
        """Speed of rounds with drafts relative to plain steps; None if unknown."""
        return self.plain_seconds / self.seconds if self.seconds and self.plain_seconds else None


@dataclass
class DraftReport:
    """Counts rounds, logs a line a minute, and sets the metrics.

    Attributes:
        lengths: Chooses the draft length, and predicts its gain.
        costs: Predicts the time of plain steps.
        metrics: Receives the figures.
        writes_log: Whether this process writes the log line for all ranks.
        chooses_interval: Whether the server chooses the selection interval; only then it is reported.
        clock: Returns seconds.
        totals: Sums over the rounds since the last log line.
    """

    lengths: "DraftLength | FixedDraftLength"
    costs: RoundCosts
    metrics: KVMetrics
    writes_log: bool = True
    chooses_interval: bool = False
    clock: Callable[[], float] = time.monotonic
    totals: DraftTotals = field(default_factory=DraftTotals)
    _last_totals: DraftTotals = field(default_factory=DraftTotals)
    _since: float | None = None

    def add_seconds(self, plan: "RoundPlan", seconds: float) -> None:
        """Record the seconds of a round."""
        if plan.num_draft_steps and self._is_measured(BatchLoad.of(plan.lengths)):
            self.totals.seconds += seconds

    def count_verify(self, offered: int, accepted: int) -> None:
        """Count a verification of one request."""
        self.totals.verifies += 1
        self.totals.offered += offered
        self.totals.accepted += accepted

    def count_fallback(self, reason: int, tokens: int) -> None:
        """Count tokens without drafts; ``reason`` is an index into ``FALLBACK_REASONS``."""
        self.totals.undrafted_tokens[reason] += tokens

    def on_round_end(self, plan: "RoundPlan", tokens: int) -> None:
        """Count a round, and report if a minute has passed. ``tokens`` is the sum over its requests."""
        totals, now = self.totals, self.clock()
        self._since = now if self._since is None else self._since
        if plan.num_draft_steps:
            load = BatchLoad.of(plan.lengths)
            totals.rounds += 1
            totals.steps += plan.num_steps
            totals.selection_interval = plan.selection_interval if self.chooses_interval else 0
            if self._is_measured(load):
                totals.plain_seconds += tokens / len(plan.states) * self.costs.step_seconds(load)
        self.metrics.observe_drafting(self.figures)
        if now - self._since >= LOG_INTERVAL_SECONDS:
            if self.writes_log:
                logger.info("sglang-ext: %s", self.line(now - self._since))
            self._last_totals, self.totals, self._since = totals, DraftTotals(), None

    @property
    def figures(self) -> dict[str, float | None]:
        """The metrics of drafting, by name; None if unknown. Until a round drafts after a log line, they are those of that line."""
        totals = self.totals if self.totals.rounds else self._last_totals
        return {
            "draft_length": totals.draft_length,
            "draft_acceptance_rate": totals.acceptance_rate,
            "draft_accept_length": totals.accept_length,
            "draft_gain": totals.gain,
            "draft_predicted_gain": self.lengths.predicted_gain,
            "selection_interval": totals.selection_interval,
        }

    def _is_measured(self, load: BatchLoad) -> bool:
        return self.costs.plain_step_times.is_near(load.coordinates, MAX_LOAD_DISTANCE)

    def line(self, seconds: float) -> str:
        """The log line for the rounds of the last ``seconds``."""
        totals = self.totals
        plain, reasons = totals.undrafted_tokens.total(), [self._why(reason) for reason, _ in totals.undrafted_tokens.most_common(2)]
        if not totals.rounds:
            return f"drafting is off in the last {seconds:.0f} s, {plain} tokens: {'; '.join(reasons) or 'requests ended'}"
        gain = "not known, as no plain step was measured near this load" if totals.gain is None else f"{totals.gain:.2f} over plain steps"
        parts = [
            f"drafting in the last {seconds:.0f} s: {totals.rounds} rounds, draft length {totals.draft_length:.1f}",
            f"acceptance rate {totals.acceptance_rate:.2f}, accept length {totals.accept_length:.2f}, gain {gain}",
        ]
        if totals.selection_interval:
            parts.append(f"selection every {totals.selection_interval} steps")
        if plain:
            parts.append(f"{plain} tokens without drafts: {'; '.join(reasons)}")
        return ", ".join(parts)

    def _why(self, reason: int) -> str:
        words = REASON_WORDS[FALLBACK_REASONS[reason]]
        predicted = self.lengths.predicted_gain
        if reason != SLOWER or predicted is None:
            return words
        if predicted > 1:
            return "plain steps were measured, or drafting was predicted to be slower"
        return f"{words} ({predicted:.2f} of plain steps predicted)"
