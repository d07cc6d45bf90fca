"""Reports what drafting gains: one log line a minute, and metrics.

The gain is measured: the time that plain steps would have taken for the same tokens, over the time that the rounds took. Plain steps are predicted
by the cost model (round_costs.py), which must have measured some near the load.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_ext.core import FALLBACK_REASONS, SLOWER
from sglang_ext.managers.metrics import KVMetrics
from sglang_ext.managers.spec_decode.round_costs import Load, RoundCosts

if TYPE_CHECKING:
    from sglang_ext.managers.spec_decode.draft_length import DraftLength, FixedLength
    from sglang_ext.managers.spec_decode.round import Round

logger = logging.getLogger(__name__)

# Seconds between two log lines.
INTERVAL = 60.0
# Doublings from a load to the nearest measured plain step, up to which a gain is reported.
NEAR = 1.0
# What the reasons of fallbacks mean, for the log.
WORDS = {
    "short-context": "contexts are too short to compress",
    "no-free-slots": "the KV pool has no room for compressed KV",
    "no-queries": "too few queries are kept to compress",
    "slower": "drafting would be slower",
    "min-p": "requests use min_p",
    "custom-logit-processor": "requests use a custom logit processor",
    "grammar": "the grammar backend cannot take drafts back",
    "hidden-states": "requests ask for hidden states",
    "wrong-scores": "the compressor's scores cannot be used",
    "no-selection": "no cache rank has selected tokens",
}


@dataclass
class Totals:
    """Sums over some rounds.

    Attributes:
        rounds: that drafted.
        steps: draft steps of these.
        every: selection interval of the last of them, in steps.
        verifies: verifications of single requests.
        offered, accepted: draft tokens that were verified, and accepted.
        seconds: that rounds took near whose load plain steps were measured.
        plain_seconds: that plain steps would have taken for the tokens of these rounds.
        plain: tokens without drafts, by index into ``FALLBACK_REASONS``.
    """

    rounds: int = 0
    steps: int = 0
    every: int = 0
    verifies: int = 0
    offered: int = 0
    accepted: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    plain: Counter[int] = field(default_factory=Counter)

    @property
    def draft_length(self) -> float:
        """Mean draft steps of a round; 0 where none drafted."""
        return self.steps / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens of the verified draft tokens; 0 where none were verified."""
        return self.accepted / self.offered if self.offered else 0.0

    @property
    def accept_length(self) -> float:
        """Mean tokens of a verification; 0 where none ran."""
        return (self.accepted + self.verifies) / self.verifies if self.verifies else 0.0

    @property
    def gain(self) -> float | None:
        """Speed of rounds with drafts relative to plain steps; None where it is not known."""
        return self.plain_seconds / self.seconds if self.seconds and self.plain_seconds else None


@dataclass
class DraftReport:
    """Counts rounds, and reports.

    Attributes:
        lengths: chooses the draft length; says what it predicts.
        costs: predicts plain steps.
        metrics: gets the figures.
        first: whether this process logs for all ranks.
        intervals: whether the server chooses the selection interval, which is reported then.
        clock: seconds.
        totals: of the rounds since the last log line.
    """

    lengths: "DraftLength | FixedLength"
    costs: RoundCosts
    metrics: KVMetrics
    first: bool = True
    intervals: bool = False
    clock: Callable[[], float] = time.monotonic
    totals: Totals = field(default_factory=Totals)
    _before: Totals = field(default_factory=Totals)
    _since: float | None = None

    def timed(self, round_: "Round", seconds: float) -> None:
        """Take the seconds of a round."""
        if round_.drafts and self._is_measured(Load.of(round_.lengths)):
            self.totals.seconds += seconds

    def verified(self, offered: int, accepted: int) -> None:
        """Count a verification of one request."""
        self.totals.verifies += 1
        self.totals.offered += offered
        self.totals.accepted += accepted

    def fell_back(self, reason: int, tokens: int) -> None:
        """Count tokens without drafts; ``reason`` is an index into ``FALLBACK_REASONS``."""
        self.totals.plain[reason] += tokens

    def ended(self, round_: "Round", tokens: int) -> None:
        """Count a round that gave its requests so many tokens in all; report if it is time."""
        totals, now = self.totals, self.clock()
        self._since = now if self._since is None else self._since
        if round_.drafts:
            load = Load.of(round_.lengths)
            totals.rounds += 1
            totals.steps += round_.steps
            totals.every = round_.every if self.intervals else 0
            if self._is_measured(load):
                totals.plain_seconds += tokens / len(round_.states) * self.costs.step_seconds(load)
        self.metrics.observe_drafting(self.figures)
        if now - self._since >= INTERVAL:
            if self.first:
                logger.info("sglang-ext: %s", self.line(now - self._since))
            self._before, self.totals, self._since = totals, Totals(), None

    @property
    def figures(self) -> dict[str, float | None]:
        """The metrics of drafting, by name; None where one is not known. Before rounds draft since the last log line, as of that."""
        totals = self.totals if self.totals.rounds else self._before
        return {
            "draft_length": totals.draft_length,
            "draft_acceptance_rate": totals.acceptance_rate,
            "draft_accept_length": totals.accept_length,
            "draft_gain": totals.gain,
            "draft_predicted_gain": self.lengths.predicted_gain,
            "selection_interval": totals.every,
        }

    def _is_measured(self, load: Load) -> bool:
        return self.costs.step.is_near(load.place, NEAR)

    def line(self, seconds: float) -> str:
        """The log line of the rounds in so many seconds."""
        totals = self.totals
        plain, reasons = totals.plain.total(), [self._why(reason) for reason, _ in totals.plain.most_common(2)]
        if not totals.rounds:
            return f"drafting is off in the last {seconds:.0f} s, {plain} tokens: {'; '.join(reasons) or 'requests ended'}"
        gain = "not known, as no plain step was measured near this load" if totals.gain is None else f"{totals.gain:.2f} over plain steps"
        parts = [
            f"drafting in the last {seconds:.0f} s: {totals.rounds} rounds, draft length {totals.draft_length:.1f}",
            f"acceptance rate {totals.acceptance_rate:.2f}, accept length {totals.accept_length:.2f}, gain {gain}",
        ]
        if totals.every:
            parts.append(f"selection every {totals.every} steps")
        if plain:
            parts.append(f"{plain} tokens without drafts: {'; '.join(reasons)}")
        return ", ".join(parts)

    def _why(self, reason: int) -> str:
        words = WORDS[FALLBACK_REASONS[reason]]
        predicted = self.lengths.predicted_gain
        if reason != SLOWER or predicted is None:
            return words
        if predicted > 1:
            return "plain steps were measured, or drafting was predicted to be slower"
        return f"{words} ({predicted:.2f} of plain steps predicted)"
